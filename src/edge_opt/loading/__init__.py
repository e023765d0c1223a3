"""References of users, turned into what they name: models, factories, loaders."""

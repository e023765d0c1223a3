"""Tasks: batches of a data loader, losses, quality metrics with paired intervals, and fine-tuning."""

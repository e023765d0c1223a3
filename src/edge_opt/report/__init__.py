"""Reports: records as tables, files, pages and text for the terminal."""

"""Records turned into something to read: tables, files and a view for the terminal."""

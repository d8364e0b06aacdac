"""Workers as threads."""

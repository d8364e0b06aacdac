"""Workers as processes."""

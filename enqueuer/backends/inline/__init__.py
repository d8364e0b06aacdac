"""Workers whose code runs in the loop's own thread."""

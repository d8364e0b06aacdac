"""Workers as Ray actors."""

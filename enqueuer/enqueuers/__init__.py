"""What users construct: the side of the loop."""

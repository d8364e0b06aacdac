"""The enqueuers that users construct, on the side of the loop."""

"""`enqueuer report`: a trace is read, counted, and drawn as a page."""

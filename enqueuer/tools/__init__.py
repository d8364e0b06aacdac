"""Tools of the command line alone: benchmark, trace pages and demo."""

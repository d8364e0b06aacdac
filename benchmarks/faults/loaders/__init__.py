"""One file for each loader.

Each has `items(fault)`, which returns an iterable over what `faults.sources` makes, by one worker.
"""

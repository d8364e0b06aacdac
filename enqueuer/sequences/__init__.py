"""Samples of different lengths: batches of like length, packed rows, padding, equal work."""

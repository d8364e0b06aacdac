"""Datasets: sources for common formats, lists of files and HDF5. Import the one that you use."""

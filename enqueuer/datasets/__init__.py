"""Datasets: the sources that people need again and again, to be imported by those who use them."""

"""What runs inside a worker, wherever it runs."""

"""What every module may import."""

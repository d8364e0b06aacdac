"""Measurements, and conclusions from them."""

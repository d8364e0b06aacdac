"""Helpers that every module may import."""

"""Quantised checkpoints: readers of each format, and what makes them."""

"""Runs one job in several variants and shows how they differ."""

"""Decoder models driven by a spec, and the loading of their weights."""

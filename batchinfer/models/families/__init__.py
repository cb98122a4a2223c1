"""One short file a model family: its spec and its weight names."""

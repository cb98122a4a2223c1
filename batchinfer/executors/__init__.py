"""Where engines run."""

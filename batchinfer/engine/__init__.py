"""The step loop: turns scheduled steps into tokens and results."""

"""Click commands, one file each; no logic."""

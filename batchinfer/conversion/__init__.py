"""Makes quantised checkpoints: calibration text through one layer at a time, and the files that come out."""

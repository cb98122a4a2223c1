"""Forecasts of a job: its memory, its steps, its time."""

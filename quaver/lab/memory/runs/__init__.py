"""The memory of a run of the trainer: predicted, measured, and under other settings."""

"""What a run of the trainer takes of memory: predicted, compared, explained, measured, lowered."""

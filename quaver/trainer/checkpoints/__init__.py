"""What is saved of a run and loaded again."""

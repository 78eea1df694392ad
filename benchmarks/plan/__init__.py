"""Predictions by `quaver plan` of published runs, of large clusters and of ranks on this machine."""

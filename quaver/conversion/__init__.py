"""Functions for a whole model: convert, report, freeze, and keep delayed and static scales."""

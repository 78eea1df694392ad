"""The report of a run: what happened, and whether its float8 numerics are healthy, or where and since when not."""

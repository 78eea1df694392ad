"""The report of a run: what happened, whether its float8 numerics are healthy, and if not, where and since when."""

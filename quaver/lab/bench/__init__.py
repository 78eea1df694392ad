"""The engines of `quaver bench`: each measures, and returns rows for JSON."""

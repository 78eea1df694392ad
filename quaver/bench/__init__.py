"""The engines of `quaver bench` and `quaver profile`: each measures, and returns rows for JSON."""

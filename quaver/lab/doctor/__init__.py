"""Finds out what float8 brings a machine, a GPU and the layers of a model, for `quaver doctor`."""

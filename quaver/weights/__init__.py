"""Weights in another form than a plain parameter: gathered, cast once, frozen, primary. See docs/weights.md."""

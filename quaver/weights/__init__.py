"""Options for weights: cast once per step, float8 primary weights, frozen modules. See docs/weights.md."""

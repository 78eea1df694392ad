"""What users switch on for weights: cast once, float8 primary weights, frozen modules. See docs/weights.md."""

"""The lab: the trainer, benchmarks, memory prediction and planning. The library does not import it."""

"""The parts of `make gpu` that no command of quaver covers: python -m benchmarks.gpu_parts PART [--dry].

A part is a generator of rows. Each row is written to the part's file at once, so that an interrupted part keeps its
rows. `--dry` runs every line at small sizes on a CPU, where times mean nothing.
"""

"""The parts of `make gpu` that measure what no verb of quaver does: python -m benchmarks.gpu_parts PART [--dry].

A part is a generator of rows. Each row is written to the part's file when it is there, so that an interrupted part
keeps what it found. `--dry` runs every line at small sizes on a CPU, where times mean nothing.
"""

"""Counts the work of compiled float8 code for a GPU, without a GPU: launches, bytes, copies, and a model of the time.

counting.py      a block, a linear or a block of experts, compiled for a GPU in one precision
entries.py       launches with their category, corrected bytes and FLOPs
kernels.py       second reads and float64 operations, from the source of a Triton kernel
ledger.py        sums of entries: what a recipe reads, stores and saves
times.py         modeled milliseconds
table.py, picture.py, machine_code.py
"""

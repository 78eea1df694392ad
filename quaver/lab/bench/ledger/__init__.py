"""Counts the work of compiled float8 on a GPU, without one: launches, bytes, copies, and a model of the time.

subjects.py      a block, a linear or a block of experts, compiled for a GPU in one precision
entries.py       each launch with its category, its corrected bytes and its FLOPs
kernels.py       what the source of a Triton kernel tells: second reads, float64 an element
ledger.py        sums of entries, what a recipe reads, stores and saves
times.py         modelled milliseconds
table.py, picture.py, machine_code.py
"""

"""Counts the work of compiled float8 code for a GPU, without a GPU: launches, bytes, copies, and a model of the time.

counting.py       a block, a linear or a block of experts, compiled for a GPU in one precision
entries.py        launches with their category, corrected bytes and FLOPs
kernels.py        second reads and float64 operations, from the source of a Triton kernel
ledger.py         sums of entries: what a recipe reads, stores and saves
times.py          modeled milliseconds
gpu_code.py       what Inductor generates for a GPU, traced with fake CPU tensors
launches.py       the launches of a compiled graph, with the tensors that each reads and writes
kernel_layout.py  the tiles that the programs of a Triton kernel load and store
disassembly.py    machine instructions of a Triton kernel, from its cubin
operator_calls.py the operators that an operation of quaver calls
machine_code.py   instructions per element, for the table
table.py, picture.py   the ledger as text and as a picture
"""

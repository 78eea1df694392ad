"""What the server of tests/isolated.py computes once for the processes that are forked from it."""

import torch

from quaver.roofline.device_specs import peak_flops

torch.set_num_threads(1)  # threads would not be there after the fork
peak_flops(torch.device("cpu"))
"""Remembered, because each run asks: ten matmuls of 2 GFLOP, which a CPU without bfloat16 units takes seconds for."""

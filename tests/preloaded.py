"""Computes once, in the fork server of tests/isolated.py, what its processes need."""

import torch

from quaver.roofline.device_specs import get_peak_flops

torch.set_num_threads(1)  # a fork has no other threads
# Cached for all runs: ten matmuls of 2 GFLOP, which take a CPU without bfloat16 units seconds.
get_peak_flops(torch.device("cpu"))

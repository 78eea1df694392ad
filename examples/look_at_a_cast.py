"""Compares casts with one scale per tensor and with one scale per row, on data with an outlier."""

import math

import torch

from quaver.recipes.scaling import dynamic_cast

torch.manual_seed(0)
hp = torch.randn(4, 1024) * torch.tensor([[1.0], [1e-2], [1e-4], [1e-6]])
hp[0, 0] = 300.0

print("SQNR in dB of each row of a tensor whose rows differ in size, with one outlier in the first row")
for name, dim in (("tensorwise", None), ("rowwise", 1)):
    codes, quant_scale, dequant_scale = dynamic_cast(hp, torch.float8_e4m3fn, dim)
    noise = (codes.float() * dequant_scale - hp).norm(dim=1)
    sqnr = [20 * math.log10(s / n) for s, n in zip(hp.norm(dim=1).tolist(), noise.tolist(), strict=True)]
    print(f"{name:<10}", "  ".join(f"{decibels:6.1f}" for decibels in sqnr), f"  zeros: {(codes.float() == 0).sum()}")

"""Makes linears of a recipe, and counts what their casts read."""

import pytest
import torch
from torch import nn

from quaver import Float8Linear
from quaver.kernels import cpu
from tests.recipes import make_recipe_config


def make_linear(recipe, k=64, n=32, *, bias=False, dtype=torch.bfloat16, **options):
    return Float8Linear(k, n, bias=bias, dtype=dtype, config=make_recipe_config(recipe, **options))


class Qkv(nn.Module):
    """Three linears that read one input."""

    def __init__(self, k, n, dtype):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(k, n, bias=False, dtype=dtype) for _ in range(3))

    def forward(self, input):
        return [linear(input) for linear in self.linears]


def count_reads(step):
    """Return how many elements the casts of `step()` read."""
    before = cpu.count_elements_read()
    step()
    return cpu.count_elements_read() - before


needs_counts = pytest.mark.skipif(not cpu.HAS_EXTENSION, reason="the C extension counts what is read")

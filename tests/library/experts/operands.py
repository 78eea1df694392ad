"""Makes grouped operands with an empty group and rows outside every group, and takes a step with them."""

import functools

import torch

from quaver import float8_grouped_mm
from tests.steps import compute_results

ENDS = [37, 37, 200, 300]
"""Of 310 rows: one group is empty, blocks of 32 and of 128 are cut, and the last ten rows belong to no group."""


def make_operands(*, k=96, n=160, rows=310, experts=4, dtype=torch.bfloat16, transposed=False):
    a = torch.randn(rows, k, dtype=dtype) * torch.logspace(-3, 0, rows).view(-1, 1).to(dtype)
    b_t = torch.randn(experts, k, n, dtype=dtype) * torch.logspace(-1, 1, experts).view(-1, 1, 1).to(dtype)
    b_t = b_t if transposed else b_t.transpose(1, 2).contiguous().transpose(1, 2)
    return a.requires_grad_(), b_t.requires_grad_(), torch.tensor(ENDS, dtype=torch.int32)


def step(a, b_t, ends, grad_output, config, function=float8_grouped_mm):
    """Return the output and both gradients."""
    call = functools.partial(function, offs=ends, config=config)
    return compute_results(torch.nn.Module(), a, b_t, grad_output=grad_output, call=call)

"""Collectives of any dtype, eager and compiled, on any backend. Amaxes are sent as integers, codes as uint8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from quaver.torch_private import functional_collectives as functional

NO_AMAX = -1.0
"""A value that stands for a missing amax."""


def all_reduce_max(amaxes: Tensor, group: ProcessGroup, *, allow_missing: bool = False) -> Tensor:
    """Compute the elementwise maximum over the ranks of `group`, NaN where any rank has a NaN.

    Args:
        amaxes: float32, contiguous, each at least 0, or NaN; the same shape on every rank.
        allow_missing: whether values may be NO_AMAX. The result is NO_AMAX only if every rank passes it.
    Returns:
        A new float32 tensor, equal on every rank.

    Backends lose NaNs in a maximum of floats. As integers, IEEE magnitudes have the same order, with NaNs on top.
    """
    # The mask clears the sign. Without an operation here, torch.compile (2.13) passes the collective a view of floats.
    bits = amaxes.view(torch.int32).bitwise_and(0x7FFFFFFF)
    bits = torch.where(amaxes < 0, -1, bits) if allow_missing else bits
    bits = functional.wait_tensor(functional.all_reduce(bits, "max", group))
    largest = bits.view(torch.float32)
    return torch.where(bits < 0, NO_AMAX, largest) if allow_missing else largest


def all_gather(local: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate `local` of every rank of `group` along `dim`; any dtype, the same shape on every rank."""
    payload = local.contiguous().view(torch.uint8) if local.itemsize == 1 else local.contiguous()
    parts = functional.wait_tensor(functional.all_gather_single(payload, 0, group)).view(local.dtype)
    if dim == 0:
        return parts
    # torch's all-gather along other dims joins the parts in a function that torch.compile does not trace (2.11).
    return parts.unflatten(0, (group.size(), local.shape[0])).movedim(0, dim).flatten(dim, dim + 1)


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Append zeros along dim 0 to a total of `rows`, such as the length that all ranks send."""
    missing = rows - tensor.shape[0]
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)) if missing else tensor


def reduce_scatter(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum over the ranks of `group`."""
    return functional.wait_tensor(functional.reduce_scatter_single(tensor.contiguous(), "sum", dim, group))


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks of `group`, into a new tensor."""
    return functional.wait_tensor(functional.all_reduce(tensor.contiguous(), "sum", group))


def all_to_all(
    rows: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group: ProcessGroup
) -> Tensor:
    """Exchange rows with the ranks of `group`, in rank order.

    Args:
        rows: [sum(input_split_sizes), columns], any dtype; `columns` is the same on every rank.
        output_split_sizes: the number of rows from each rank.
        input_split_sizes: the number of rows to each rank.
    """
    payload = rows.contiguous().view(torch.uint8) if rows.itemsize == 1 else rows.contiguous()
    exchanged = functional.all_to_all_single(payload, output_split_sizes, input_split_sizes, group)
    return functional.wait_tensor(exchanged).view(rows.dtype)

"""The collectives that float8 needs, eager and compiled, on any backend: amaxes travel as integers, codes as uint8."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from quaver.torch_private import collectives as functional

NOTHING_OBSERVED = -1.0
"""In place of an amax."""


def max_over_ranks(amaxes: Tensor, group: ProcessGroup, *, may_lack: bool = False) -> Tensor:
    """The elementwise largest over the ranks of `group`, NaN where one rank has a NaN.

    Args:
        amaxes: float32, contiguous, each 0 or more or NaN; of one shape on every rank.
        may_lack: that some are NOTHING_OBSERVED, which stays only where all ranks have it.
    Returns:
        A new float32 tensor, equal on every rank.

    Backends lose a NaN in a maximum of floats. As integers, IEEE magnitudes order alike, with the NaNs on top.
    """
    # The mask clears a sign; without an operation here torch's compiler (2.13) hands the collective a view of floats.
    bits = amaxes.view(torch.int32).bitwise_and(0x7FFFFFFF)
    bits = torch.where(amaxes < 0, -1, bits) if may_lack else bits
    bits = functional.wait_tensor(functional.all_reduce(bits, "max", group))
    largest = bits.view(torch.float32)
    return torch.where(bits < 0, NOTHING_OBSERVED, largest) if may_lack else largest


def all_gather(local: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The `local` of every rank of `group`, in rank order along `dim`; any dtype, one shape on every rank."""
    payload = local.contiguous().view(torch.uint8) if local.itemsize == 1 else local.contiguous()
    parts = functional.wait_tensor(functional.all_gather_single(payload, 0, group)).view(local.dtype)
    if dim == 0:
        return parts
    # torch gathers along other dims too, but the compiler of 2.11 does not trace the function that joins the parts.
    return parts.unflatten(0, (group.size(), local.shape[0])).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part along `dim` of the sum over the ranks of `group`."""
    return functional.wait_tensor(functional.reduce_scatter_single(whole.contiguous(), "sum", dim, group))


def all_reduce(whole: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks of `group`, a new tensor."""
    return functional.wait_tensor(functional.all_reduce(whole.contiguous(), "sum", group))


def all_to_all(rows: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Rows from every rank of `group`, in rank order: `sent[r]` of `rows` go to rank r, `received[r]` come from it.

    Args:
        rows: [sum(sent), columns], any dtype; `columns` is the same on every rank.
    """
    payload = rows.contiguous().view(torch.uint8) if rows.itemsize == 1 else rows.contiguous()
    return functional.wait_tensor(functional.all_to_all_single(payload, received, sent, group)).view(rows.dtype)

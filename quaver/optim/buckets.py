"""Runs `update_blocks` on many parameters at once, in buckets: operations grow with elements, not with parameters.

    gather      rows of parameters, gradients and moments -> one matrix of blocks each
    update      in PyTorch, or compiled once for all buckets
    scatter     one multi-tensor copy back

On a CPU with the C extension a parameter is one call instead, which reads and writes each tensor once.
"""

from __future__ import annotations

import functools
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels import adamw as cpu_adamw
from quaver.kernels.adamw import BLOCK
from quaver.optim.blocks import BlockGrid, RowRange, block_numbers, from_blocks, to_blocks
from quaver.optim.cut_blocks import CutPart, agree, store_scales
from quaver.optim.rounding import block_keys
from quaver.optim.update import ParameterBlocks, Scalars, largest_of, update_blocks

BUCKET = 1 << 22
"""Elements that are updated at once, at most. In PyTorch they take about 60 bytes each meanwhile."""

SHARE = 4
"""A bucket has at most one in so many of the elements, or the step of a small model would be its peak of memory."""


class Update(NamedTuple):
    """A parameter's part on this rank with what its step reads and writes, plain and contiguous, but for `tensors[0]`.

    That may be a subclass around the part, which is to see the write.
    """

    tensors: ParameterBlocks
    """Parameter (or master) and moments; the scales are float32 [rows, blocks of a row] or None."""
    grad: Tensor
    grid: BlockGrid
    key: int


def run_updates(
    updates: Sequence[Update], scalars: Scalars, skipped: Callable[[torch.device], Tensor], compile: bool
) -> None:
    """Make the step of these parameters, which have the same `scalars`.

    Args:
        skipped: the counter of a device, int64 (): blocks that are left as they are are added.
        compile: compile the arithmetic of what the C extension does not take: on a CPU compiled code is slower.
    """
    values = torch.tensor(scalars, dtype=torch.float32)
    in_buckets = []
    for update in updates:
        if not cpu_adamw.takes(update.tensors.param, update.grad):
            in_buckets.append(update)
            continue
        cpu_adamw.adamw_(
            update.tensors.param, update.grad, *update.tensors[1:], values, skipped(update.grad.device),
            update.grid, update.key,
        )  # fmt: skip
    function = _compiled() if compile and in_buckets else update_blocks
    for bucket in _buckets(in_buckets):
        device = bucket[0][0].grad.device
        skipped(device).add_(_run_bucket(bucket, values.to(device), function))


@functools.cache
def _compiled() -> Callable[..., Any]:
    from quaver.torch_private.compiler import recompile_limit  # imports the compiler, which takes seconds

    compiled = torch.compile(update_blocks, dynamic=True, fullgraph=True)

    def run(*arguments: Any) -> Any:
        with recompile_limit(64):  # two dtypes of parameters, three of each moment, single blocks
            return compiled(*arguments)

    return run


def row_runs(grid: BlockGrid, key: int, elements: int | None = None) -> list[RowRange]:
    """All rows of a parameter's part, in runs of at most `elements` (`BUCKET`), or one row."""
    rows = max((elements or BUCKET) // max(grid.blocks * BLOCK, 1), 1)
    return [RowRange(grid, begin, min(begin + rows, grid.rows), key) for begin in range(0, grid.rows, rows)]


def _buckets(updates: Sequence[Update]) -> Iterator[list[tuple[Update, RowRange]]]:
    """Runs of rows of like dtypes on one device, in buckets of at most `BUCKET` elements and a `SHARE`, or one row."""
    numel = sum(update.grid.rows * update.grid.blocks * BLOCK for update in updates)
    most = min(BUCKET, max(numel // SHARE, BLOCK))
    alike: dict[Any, list[tuple[Update, RowRange]]] = defaultdict(list)
    for update in updates:
        kind = (update.grad.device, update.grad.dtype, *(None if t is None else t.dtype for t in update.tensors))
        alike[kind] += [(update, run) for run in row_runs(update.grid, update.key, most)]
    for runs in alike.values():
        bucket: list[tuple[Update, RowRange]] = []
        blocks = 0
        for each in runs:
            if bucket and blocks + each[1].blocks > most // BLOCK:
                yield bucket
                bucket, blocks = [], 0
            bucket.append(each)
            blocks += each[1].blocks
        yield bucket


def _gathered(bucket: list[tuple[Update, RowRange]]) -> tuple[ParameterBlocks, Tensor, dict[str, list[Tensor]]]:
    """The blocks of a bucket, those of the gradients, and by name the rows that the blocks are of."""
    runs = [run for _, run in bucket]
    grad = torch.cat([to_blocks(rows_of(update.grad, run), run.grid) for update, run in bucket])
    rows_by_name: dict[str, list[Tensor]] = {}
    old: dict[str, Any] = dict.fromkeys(ParameterBlocks._fields)
    for name, tensors in zip(
        ParameterBlocks._fields, zip(*(update.tensors for update, _ in bucket), strict=True), strict=True
    ):
        if tensors[0] is not None:
            rows = [rows_of(tensor, run) for tensor, run in zip(tensors, runs, strict=True)]
            rows_by_name[name] = rows
            parts = zip(rows, runs, strict=True)
            old[name] = torch.cat([to.flatten() if _is_scale(name) else to_blocks(to, run.grid) for to, run in parts])
    return ParameterBlocks(**old), grad, rows_by_name


def _run_bucket(bucket: list[tuple[Update, RowRange]], scalars: Tensor, function: Callable[..., Any]) -> Tensor:
    old, grad, rows_by_name = _gathered(bucket)
    runs = [run for _, run in bucket]
    made, skipped = function(old, grad, block_keys(*block_numbers(runs, grad.device)), scalars)
    for name, rows in rows_by_name.items():
        blocks = zip(getattr(made, name).split([run.blocks for run in runs]), rows, runs, strict=True)
        new = [each.view_as(to) if _is_scale(name) else from_blocks(each, run.grid) for each, to, run in blocks]
        torch._foreach_copy_(rows, new)
    return typing.cast(Tensor, skipped)


def run_cut_updates(
    updates: Sequence[tuple[Tensor, Update, Sequence[Tensor | None]]],
    scalars: Scalars,
    skipped: Callable[[torch.device], Tensor],
) -> None:
    """Make the step of parameters whose blocks several ranks share; a collective, see cut_blocks.py.

    Args:
        updates: (parameter, update, this rank's tensors with the scales of whole rows of both moments or None), in the
            same order on all ranks; also those of which this rank has no element.
    """
    values, parts = torch.tensor(scalars, dtype=torch.float32), []
    for parameter, update, _ in updates:
        parts.append(part := CutPart.of(parameter, 2))
        for run in _runs_here(update):
            old, grad, _ = _gathered([(update, run)])
            for own, amax in zip(part.own, largest_of(old, grad, values.to(grad.device)), strict=True):
                own[run.begin : run.end].copy_(amax.view(-1, run.grid.blocks))
    for part, (_, update, scales) in zip(agree(parts), updates, strict=True):
        device = update.grad.device
        for run in _runs_here(update):
            mean, root = (own[run.begin : run.end].reshape(-1) for own in part.own)
            function = functools.partial(update_blocks, largest=(mean, root))
            skipped(device).add_(_run_bucket([(update, run)], values.to(device), function))
        store_scales(part, scales, part.amaxes.isfinite().all(0))


def _runs_here(update: Update) -> list[RowRange]:
    return row_runs(update.grid, update.key) if update.grad.numel() else []


def _is_scale(name: str) -> bool:
    return name.endswith("_scale")


def rows_of(tensor: Tensor, run: RowRange) -> Tensor:
    """A run's rows of a parameter's part, [rows, columns], or of its scales, [rows, blocks]."""
    return tensor.view(run.grid.rows, -1)[run.begin : run.end]

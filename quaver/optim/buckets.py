"""Runs `update_blocks` on buckets of many parameters, so that the number of operations depends on the number of
elements, not of parameters.

    gather      rows of parameters, gradients and moments -> one matrix of blocks each
    update      in PyTorch, or compiled once for all buckets
    scatter     one multi-tensor copy back

On a CPU the C extension updates a parameter in one call instead, which reads and writes each tensor once.
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
from quaver.kernels.adamw import MOMENT_BLOCK_ELEMENTS
from quaver.optim.blocks import BlockGrid, RowSpan, from_blocks, number_blocks, to_blocks
from quaver.optim.cut_blocks import BlockAmaxes, reduce_amaxes, store_scales
from quaver.optim.rounding import make_block_keys
from quaver.optim.update import AdamWScalars, ParameterBlocks, compute_amaxes, update_blocks

MAX_BUCKET_ELEMENTS = 1 << 22
"""The most elements of a bucket."""

BYTES_PER_UPDATED_ELEMENT = 60
"""Bytes per element of a bucket that an update in PyTorch temporarily takes."""

MIN_BUCKETS = 4
"""A step has at least this many buckets, so that the step of a small model is not its memory peak."""


class ShardUpdate(NamedTuple):
    """The tensors that the step of a parameter's shard reads and writes.

    All are plain and contiguous, except that `tensors[0]` may be a subclass that must see the write.
    """

    tensors: ParameterBlocks
    """The parameter or its master, and the moments. Scales are float32 [rows, blocks of a row] or None."""
    grad: Tensor
    grid: BlockGrid
    key: int


def run_updates(
    updates: Sequence[ShardUpdate],
    scalars: AdamWScalars,
    get_skip_counter: Callable[[torch.device], Tensor],
    *,
    compile: bool,
) -> None:
    """Make a step of parameters with the same `scalars`.

    Args:
        get_skip_counter: returns the int64 () counter of a device, to which the number of skipped blocks is added.
        compile: compile the arithmetic of parameters that the C extension does not support.
    """
    scalar_tensor = torch.tensor(scalars, dtype=torch.float32, device="cpu")
    bucketed = []
    for update in updates:
        if not cpu_adamw.supports(update.tensors.param, update.grad):
            bucketed.append(update)
            continue
        cpu_adamw.adamw_(
            update.tensors.param, update.grad, *update.tensors[1:], scalar_tensor, get_skip_counter(update.grad.device),
            update.grid, update.key,
        )  # fmt: skip
    update_function = compile_update() if compile and bucketed else update_blocks
    for bucket in _fill_buckets(bucketed):
        device = bucket[0][0].grad.device
        get_skip_counter(device).add_(_update_bucket(bucket, scalar_tensor.to(device), update_function))


@functools.cache
def compile_update() -> Callable[..., Any]:
    """Return `update_blocks`, compiled for any number of blocks at its first call."""
    from quaver.torch_private.compiler import recompile_limit  # imports the compiler, which takes seconds

    compiled = torch.compile(update_blocks, dynamic=True, fullgraph=True)

    def run(*arguments: Any) -> Any:
        with recompile_limit(64):  # two dtypes of parameters, three of each moment, single blocks
            return compiled(*arguments)

    return run


def split_rows(grid: BlockGrid, key: int, elements: int | None = None) -> list[RowSpan]:
    """Split the rows of a shard into spans of at most `elements` (`MAX_BUCKET_ELEMENTS`) elements, or of one row."""
    rows = max((elements or MAX_BUCKET_ELEMENTS) // max(grid.blocks_per_row * MOMENT_BLOCK_ELEMENTS, 1), 1)
    return [RowSpan(grid, start, min(start + rows, grid.rows), key) for start in range(0, grid.rows, rows)]


def _fill_buckets(updates: Sequence[ShardUpdate]) -> Iterator[list[tuple[ShardUpdate, RowSpan]]]:
    """Yield buckets of spans with the same device and dtypes, of at most `MAX_BUCKET_ELEMENTS` elements or one row."""
    numel = sum(update.grid.rows * update.grid.blocks_per_row * MOMENT_BLOCK_ELEMENTS for update in updates)
    capacity = min(MAX_BUCKET_ELEMENTS, max(numel // MIN_BUCKETS, MOMENT_BLOCK_ELEMENTS))
    spans_by_key: dict[Any, list[tuple[ShardUpdate, RowSpan]]] = defaultdict(list)
    for update in updates:
        bucket_key = (update.grad.device, update.grad.dtype, *(None if t is None else t.dtype for t in update.tensors))
        spans_by_key[bucket_key] += [(update, span) for span in split_rows(update.grid, update.key, capacity)]
    for spans in spans_by_key.values():
        bucket: list[tuple[ShardUpdate, RowSpan]] = []
        blocks = 0
        for update, span in spans:
            if bucket and blocks + span.num_blocks > capacity // MOMENT_BLOCK_ELEMENTS:
                yield bucket
                bucket, blocks = [], 0
            bucket.append((update, span))
            blocks += span.num_blocks
        yield bucket


def _gather_blocks(
    bucket: list[tuple[ShardUpdate, RowSpan]],
) -> tuple[ParameterBlocks, Tensor, dict[str, list[Tensor]]]:
    """Gather the blocks of a bucket and of its gradients. Also returns the source rows of each field."""
    spans = [span for _, span in bucket]
    grad = torch.cat([to_blocks(select_rows(update.grad, span), span.grid) for update, span in bucket])
    rows_by_name: dict[str, list[Tensor]] = {}
    old: dict[str, Any] = dict.fromkeys(ParameterBlocks._fields)
    for name, tensors in zip(
        ParameterBlocks._fields, zip(*(update.tensors for update, _ in bucket), strict=True), strict=True
    ):
        if tensors[0] is not None:
            rows = [select_rows(tensor, span) for tensor, span in zip(tensors, spans, strict=True)]
            rows_by_name[name] = rows
            pairs = zip(rows, spans, strict=True)
            old[name] = torch.cat(
                [row.flatten() if _is_scale(name) else to_blocks(row, span.grid) for row, span in pairs]
            )
    return ParameterBlocks(**old), grad, rows_by_name


def _update_bucket(bucket: list[tuple[ShardUpdate, RowSpan]], scalars: Tensor, update: Callable[..., Any]) -> Tensor:
    old, grad, rows_by_name = _gather_blocks(bucket)
    spans = [span for _, span in bucket]
    updated, skipped = update(old, grad, make_block_keys(*number_blocks(spans, grad.device)), scalars)
    for name, rows in rows_by_name.items():
        blocks = zip(getattr(updated, name).split([span.num_blocks for span in spans]), rows, spans, strict=True)
        new = [part.view_as(row) if _is_scale(name) else from_blocks(part, span.grid) for part, row, span in blocks]
        torch._foreach_copy_(rows, new)
    return typing.cast(Tensor, skipped)


def run_cut_updates(
    updates: Sequence[tuple[Tensor, ShardUpdate, Sequence[Tensor | None]]],
    scalars: AdamWScalars,
    get_skip_counter: Callable[[torch.device], Tensor],
) -> None:
    """Make a step of parameters whose blocks several ranks share. A collective; see cut_blocks.py.

    Args:
        updates: (parameter, update, scales of whole rows of both moments or None), in the same order on all ranks,
            including parameters whose shard on this rank is empty.
    """
    scalar_tensor, unreduced = torch.tensor(scalars, dtype=torch.float32, device="cpu"), []
    for parameter, update, _ in updates:
        unreduced.append(block_amaxes := BlockAmaxes.zeros(parameter, 2))
        for span in _split_shard(update):
            old, grad, _ = _gather_blocks([(update, span)])
            for local, amax in zip(
                block_amaxes.local, compute_amaxes(old, grad, scalar_tensor.to(grad.device)), strict=True
            ):
                local[span.start : span.end].copy_(amax.view(-1, span.grid.blocks_per_row))
    for block_amaxes, (_, update, scales) in zip(reduce_amaxes(unreduced), updates, strict=True):
        device = update.grad.device
        for span in _split_shard(update):
            mean, root = (local[span.start : span.end].reshape(-1) for local in block_amaxes.local)
            update_function = functools.partial(update_blocks, amaxes=(mean, root))
            get_skip_counter(device).add_(_update_bucket([(update, span)], scalar_tensor.to(device), update_function))
        store_scales(block_amaxes, scales, block_amaxes.amaxes.isfinite().all(0))


def _split_shard(update: ShardUpdate) -> list[RowSpan]:
    return split_rows(update.grid, update.key) if update.grad.numel() else []


def _is_scale(name: str) -> bool:
    return name.endswith("_scale")


def select_rows(tensor: Tensor, span: RowSpan) -> Tensor:
    """Select the rows of a span from a shard, [rows, columns], or from its scales, [rows, blocks]."""
    return tensor.view(span.grid.rows, -1)[span.start : span.end]

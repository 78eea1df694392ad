"""Reduces gradients over data-parallel ranks as float8 codes: an all-to-all, then a float32 sum of the received codes.

Each rank arranges its gradients as [n, chunk], one row for each of n ranks, and quantizes blocks of 256 elements to
e4m3 with one float32 scale per block. It sends row r to rank r, which sums the received rows in float32 in rank order.
A rank sends and rounds:

             bytes per element           relative to bfloat16    roundings to e4m3
    FSDP2    (n - 1) / n * 1.016         0.51                    one, before the sum
    DDP      2 * (n - 1) / n * 1.016     0.51                    two: the sum is all-gathered as codes too

Under DDP every rank dequantizes the same codes of the sum, including its own part, so replicas stay bit-identical.
A block with an inf or a NaN has a non-finite scale and arrives as NaN in all its elements. Under HSDP, FSDP2
all-reduces over the replicas in high precision as before.

FSDP2 calls the collectives on its communication stream. DDP calls them on the stream of the backward, so its buckets
get a stream here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.kernels.cast import CASTS
from quaver.kernels.operands import require
from quaver.recipes import scaling
from quaver.recipes.config import ScalingGranularity
from quaver.recipes.formats import E4M3, HP_DTYPES
from quaver.recipes.scale_layout import make_block_layout
from quaver.runtime.agreement import wait_at_store_barrier
from quaver.runtime.errors import check_is_module
from quaver.torch_private.fsdp import (
    find_fsdp_module_class,
    has_comm_hook,
    has_custom_reduce_scatter,
    list_reductions,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

BLOCK_ELEMENTS = 256
"""Elements that share a scale of 4 bytes."""
MIN_GRADIENTS = 16 * BLOCK_ELEMENTS
"""The fewest gradients of one rank in one reduction. Below it, the extra message costs more than the bytes save."""
_SCALE_BYTES = 4
_MAX_DEQUANTIZED_ROWS = 8
"""Rows that are dequantized at once, which bounds the float32 memory to as many chunks."""


def reduce_gradients_in_float8(model: nn.Module) -> None:
    """Make FSDP2 or DDP send the gradients of `model` as float8 codes from now on.

    Call it on every rank, after `fully_shard` of all modules or `DistributedDataParallel`, before the first backward.
    Under FSDP2 it replaces the reduce-scatter of `model` and its submodules, for sums and means; groups of one rank
    send nothing. The codes are cast from FSDP2's buffers in `reduce_dtype`, for which float32 is best.

    Raises:
        ValueError: the model uses neither, a rank has fewer than `MIN_GRADIENTS` of a group's gradients, or gradients
            are reduced in another dtype than float32, bfloat16 or float16.
        RuntimeError: DDP has a communication hook already, or FSDP2 a custom reduce-scatter, for example of an earlier
            call; or other ranks that share gradients did not call it within half the time limit of their store.
    """
    check_is_module(model, argument="model")
    fsdp_class = find_fsdp_module_class()
    sharded: list[Any] = []
    if fsdp_class is not None:
        sharded = [module for module in model.modules() if isinstance(module, fsdp_class)]
    if sharded:
        _reduce_scatter_in_float8(model, sharded)
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        _all_reduce_in_float8(model)
    else:
        raise ValueError(
            f"expected a model of fully_shard (FSDP2) or DistributedDataParallel, got {type(model).__name__}: call "
            "reduce_gradients_in_float8 after one of them"
        )


def _check_reduction(num_elements: int, num_ranks: int, dtype: torch.dtype, owner: str) -> None:
    if num_ranks == 1:
        return
    if dtype not in HP_DTYPES:
        raise ValueError(
            f"{owner} has gradients in {dtype}; expected {', '.join(map(str, HP_DTYPES))} to reduce in float8: set "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32) of FSDP2, or convert the parameters"
        )
    if num_elements < MIN_GRADIENTS:
        raise ValueError(
            f"{owner} has {num_elements:,} gradients for each of {num_ranks} ranks; expected at least "
            f"{MIN_GRADIENTS:,} to reduce in float8: shard over fewer ranks, put more modules into one fully_shard, or "
            "reduce in high precision"
        )


def _reduce_scatter_in_float8(model: nn.Module, sharded: Sequence[FSDPModule]) -> None:
    names = {module: name for name, module in model.named_modules()}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for module in sharded:
        owner = f"the FSDP2 group of {names[module] or type(module).__name__}"
        if has_custom_reduce_scatter(module):
            raise RuntimeError(
                f"{owner} has a custom reduce-scatter already: call reduce_gradients_in_float8 once, on the whole "
                "model, and without set_custom_reduce_scatter"
            )
        for elements, group, dtype in list_reductions(module):
            _check_reduction(elements, 1 if group is None else group.size(), dtype, owner)
            if group is not None:
                groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    for group in groups.values():
        _check_every_rank_calls(group)
    reduce_scatter: Any = Float8ReduceScatter()  # without FSDP2's base class, which is private
    for module in sharded:
        module.set_custom_reduce_scatter(reduce_scatter)


def _check_every_rank_calls(group: dist.ProcessGroup) -> None:
    """Raise RuntimeError if another rank of `group` does not call: its collective in the backward would be another."""
    wait_at_store_barrier(group, "reduce_gradients_in_float8 was called", advice="call it on all ranks")


class Float8ReduceScatter:
    """A reduce-scatter that sends float8 codes, for `FSDPModule.set_custom_reduce_scatter`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for FSDP2 to copy gradients into, or for their sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's chunk of the sum or mean over `group` of `input_tensor` [ranks * chunk]."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or async_op:
            raise NotImplementedError(
                f"float8 gradients: expected a synchronous SUM or AVG, got {op}, async_op={async_op}. With "
                "set_gradient_divide_factor call set_force_sum_reduction_for_comms(True)"
            )
        ranks = group.size()
        total = sum_over_ranks(input_tensor.view(ranks, -1), group)
        output_tensor.copy_(total.div_(ranks) if op == dist.ReduceOp.AVG else total)


def _all_reduce_in_float8(model: nn.parallel.DistributedDataParallel) -> None:
    group: dist.ProcessGroup = model.process_group
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in trained) // group.size()
    for dtype in {parameter.dtype for parameter in trained}:
        _check_reduction(elements, group.size(), dtype, "the model")
    if has_comm_hook(model):
        raise RuntimeError(
            "this DistributedDataParallel has a communication hook already, and DDP accepts one: call "
            "reduce_gradients_in_float8 once, and without register_comm_hook"
        )
    _check_every_rank_calls(group)
    # A lambda, since DDP checks the annotations of a hook and expects classes, and this module's are strings.
    model.register_comm_hook(group, lambda group, bucket: _average_bucket(group, bucket))


@functools.cache
def _get_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which this process averages buckets on a GPU."""
    return torch.Stream(device)


def _average_bucket(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average the bucket over the ranks, as DDP's communication hook."""
    buffer = bucket.buffer()
    if buffer.device.type == "cpu":
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        _average(buffer, group)
        future.set_result(buffer)
        return future
    future, stream = torch.futures.Future(devices=[buffer.device]), _get_stream(buffer.device)
    stream.wait_stream(torch.accelerator.current_stream(buffer.device))
    with stream:
        _average(buffer, group)
        future.set_result(buffer)  # records an event on the stream, for which wait() waits
    return future


def _average(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Write the mean over the ranks into `buffer`, a vector; it is bit-identical on every rank."""
    ranks, elements = group.size(), buffer.numel()
    rows = F.pad(buffer, (0, -elements % ranks)).view(ranks, -1)
    average = sum_over_ranks(rows, group).div_(ranks)
    payload = quantize_gradients(average.unsqueeze(0))
    gathered = payload.new_empty(ranks, payload.shape[1])
    dist.all_gather_into_tensor(gathered, payload, group=group)
    parts = gathered.split(_MAX_DEQUANTIZED_ROWS)
    flat = torch.cat([dequantize_gradients(part, rows.shape[1]).to(buffer.dtype) for part in parts])
    buffer.copy_(flat.view(-1)[:elements])


def sum_over_ranks(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the rows that the ranks of `group` hold for this rank. Rows are sent as float8 codes.

    Args:
        rows: [ranks, chunk], high precision: row r is this rank's summand for rank r.
    Returns:
        A new tensor, float32 [chunk].
    """
    payload = quantize_gradients(rows)
    received = torch.empty_like(payload)
    dist.all_to_all_single(received, payload, group=group)
    total = torch.zeros(rows.shape[1], dtype=torch.float32, device=rows.device)
    for part in received.split(_MAX_DEQUANTIZED_ROWS):
        for values in dequantize_gradients(part, rows.shape[1]):
            total += values
    return total


def quantize_gradients(rows: Tensor) -> Tensor:
    """Quantize [n, columns] into uint8 [n, 4 * blocks + columns]: the scales of each row, then its codes."""
    row, column, power_of_2 = True, False, False
    cast, options = CASTS[ScalingGranularity.BLOCKWISE], (1, BLOCK_ELEMENTS, "")
    operand = require(cast(rows, E4M3.dtype, row, column, power_of_2, *options).row, "the row operand")
    scales = require(operand.dequant_scale, "the dequant_scale").contiguous()  # they are column-major on a GPU
    return torch.cat([scales.view(torch.uint8), operand.data.view(torch.uint8)], dim=1)


def dequantize_gradients(payload: Tensor, columns: int) -> Tensor:
    """Dequantize the payload of `quantize_gradients` to float32 [n, columns]."""
    scale_bytes = _SCALE_BYTES * -(-columns // BLOCK_ELEMENTS)
    scales = payload[:, :scale_bytes].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned
    codes = payload[:, scale_bytes:].view(E4M3.dtype)
    return scaling.dequantize(codes, scales, layout=make_block_layout(E4M3.dtype, 1, BLOCK_ELEMENTS))

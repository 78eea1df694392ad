"""Gradients over data-parallel ranks as float8 codes: an all-to-all, and a float32 sum where the codes arrive.

A rank cuts its gradients [n, chunk], one row for each of n ranks, into blocks of 256, quantizes each to e4m3 with a
float32 scale of its own, and sends row r to rank r, which adds up what arrives in float32 in the order of ranks:

                     bytes that a rank sends, of those in bfloat16      roundings to e4m3
    FSDP2            (n - 1) / n * 1.016 an element, 0.51               one, before the sum
    DDP              twice that, 0.51                                   two: the sum is gathered as codes, too

Every rank decodes the same codes of a gathered sum, its own among them, so that replicas stay equal to the bit. A block
with an inf or a NaN has such a scale, and arrives as NaN in all of its elements. Under HSDP the all-reduce of replicas
stays FSDP2's.

Collectives run on the stream on which FSDP2 calls them. DDP goes on with the backward meanwhile: its buckets have a
stream here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.kernels.cast import CASTS
from quaver.kernels.operands import present
from quaver.recipes import scaling
from quaver.recipes.config import ScalingGranularity
from quaver.recipes.formats import E4M3
from quaver.recipes.scale_layout import layout_of_blocks
from quaver.torch_private.fsdp import fsdp_module_class, sharded_elements

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

BLOCK = 256
"""Elements with one scale: 4 bytes for 256."""
LEAST_ELEMENTS = 16 * BLOCK
"""Of one rank in one reduction: for fewer, one message more costs more than half of the bytes save."""
_SCALE_BYTES = 4
_RANKS_AT_A_TIME = 8
"""Rows that are decoded together: float32 of so many chunks at most."""


def reduce_gradients_in_float8(model: nn.Module) -> None:
    """Let FSDP2 or DDP send the gradients of `model` as float8 codes from now on.

    Call it on every rank, after `fully_shard` of all modules or `DistributedDataParallel`, before the first backward.
    Of FSDP2, each reduce-scatter of `model` and its submodules; it then takes sums and means, and leaves groups of one
    rank alone. Their buffers have `reduce_dtype`: float32 is best, as codes are cast from it.

    Raises:
        ValueError: the model is neither, or a rank has fewer than `LEAST_ELEMENTS` of a group's gradients.
    """
    kind = fsdp_module_class()
    sharded: list[Any] = [] if kind is None else [each for each in model.modules() if isinstance(each, kind)]
    if sharded:
        _reduce_scatter_in_float8(model, sharded)
    elif isinstance(model, nn.parallel.DistributedDataParallel):  # FSDP1 has hooks of another kind
        _all_reduce_in_float8(model)
    else:
        raise ValueError(
            f"expected a model of fully_shard (FSDP2) or DistributedDataParallel, got {type(model).__name__}: call "
            "reduce_gradients_in_float8 after one of them"
        )


def _check_elements(elements: int, ranks: int, what: str) -> None:
    if elements < LEAST_ELEMENTS:
        raise ValueError(
            f"{what} has {elements:,} gradients for each of {ranks} ranks; expected at least {LEAST_ELEMENTS:,} to "
            "reduce in float8: shard over fewer ranks, put more modules into one fully_shard, or reduce in high "
            "precision"
        )


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def _reduce_scatter_in_float8(model: nn.Module, sharded: Sequence[FSDPModule]) -> None:
    names = {module: name for name, module in model.named_modules()}
    for module in sharded:
        for elements, ranks in sharded_elements(module):
            if ranks > 1:
                _check_elements(elements, ranks, f"the FSDP2 group of {names[module] or type(module).__name__}")
    reduce_scatter: Any = Float8ReduceScatter()  # FSDP2's base class is private, and FSDP2 asks for no more than this
    for module in sharded:
        module.set_custom_reduce_scatter(reduce_scatter)


class Float8ReduceScatter:
    """FSDP2's interface of a reduce-scatter (`FSDPModule.set_custom_reduce_scatter`), with float8 codes on the way."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2 to copy gradients into, or for their sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum or mean over `group` of all `input_tensor` [ranks * chunk]."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or async_op:
            raise NotImplementedError(
                f"expected the sum or the mean of gradients in float8, in order; got {op}, async_op={async_op}. With "
                "set_gradient_divide_factor call set_force_sum_reduction_for_comms(True)"
            )
        ranks = group.size()
        total = sum_over_ranks(input_tensor.view(ranks, -1), group)
        output_tensor.copy_(total.div_(ranks) if op == dist.ReduceOp.AVG else total)


# ---- DDP -------------------------------------------------------------------------------------------------------------


def _all_reduce_in_float8(model: nn.parallel.DistributedDataParallel) -> None:
    group: dist.ProcessGroup = model.process_group
    elements = sum(each.numel() for each in model.parameters() if each.requires_grad)
    if group.size() > 1:
        _check_elements(elements // group.size(), group.size(), "the model")
    # DDP refuses annotations of a hook that are not its classes; those of this file are text.
    model.register_comm_hook(_BucketStream(group), lambda state, bucket: _mean_of_bucket(state, bucket))


class _BucketStream:
    """The group of a DDP model, and the stream of its buckets on a GPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._stream: torch.Stream | None = None

    def stream_for(self, device: torch.device) -> torch.Stream | None:
        """None on a CPU, which has no streams."""
        if device.type != "cpu" and self._stream is None:
            self._stream = torch.Stream(device)
        return self._stream


def _mean_of_bucket(state: _BucketStream, bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: the mean of the bucket over the ranks."""
    buffer = bucket.buffer()
    stream = state.stream_for(buffer.device)
    if stream is None:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        _average(buffer, state.group)
        future.set_result(buffer)
        return future
    future = torch.futures.Future(devices=[buffer.device])
    stream.wait_stream(torch.accelerator.current_stream(buffer.device))
    with stream:
        _average(buffer, state.group)
        future.set_result(buffer)  # whoever waits for it waits for the stream
    return future


def _average(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Write the mean over the ranks into `buffer`, a vector: the same bits on every rank."""
    ranks, elements = group.size(), buffer.numel()
    rows = F.pad(buffer, (0, -elements % ranks)).view(ranks, -1)
    own = sum_over_ranks(rows, group).div_(ranks)
    payload = _encoded(own.unsqueeze(0))
    gathered = payload.new_empty(ranks, payload.shape[1])
    dist.all_gather_into_tensor(gathered, payload, group=group)
    flat = torch.cat([_decoded(each, rows.shape[1]).to(buffer.dtype) for each in gathered.split(_RANKS_AT_A_TIME)])
    buffer.copy_(flat.view(-1)[:elements])


# ---- codes -----------------------------------------------------------------------------------------------------------


def sum_over_ranks(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The float32 sum over the ranks of `group` of this rank's row of their `rows`, which travel as float8.

    Args:
        rows: [ranks, chunk], high precision: what this rank has for each of them.
    Returns:
        float32 [chunk], new.
    """
    payload = _encoded(rows)
    arrived = torch.empty_like(payload)
    dist.all_to_all_single(arrived, payload, group=group)
    total = torch.zeros(rows.shape[1], dtype=torch.float32, device=rows.device)
    for part in arrived.split(_RANKS_AT_A_TIME):
        for decoded in _decoded(part, rows.shape[1]):
            total += decoded
    return total


def _encoded(rows: Tensor) -> Tensor:
    """[n, columns] as uint8 [n, 4 * blocks + columns]: the scales of each row, then its codes."""
    row = present(CASTS[ScalingGranularity.BLOCKWISE](rows, E4M3.dtype, True, False, False, 1, BLOCK, "").row)
    scales = present(row.dequant_scale).contiguous()  # a GPU's lie by columns
    return torch.cat([scales.view(torch.uint8), row.data.view(torch.uint8)], dim=1)


def _decoded(payload: Tensor, columns: int) -> Tensor:
    """float32 [n, columns] of what `_encoded` wrote."""
    scale_bytes = _SCALE_BYTES * -(-columns // BLOCK)
    scales = payload[:, :scale_bytes].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned
    codes = payload[:, scale_bytes:].view(E4M3.dtype)
    return scaling.dequantize(codes, scales, layout=layout_of_blocks(E4M3.dtype, 1, BLOCK))

"""The collectives of tensor, context and expert parallelism inside one block and microbatch.

tests/lab/plan/test_collectives.py compares their count and bytes with `quaver memory --traffic`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from quaver.conversion.roles import LM_HEAD
from quaver.fsdp.scales import list_linear_layouts
from quaver.lab.model.llama import SPLIT_DIMS, list_block_weights
from quaver.lab.plan.compute_time import INPUT_READERS, list_expert_matrix_sizes, list_linear_sizes
from quaver.lab.plan.planned_run import EXPERTS, PlannedRun
from quaver.parallel.expert_parallel import sends_codes
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.linear_casts import LinearCasts, OperandCasts

_GATHER_INPUTS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_GATHER_GRADIENTS = ("o_proj",), ("down_proj",)
"""The linears in each half of a block that read what tensor parallelism gathers: codes if all of them are float8."""

_LOSS_BYTES_PER_TOKEN = 12
"""Three float32 numbers, which the loss gathers from each rank (quaver/lab/model/loss.py)."""


class ModeledCollective(NamedTuple):
    """A collective of tensor, context or expert parallel ranks, repeated in one direction of a block."""

    kind: str
    tensor_bytes: float
    """Bytes of the tensor of one collective."""
    ranks: int
    stride: int = 1
    repeats: float = 1
    """How often it runs. Shares of float8 blocks make it fractional."""


def list_block_collectives(run: PlannedRun, *, backward: bool) -> list[ModeledCollective]:
    """Return the collectives of a block's forward, or of its backward with the recomputation."""
    return [
        *_iter_tensor_parallel(run, backward),
        *_iter_context_parallel(run, backward),
        *_iter_expert_parallel(run, backward),
    ]


def list_embedding_collectives(run: PlannedRun, *, backward: bool) -> list[ModeledCollective]:
    """Return the collective of an embedding that tensor parallelism splits over the vocabulary.

    Its output is scattered by sequence and its gradient gathered, in the residual stream's dtype.
    """
    if run.tp == 1:
        return []
    kind = "all_gather" if backward else "reduce_scatter"
    return [ModeledCollective(kind, run.residual_bytes * run.micro_batch_tokens * run.model.dim, run.tp)]


def list_head_collectives(run: PlannedRun, *, backward: bool) -> list[ModeledCollective]:
    """Return the collectives of the loss and the projection, which gathers its input and scatters its gradient."""
    if run.tp == 1:
        return []
    input_bytes = 2 * run.micro_batch_tokens * run.model.dim
    if backward:
        return [ModeledCollective("reduce_scatter", input_bytes, run.tp)]
    logit_bytes = _LOSS_BYTES_PER_TOKEN * run.micro_batch_tokens * run.tp
    return [ModeledCollective("all_gather", size, run.tp) for size in (input_bytes, logit_bytes)]


def _iter_tensor_parallel(run: PlannedRun, backward: bool) -> Iterator[ModeledCollective]:
    """Yield the collectives of sequence parallelism: a half of a block gathers its input and scatters its output.

    Gradients do the reverse. A recomputation gathers again; under "op" it does not scatter again.
    """
    if run.tp == 1:
        return
    dim, halves = run.model.dim, 2 if run.has_feed_forward else 1
    gathers_forward = not backward or run.checkpointing != "none"
    casts = run.casts
    float8_share = fmean(run.get_float8_share(name) for name, _ in list_block_weights(run.model) if name in SPLIT_DIMS)
    if casts is not None and not run.framework.casts_gathered:
        for amaxes, is_issued in zip(_count_amaxes(run, casts), (gathers_forward, backward), strict=True):
            if is_issued and amaxes.all_reduces and float8_share:
                amax_bytes = 4 * amaxes.elements / amaxes.all_reduces
                yield ModeledCollective("all_reduce", amax_bytes, run.tp, repeats=amaxes.all_reduces * float8_share)
    if backward and float8_share:  # gradients of the norms' weights; bfloat16 blocks start no such collective
        yield ModeledCollective("all_reduce", 2 * dim, run.tp, repeats=2 * float8_share)
    gathers: list[tuple[tuple[tuple[str, ...], ...], OperandCasts | None]] = []
    if gathers_forward:
        gathers.append((_GATHER_INPUTS[:halves], casts and casts.input))
    if backward:
        gathers.append((_GATHER_GRADIENTS[:halves], casts and casts.grad_output))
    for readers, operand in gathers:
        float8_repeats = sum(min(map(run.get_float8_share, linears)) for linears in readers)
        sent_as = None if run.framework.casts_gathered else operand
        for repeats, operand_casts in ((float8_repeats, sent_as), (halves - float8_repeats, None)):
            for gathered_bytes in (
                _list_gathered_bytes(operand_casts, run.micro_batch_tokens, dim, run.tp) if repeats else []
            ):
                yield ModeledCollective("all_gather", gathered_bytes, run.tp, repeats=repeats)
    scatters = halves + (1 if backward and run.checkpointing == "full" else 0)
    yield ModeledCollective("reduce_scatter", 2 * run.micro_batch_tokens * dim, run.tp, repeats=scatters)


def _list_gathered_bytes(casts: OperandCasts | None, tokens: int, dim: int, ranks: int) -> list[float]:
    """Return the bytes of the tensors that are gathered for an operand of `tokens` rows: its codes and their scales.

    bfloat16 is gathered if a rank's rows do not divide into blocks.
    """
    elements = tokens * dim
    if casts is None or not casts.is_float8:
        return [2 * elements]
    if casts.row.is_blockwise:
        length = (casts.row.layout or (1, 1))[1]
        if tokens // ranks % length:
            return [2 * elements]
        codes = [elements, 4 * elements / length]
        return codes if casts.is_dequantized else [*codes, *codes]
    if casts.row.is_rowwise:
        return [elements, 4 * tokens] if casts.is_dequantized else [elements, elements, 4 * tokens]
    return [elements]


def list_scale_collectives(run: PlannedRun) -> list[ModeledCollective]:
    """Return the all-reduces of the amaxes from which a step's scales are computed.

    Persistent scales: 8 bytes for each operand, over all ranks; linears that read the same input have one for it.
    Dynamic scales of weights that FSDP2 gathers as codes: 4 bytes for each scale, over the ranks that hold the shards.
    Without float8.precompute_float8_dynamic_scale_for_fsdp the first all-gather of a step computes all of them.
    """
    if run.recipe is None or run.world_size == 1:
        return []
    model, config = run.model, Float8LinearConfig.from_recipe_name(run.recipe)
    linears = [(model.n_layers * run.get_float8_share(name), *size) for name, size in list_linear_sizes(model).items()]
    linears.append((run.get_float8_share(LM_HEAD), model.dim, model.vocab_size))
    if config.has_persistent_scales:
        inputs = sum(
            model.n_layers * run.get_float8_share(name) / INPUT_READERS.get(name, 1)
            for name in list_linear_sizes(model)
        )
        operands = 2 * sum(count for count, _, _ in linears) + inputs + run.get_float8_share(LM_HEAD)
        return [ModeledCollective("all_reduce", 8 * operands, run.world_size)]
    shards = run.dp_shard * run.cp
    if not run.float8_all_gather or shards == 1:
        return []
    held = model.n_layers * run.get_float8_share(EXPERTS) * model.n_experts / run.ep
    experts = [(held, *size) for size in list_expert_matrix_sizes(model)]
    groups = [
        (linears if run.ep > 1 else linears + experts, shards * run.tp, 1),
        (experts if run.ep > 1 else [], shards // run.ep, run.ep),
    ]
    layouts = list_linear_layouts(config.casts.weight)
    collectives = []
    for weights, ranks, stride in groups:
        scales = sum(
            count * math.prod(layout.get_scale_shape(outputs, inputs))
            for count, inputs, outputs in weights
            for layout in layouts
        )
        if scales and ranks > 1:
            collectives.append(ModeledCollective("all_reduce", 4 * scales, ranks, stride))
    return collectives


@dataclass
class _Amaxes:
    """The all-reduces of amaxes in one direction of a block, and the elements of all of them."""

    all_reduces: int = 0
    elements: int = 0

    def add(self, all_reduces: int, elements_each: int) -> None:
        self.all_reduces += all_reduces
        self.elements += all_reduces * elements_each


def _count_amaxes(run: PlannedRun, casts: LinearCasts) -> tuple[_Amaxes, _Amaxes]:
    """Return the amaxes of the forward and of the backward.

    Ranks that split a tensor agree on its scale, and ranks that split a contracted dim on the scales along it. q, k, v,
    gate and up split their outputs, and their inputs by sequence. o and down split their inputs, and their gradients by
    sequence. With a float8 all-gather, FSDP2 agrees on the scales of weights once a step.
    """
    tokens, dim = run.micro_batch_tokens, run.model.dim
    forward, backward = _Amaxes(), _Amaxes()
    split_outputs, split_inputs = (5, 2) if run.has_feed_forward else (3, 1)
    halves = split_inputs
    if _needs_amax(casts.input.row):
        forward.add(halves + split_inputs, 1)
    elif casts.input.row.is_rowwise:
        forward.add(split_inputs, tokens)
        if not casts.input.column.is_disabled:
            forward.add(halves, dim)
    if not run.float8_all_gather:
        weight = casts.weight
        if weight.row.is_rowwise:
            forward.add(split_inputs, dim)
        elif _needs_amax(weight.row):
            forward.add(split_outputs + split_inputs, 1)
        if weight.is_dequantized and weight.row.is_rowwise:  # cast as in the forward
            backward.add(split_inputs, dim)
        elif weight.column.is_rowwise:
            backward.add(split_outputs, dim)
        elif _needs_amax(weight.column) and not weight.has_equal_casts:
            backward.add(split_outputs + split_inputs, 1)
    gradient = casts.grad_output
    if _needs_amax(gradient.row):
        backward.add(split_outputs + split_inputs, 1)
    elif gradient.row.is_rowwise:
        backward.add(split_outputs, tokens)
        if not gradient.column.is_disabled:
            backward.add(split_inputs, dim)
    return forward, backward


def _needs_amax(cast: CastConfig) -> bool:
    """Return whether the cast's one scale comes from the tensor itself."""
    return cast.is_tensorwise and not cast.is_persistent


def _iter_context_parallel(run: PlannedRun, backward: bool) -> Iterator[ModeledCollective]:
    """Yield the all-gather of keys and values, and the reduce-scatter of their gradients."""
    if run.cp == 1:
        return
    kv_bytes = 2 * run.model.n_kv_heads * run.model.head_dim * run.micro_batch_tokens * run.cp * 2 / run.tp
    yield ModeledCollective("all_gather", kv_bytes, run.cp, stride=run.tp)
    if backward:
        yield ModeledCollective("reduce_scatter", kv_bytes, run.cp, stride=run.tp)


def _iter_expert_parallel(run: PlannedRun, backward: bool) -> Iterator[ModeledCollective]:
    """Yield the all-to-alls of counts, and of tokens or their gradients to the experts and back.

    Rows return in bfloat16. They are sent as codes where `sends_codes` says so; with one scale per expert, ranks
    first agree on its amax.
    """
    if run.ep == 1:
        return
    model = run.model

    def make_collective(kind: str, tensor_bytes: float, *, repeats: float = 1) -> ModeledCollective:
        return ModeledCollective(kind, tensor_bytes, run.ep, stride=run.tp * run.cp, repeats=repeats)

    rows = run.micro_batch_tokens * model.top_k * run.framework.exchanged_share
    operands = []
    if not backward or run.checkpointing != "none":
        yield make_collective("all_to_all", 8 * (model.n_experts + run.ep))
        operands.append(run.casts and run.casts.input)
    if backward:
        operands.append(run.casts and run.casts.grad_output)
    for operand in operands:
        float8_repeats = 0.0
        if operand is not None and sends_codes(
            operand, row=True, column=True, grad_weight_from_codes=run.grad_weight_from_codes
        ):
            float8_repeats = run.get_float8_share(EXPERTS)
        if operand is not None and float8_repeats:
            if operand.row.is_tensorwise:
                yield make_collective("all_reduce", 4 * (model.n_experts + 1), repeats=float8_repeats)
            code_bytes = rows * _count_row_bytes(operand.row, model.dim)
            yield make_collective("all_to_all", code_bytes, repeats=float8_repeats)
        yield make_collective("all_to_all", 2 * rows * model.dim, repeats=2 - float8_repeats)


def _count_row_bytes(cast: CastConfig, length: int) -> float:
    """Return the bytes of a row of codes and of the scales that are sent with it."""
    if cast.is_tensorwise:
        return length
    scale_bytes = 1 if cast.scale_calculation_mode else 4
    layout = cast.require_layout("expert parallelism")
    return length + scale_bytes * math.prod(layout.get_scale_shape(1, length))

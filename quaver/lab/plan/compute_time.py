"""The compute time of one rank for one microbatch: a block, the embedding, and the output projection with the loss.

The model is quaver/roofline's: matmuls run at the rate of their shape, casts and other operations at memory bandwidth,
and every kernel adds its launch. tests/lab/plan/test_compute_time.py compares it with `quaver bench ledger`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import ceil
from typing import NamedTuple

from quaver.conversion.roles import LM_HEAD
from quaver.lab.model.llama import SPLIT_DIMS, count_expert_elements, list_block_weights
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.planned_run import EXPERTS, PlannedRun, count_feed_forwards_per_token
from quaver.lab.settings import Model
from quaver.recipes.config import SHARED_INPUTS, Float8LinearRecipeName
from quaver.roofline.attention import predict_attention_seconds
from quaver.roofline.block import BlockShape, PerPass, predict_seconds_between_matmuls
from quaver.roofline.cost import KERNEL_LAUNCH_S, LinearTime, predict_linear_cost
from quaver.roofline.device_specs import DeviceSpec
from quaver.roofline.matmul import predict_move_seconds
from quaver.roofline.scaled_matmul import find_scale_kinds, get_cutlass_rowwise_share

INPUT_READERS = {name: len(names) for names in SHARED_INPUTS for name in names if name in SPLIT_DIMS}
"""The number of linears that share the input of a linear and its casts."""
OP_RECOMPUTED_LINEARS = ("k_proj", "o_proj", "up_proj")
"""Linears that "selective" recomputes: every second matmul, starting from the second to last."""
LOGIT_BYTES = PerPass(14, 36)
"""Bytes that the loss moves per logit, in slices of float32 (quaver/lab/model/loss.py). Forward reads bfloat16,
writes float32, reads it and writes log-probabilities. Backward repeats that, writes the gradient of the
log-probabilities, and reads both to write the gradient of the logits in bfloat16."""
SPLIT_LOGIT_BYTES = PerPass(20, 28)
"""Bytes per logit of a tensor parallel rank's part. Forward reads bfloat16 for the maxima, and again to write
differences in float32, takes exponentials and sums them. Backward writes differences, changes them twice, and reads
them for the gradient."""
FORWARD_CAST_SHARE = 0.625
"""Share of the bytes of a weight's casts that the forward moves. With dynamic tensorwise scales, the amax and the codes
for the forward move 5 of 8 bytes an element, the codes for the backward 3."""
RESCALING_BYTES_PER_ELEMENT = 4
"""Bytes that torchao moves per element of a rowwise linear's gradients. It multiplies with one scale per operand, and
a pass that reads and writes bfloat16 scales the result (torchao/float8/float8_ops.py)."""
EAGER_BYTES_RATIO = 3.0
"""Ratio of the bytes between matmuls of eager to compiled code. Counted for a Llama 3 8B block, per token: a norm reads
and writes 30 D bytes in bfloat16 and float32, RoPE 20 (Q + K), SwiGLU 10 H, the residual 6 D twice: 540 kB forward,
compared with 180."""
GROUPED_TILE_ROWS = 128
"""Rows of a grouped matmul's tile. The tokens of an expert are padded to a multiple of it."""


class BlockTimes(NamedTuple):
    """Seconds of one block: forward, backward without recomputation, and the recomputation."""

    forward: float
    backward: float
    recomputed: float


def list_linear_sizes(model: Model) -> dict[str, tuple[int, int]]:
    """Return the in- and out-features of each linear of a block, and of the router as "gate"."""
    return {name: (shape[1], shape[0]) for name, shape in list_block_weights(model) if len(shape) == 2}


def list_expert_matrix_sizes(model: Model) -> list[tuple[int, int]]:
    """Return the in- and out-features of each matrix of a routed expert; none without experts."""
    return [(shape[2], shape[1]) for _, shape in list_block_weights(model) if len(shape) == 3]


def count_dense_parameters(run: PlannedRun) -> int:
    """Return the number of a block's parameters on one tensor parallel rank, without routed experts."""
    weights = sum(inputs * outputs for inputs, outputs in list_linear_sizes(run.model).values())
    return weights // run.tp + 2 * run.model.dim


def count_expert_parameters(run: PlannedRun) -> int:
    """Return the number of parameters of a block's routed experts on one expert parallel rank."""
    return run.model.n_experts * count_expert_elements(run.model) // run.ep


def count_held_parameters(run: PlannedRun) -> float:
    """Return the number of parameters whose optimizer states one rank holds."""
    model = run.model
    tables = 1 if model.tie_word_embeddings else 2
    dense = count_dense_parameters(run) * model.n_layers + tables * model.vocab_size * model.dim / run.tp
    experts = count_expert_parameters(run) * model.n_layers * run.ep
    return (dense + experts) / (run.dp_shard * run.cp)


def predict_block_times(run: PlannedRun, cluster: Cluster) -> BlockTimes:
    """Return the times of one block and microbatch."""
    linears = {
        name: predict_linear_time(run, name, *sizes, cluster) for name, sizes in list_linear_sizes(run.model).items()
    }
    spec, model, rank_tokens = cluster.spec, run.model, run.micro_batch_tokens / run.tp
    queries, keys = (heads * model.head_dim for heads in (model.n_heads, model.n_kv_heads))
    hidden = model.hidden_dim * count_feed_forwards_per_token(model)
    between = predict_seconds_between_matmuls(
        BlockShape(model.dim, queries, keys, hidden), rank_tokens, spec, run.residual_bytes
    )
    if not run.framework.compiled:
        between = PerPass(*(EAGER_BYTES_RATIO * seconds for seconds in between))
    attention = predict_attention_seconds(queries, rank_tokens, run.seq_len, spec, run.framework.attention)
    forward = sum(map(_sum_forward_seconds, linears.values()))
    backward = sum(time.total_s - _sum_forward_seconds(time) for time in linears.values())
    experts = predict_expert_times(run, cluster) if model.n_experts else PerPass(0, 0)
    storing_s = _predict_storing_seconds(run, cluster) if run.stores_in_float8 else 0.0
    down_proj_s = linears["down_proj"].output_s if "down_proj" in linears else 0.0
    recomputed = {
        "none": 0.0,
        "op": sum(_sum_forward_seconds(time) for name, time in linears.items() if name in OP_RECOMPUTED_LINEARS)
        + between.forward
        + experts.forward / 2,
        "full": forward - down_proj_s + between.forward + attention.forward + experts.forward,
    }[run.checkpointing]
    slowdown = 1 / cluster.sustained_share
    return BlockTimes(
        slowdown * (forward + experts.forward + attention.forward) + between.forward + storing_s,
        slowdown * (backward + experts.backward + attention.backward) + between.backward + storing_s,
        slowdown * recomputed,
    )


def count_recomputed_flops(run: PlannedRun) -> int:
    """Return the FLOPs of matmuls and attention that the backward of a checkpointed block recomputes for one token.

    It counts the matmuls of `predict_block_times`, and all of attention, although a causal kernel may skip half of it.
    """
    model = run.model
    weights = {name: inputs * outputs for name, (inputs, outputs) in list_linear_sizes(model).items()}
    experts = model.top_k * count_expert_elements(model)
    return {
        "none": 0,
        "op": 2 * sum(weights.get(name, 0) for name in OP_RECOMPUTED_LINEARS) + experts,
        "full": 2 * (sum(weights.values()) - weights.get("down_proj", 0) + experts)
        + 4 * model.n_heads * model.head_dim * run.seq_len,
    }[run.checkpointing]


def predict_linear_time(run: PlannedRun, name: str, inputs: int, outputs: int, cluster: Cluster) -> LinearTime:
    """Return the time of a linear for one microbatch on this rank, averaged over all blocks (float8 and others).

    Under a float8 all-gather, its weight arrives as codes.
    """
    float8_share = run.get_float8_share(name)
    if 0 < float8_share < 1:
        parts = [replace(run, float8_shares={name: float(is_float8)}) for is_float8 in (True, False)]
        float8, bfloat16 = (predict_linear_time(part, name, inputs, outputs, cluster) for part in parts)
        return _average(float8, bfloat16, float8_share)
    spec, split = cluster.spec, run.tp if name != "gate" else 1
    is_split_by_input = SPLIT_DIMS.get(name) == 1
    inputs, outputs = (inputs // split, outputs) if is_split_by_input else (inputs, max(1, outputs // split))
    rescales = run.framework.rescales_rows and run.precision == Float8LinearRecipeName.ROWWISE.value

    def predict_time(tokens: int) -> LinearTime:
        linear = predict_linear_cost(
            tokens,
            inputs,
            outputs,
            run.recipe or "tensorwise",
            spec,
            microbatches=run.micro_batches if run.casts_weights_once else None,
            input_readers=INPUT_READERS.get(name, 1),
            by_shape=True,
            shares={"output": get_cutlass_rowwise_share(spec)} if rescales else None,
        )
        if rescales and float8_share:
            return _add_rescaling(linear.float8, (tokens, inputs, outputs), spec)
        return linear.float8 if float8_share else linear.bfloat16

    time = predict_time(run.micro_batch_tokens)
    if run.framework.async_tensor and split > 1:  # one matmul per rank's tokens, at the rate of its shape
        part = predict_time(max(1, run.micro_batch_tokens // split))
        time = replace(time, output_s=split * part.output_s, grad_input_s=split * part.grad_input_s)
    if run.recipe is None or not float8_share:
        return time
    if run.float8_all_gather:  # the shard was cast; grad_input still needs another layout, or the dequantized weight
        bytes_per_element = 2 if "grad_input" in find_scale_kinds(run.precision) else 3
        time = replace(
            time,
            weight_casts_s=predict_move_seconds(bytes_per_element * inputs * outputs, spec)
            if run.reuses_weight_codes
            else 0.0,
        )
    if split > 1 and not is_split_by_input and not run.framework.casts_gathered:
        # a rank casts its part of the sequence, and changes the layout of the gathered codes
        layout_s = predict_move_seconds(2 * run.micro_batch_tokens * inputs, spec) / INPUT_READERS.get(name, 1)
        time = replace(time, input_casts_s=time.input_casts_s / split + layout_s)
    return time


def _average(float8: LinearTime, bfloat16: LinearTime, float8_share: float) -> LinearTime:
    """Return the time of a linear that is float8 in a share of the blocks."""
    names = (field.name for field in fields(LinearTime))
    return LinearTime(
        **{name: float8_share * getattr(float8, name) + (1 - float8_share) * getattr(bfloat16, name) for name in names}
    )


def _add_rescaling(time: LinearTime, sizes: tuple[int, int, int], spec: DeviceSpec) -> LinearTime:
    """Add torchao's passes that scale both gradients of a rowwise linear of (tokens, inputs, outputs)."""
    tokens, inputs, outputs = sizes
    return replace(
        time,
        grad_input_s=time.grad_input_s + predict_move_seconds(RESCALING_BYTES_PER_ELEMENT * tokens * inputs, spec),
        grad_weight_s=time.grad_weight_s + predict_move_seconds(RESCALING_BYTES_PER_ELEMENT * inputs * outputs, spec),
        launches_s=time.launches_s + 2 * KERNEL_LAUNCH_S,
    )


def predict_expert_times(run: PlannedRun, cluster: Cluster) -> PerPass:
    """Return the time of this rank's grouped matmuls, with evenly spread tokens, and of the permutation of tokens."""
    model, spec = run.model, cluster.spec
    local_experts, rows = model.n_experts // run.ep, run.micro_batch_tokens * model.top_k
    padded_rows = local_experts * ceil(rows / local_experts / GROUPED_TILE_ROWS) * GROUPED_TILE_ROWS
    forward = backward = 0.0
    for inputs, outputs in list_expert_matrix_sizes(model):
        cost = predict_linear_cost(padded_rows, inputs, outputs, run.recipe or "tensorwise", spec, by_shape=True)
        time = _average(cost.float8, cost.bfloat16, run.get_float8_share(EXPERTS))
        time = replace(time, weight_casts_s=time.weight_casts_s * local_experts)
        forward += _sum_forward_seconds(time)
        backward += time.total_s - _sum_forward_seconds(time)
    permuted_s = predict_move_seconds(4 * 2 * rows * model.dim, spec)
    return PerPass(forward + permuted_s, backward + permuted_s)


def predict_head_times(run: PlannedRun, cluster: Cluster) -> PerPass:
    """Return the time of the output projection and the loss."""
    model = run.model
    time = predict_linear_time(run, LM_HEAD, model.dim, model.vocab_size, cluster)
    logits = run.micro_batch_tokens * model.vocab_size / run.tp
    bytes_per_logit = LOGIT_BYTES if run.tp == 1 else SPLIT_LOGIT_BYTES
    loss = [predict_move_seconds(logits * logit_bytes, cluster.spec) for logit_bytes in bytes_per_logit]
    forward, share = _sum_forward_seconds(time), cluster.sustained_share
    return PerPass(forward / share + loss[0], (time.total_s - forward) / share + loss[1])


def predict_embedding_times(run: PlannedRun, cluster: Cluster) -> PerPass:
    """Return the time of the embedding, which reads and writes rows, and zeroes and accumulates its gradient."""
    model, spec = run.model, cluster.spec
    rows = run.micro_batch_tokens * model.dim * 2 * run.residual_bytes
    gradient = model.vocab_size * model.dim * 4 / run.tp
    return PerPass(predict_move_seconds(rows, spec), predict_move_seconds(rows + gradient, spec))


def _sum_forward_seconds(time: LinearTime) -> float:
    casts = time.input_casts_s + FORWARD_CAST_SHARE * time.weight_casts_s
    return time.output_s + casts + time.widening_s / 3 + time.launches_s / 3


def _predict_storing_seconds(run: PlannedRun, cluster: Cluster) -> float:
    """Return the time to cast stored activations to float8 or back, 3 bytes an element."""
    model = run.model
    stored = 2 * model.dim + model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)
    stored += 2 * model.hidden_dim * count_feed_forwards_per_token(model)
    return predict_move_seconds(3 * stored * run.micro_batch_tokens / run.tp, cluster.spec)

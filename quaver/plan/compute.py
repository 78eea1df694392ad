"""The seconds that one rank computes for one micro-batch: of a block, of the output projection with the loss, and more.

The model is that of quaver/roofline: matmuls at the rate of their shape, casts and all between matmuls by bytes, each
kernel's launch. So a block on one rank takes what `quaver bench ledger` models (tests/unit/plan/test_compute.py).
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from math import ceil
from typing import NamedTuple

from quaver.linear.gemm import ScaleKind, kind_of_casts
from quaver.plan.cluster import Cluster
from quaver.plan.run import EXPERTS, HEAD, Run
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.linear_casts import MATMULS
from quaver.roofline.attention import attention_seconds
from quaver.roofline.block import BlockShape, Both, seconds_between_matmuls
from quaver.roofline.cost import LinearTime, linear_cost
from quaver.roofline.matmul import MEMORY_SHARE

READERS = {"q_proj": 3, "k_proj": 3, "v_proj": 3, "gate_proj": 2, "up_proj": 2}
"""Linears that share their input and its casts."""
RECOMPUTED_BY_OP = ("k_proj", "o_proj", "up_proj")
"""Linears that "selective" recomputes: one matmul in two, counted from the end, without the last."""
LOGIT_BYTES = Both(14, 36)
"""Bytes that the loss moves for each logit, in slices of float32 (quaver/trainer/loss.py): forward reads bfloat16,
writes float32, reads it and writes log-probabilities; backward does so again, writes their gradient, and reads both for
that of the logits, which it writes in bfloat16."""
SPLIT_LOGIT_BYTES = Both(20, 28)
"""The same for each logit of a tensor parallel rank's part: forward reads bfloat16 for the maxima, and again to write
differences in float32, takes exponentials and sums them; backward writes differences, changes them twice, and reads
them for the gradient."""
CAST_FORWARD = 0.625
"""Share of the bytes of a weight's casts that the forward moves: 5 of 8 for one dynamic tensor-wise layout, then one
more."""
ROWWISE_SHARE = 0.8
"""Rate of a float8 matmul with a scale for each row, over that of one with a scale for each operand. Its kernel is
CUTLASS's and adds up exactly. Fitted to torchao's Llama 3 8B on 8 H100s: rowwise has 0.88 of tensorwise's tokens/s
(torchao/float8/README.md, March 2025); no rate by shape was found."""
BLOCKS_SHARE = 0.95
"""Rate of a float8 matmul with scales of 1 x 128, likewise: DeepGEMM's best against cuBLAS's with one scale, on H800s
and H100s at 4,096 tokens: 1,168 of 1,197 TFLOP/s (7168 x 2048), 1,265 of 1,364 (4096 x 7168), 1,009 of 1,180 (2112 x
7168)."""
MX_SHARE = 0.9
"""Rate of a float8 matmul with scales of 1 x 32, likewise, which B200s multiply: fitted to torchao's Llama 3 8B on 8
B200s, where mxfp8 has 0.96 of tensorwise's tokens/s (torchao/float8/README.md, August 2025)."""
_SHARES = {ScaleKind.ROWWISE: ROWWISE_SHARE, ScaleKind.BLOCKS_OF_128: BLOCKS_SHARE, ScaleKind.BLOCKS_OF_32: MX_SHARE}
EAGER_BYTES = 3.0
"""Times the bytes of compiled code between matmuls that eager code moves. Counted for a Llama 3 8B block, for each
token: a norm reads and writes 30 D bytes in bfloat16 and float32, RoPE 20 (Q + K), SwiGLU 10 H, the residual 6 D twice:
540 kB forward, of 180."""
TOKEN_ROWS = 128
"""Rows of a tile of a grouped matmul, to which the tokens of each expert are filled up."""


class BlockTimes(NamedTuple):
    """Seconds of one block: forward, backward without recomputation, and what the backward recomputes."""

    forward: float
    backward: float
    recomputed: float


def weights_of_block(run: Run) -> dict[str, tuple[int, int]]:
    """In- and out-features of each linear of a block, whole, without routed experts."""
    model = run.model
    queries, keys = (heads * model.head_dim for heads in (model.n_heads, model.n_kv_heads))
    dim, hidden = model.dim, model.hidden_dim * (model.n_shared_experts if model.n_experts else 1)
    sizes = {"q_proj": (dim, queries), "k_proj": (dim, keys), "v_proj": (dim, keys), "o_proj": (queries, dim)}
    if hidden:
        sizes |= {"gate_proj": (dim, hidden), "up_proj": (dim, hidden), "down_proj": (hidden, dim)}
    if model.n_experts:
        sizes |= {"gate": (dim, model.n_experts)}
    return sizes


def dense_parameters(run: Run) -> int:
    """Parameters of a block that one tensor parallel rank has, without routed experts, norms included."""
    weights = sum(inputs * outputs for inputs, outputs in weights_of_block(run).values())
    return weights // run.tensor + 2 * run.model.dim


def expert_parameters(run: Run) -> int:
    """Parameters of the routed experts of a block that one expert parallel rank has."""
    model = run.model
    return model.n_experts * 3 * model.dim * model.hidden_dim // run.expert


def held_parameters(run: Run) -> float:
    """The parameters of which one rank holds the optimizer's states."""
    model = run.model
    tables = 1 if model.tie_word_embeddings else 2
    dense = dense_parameters(run) * model.n_layers + tables * model.vocab_size * model.dim / run.tensor
    experts = expert_parameters(run) * model.n_layers * run.expert
    return (dense + experts) / (run.shard * run.context)


def block_times(run: Run, cluster: Cluster) -> BlockTimes:
    """The times of one block and micro-batch."""
    linears = {name: linear_time(run, name, *sizes, cluster) for name, sizes in weights_of_block(run).items()}
    spec, model, share = cluster.spec, run.model, run.tokens / run.tensor
    queries, keys = (heads * model.head_dim for heads in (model.n_heads, model.n_kv_heads))
    wide = model.hidden_dim * ((model.top_k + model.n_shared_experts) if model.n_experts else 1)
    between = seconds_between_matmuls(BlockShape(model.dim, queries, keys, wide), share, spec, run.residual_bytes)
    if not run.compiled:
        between = Both(*(EAGER_BYTES * each for each in between))
    attention = attention_seconds(queries, share, run.seq_len, spec, run.attention)
    forward = sum(map(_forward_s, linears.values()))
    backward = sum(time.total_s - _forward_s(time) for time in linears.values())
    experts = expert_times(run, cluster) if model.n_experts else Both(0, 0)
    stored = _storing_s(run, cluster) if run.stores_in_float8 else 0.0
    recomputed = {
        "none": 0.0,
        "op": sum(_forward_s(time) for name, time in linears.items() if name in RECOMPUTED_BY_OP)
        + between.forward
        + experts.forward / 2,
        "full": forward - _output_s(linears.get("down_proj")) + between.forward + attention.forward + experts.forward,
    }[run.checkpointing]
    slower = 1 / cluster.sustained
    return BlockTimes(
        slower * (forward + experts.forward + attention.forward) + between.forward + stored,
        slower * (backward + experts.backward + attention.backward) + between.backward + stored,
        slower * recomputed,
    )


def linear_time(run: Run, name: str, inputs: int, outputs: int, cluster: Cluster) -> LinearTime:
    """One linear for one micro-batch, this rank's share: the mean over all blocks, in some of which it may be float8.

    Under a float8 gather its weight comes as codes.
    """
    share = run.float8_share(name)
    if 0 < share < 1:
        parts = [replace(run, in_float8={name: float(is_float8)}) for is_float8 in (True, False)]
        float8, bfloat16 = (linear_time(part, name, inputs, outputs, cluster) for part in parts)
        return _mean(float8, bfloat16, share)
    spec, split = cluster.spec, run.tensor if name != "gate" else 1
    is_split_by_input = name in ("o_proj", "down_proj")
    inputs, outputs = (inputs // split, outputs) if is_split_by_input else (inputs, max(1, outputs // split))

    def cost(tokens: int) -> LinearTime:
        found = linear_cost(
            tokens,
            inputs,
            outputs,
            run.recipe or "tensorwise",
            spec,
            microbatches=run.micro_batches if run.casts_weights_once else None,
            input_readers=READERS.get(name, 1),
            by_shape=True,
        )
        return found.float8 if share else found.bfloat16

    time = cost(run.tokens)
    if run.async_tensor and split > 1:  # a part for each rank's tokens, at the rate of the part's shape
        part = cost(max(1, run.tokens // split))
        time = replace(time, output_s=split * part.output_s, grad_input_s=split * part.grad_input_s)
    if run.recipe is None or not share:
        return time
    time, bytes_per_s = _at_its_rate(time, run.recipe), spec.memory_gb_per_s * 1e9 * MEMORY_SHARE
    if run.float8_gather:  # the shard was cast; a layout is left for grad_input
        time = replace(time, weight_casts_s=2 * inputs * outputs / bytes_per_s if run.has_one_cast else 0.0)
    if split > 1 and not is_split_by_input and not run.casts_gathered:
        # a rank casts its part of the sequence, and lays out what it gathers
        laid_out_s = 2 * run.tokens * inputs / bytes_per_s / READERS.get(name, 1)
        time = replace(time, input_casts_s=time.input_casts_s / split + laid_out_s)
    return time


def _mean(one: LinearTime, other: LinearTime, share: float) -> LinearTime:
    """The mean of two times, of which the first has a share."""
    names = (each.name for each in fields(LinearTime))
    return LinearTime(**{name: share * getattr(one, name) + (1 - share) * getattr(other, name) for name in names})


def _at_its_rate(time: LinearTime, recipe: Float8LinearRecipeName) -> LinearTime:
    """The time with matmuls of other than one scale for each operand at their lower rate."""
    if time.widening_s:
        return time
    slower = {f"{name}_s": getattr(time, f"{name}_s") / share for name, share in shares_of_matmuls(recipe).items()}
    return replace(time, **slower)


@functools.cache
def shares_of_matmuls(recipe: Float8LinearRecipeName) -> dict[str, float]:
    """By name, as in MATMULS, the shares of the rate of those that are slower than with one scale for each operand."""
    casts = Float8LinearConfig.from_recipe_name(recipe).casts
    pairs = {name: (casts.of(*left), casts.of(*right)) for name, (left, right) in MATMULS.items()}
    kinds = {name: None if pair[0].is_disabled else kind_of_casts(*pair) for name, pair in pairs.items()}
    return {name: _SHARES[kind] for name, kind in kinds.items() if kind in _SHARES}


def expert_times(run: Run, cluster: Cluster) -> Both:
    """The grouped matmuls of this rank's experts, with tokens spread evenly, and their permutation."""
    model, spec = run.model, cluster.spec
    local, rows = model.n_experts // run.expert, run.tokens * model.top_k
    filled = local * ceil(rows / local / TOKEN_ROWS) * TOKEN_ROWS
    forward = backward = 0.0
    for inputs, outputs in ((model.dim, 2 * model.hidden_dim), (model.hidden_dim, model.dim)):
        cost = linear_cost(filled, inputs, outputs, run.recipe or "tensorwise", spec, by_shape=True)
        time = _mean(cost.float8, cost.bfloat16, run.float8_share(EXPERTS))
        time = replace(time, weight_casts_s=time.weight_casts_s * local)
        forward += _forward_s(time)
        backward += time.total_s - _forward_s(time)
    permuted_s = 4 * 2 * rows * model.dim / (spec.memory_gb_per_s * 1e9 * MEMORY_SHARE)
    return Both(forward + permuted_s, backward + permuted_s)


def head_times(run: Run, cluster: Cluster) -> Both:
    """The output projection and the loss."""
    model = run.model
    time = linear_time(run, HEAD, model.dim, model.vocab_size, cluster)
    logits = run.tokens * model.vocab_size / run.tensor
    bytes_of_each = LOGIT_BYTES if run.tensor == 1 else SPLIT_LOGIT_BYTES
    loss = [logits * each / (cluster.spec.memory_gb_per_s * 1e9 * MEMORY_SHARE) for each in bytes_of_each]
    forward = _forward_s(time)
    return Both(forward / cluster.sustained + loss[0], (time.total_s - forward) / cluster.sustained + loss[1])


def embedding_times(run: Run, cluster: Cluster) -> Both:
    """The embedding: its rows are read and written, its gradient is zeroed and added to."""
    model, bytes_per_s = run.model, cluster.spec.memory_gb_per_s * 1e9 * MEMORY_SHARE
    rows = run.tokens * model.dim * 2 * run.residual_bytes
    whole = model.vocab_size * model.dim * 4 / run.tensor
    return Both(rows / bytes_per_s, (rows + whole) / bytes_per_s)


def moved_s(moved_bytes: float, cluster: Cluster) -> float:
    """The time of a kernel that only moves bytes."""
    return moved_bytes / (cluster.spec.memory_gb_per_s * 1e9 * MEMORY_SHARE)


def _forward_s(time: LinearTime) -> float:
    casts = time.input_casts_s + CAST_FORWARD * time.weight_casts_s
    return time.output_s + casts + time.widening_s / 3 + time.launches_s / 3


def _output_s(time: LinearTime | None) -> float:
    return 0.0 if time is None else time.output_s


def _storing_s(run: Run, cluster: Cluster) -> float:
    """Casts of what is stored in float8, and back: 3 bytes an element each way."""
    model = run.model
    kept = 2 * model.dim + model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads) + 2 * model.hidden_dim
    return moved_s(3 * kept * run.tokens / run.tensor, cluster)

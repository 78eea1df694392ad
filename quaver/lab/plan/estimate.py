"""The peak memory of one rank in closed form, in a millisecond: it orders layouts and rules out hopeless ones.

Bytes of the rank, with T tokens of a micro-batch, D, Q, K, H and V features of the stream, all queries, all keys, the
feed-forward and the vocabulary; a block has P weights on this tensor parallel rank:

    resident    parameters, optimizer states, tokens; gradients too where there are several micro-batches,
                whole and in float32 if they are reduced after the last
    root        the gathered embedding, which FSDP2 frees after the backward
    saved       what blocks save (`_saved_by_blocks`), rotary tables, the last block's output and its norm
    peak        resident + root + saved + the largest of
        head, forward       its gathered weight twice (with the buffer of the all-gather), logits
        head, backward      gathered weight, its gradient, the next gathered block, logits, gradient of its input
        last block          two gathered blocks, the head's gradient in float32, gradients of P, temporaries
        first block         as the last, without saved activations, with all gradients sharded
        embedding           all gradients sharded, its own in float32

All blocks are taken to be alike: a linear that is in float8 in some of them has that share of it in each. Layers with
a recipe of their own count as the run's.

`quaver.lab.memory.runs.predict.predict_memory` predicts the peak to the byte, in seconds to minutes;
tests/lab/plan/test_estimate.py holds the two within 5% of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, prod

import torch

from quaver.checkpointing.policy import selected_every
from quaver.kernels.adamw import BLOCK
from quaver.lab.plan.run import EXPERTS, float8_shares, has_one_cast
from quaver.lab.settings import Model, TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims, resolve
from quaver.lab.trainer.loss import SLICE_ELEMENTS
from quaver.optim.state import SMALL
from quaver.recipes.config import Float8LinearConfig

_FLOAT32, _LOW = 4, 2
"""Bytes of an element in float32, and in bfloat16."""
_STORED = 1 + _FLOAT32 / 128
"""Bytes of an element that is stored in float8: its code and its part of a scale."""
_SLICES = 4
"""Slices of the logits in float32 that the loss's backward has at once."""
_SPLIT_SLICES = 1
"""The same of tensor parallel ranks, each with its part of the vocabulary."""


@dataclass(frozen=True)
class _Weight:
    """A parameter: whether tensor parallel ranks split its first or its last dim, or none (-1)."""

    shape: tuple[int, ...]
    split: int = -1
    is_expert: bool = False

    def shape_on(self, layout: ParallelDims) -> tuple[int, ...]:
        """On one tensor and expert parallel rank, gathered."""
        shape = list(self.shape)
        if self.split >= 0:
            shape[self.split] //= layout.tensor
        if self.is_expert:
            shape[0] //= layout.expert
        return tuple(shape)

    def sharded(self, layout: ParallelDims) -> int:
        """Elements on the first rank."""
        first, *rest = self.shape_on(layout)
        ranks = layout.shard // layout.expert if self.is_expert else layout.shard
        return ceil(first / ranks) * prod(rest)

    def scales(self, layout: ParallelDims) -> int:
        """Scales of a float8 state on the first rank; a rank has those of whole rows where ranks split a block."""
        columns = self.shape_on(layout)[-1]
        whole = columns if columns % BLOCK == 0 else self.shape[-1]
        return self.sharded(layout) // columns * ceil(whole / BLOCK)


def estimated_peak(config: TrainConfig, ranks: int = 1) -> int:
    """About the peak bytes of `predict_memory(config, ranks)` for a GPU.

    Raises:
        ValueError: the degrees do not fit the ranks, as `resolve` says.
    """
    config, layout = resolve(config, rank=0, world_size=ranks)
    return _Estimate(config, layout).peak


class _Estimate:
    """The terms of a run; those of a rank that has its share of each tensor."""

    def __init__(self, config: TrainConfig, layout: ParallelDims) -> None:
        self.config, self.layout, self.model = config, layout, config.model
        training, float8 = config.training, config.float8
        self.tokens = training.local_batch_size * training.seq_len
        self.micro_batches = layout.micro_batches(training)
        self.stream_bytes = getattr(torch, training.residual_stream_dtype).itemsize
        self.parameter_bytes = getattr(torch, training.dtype).itemsize
        self.is_sharded = layout.data_parallel_degree > 1
        self.shares = float8_shares(config)
        self.recipe = Float8LinearConfig.from_recipe_name(float8.recipe) if float8.enable_float8_linear else None
        self.block, self.outside = _weights_of_block(self.model), _weights_outside(self.model)
        self.in_block = sum(prod(weight.shape_on(layout)) for weight in self.block)

    @property
    def peak(self) -> int:
        """Bytes; see the top of the file."""
        model, tp = self.model, self.layout.tensor
        parameters = self.parameters
        resident = parameters + self.states + self._buffers() + self._inputs() + self._held_codes()
        gradients = self._held_gradients()
        all_reduced = max(parameters, gradients)
        embedding = model.vocab_size * model.dim // tp
        head = 0 if model.tie_word_embeddings else embedding
        head_gradient = _FLOAT32 * head // self.layout.shard
        reshard = self.config.parallelism.fsdp_reshard_after_forward
        root = embedding * self.stream_bytes if self.is_sharded and reshard != "always" else 0
        codes = int(self._gathered_bytes() * self.in_block) if self.is_sharded else 0
        if reshard == "never":
            root, codes = root + model.n_layers * codes, 0
        saved = self.tokens * sum(self._saved_by_blocks()) + self._saved_outside()
        gathered_input = self.tokens * model.dim * _LOW if tp > 1 else 0
        block = codes * 2 + self._temporaries() + gathered_input
        codes_of_gradients = 3 if self.config.comm.float8_gradients else 0  # to be sent, their copy, and arrived
        reduced = (_FLOAT32 + codes_of_gradients) * self.in_block if self.is_sharded else 0
        live = root + saved
        return resident + max(
            live + gradients + self._head(head if self.is_sharded else 0, codes, head),
            live + max(gradients, head_gradient) + block + max(_FLOAT32 * head if self.is_sharded else 0, reduced),
            root + all_reduced + block + reduced,
            root + all_reduced + reduced + embedding * _FLOAT32 + self.tokens * model.dim * _FLOAT32 // tp,
            parameters + (2 * embedding * _FLOAT32 if self.is_sharded else 0),
        )

    @property
    def parameters(self) -> int:
        """Bytes of this rank's parameters, and of their gradients."""
        return self._sum(lambda weight: weight.sharded(self.layout)) * self.parameter_bytes

    def _held_gradients(self) -> int:
        """Bytes of gradients that earlier micro-batches leave: shards in the parameters' dtype, or float32 sums."""
        reduce = self.config.training.reduce
        if self.micro_batches == 1:
            return 0
        if reduce == "every":
            return self.parameters
        if reduce == "last_all_reduce":
            return _FLOAT32 * self._sum(lambda weight: weight.sharded(self.layout))
        return _FLOAT32 * self._sum(lambda weight: prod(weight.shape_on(self.layout)))

    def _buffers(self) -> int:
        """Buffers of routers: a bias and a count of tokens for each expert."""
        return self.model.n_layers * 2 * self.model.n_experts * _FLOAT32

    def _head(self, gathered: int, codes: int, head: int) -> int:
        """Bytes of the output projection and the loss, which tensor parallel ranks split by words."""
        tp, stream = self.layout.tensor, self.tokens * self.model.dim * _LOW
        logits = self.tokens * self.model.vocab_size // tp
        slices = (_SLICES if tp == 1 else _SPLIT_SLICES) * _FLOAT32 * min(SLICE_ELEMENTS, logits)
        forward = (2 * gathered + logits) * _LOW + (stream // tp if tp > 1 else 0)
        backward = (gathered + logits + head) * _LOW + codes + stream
        return max(forward, logits * _LOW + slices, backward)

    def _sum(self, number: Callable[[_Weight], int]) -> int:
        return self.model.n_layers * sum(map(number, self.block)) + sum(map(number, self.outside))

    @property
    def states(self) -> int:
        """Bytes of the optimizer's states: float8 codes with a scale for 128 of them, or moments like the parameter."""
        optimizer, blocks = self.config.optimizer, set(self.block)

        def of(weight: _Weight) -> int:
            elements, is_muons = weight.sharded(self.layout), optimizer.is_muon and weight in blocks
            is_muons = is_muons and len(weight.shape) == 2
            moments, step = (1, 0) if is_muons else (2, _FLOAT32)
            if not optimizer.has_float8_states:
                return moments * elements * self.parameter_bytes + step
            is_small = len(weight.shape) < 2 or prod(weight.shape) < SMALL
            in_float32 = is_small or weight is self.outside[1]  # the embedding
            each = _FLOAT32 * elements if in_float32 else elements + _FLOAT32 * weight.scales(self.layout)
            return moments * each + _FLOAT32

        return self._sum(of)

    def _inputs(self) -> int:
        tensors = 3 if self.config.data.document_mask else 2
        mask = self.tokens * self.config.training.seq_len if tensors == 3 else 0
        return self.micro_batches * tensors * self.tokens * torch.int64.itemsize + mask

    def _casts(self) -> float:
        """Bytes of the codes of a weight, for both of its matmuls; those in high precision have two, too."""
        if self.recipe is None:
            return _LOW
        codes = 1 if has_one_cast(self.config.float8.recipe) else 2
        sizes = self._sizes()
        share = sum(self._share(name) * size for name, size in sizes.items()) / sum(sizes.values())
        return share * codes + (1 - share) * _LOW

    def _share(self, *names: str) -> float:
        """The share of blocks in which all of these linears are in float8."""
        return min(self.shares.get(name, 0.0) for name in names)

    def _sizes(self) -> dict[str, int]:
        """The elements of the linears of a block, without routed experts, and of these."""
        model = self.model
        dim, keys = model.dim, model.n_kv_heads * model.head_dim
        sizes = {"q_proj": dim * dim, "k_proj": keys * dim, "v_proj": keys * dim, "o_proj": dim * dim}
        wide = dim * model.hidden_dim * (model.n_shared_experts if model.n_experts else 1)
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), wide) if wide else {}
        return sizes | ({EXPERTS: 3 * dim * model.hidden_dim * model.n_experts} if model.n_experts else {})

    def _gathered_bytes(self) -> float:
        return self._casts() if self.config.float8.enable_fsdp_float8_all_gather else _LOW

    def _held_codes(self) -> int:
        """Weights that a step casts once: one process does, and whoever is asked to."""
        if not self.is_sharded:
            return int(self.model.n_layers * self.in_block * self._casts())
        shards = sum(weight.sharded(self.layout) for weight in self.block)
        return int(self.model.n_layers * shards * self._casts()) if self.config.float8.cast_weights_once else 0

    def _saved_outside(self) -> int:
        """Rotary tables; the stream after the last block, and the input of the head, gathered."""
        tables = 2 * self.config.training.seq_len * self.model.head_dim * _FLOAT32
        stream = self.stream_bytes * self.model.dim // self.layout.tensor
        return tables + self.tokens * (stream + _LOW * self.model.dim)

    def _saved_by_blocks(self) -> Iterator[int]:
        """Bytes for each token that each block saves."""
        checkpoint, layers = self.config.activation_checkpoint, self.model.n_layers
        stream = self.stream_bytes * self.model.dim // self.layout.tensor
        everything = self._saved_without_checkpoint()
        every = selected_every(checkpoint.selective_ac_option) if checkpoint.mode == "selective" else 1
        if checkpoint.mode == "none":
            yield from [everything] * layers
        elif checkpoint.mode == "memory_budget":
            yield from [stream + int(checkpoint.memory_budget * (everything - stream))] * layers
        elif every is None:
            yield from [self._saved_by_policy()] * layers
        else:
            yield from (stream if number % every == 0 else everything for number in range(1, layers + 1))

    def _attention(self) -> tuple[int, int, int]:
        """Features of queries and keys, and bytes of attention's output with the sums of its scores."""
        queries, keys = self.model.dim, self.model.n_kv_heads * self.model.head_dim
        return queries, keys, _LOW * queries + _FLOAT32 * self.model.n_heads

    def _saved_by_policy(self) -> int:
        """With the policy of checkpointing/policy.py: one matmul in two, attention, reduce-scatters.

        Matmuls are counted from the first in compiled code, where the last is not saved, and from the last in eager
        code.
        """
        (queries, keys, attention), dim, tp = self._attention(), self.model.dim, self.layout.tensor
        experts, shared = self.model.n_experts, self.model.n_shared_experts * self.model.hidden_dim
        if self.config.training.compile:
            matmuls = _LOW * (queries + keys) + (_FLOAT32 * experts if experts else _LOW * self.model.hidden_dim)
            matmuls += _LOW * (self.model.top_k * dim + shared) if experts else 0
        else:
            wide = self.model.top_k * 2 * self.model.hidden_dim + shared if experts else self.model.hidden_dim
            matmuls = _LOW * (keys + dim + wide)
        scattered = 2 * _LOW * dim if tp > 1 else 0
        return (self.stream_bytes * dim + matmuls + attention + scattered) // tp

    def _saved_without_checkpoint(self) -> int:
        """All that a block saves.

        Compiled float8 saves no input of a linear that it can cast again from what else is saved. Eager code saves
        codes, and so do inputs that tensor parallel ranks gather; a gradient of weights in high precision saves the
        input.
        Norms, attention and feed-forwards may store what they save as codes; linears store nothing.
        """
        (queries, keys, attention), dim, tp = self._attention(), self.model.dim, self.layout.tensor
        experts, hidden = self.model.n_experts, self.model.hidden_dim
        is_compiled, stores = self.config.training.compile, self.config.activation_checkpoint.store_in_float8
        low, of_stream = (_STORED, _STORED) if stores else (_LOW, self.stream_bytes)
        # at the begin of the block, and after attention; compiled code saves what attention adds
        streams = (of_stream + (low if is_compiled else of_stream)) * dim
        if self.config.data.document_mask:  # attention with a mask has as many keys as queries
            keys = queries
        rotated = low * (queries + 2 * keys)
        attention += int((low - _LOW) * queries)
        rows = self._rows()
        gates = low * 2 * hidden * rows
        wide, down = (EXPERTS, EXPERTS) if experts else ("gate_proj", "down_proj")
        saved, product = self._saved_of_float8(tp=1), hidden * rows
        gathered = dim * tp, self._saved_of_float8(tp)
        inputs = (
            (self._share("q_proj", "k_proj", "v_proj"), *gathered),
            (self._share(wide), *gathered),
            (self._share(down), product, saved),
        )
        of_linears = sum(features * (share * codes + (1 - share) * _LOW) for share, features, codes in inputs)
        if saved < _LOW:  # attention saves its output
            of_linears += self._share("o_proj") * saved * queries
        if not is_compiled:  # silu(gate), which a norm or SwiGLU in front of float8 does not save
            fused = self._share(down) if self.config.float8.fused_producers else 0.0
            of_linears += low * product * (1 - fused)
        if experts:
            of_linears += (
                low * dim * self.model.top_k * 2 + _FLOAT32 * experts
            )  # tokens of experts, before and after; scores
        return int(streams + rotated + attention + gates + of_linears) // tp

    def _rows(self) -> int:
        """Feed-forwards, or experts, that a token passes."""
        return self.model.top_k + self.model.n_shared_experts if self.model.n_experts else 1

    def _saved_of_float8(self, tp: int) -> int:
        """Bytes that a float8 linear saves for each element of its input, which so many ranks gather."""
        if self.recipe is None:
            return 0
        if self.recipe.casts.input.of_column.is_disabled:
            return _LOW
        saves = tp > 1 or not self.config.training.compile
        return int(saves)

    def _temporaries(self) -> int:
        """Gradients of a block's weights, or their copy in float32, and of the tensors of its feed-forward."""
        of_token = 8 * self._rows() * self.model.hidden_dim + _FLOAT32 * self.model.dim
        return _LOW * self.in_block + self.tokens * of_token // self.layout.tensor


def _weights_of_block(model: Model) -> list[_Weight]:
    dim, keys = model.dim, model.n_kv_heads * model.head_dim
    attention = [_Weight((dim, dim), 0), _Weight((keys, dim), 0), _Weight((keys, dim), 0), _Weight((dim, dim), 1)]
    norms = [_Weight((dim,)), _Weight((dim,))]
    hidden = model.n_shared_experts * model.hidden_dim if model.n_experts else model.hidden_dim
    network = [_Weight((hidden, dim), 0), _Weight((hidden, dim), 0), _Weight((dim, hidden), 1)] if hidden else []
    if not model.n_experts:
        return [*attention, *network, *norms]
    experts = [
        _Weight((model.n_experts, dim)),
        _Weight((model.n_experts, 2 * model.hidden_dim, dim), is_expert=True),
        _Weight((model.n_experts, dim, model.hidden_dim), is_expert=True),
    ]
    return [*attention, *experts, *network, *norms]


def _weights_outside(model: Model) -> list[_Weight]:
    """The last norm, the embedding, and last the head."""
    embedding = _Weight((model.vocab_size, model.dim), 0)
    return [_Weight((model.dim,)), embedding, *([] if model.tie_word_embeddings else [_Weight(embedding.shape, 0)])]

"""Estimates the peak memory of one rank in closed form, in a millisecond, to order layouts and rule out hopeless ones.

The peak is what lives during the whole step (parameters, optimizer states and tokens) and the largest of the moments
in `Estimate.count_moment_bytes`.

With several micro-batches the gradients of earlier ones are resident too (`_count_held_gradient_bytes`): shards, or
with training.reduce = last whole float32 sums.

All blocks are taken to be equal: a linear that is float8 in some blocks counts with that share in every block. Layer
recipes count as the run's recipe.

`quaver.lab.memory.runs.predict.predict_memory` runs the trainer's code with fake tensors, and predicts the peak to the
byte in seconds to minutes. Nothing runs here: which tensors are alive at each moment is written down. The two share
the trainer's shapes and degrees, and tests/lab/plan/test_estimate.py holds their results together.
docs/design/0020-plan.md says why there are two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, prod

import torch

from quaver.checkpointing.policy import parse_selective_option
from quaver.kernels.adamw import BLOCK
from quaver.lab.plan.run import EXPERTS, HEAD, count_networks, find_float8_shares, has_one_cast
from quaver.lab.settings import Model, TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims, resolve
from quaver.lab.trainer.loss import SLICE_ELEMENTS
from quaver.lab.trainer.model import SPLIT_DIMS, BlockWeight, list_block_weights
from quaver.optim.state import MIN_FLOAT8_ELEMENTS
from quaver.recipes.config import Float8LinearConfig

ESTIMATE_ERROR = 0.1
"""The largest difference between an estimate and a prediction, as a share of the prediction. The configs of
tests/lab/plan/test_estimate.py, most of which are within half of it, are a sample of all configs."""

_FLOAT32, _LOW = 4, 2
"""Bytes of an element in float32, and in bfloat16."""
_STORED = 1 + _FLOAT32 / 128
"""Bytes of an element that is stored in float8: its code and its part of a scale."""
_EMBEDDING = "embed_tokens"
_ALL_SPLIT_DIMS = SPLIT_DIMS | {_EMBEDDING: 0, HEAD: 0}
_SLICES = 4
"""Slices of the logits in float32 that are alive at once in the loss's backward (quaver/lab/trainer/loss.py):
log-probabilities and gradients of the previous slice, logits and log-probabilities of the next."""
_SPLIT_SLICES = 1
"""The same number under tensor parallelism, which splits the vocabulary: the gradients, computed in place."""


class _Weight(BlockWeight):
    """A parameter of a block, or outside of the blocks."""

    def find_gathered_shape(self, dims: ParallelDims) -> tuple[int, ...]:
        """Return the gathered shape on one tensor and expert parallel rank."""
        shape = list(self.shape)
        if self.name in _ALL_SPLIT_DIMS:
            shape[_ALL_SPLIT_DIMS[self.name]] //= dims.tensor
        if self.name == EXPERTS:
            shape[0] //= dims.expert
        return tuple(shape)

    def count_sharded(self, dims: ParallelDims) -> int:
        """Return the number of elements on the first rank."""
        first, *rest = self.find_gathered_shape(dims)
        ranks = dims.shard // dims.expert if self.name == EXPERTS else dims.shard
        return ceil(first / ranks) * prod(rest)

    def count_scales(self, dims: ParallelDims) -> int:
        """Return the number of scales of a float8 state on the first rank: of whole rows if their blocks are split."""
        columns = self.find_gathered_shape(dims)[-1]
        row = columns if columns % BLOCK == 0 else self.shape[-1]
        return self.count_sharded(dims) // columns * ceil(row / BLOCK)


def estimate_peak(config: TrainConfig, ranks: int = 1) -> int:
    """Estimate the peak bytes of `predict_memory(config, ranks)` on a GPU.

    Raises:
        InputError: the degrees do not fit the ranks, as `resolve` says.
    """
    config, dims = resolve(config, rank=0, world_size=ranks)
    return Estimate(config, dims).count_peak_bytes()


class Estimate:
    """The bytes of one rank at the moments of a step, for the `config` and `dims` that `resolve` returned."""

    def __init__(self, config: TrainConfig, dims: ParallelDims) -> None:
        self.config, self.dims, self.model = config, dims, config.model
        training, float8 = config.training, config.float8
        self.tokens = training.local_batch_size * training.seq_len
        self.micro_batches = dims.count_micro_batches(training)
        self.stream_bytes = getattr(torch, training.residual_stream_dtype).itemsize
        self.parameter_bytes = getattr(torch, training.dtype).itemsize
        self.is_sharded = dims.data_parallel_degree > 1
        self.float8_shares = find_float8_shares(config)
        self.recipe = Float8LinearConfig.from_recipe_name(float8.recipe) if float8.enable_float8_linear else None
        self.block_weights = [_Weight(*weight) for weight in list_block_weights(self.model)]
        self.outside_weights = _list_outside_weights(self.model)
        self.block_elements = sum(prod(weight.find_gathered_shape(dims)) for weight in self.block_weights)

    def count_peak_bytes(self) -> int:
        """Return the bytes of the peak."""
        return self._count_resident_bytes() + max(self.count_moment_bytes().values())

    def _count_resident_bytes(self) -> int:
        return (
            self.count_parameter_bytes()
            + self.count_state_bytes()
            + self._count_buffer_bytes()
            + self._count_input_bytes()
            + self._count_held_code_bytes()
        )

    def count_moment_bytes(self) -> dict[str, int]:
        """Return the bytes beside the resident ones at each moment that may be the peak.

        Up to the last block all blocks' activations, the rotary tables, the last block's output and its norm are saved.
        FSDP2 keeps the gathered embedding, the root, until its backward; fsdp_reshard_after_forward = "always" frees it
        only between the forward and the backward of the whole model.
        """
        model, tp = self.model, self.dims.tensor
        held_gradients = self._count_held_gradient_bytes()
        all_gradients = max(self.count_parameter_bytes(), held_gradients)
        embedding = model.vocab_size * model.dim // tp
        is_tied = model.tie_word_embeddings
        gathered_embedding = embedding * self.stream_bytes if self.is_sharded else 0
        gathered_block = int(self._compute_gathered_bytes() * self.block_elements) if self.is_sharded else 0
        gathered_always = gathered_embedding
        if self.config.parallelism.fsdp_reshard_after_forward == "never":
            gathered_always += model.n_layers * gathered_block
            gathered_block = 0
        saved = self.tokens * sum(self._iter_saved_by_blocks()) + self._count_saved_outside()
        # two gathered blocks, and the temporaries of one
        in_block = gathered_block * 2 + self._count_temporary_bytes()
        in_block += self.tokens * model.dim * _LOW if tp > 1 else 0
        gradient_codes = 3 if self.config.comm.float8_gradients else 0  # sent, copied and received
        reduced_block = (_FLOAT32 + gradient_codes) * self.block_elements if self.is_sharded else 0
        head = 0 if is_tied else embedding
        head_shard, reduced_head = _FLOAT32 * head // self.dims.shard, _FLOAT32 * head if self.is_sharded else 0
        # The gradient of a tied projection waits for the embedding's, to which it is added.
        tied_gradient = embedding * self.stream_bytes if is_tied else 0
        at_last_block = gathered_always + saved + held_gradients
        at_first_block = gathered_always + all_gradients + tied_gradient
        return {
            **{
                name: at_last_block + head_bytes
                for name, head_bytes in self._count_head_bytes(embedding, gathered_block).items()
            },
            # its gradients, while the head's or its own are reduced
            "last block": at_last_block
            + tied_gradient
            + max(0, head_shard - held_gradients)
            + in_block
            + max(reduced_head, reduced_block),
            "first block": at_first_block + in_block + reduced_block,
            # the gradient of the embedding, and its sum with a tied projection's, while the first block's are reduced
            "embedding": at_first_block
            + (2 if is_tied and self.is_sharded else 1) * embedding * self.stream_bytes
            + reduced_block
            + self.tokens * model.dim * _FLOAT32 // tp,
            # the gradient, and the copy that is reduced
            "reduction of the embedding's gradient": self.count_parameter_bytes()
            + (2 * embedding * _FLOAT32 if self.is_sharded else 0),
        }

    def count_parameter_bytes(self) -> int:
        """Return the bytes of this rank's parameters. Their gradients take as many."""
        return self._sum(lambda weight: weight.count_sharded(self.dims)) * self.parameter_bytes

    def _count_held_gradient_bytes(self) -> int:
        """Return the bytes of earlier micro-batches' gradients: shards in the parameters' dtype, or float32 sums."""
        reduce = self.config.training.reduce
        if self.micro_batches == 1:
            return 0
        if reduce == "every":
            return self.count_parameter_bytes()
        if reduce == "last_all_reduce":
            return _FLOAT32 * self._sum(lambda weight: weight.count_sharded(self.dims))
        return _FLOAT32 * self._sum(lambda weight: prod(weight.find_gathered_shape(self.dims)))

    def _count_buffer_bytes(self) -> int:
        """Return the bytes of the routers' buffers, a bias and a count of tokens per expert."""
        return self.model.n_layers * 2 * self.model.n_experts * _FLOAT32

    def _count_head_bytes(self, weights: int, gathered_block: int) -> dict[str, int]:
        """Return the bytes of the output projection and the loss, split over the vocabulary by tensor parallelism.

        Args:
            weights: the number of the projection's weights.
            gathered_block: bytes of a gathered block.
        """
        tp, stream = self.dims.tensor, self.tokens * self.model.dim * _LOW
        logits = self.tokens * self.model.vocab_size // tp
        slices = (_SLICES if tp == 1 else _SPLIT_SLICES) * _FLOAT32 * min(SLICE_ELEMENTS, logits)
        is_tied = self.model.tie_word_embeddings
        gathered = weights if self.is_sharded and not is_tied else 0
        cast = weights if self.is_sharded and is_tied and self.stream_bytes > _LOW else 0  # from the root
        return {
            # the weight, the all-gather's buffer of the same size, and the logits
            "forward of the head": (2 * gathered + cast + logits) * _LOW + (stream // tp if tp > 1 else 0),
            "loss": (cast + logits) * _LOW + slices,
            # the weight and its gradient, the logits, the gradient of the input, and the last block's weights
            "backward of the head": (gathered + cast + logits + weights) * _LOW + gathered_block + stream,
        }

    def _sum(self, count: Callable[[_Weight], int]) -> int:
        return self.model.n_layers * sum(map(count, self.block_weights)) + sum(map(count, self.outside_weights))

    def count_state_bytes(self) -> int:
        """Return the bytes of the optimizer's states: codes with a scale per 128, or moments in the weights' dtype."""
        optimizer, blocks = self.config.optimizer, set(self.block_weights)

        def count_bytes(weight: _Weight) -> int:
            elements = weight.count_sharded(self.dims)
            is_muons = optimizer.is_muon and weight in blocks and len(weight.shape) == 2
            moments, step = (1, 0) if is_muons else (2, _FLOAT32)
            if not optimizer.has_float8_states:
                return moments * elements * self.parameter_bytes + step
            is_small = len(weight.shape) < 2 or prod(weight.shape) < MIN_FLOAT8_ELEMENTS
            in_float32 = is_small or weight.name == _EMBEDDING
            moment = _FLOAT32 * elements if in_float32 else elements + _FLOAT32 * weight.count_scales(self.dims)
            return moments * moment + _FLOAT32

        return self._sum(count_bytes)

    def _count_input_bytes(self) -> int:
        tensors = 3 if self.config.data.document_mask else 2
        mask = self.tokens * self.config.training.seq_len if tensors == 3 else 0
        return self.micro_batches * tensors * self.tokens * torch.int64.itemsize + mask

    def _compute_cast_bytes(self) -> float:
        """Return the bytes per element of a weight's codes for both of its matmuls, or 2 in high precision."""
        if self.recipe is None:
            return _LOW
        codes = 1 if has_one_cast(self.config.float8.recipe) else 2
        sizes = [(name, prod(shape)) for name, shape in self.block_weights if name in SPLIT_DIMS or name == EXPERTS]
        share = sum(self._compute_share(name) * size for name, size in sizes) / sum(size for _, size in sizes)
        return share * codes + (1 - share) * _LOW

    def _compute_share(self, *names: str) -> float:
        """Return the share of blocks in which all named linears are in float8."""
        return min(self.float8_shares.get(name, 0.0) for name in names)

    def _compute_gathered_bytes(self) -> float:
        return self._compute_cast_bytes() if self.config.float8.enable_fsdp_float8_all_gather else _LOW

    def _count_held_code_bytes(self) -> int:
        """Return the bytes of the codes of weights that are cast once per step, as they always are in one process."""
        if self.is_sharded and not self.config.float8.cast_weights_once:
            return 0
        held = (
            sum(weight.count_sharded(self.dims) for weight in self.block_weights)
            if self.is_sharded
            else self.block_elements
        )
        return int(self.model.n_layers * held * self._compute_cast_bytes())

    def _count_saved_outside(self) -> int:
        """Return the bytes of the rotary tables, the last block's output and the gathered input of the head."""
        tables = 2 * self.config.training.seq_len * self.model.head_dim * _FLOAT32
        stream = _STORED if self.config.activation_checkpoint.store_in_float8 else self.stream_bytes
        return tables + int(self.tokens * self.model.dim * (stream / self.dims.tensor + _LOW))

    def _iter_saved_by_blocks(self) -> Iterator[int]:
        """Yield the bytes per token that each block saves."""
        checkpoint, layers = self.config.activation_checkpoint, self.model.n_layers
        stream = int(self._choose_stream_bytes() * self.model.dim) // self.dims.tensor
        everything = self._count_saved_without_checkpoint()
        every = parse_selective_option(checkpoint.selective_ac_option) if checkpoint.mode == "selective" else 1
        if checkpoint.mode == "none":
            yield from [everything] * layers
        elif checkpoint.mode == "memory_budget":
            yield from [stream + int(checkpoint.memory_budget * (everything - stream))] * layers
        elif every is None:
            yield from [self._count_saved_by_policy()] * layers
        else:
            yield from (stream if number % every == 0 else everything for number in range(1, layers + 1))

    def _choose_stream_bytes(self) -> float:
        """Return the bytes per feature of a checkpointed block's input, which only compiled code stores as codes."""
        stores = self.config.activation_checkpoint.store_in_float8
        return _STORED if stores and self.config.training.compile else self.stream_bytes

    def _count_attention_bytes(self) -> tuple[int, int, int]:
        """Return the features of queries and keys, and the bytes of attention's output with the sums of its scores."""
        queries, keys = self.model.dim, self.model.n_kv_heads * self.model.head_dim
        return queries, keys, _LOW * queries + _FLOAT32 * self.model.n_heads

    def _count_saved_by_policy(self) -> int:
        """Return the bytes per token that the policy of checkpointing/policy.py saves.

        The policy saves every second matmul, attention and reduce-scatters. It counts matmuls from the first in
        compiled code, where the last is not saved, and from the last in eager code. Only compiled code stores what the
        policy saves as codes.
        """
        (queries, keys, attention), dim, tp = self._count_attention_bytes(), self.model.dim, self.dims.tensor
        experts, shared = self.model.n_experts, self.model.n_shared_experts * self.model.hidden_dim
        is_compiled, stores = self.config.training.compile, self.config.activation_checkpoint.store_in_float8
        low, stream = _STORED if is_compiled and stores else _LOW, self._choose_stream_bytes()
        attention += int((low - _LOW) * queries)
        matmuls: float
        if is_compiled:
            matmuls = low * (queries + keys) + (_FLOAT32 * experts if experts else low * self.model.hidden_dim)
            matmuls += low * (self.model.top_k * dim + shared) if experts else 0
        else:
            wide = self.model.top_k * 2 * self.model.hidden_dim + shared if experts else self.model.hidden_dim
            matmuls = _LOW * (keys + dim + wide)
        scattered = 2 * low * dim if tp > 1 else 0
        return int(stream * dim + matmuls + attention + scattered) // tp

    def _count_saved_without_checkpoint(self) -> int:
        """Return the bytes per token that a block saves without checkpointing.

        Compiled float8 code does not save an input of a linear that it can cast again from other saved tensors. Eager
        code, and linears whose input tensor parallelism gathers, save codes. A grad_weight in high precision saves the
        input. Norms, attention and feed-forwards may store saved tensors as codes; linears do not.
        """
        (queries, keys, attention), dim, tp = self._count_attention_bytes(), self.model.dim, self.dims.tensor
        experts, hidden = self.model.n_experts, self.model.hidden_dim
        is_compiled, stores = self.config.training.compile, self.config.activation_checkpoint.store_in_float8
        low, stream = (_STORED, _STORED) if stores else (_LOW, self.stream_bytes)
        # the residual stream before attention, and after it, where compiled code saves attention's output instead
        streams = (stream + (low if is_compiled else stream)) * dim
        if self.config.data.document_mask:  # attention with a mask has as many keys as queries
            keys = queries
        rotated = low * (queries + 2 * keys)
        attention += int((low - _LOW) * queries)
        rows = count_networks(self.model)
        gates = low * 2 * hidden * rows
        wide, down = (EXPERTS, EXPERTS) if experts else ("gate_proj", "down_proj")
        saved, product = self._count_saved_of_float8(tp=1), hidden * rows
        gathered = dim * tp, self._count_saved_of_float8(tp)
        inputs = (
            (self._compute_share("q_proj", "k_proj", "v_proj"), *gathered),
            (self._compute_share(wide), *gathered),
            (self._compute_share(down), product, saved),
        )
        linears = sum(features * (share * codes + (1 - share) * _LOW) for share, features, codes in inputs)
        if saved < _LOW:  # attention saves its output
            linears += self._compute_share("o_proj") * saved * queries
        if not is_compiled:  # silu(gate), which a SwiGLU in front of float8 does not save
            fused = self._compute_share(down) if self.config.float8.fused_producers else 0.0
            linears += low * product * (1 - fused)
        if experts:  # scores, and the tokens of experts before and after
            linears += low * dim * self.model.top_k * 2 + _FLOAT32 * experts
        return int(streams + rotated + attention + gates + linears) // tp

    def _count_saved_of_float8(self, tp: int) -> int:
        """Return the bytes that a float8 linear saves per element of its input, which `tp` ranks gather."""
        if self.recipe is None:
            return 0
        if self.recipe.casts.input.column_source.is_disabled:
            return _LOW
        saves = tp > 1 or not self.config.training.compile
        return int(saves)

    def _count_temporary_bytes(self) -> int:
        """Return the bytes of a block's weight gradients, and of the gradients in its feed-forward.

        Per token these are four in bfloat16 as wide as its hidden layer (of gate, up, silu(gate) and their product),
        and the gradient of its output in float32.
        """
        token_bytes = 8 * count_networks(self.model) * self.model.hidden_dim + _FLOAT32 * self.model.dim
        return _LOW * self.block_elements + self.tokens * token_bytes // self.dims.tensor


def _list_outside_weights(model: Model) -> list[_Weight]:
    """Return the last norm, the embedding and, unless it is tied, the head."""
    tables = [_EMBEDDING] if model.tie_word_embeddings else [_EMBEDDING, HEAD]
    return [_Weight("norm", (model.dim,)), *(_Weight(name, (model.vocab_size, model.dim)) for name in tables)]

"""Estimates the peak memory of one rank in closed form, in a millisecond, to order layouts and rule out hopeless ones.

The peak is the sum of what lives during the whole step (parameters, optimizer states, tokens) and the largest of the
instants in `PeakEstimate.count_bytes_by_instant`.

With several microbatches the gradients of earlier ones are resident too (`_count_held_gradient_bytes`): shards, or
with training.reduce = last whole float32 sums.

All blocks are taken to be equal: a linear that is float8 in some blocks counts with that share in every block. Layer
recipes count as the run's recipe.

`predict_run_memory` (quaver/lab/memory/train_step/predict_run.py) runs the trainer's code with fake tensors, and
predicts the peak to the byte in seconds to minutes. Nothing runs here: formulas state which tensors are alive at each
instant. Both share the trainer's shapes and degrees, and tests/lab/plan/test_peak_memory.py compares their results.
docs/design/0020-plan.md says why there are two.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod

import torch

from quaver.conversion.roles import LM_HEAD
from quaver.kernels.adamw import MOMENT_BLOCK_ELEMENTS
from quaver.lab.model.llama import SPLIT_DIMS, BlockWeight, list_block_weights
from quaver.lab.model.loss import SLICE_ELEMENTS
from quaver.lab.plan.planned_run import (
    EXPERTS,
    count_feed_forwards_per_token,
    find_float8_shares,
    get_itemsize,
    recipe_reuses_weight_codes,
)
from quaver.lab.plan.saved_activations import FLOAT32_BYTES, STORED_BYTES, SavedActivations
from quaver.lab.settings import Model, TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims, resolve_parallel_dims
from quaver.optim.buckets import BYTES_PER_UPDATED_ELEMENT, MAX_BUCKET_ELEMENTS, MIN_BUCKETS
from quaver.optim.state import MIN_FLOAT8_ELEMENTS
from quaver.recipes.config import Float8LinearConfig

ESTIMATE_ERROR = 0.1
"""The difference between an estimate and a prediction, as a share of the prediction, that tests allow. It is no bound:
tests/lab/plan/test_peak_memory.py compares the configs of seeds 0 and 1 in each run, and 38 more at night. Most differ
by less than half of it."""

_EMBEDDING = "embed_tokens"
_ALL_SPLIT_DIMS = SPLIT_DIMS | {_EMBEDDING: 0, LM_HEAD: 0}
_LOSS_SLICES = 4
"""Slices of the logits in float32 that are alive at once in the loss's backward (quaver/lab/model/loss.py):
log-probabilities and gradients of the previous slice, logits (unless they are float32) and log-probabilities of the
next."""
_SPLIT_LOSS_SLICES = 1
"""The same number under tensor parallelism, which splits the vocabulary: the gradients, computed in place."""


class _Weight(BlockWeight):
    """A parameter of a block, or outside of the blocks."""

    def find_gathered_shape(self, dims: ParallelDims) -> tuple[int, ...]:
        """Return the gathered shape on one tensor and expert parallel rank."""
        shape = list(self.shape)
        if self.name in _ALL_SPLIT_DIMS:
            shape[_ALL_SPLIT_DIMS[self.name]] //= dims.tp
        if self.name == EXPERTS:
            shape[0] //= dims.ep
        return tuple(shape)

    def count_sharded(self, dims: ParallelDims) -> int:
        """Return the number of elements on the first rank."""
        first, *rest = self.find_gathered_shape(dims)
        return ceil(first / self._count_ranks(dims)) * prod(rest)

    def count_padded(self, dims: ParallelDims) -> int:
        """Return the number of gathered elements: FSDP2 pads all shards to the size of the first."""
        return self.count_sharded(dims) * self._count_ranks(dims)

    def _count_ranks(self, dims: ParallelDims) -> int:
        return dims.dp_shard // dims.ep if self.name == EXPERTS else dims.dp_shard

    def count_scales(self, dims: ParallelDims) -> int:
        """Return the number of scales of a float8 state on the first rank: of whole rows if their blocks are split."""
        columns = self.find_gathered_shape(dims)[-1]
        row = columns if columns % MOMENT_BLOCK_ELEMENTS == 0 else self.shape[-1]
        return self.count_sharded(dims) // columns * ceil(row / MOMENT_BLOCK_ELEMENTS)


def estimate_peak(config: TrainConfig, ranks: int = 1) -> int:
    """Estimate the peak bytes of `predict_run_memory(config, ranks)` on a GPU.

    Raises:
        InputError: the degrees do not fit the ranks, as `resolve_parallel_dims` says.
    """
    config, dims = resolve_parallel_dims(config, rank=0, world_size=ranks)
    return PeakEstimate(config, dims).count_peak_bytes()


class PeakEstimate:
    """The bytes of one rank at the instants of a step, for what `resolve_parallel_dims` returned."""

    def __init__(self, config: TrainConfig, dims: ParallelDims) -> None:
        self.config, self.dims, self.model = config, dims, config.model
        training, float8 = config.training, config.float8
        self.micro_batch_tokens = training.local_batch_size * training.seq_len
        self.micro_batches = dims.count_micro_batches(training)
        self.residual_bytes = get_itemsize(training.residual_stream_dtype)
        self.compute_bytes = get_itemsize(training.mixed_precision_param)
        self.parameter_bytes = get_itemsize(training.dtype)
        self.is_sharded = dims.data_parallel_degree > 1
        self.embedding_bytes = self.residual_bytes if self.is_sharded else self.parameter_bytes
        self.float8_shares = find_float8_shares(config)
        self.float8_config = Float8LinearConfig.from_recipe_name(float8.recipe) if float8.enable_float8_linear else None
        self.saved = SavedActivations(config, dims.tp, self.float8_shares, self.float8_config)
        self.block_weights = [_Weight(*weight) for weight in list_block_weights(self.model)]
        self.outside_weights = _list_outside_weights(self.model)
        self.embedding_elements = self.model.vocab_size * self.model.dim // dims.tp
        self.block_elements = sum(prod(weight.find_gathered_shape(dims)) for weight in self.block_weights)
        self.padded_block_elements = sum(weight.count_padded(dims) for weight in self.block_weights)
        block_bytes = self._count_gathered_block_bytes()
        is_kept = config.parallelism.fsdp_reshard_after_forward == "never"
        self.gathered_block_bytes, self.kept_block_bytes = (0, block_bytes) if is_kept else (block_bytes, 0)
        """Bytes of a block's weights that are gathered for its forward or backward only, or until its backward."""
        self.held_gradient_bytes = self._count_held_gradient_bytes()

    def count_peak_bytes(self) -> int:
        """Return the resident bytes plus those of the instant that has the most beside them."""
        resident = self.count_parameter_bytes() + self.count_state_bytes()
        resident += self._count_router_buffer_bytes() + self._count_token_bytes()
        return resident + max(self.count_bytes_by_instant().values())

    def count_bytes_by_instant(self) -> dict[str, int]:
        """Return the bytes beside the resident ones at each instant that may be the peak.

        FSDP2 keeps the gathered embedding, the root, until its backward; fsdp_reshard_after_forward = "always" frees it
        only between the forward and the backward of the whole model.
        """
        codes_and_root = self._count_held_code_bytes()
        codes_and_root += self.embedding_elements * self.residual_bytes if self.is_sharded else 0
        in_model = {**self._count_head_instants(), **self._count_block_instants(), **self._count_embedding_instants()}
        # Resident are the embedding's gradient, in the dtype of its weight, and the float32 copy that FSDP2 reduces.
        reduced = self._count_reduced_bytes(self.embedding_elements)
        reduced += self.embedding_bytes * self.embedding_elements if self.is_sharded else 0
        return {
            **{name: codes_and_root + size for name, size in in_model.items()},
            "reduction of the embedding's gradient": max(self.count_parameter_bytes(), self.held_gradient_bytes)
            + reduced,
            "optimizer": self.count_parameter_bytes() + self._count_optimizer_bytes(),
        }

    def _count_head_instants(self) -> dict[str, int]:
        """Return the bytes during the output projection and the loss, which follow the forward of the last block."""
        saved = sum(self._list_saved_by_blocks()) + self._count_rope_table_bytes() + self.held_gradient_bytes
        saved += self.model.n_layers * self.kept_block_bytes
        with_input = saved + self._count_head_input_bytes()
        weights = 0 if self.model.tie_word_embeddings or not self.is_sharded else self.embedding_elements
        return {
            # Resident are the buffers of two all-gathers, or one buffer and the weights that it is copied into.
            "forward of the last block": saved + self._count_mask_bytes() + 2 * self._count_gathered_block_bytes(),
            **{name: with_input + size for name, size in self._count_head_bytes().items()},
            # FSDP2 reduces a float32 copy of the head's gradient while it gathers the last block's weights.
            "end of the head": saved
            + self.gathered_block_bytes
            + self.compute_bytes * weights
            + self._count_reduced_bytes(weights),
        }

    def _count_block_instants(self) -> dict[str, int]:
        """Return the bytes in the backward of the first block and the last two.

        In the feed-forward of a block the gradients of the module after it are reduced, and the weights of the block
        before it are gathered. At the end of a block it has the gradients of all its weights.
        """
        saved, parameter, blocks = self._list_saved_by_blocks(), self.parameter_bytes, self.model.n_layers
        head = 0 if self.model.tie_word_embeddings else self.embedding_elements
        reduced_head, reduced_block = map(self._count_reduced_bytes, (head, self.padded_block_elements))
        gathered, block_gradients = self.gathered_block_bytes, self._count_gradient_bytes(self.block_elements)
        head_shard, embedding_shard = (
            parameter * size // self.dims.dp_shard for size in (head, self.embedding_elements)
        )
        block_shard = parameter * sum(weight.count_sharded(self.dims) for weight in self.block_weights)
        kept_before_last = (blocks - 1) * self.kept_block_bytes

        def count_alive(gradient_shards: int, saved_before: list[int]) -> int:
            """Return what is alive beside a block: its predecessors' saved tensors, and gradients that were reduced."""
            gradients = self._count_tied_gradient_bytes() + max(self.held_gradient_bytes, gradient_shards)
            return gradients + self._count_rope_table_bytes() + sum(saved_before)

        def count_feed_forward(index: int) -> int:
            return saved[index] + self._count_feed_forward_bytes(saved[index])

        last = count_alive(head_shard, saved[:-1]) + kept_before_last
        first = count_alive(self.count_parameter_bytes() - embedding_shard - block_shard, []) + self.kept_block_bytes
        first += gathered
        instants = {
            "feed-forward of the last block": last
            + self.kept_block_bytes
            + 2 * gathered
            + count_feed_forward(-1)
            + reduced_head,
            "end of the last block": last
            + block_gradients
            + max(gathered + reduced_block, 2 * gathered + reduced_head),
            "feed-forward of the first block": first
            + count_feed_forward(0)
            + (reduced_head if blocks == 1 else reduced_block),
            "end of the first block": first + block_gradients + reduced_block,
        }
        if blocks > 2:
            second_last = count_alive(head_shard + block_shard, saved[:-2]) + kept_before_last
            second_last += 2 * gathered + reduced_block
            instants |= {
                "feed-forward of the second last block": second_last + count_feed_forward(-2),
                "end of the second last block": second_last + block_gradients,
            }
        return instants

    def _count_embedding_instants(self) -> dict[str, int]:
        """Return the bytes in the embedding's backward, while the first block's gradients are reduced.

        The embedding's gradient is summed in float32, for the whole vocabulary also under tensor parallelism, where a
        rank then copies its part. The gradient of a tied projection is added out of place.
        """
        tp, elements = self.dims.tp, self.embedding_elements
        reduced_gradients = self.count_parameter_bytes() - self.parameter_bytes * elements // self.dims.dp_shard
        is_cast = self.embedding_bytes < FLOAT32_BYTES  # as a whole, before a rank copies its part
        copies = (tp if is_cast else 1) * (tp > 1) + int(self.model.tie_word_embeddings)
        size = self._count_tied_gradient_bytes() + max(self.held_gradient_bytes, reduced_gradients)
        size += (FLOAT32_BYTES * tp + copies * self.embedding_bytes) * elements
        return {
            "embedding": size
            + self._count_reduced_bytes(self.padded_block_elements)
            + self.micro_batch_tokens * self.model.dim * FLOAT32_BYTES // tp
        }

    def _list_saved_by_blocks(self) -> list[int]:
        """Return the bytes that each block saves."""
        return [self.micro_batch_tokens * token_bytes for token_bytes in self.saved.iter_bytes_per_token()]

    def _count_gathered_block_bytes(self) -> int:
        """Return the bytes of a block's gathered weights."""
        in_float8 = self.config.float8.enable_fsdp_float8_all_gather
        element_bytes = self._compute_cast_bytes() if in_float8 else self.compute_bytes
        return int(element_bytes * self.padded_block_elements) if self.is_sharded else 0

    def _count_tied_gradient_bytes(self) -> int:
        """Return the bytes of a tied projection's gradient, which waits for the embedding's, to which it is added."""
        return self.embedding_elements * self.embedding_bytes if self.model.tie_word_embeddings else 0

    def count_parameter_bytes(self) -> int:
        """Return the bytes of this rank's parameters. Their gradients take as many."""
        return self._sum_over_weights(lambda weight: weight.count_sharded(self.dims)) * self.parameter_bytes

    def _count_held_gradient_bytes(self) -> int:
        """Return the bytes of earlier microbatches' gradients: shards in the parameters' dtype, or float32 sums."""
        reduce = self.config.training.reduce
        if self.micro_batches == 1:
            return 0
        if reduce == "every":
            return self.count_parameter_bytes()
        if reduce == "last_all_reduce":
            return FLOAT32_BYTES * self._sum_over_weights(lambda weight: weight.count_sharded(self.dims))
        return FLOAT32_BYTES * self._sum_over_weights(lambda weight: prod(weight.find_gathered_shape(self.dims)))

    def _count_gradient_bytes(self, elements: int) -> int:
        """Return the bytes of gradients in the dtype of gathered weights, or of parameters that are not sharded."""
        return elements * (self.compute_bytes if self.is_sharded else self.parameter_bytes)

    def _count_reduced_bytes(self, elements: int) -> int:
        """Return the bytes of float32 gradients that are reduced, with their codes if they are sent in float8."""
        gradient_codes = 3 if self.config.comm.float8_gradients else 0  # sent, copied and received
        return (FLOAT32_BYTES + gradient_codes) * elements if self.is_sharded else 0

    def _count_optimizer_bytes(self) -> int:
        """Return the bytes of the temporaries of the optimizer's step."""
        optimizer, blocks = self.config.optimizer, set(self.block_weights)
        if optimizer.has_float8_states:
            elements = self._sum_over_weights(lambda weight: weight.count_sharded(self.dims))
            return BYTES_PER_UPDATED_ELEMENT * min(MAX_BUCKET_ELEMENTS, elements // MIN_BUCKETS)
        if optimizer.implementation != "foreach":
            return 0
        # foreach AdamW holds the square roots of the second moments of all parameters at once.
        return self.parameter_bytes * self._sum_over_weights(
            lambda weight: (
                0
                if optimizer.is_muon and weight in blocks and len(weight.shape) == 2
                else weight.count_sharded(self.dims)
            )
        )

    def _count_mask_bytes(self) -> int:
        """Return the bytes of a bool per query and key, with which attention keeps documents apart."""
        return self.micro_batch_tokens * self.config.training.seq_len if self.config.data.document_mask else 0

    def _count_router_buffer_bytes(self) -> int:
        """Return the bytes of the routers' buffers, a bias and a count of tokens per expert."""
        return self.model.n_layers * 2 * self.model.n_experts * FLOAT32_BYTES

    def _count_head_bytes(self) -> dict[str, int]:
        """Return the bytes of the output projection and the loss, split over the vocabulary by tensor parallelism."""
        tp, weights, compute_bytes = self.dims.tp, self.embedding_elements, self.compute_bytes
        input_bytes = self.micro_batch_tokens * self.model.dim * compute_bytes
        logits = self.micro_batch_tokens * self.model.vocab_size // tp
        is_tied = self.model.tie_word_embeddings
        gathered = weights if self.is_sharded and not is_tied else 0
        cast = weights if self.is_sharded and is_tied and self.residual_bytes > compute_bytes else 0  # from the root
        if tp > 1:
            loss = compute_bytes * logits + _SPLIT_LOSS_SLICES * FLOAT32_BYTES * min(SLICE_ELEMENTS, logits)
        elif logits > SLICE_ELEMENTS:
            slices = _LOSS_SLICES - (compute_bytes == FLOAT32_BYTES)
            loss = compute_bytes * logits + slices * FLOAT32_BYTES * SLICE_ELEMENTS
        else:  # the log-probabilities and two gradients are resident
            loss = 3 * FLOAT32_BYTES * logits
        return {
            # Resident are the gathered weight, the all-gather's buffer of the same size, and the logits.
            "forward of the head": (2 * gathered + cast + logits) * compute_bytes
            + (input_bytes // tp if tp > 1 else 0),
            "loss": cast * compute_bytes + loss,
            # Resident are the weight and its gradient, the logits, the input's gradient and the last block's weights.
            "backward of the head": (gathered + cast + logits + weights) * compute_bytes
            + self.gathered_block_bytes
            + input_bytes,
        }

    def _sum_over_weights(self, count: Callable[[_Weight], int]) -> int:
        return self.model.n_layers * sum(map(count, self.block_weights)) + sum(map(count, self.outside_weights))

    def count_state_bytes(self) -> int:
        """Return the bytes of the optimizer's states: codes with a scale per 128, or moments in the weights' dtype."""
        optimizer, blocks = self.config.optimizer, set(self.block_weights)

        def count_bytes(weight: _Weight) -> int:
            elements = weight.count_sharded(self.dims)
            is_updated_by_muon = optimizer.is_muon and weight in blocks and len(weight.shape) == 2
            moments, step = (1, 0) if is_updated_by_muon else (2, FLOAT32_BYTES)
            if not optimizer.has_float8_states:
                return moments * elements * self.parameter_bytes + step
            is_small = len(weight.shape) < 2 or prod(weight.shape) < MIN_FLOAT8_ELEMENTS
            in_float32 = is_small or weight.name == _EMBEDDING
            scale_bytes = FLOAT32_BYTES * weight.count_scales(self.dims)
            return moments * (FLOAT32_BYTES * elements if in_float32 else elements + scale_bytes) + FLOAT32_BYTES

        return self._sum_over_weights(count_bytes)

    def _count_token_bytes(self) -> int:
        tensors = 3 if self.config.data.document_mask else 2
        return self.micro_batches * tensors * self.micro_batch_tokens * torch.int64.itemsize

    def _compute_cast_bytes(self, *, is_held: bool = False) -> float:
        """Return the bytes per element of a weight's codes for both of its matmuls, or of its cast in high precision.

        Autocast holds no cast of weights that have its dtype.
        """
        high_precision = 0 if is_held and self.compute_bytes == self.parameter_bytes else self.compute_bytes
        if self.float8_config is None:
            return high_precision
        # A GPU multiplies codes along rows only, so that a process holds them in both layouts.
        codes = 1 if recipe_reuses_weight_codes(self.config.float8.recipe) and self.is_sharded else 2
        sizes = [(name, prod(shape)) for name, shape in self.block_weights if name in SPLIT_DIMS or name == EXPERTS]
        share = sum(self.float8_shares.get(name, 0.0) * size for name, size in sizes) / sum(size for _, size in sizes)
        return share * codes + (1 - share) * high_precision

    def _count_held_code_bytes(self) -> int:
        """Return the bytes of the codes of weights that are cast once per step, as they always are in one process."""
        if self.dims.world_size > 1 and not self.config.float8.cast_weights_once:
            return 0
        held = sum(
            weight.count_sharded(self.dims) if self.is_sharded else prod(weight.shape) for weight in self.block_weights
        )
        return int(self.model.n_layers * held * self._compute_cast_bytes(is_held=True))

    def _count_rope_table_bytes(self) -> int:
        """Return the bytes of the rotary tables."""
        return 2 * self.config.training.seq_len * self.model.head_dim * FLOAT32_BYTES

    def _count_head_input_bytes(self) -> int:
        """Return the bytes of the last block's output, and of its norm, which tensor parallel ranks gather."""
        residual = STORED_BYTES if self.config.activation_checkpoint.store_in_float8 else self.residual_bytes
        return int(self.micro_batch_tokens * self.model.dim * (residual / self.dims.tp + self.compute_bytes))

    def _count_feed_forward_bytes(self, saved_bytes: int) -> int:
        """Return the bytes of the temporaries in a feed-forward's backward.

        Per token these are three as wide as its hidden layer (the gradients of up, silu(gate) and their product), and
        the gradient of its output in float32; and the gradient of down_proj. A checkpointed block has been recomputed.
        """
        model, checkpoint = self.model, self.config.activation_checkpoint
        wide_bytes = self.compute_bytes * count_feed_forwards_per_token(model) * model.hidden_dim
        token_bytes = 3 * wide_bytes
        if not self.config.training.compile:
            # Eager code dequantizes the saved codes of gate and up, and adds the gradients of all experts in float32.
            token_bytes += 2 * wide_bytes if checkpoint.store_in_float8 else 0
            if model.n_experts:
                token_bytes = max(token_bytes, (3 * FLOAT32_BYTES + self.compute_bytes) * model.dim * model.top_k)
        token_bytes += self.residual_bytes * model.dim
        wide = sum(
            prod(weight.find_gathered_shape(self.dims))
            for weight in self.block_weights
            if weight.name in ("gate_proj", "up_proj", "down_proj", EXPERTS)
        )
        recomputed_bytes = max(0, self.micro_batch_tokens * self.saved.count_bytes_without_checkpoint() - saved_bytes)
        gradient_bytes = self._count_gradient_bytes(wide // 3)
        return gradient_bytes + self.micro_batch_tokens * token_bytes // self.dims.tp + recomputed_bytes


def _list_outside_weights(model: Model) -> list[_Weight]:
    """Return the last norm, the embedding and, unless it is tied, the head."""
    tables = [_EMBEDDING] if model.tie_word_embeddings else [_EMBEDDING, LM_HEAD]
    return [_Weight("norm", (model.dim,)), *(_Weight(name, (model.vocab_size, model.dim)) for name in tables)]

"""Counts the bytes that each block saves for its backward, for one token on one rank, by how it is checkpointed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quaver.activations.policy import parse_selective_option
from quaver.lab.plan.planned_run import EXPERTS, count_feed_forwards_per_token, get_itemsize
from quaver.lab.settings import TrainConfig
from quaver.recipes.config import Float8LinearConfig

FLOAT32_BYTES = 4
"""Bytes of an element in float32."""
STORED_BYTES = 1 + FLOAT32_BYTES / 128
"""Bytes of an element that is stored in float8: its code and its part of a scale."""


class SavedActivations:
    """The tensors that blocks save, on each of `ranks` tensor parallel ranks.

    Args:
        float8_shares: the share of blocks in which each linear is in float8 (`find_float8_shares`).
        float8_config: the config of float8 linears; None for a run in high precision.
    """

    def __init__(
        self,
        config: TrainConfig,
        ranks: int,
        float8_shares: Mapping[str, float],
        float8_config: Float8LinearConfig | None,
    ) -> None:
        training = config.training
        self._config, self._model, self._ranks = config, config.model, ranks
        self._float8_shares, self._float8_config = float8_shares, float8_config
        self._is_compiled, self._stores_in_float8 = training.compile, config.activation_checkpoint.store_in_float8
        self._compute_bytes = get_itemsize(training.mixed_precision_param)
        self._residual_bytes = get_itemsize(training.residual_stream_dtype)

    def iter_bytes_per_token(self) -> Iterator[int]:
        """Yield the bytes per token that each block saves, from the first block to the last."""
        checkpoint, layers = self._config.activation_checkpoint, self._model.n_layers
        input_bytes = int(self._choose_input_bytes() * self._model.dim) // self._ranks
        whole_bytes = self.count_bytes_without_checkpoint()
        interval = parse_selective_option(checkpoint.selective_ac_option) if checkpoint.mode == "selective" else 1
        if checkpoint.mode == "none":
            yield from [whole_bytes] * layers
        elif checkpoint.mode == "memory_budget":
            yield from [input_bytes + int(checkpoint.memory_budget * (whole_bytes - input_bytes))] * layers
        elif interval is None:
            yield from [self._count_policy_bytes()] * layers
        else:
            yield from (input_bytes if number % interval == 0 else whole_bytes for number in range(1, layers + 1))

    def _choose_input_bytes(self) -> float:
        """Return the bytes per feature of a checkpointed block's input, which only compiled code stores as codes."""
        return STORED_BYTES if self._stores_in_float8 and self._is_compiled else self._residual_bytes

    def _compute_attention_sizes(self) -> tuple[int, int, int]:
        """Return the features of queries and keys, and the bytes of attention's output with the sums of its scores."""
        queries, keys = self._model.dim, self._model.n_kv_heads * self._model.head_dim
        return queries, keys, self._compute_bytes * queries + FLOAT32_BYTES * self._model.n_heads

    def _count_policy_bytes(self) -> int:
        """Return the bytes per token that the policy of activations/policy.py saves.

        The policy saves every second matmul, attention and reduce-scatters. It counts matmuls from the first in
        compiled code, where the last is not saved, and from the last in eager code. Only compiled code stores what the
        policy saves as codes.
        """
        (queries, keys, attention), dim, ranks = self._compute_attention_sizes(), self._model.dim, self._ranks
        experts, shared = self._model.n_experts, self._model.n_shared_experts * self._model.hidden_dim
        stores_codes = self._is_compiled and self._stores_in_float8
        saved_bytes, residual_bytes = STORED_BYTES if stores_codes else self._compute_bytes, self._choose_input_bytes()
        attention += int((saved_bytes - self._compute_bytes) * queries)
        matmuls: float
        if self._is_compiled:
            matmuls = saved_bytes * (queries + keys) + (
                FLOAT32_BYTES * experts if experts else saved_bytes * self._model.hidden_dim
            )
            matmuls += saved_bytes * (self._model.top_k * dim + shared) if experts else 0
        else:
            wide = self._model.top_k * 2 * self._model.hidden_dim + shared if experts else self._model.hidden_dim
            matmuls = self._compute_bytes * (keys + dim + wide)
        scattered = 2 * saved_bytes * dim if ranks > 1 else 0
        return int(residual_bytes * dim + matmuls + attention + scattered) // ranks

    def count_bytes_without_checkpoint(self) -> int:
        """Return the bytes per token that a block saves without checkpointing.

        Compiled float8 code does not save an input of a linear that it can cast again from other saved tensors. Eager
        code, and linears whose input tensor parallelism gathers, save codes. A grad_weight in high precision saves the
        input. Norms, attention and feed-forwards may store saved tensors as codes; linears do not.
        """
        (queries, keys, attention), dim, ranks = self._compute_attention_sizes(), self._model.dim, self._ranks
        experts, hidden = self._model.n_experts, self._model.hidden_dim
        saved_bytes, residual_bytes = (
            (STORED_BYTES, STORED_BYTES) if self._stores_in_float8 else (self._compute_bytes, self._residual_bytes)
        )
        # the residual stream before attention, and after it, where compiled code saves attention's output instead
        residual = (residual_bytes + (saved_bytes if self._is_compiled else residual_bytes)) * dim
        if self._config.data.document_mask:  # attention with a mask has as many keys as queries
            keys = queries
        attention_inputs = saved_bytes * (queries + 2 * keys)
        attention += int((saved_bytes - self._compute_bytes) * queries)
        rows = count_feed_forwards_per_token(self._model)
        gates = saved_bytes * 2 * hidden * rows
        wide, down = (EXPERTS, EXPERTS) if experts else ("gate_proj", "down_proj")
        saved, product = self._count_saved_of_float8(ranks=1), hidden * rows
        gathered = dim * ranks, self._count_saved_of_float8(ranks)
        inputs = (
            (self._find_float8_share("q_proj", "k_proj", "v_proj"), *gathered),
            (self._find_float8_share(wide), *gathered),
            (self._find_float8_share(down), product, saved),
        )
        linears = sum(
            features * (share * codes + (1 - share) * self._compute_bytes) for share, features, codes in inputs
        )
        if saved < self._compute_bytes:  # attention saves its output
            linears += self._find_float8_share("o_proj") * saved * queries
        if not self._is_compiled:  # silu(gate), which a SwiGLU in front of float8 does not save
            fused = self._find_float8_share(down) if self._config.float8.fused_producers else 0.0
            linears += saved_bytes * product * (1 - fused)
        if experts:  # scores, and the tokens of experts before and after
            linears += saved_bytes * dim * self._model.top_k * 2 + FLOAT32_BYTES * experts
        mask = self._compute_bytes * self._config.training.seq_len if self._config.data.document_mask else 0
        return int(residual + attention_inputs + attention + gates + linears) // ranks + mask

    def _count_saved_of_float8(self, ranks: int) -> int:
        """Return the bytes that a float8 linear saves per element of its input, which `ranks` gather."""
        if self._float8_config is None:
            return 0
        if self._float8_config.casts.input.column_source.is_disabled:
            return self._compute_bytes
        saves = ranks > 1 or not self._is_compiled
        return int(saves)

    def _find_float8_share(self, *names: str) -> float:
        """Return the share of blocks in which all named linears are in float8."""
        return min(self._float8_shares.get(name, 0.0) for name in names)

"""The properties of a run on which its time depends: the degrees of its layout, its shapes and its precision.

`make_planned_run` makes the trainer's runs from a config. Runs that others published may also have context parallelism
and another `Framework`.
"""

from __future__ import annotations

import functools
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from quaver import Float8Linear
from quaver.activations.policy import parse_selective_option
from quaver.conversion.roles import LM_HEAD
from quaver.experts.module import Float8Experts
from quaver.lab.model.float8 import convert_model
from quaver.lab.model.llama import SPLIT_DIMS, make_meta_llama
from quaver.lab.settings import Float8, Model, TrainConfig
from quaver.lab.settings.float8 import BFLOAT16
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.linear_casts import LinearCasts
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.runtime.errors import InputError

Checkpointing = Literal["none", "op", "full"]
"""A checkpointed block recomputes nothing, the ops that the selective policy does not save, or everything."""
Resharding = Literal["default", "always", "never"]
"""A value of parallelism.fsdp_reshard_after_forward."""
Reduction = Literal["every", "last", "last_all_reduce"]
"""A value of training.reduce."""

EXPERTS = "experts"
_MOMENTS_PER_PARAMETER = {"AdamW": 2, "Float8AdamW": 2, "Muon": 1, "Float8Muon": 1}
"""The optimizer's states per parameter; Muon's are for matrices of blocks."""


@dataclass(frozen=True)
class Framework:
    """How the software of a published run computes and sends a block. The defaults are the trainer's."""

    async_tensor: bool = False
    """Whether tensor parallel collectives overlap with adjacent matmuls."""
    casts_gathered: bool = False
    """Whether tensor parallel ranks all-gather bfloat16 and quantize the gathered tensor. The trainer all-gathers
    codes."""
    async_expert: bool = False
    """Whether exchanges of tokens overlap with the compute of the same half of a block, as in DeepSeek's DualPipe."""
    exchanged_share: float = 1.0
    """The bytes of token exchanges relative to the trainer's. DeepSeek-V3 sends codes, and each token once to a
    node."""
    compiled: bool = True
    """Whether the operations between matmuls are compiled."""
    attention: Literal["flash", "cudnn"] | None = None
    """The kernel of attention; None for torch's choice (roofline/attention.py)."""
    rescales_rows: bool = False
    """Whether rowwise linears are torchao's: CUTLASS multiplies the forward, cuBLAS the gradients with one scale per
    operand, and another pass scales them."""


@dataclass(frozen=True)
class PlannedRun:
    """The step of one rank: `micro_batches` times forward and backward, and the optimizer.

    Degrees are numbers of ranks; `tp` varies fastest, then `cp`, `dp_shard` and `dp_replicate`. Experts are split over
    `ep` neighbors of a shard group.
    """

    model: Model
    seq_len: int
    local_batch: int
    """Sequences of a microbatch of one data-parallel rank."""
    micro_batches: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    recipe: Float8LinearRecipeName | str | None = None
    """None for bfloat16."""
    float8_shares: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(SPLIT_DIMS, 1.0))
    """The share of blocks in which a linear is float8, by the last part of its name, or by "experts"; 0 or 1 for
    "lm_head". `get_float8_share` reads it and returns 0 without a recipe."""
    float8_all_gather: bool = False
    checkpointing: Checkpointing = "none"
    checkpointed_blocks: int = 0
    reshard_after_forward: Resharding = "default"
    """Which weights FSDP2 gathers again for the backward: default (all except the embedding's group), always, never."""
    float8_gradients: bool = False
    """FSDP2 reduces gradients as float8 codes."""
    casts_weights_once: bool = False
    stores_in_float8: bool = False
    residual_bytes: int = 4
    parameter_bytes: int = 4
    state_bytes: int = 8
    """Bytes of the optimizer's states per parameter, without scales."""
    steps_between_saves: int = 0
    """Steps from one checkpoint of the run to the next; 0 for none."""
    saves_in_background: bool = True
    """Whether the step after a checkpoint begins when its bytes are in host memory, before they are written."""
    grad_weight_from_codes: bool = False
    """Whether expert parallel ranks send tokens as codes under all float8 recipes."""
    reduce: Reduction = "every"
    """When gradients are reduced. With "last" and weights that are never resharded, weights and gradients are sent once
    a step, as if only the optimizer's states were sharded (ZeRO-1)."""
    framework: Framework = Framework()

    @property
    def world_size(self) -> int:
        """The number of GPUs."""
        return self.dp_replicate * self.dp_shard * self.tp * self.cp

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a microbatch on one rank of a context group; tensor parallel ranks split them further."""
        return self.local_batch * self.seq_len // self.cp

    @property
    def step_tokens(self) -> int:
        """Tokens of a step on all ranks."""
        return self.local_batch * self.seq_len * self.micro_batches * self.dp_replicate * self.dp_shard

    @property
    def has_feed_forward(self) -> bool:
        """Whether all tokens take a feed-forward, which is false for experts without shared experts."""
        return not self.model.n_experts or self.model.n_shared_experts > 0

    @property
    def casts(self) -> LinearCasts | None:
        """The casts of the recipe; None for bfloat16."""
        return None if self.recipe is None else Float8LinearConfig.from_recipe_name(self.recipe).casts

    @property
    def reuses_weight_codes(self) -> bool:
        """Whether one set of a weight's codes serves both of its matmuls, so that a float8 all-gather sends one."""
        return self.recipe is not None and recipe_reuses_weight_codes(self.recipe)

    def get_float8_share(self, name: str) -> float:
        """Return the share of blocks in which a linear or the experts are float8; 0 or 1 for "lm_head"."""
        return 0.0 if self.recipe is None else self.float8_shares.get(name, 0.0)

    @property
    def precision(self) -> str:
        """The recipe's name, or bfloat16."""
        return BFLOAT16 if self.recipe is None else canonicalize_recipe(self.recipe)


def count_feed_forwards_per_token(model: Model) -> int:
    """Return the number of feed-forwards, or of experts, through which a token passes in a block."""
    return model.top_k + model.n_shared_experts if model.n_experts else 1


@functools.cache
def recipe_reuses_weight_codes(recipe: Float8LinearRecipeName | str) -> bool:
    """Return whether one set of a weight's codes serves both of its matmuls."""
    return Float8LinearConfig.from_recipe_name(recipe).casts.weight.shares_codes


def make_planned_run(config: TrainConfig, dims: ParallelDims) -> PlannedRun:
    """Return the trainer's run for the `config` and `dims` that `resolve_parallel_dims` returned.

    Raises:
        InputError: the time is not simulated: the run is not in bfloat16, or the compiler chooses what to recompute.
    """
    training, activation_checkpoint, float8 = config.training, config.activation_checkpoint, config.float8
    optimizer, parameter_bytes = config.optimizer, get_itemsize(config.training.dtype)
    if training.mixed_precision_param != "bfloat16":
        raise InputError(
            "training.mixed_precision_param: expected bfloat16, the time of float32 matmuls is not simulated"
        )
    if activation_checkpoint.mode == "memory_budget":
        raise InputError(
            "activation_checkpoint.mode: expected none, selective or full: with memory_budget "
            "the compiler decides what it recomputes"
        )
    every = parse_selective_option(activation_checkpoint.selective_ac_option)
    modes: dict[str, Checkpointing] = {
        "none": "none",
        "full": "full",
        "selective": "op" if every is None else "full",
    }
    return PlannedRun(
        model=config.model,
        seq_len=training.seq_len,
        local_batch=training.local_batch_size,
        micro_batches=dims.count_micro_batches(training),
        dp_replicate=dims.dp_replicate,
        dp_shard=dims.dp_shard,
        tp=dims.tp,
        ep=dims.ep,
        recipe=float8.recipe if float8.enable_float8_linear else None,
        float8_shares=find_float8_shares(config),
        float8_all_gather=float8.enable_fsdp_float8_all_gather,
        checkpointing=modes[activation_checkpoint.mode],
        checkpointed_blocks=count_checkpointed_blocks(config),
        reshard_after_forward=typing.cast(Resharding, config.parallelism.fsdp_reshard_after_forward),
        reduce=typing.cast(Reduction, training.reduce),
        float8_gradients=config.comm.float8_gradients,
        grad_weight_from_codes=float8.grad_weight_from_codes,
        casts_weights_once=float8.cast_weights_once or dims.world_size == 1,
        stores_in_float8=activation_checkpoint.store_in_float8,
        steps_between_saves=config.checkpoint.interval if config.checkpoint.enable else 0,
        saves_in_background=config.checkpoint.async_mode != "disabled",
        residual_bytes=get_itemsize(training.residual_stream_dtype),
        parameter_bytes=parameter_bytes,
        state_bytes=_MOMENTS_PER_PARAMETER[optimizer.name] * (1 if optimizer.has_float8_states else parameter_bytes),
    )


def count_checkpointed_blocks(config: TrainConfig) -> int:
    """Return how many blocks the mode recomputes: none, all, or every n-th of the selective option."""
    activation_checkpoint, blocks = config.activation_checkpoint, config.model.n_layers
    if activation_checkpoint.mode == "selective":
        return blocks // (parse_selective_option(activation_checkpoint.selective_ac_option) or 1)
    return blocks if activation_checkpoint.mode == "full" else 0


def get_itemsize(dtype: str) -> int:
    """Return the bytes of an element of a dtype by its name, such as "bfloat16"."""
    return getattr(torch, dtype).itemsize


def find_float8_shares(config: TrainConfig) -> Mapping[str, float]:
    """Return the share of blocks in which each linear is float8, as `PlannedRun.float8_shares` has it.

    Raises:
        InputError: as `convert_model`.
    """
    float8, training = config.float8, config.training
    if not float8.enable_float8_linear:
        return {}
    converts = replace(
        float8,
        enable_fsdp_float8_all_gather=False,
        precompute_float8_dynamic_scale_for_fsdp=False,
        cast_weights_once=False,
    )
    tokens = training.local_batch_size * training.seq_len if float8.auto_filter else 1
    return _convert_and_count_shares(config.model, converts, tokens)


@functools.lru_cache(maxsize=128)
def _convert_and_count_shares(model: Model, float8: Float8, tokens: int) -> Mapping[str, float]:
    llama = make_meta_llama(model)
    convert_model(llama, float8, tokens=tokens, device=torch.device("cpu"))
    modules = dict(llama.named_modules())
    names = [name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, Float8Linear)]
    names += [EXPERTS for module in modules.values() if isinstance(module, Float8Experts)]
    return {name: 1.0 if name == LM_HEAD else count / model.n_layers for name, count in Counter(names).items()}

"""The layouts and settings of a run that a search tries, as configs of the trainer, whose refusals count.

Data parallelism (FSDP2, or HSDP with shard groups of whole nodes) x tensor parallelism inside a node x expert
parallelism x local batch size x checkpointing x precision with the dtype of its all-gather; and what stores less
precisely, where it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product

from quaver.plan.changes import Change, less_precise
from quaver.plan.run import has_one_cast
from quaver.recipes.config import Float8LinearRecipeName
from quaver.settings import ActivationCheckpoint, Float8, TrainConfig
from quaver.settings.parallel_dims import ParallelDims, resolve

BFLOAT16 = "bfloat16"
CHECKPOINTING = {
    "none": ActivationCheckpoint(mode="none"),
    "op": ActivationCheckpoint(mode="selective"),
    "full": ActivationCheckpoint(mode="full"),
}
MOST_LOCAL_BATCH = 16
MOST_EXPERT_RANKS = 64


@dataclass(frozen=True)
class Candidate:
    """A run that the trainer accepts."""

    config: TrainConfig
    """With its global batch size."""
    layout: ParallelDims
    is_configured: bool = False

    @property
    def precision(self) -> str:
        """The recipe, or bfloat16."""
        float8 = self.config.float8
        return Float8LinearRecipeName(float8.recipe_name).value if float8.enable_float8_linear else BFLOAT16

    @property
    def saved_words(self) -> str:
        """The checkpointing of blocks, and states and activations that are stored in float8: "op", "full+opt",
        "none+opt+act"."""
        checkpoint = self.config.activation_checkpoint
        words = [checkpoint.selective_ac_option if checkpoint.mode == "selective" else checkpoint.mode]
        words += ["opt"] if self.config.optimizer.name.startswith("Float8") else []
        return "+".join([*words, *(["act"] if checkpoint.store_in_float8 else [])])

    @property
    def words(self) -> str:
        """The layout, the batch and what blocks save, in a few words."""
        layout, training = self.layout, self.config.training
        degrees = {"FSDP2": layout.shard, "x HSDP": layout.replicate, "x TP": layout.tensor, "EP": layout.expert}
        where = " ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one GPU"
        batch = f"{layout.micro_batches(training)} micro-batches of {training.local_batch_size} sequences"
        return f"{where}, {batch}, AC {self.saved_words}"


@dataclass
class Layouts:
    """The layouts that a search tries, and why the trainer refuses others."""

    candidates: list[Candidate] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, config: TrainConfig, ranks: int, *, is_configured: bool = False) -> None:
        """Add a run if the trainer accepts it."""
        try:
            resolved, layout = resolve(config, rank=0, world_size=ranks)
        except ValueError as error:
            self.refusals[str(error)] += 1
            return
        self.candidates.append(Candidate(resolved, layout, is_configured))


def layouts_of(
    config: TrainConfig, ranks: int, *, nodes_of: int, precisions: list[str], step_sequences: int | None, stores: bool
) -> Layouts:
    """All candidates, the configured run first if it can be laid out.

    Args:
        step_sequences: sequences of a step over all ranks; None for one micro-batch of each data-parallel rank.
        stores: also try what rounds between the matmuls or in the optimizer.
    """
    found = Layouts()
    size = config.training.global_batch_size if step_sequences is None else step_sequences
    for batch in dict.fromkeys(
        (size, config.training.global_batch_size)
    ):  # its own where the asked one does not divide
        if not found.candidates:
            try:
                training = replace(config.training, global_batch_size=batch)
            except ValueError as error:
                found.refusals[str(error)] += 1
                continue
            found.add(replace(config, training=training), ranks, is_configured=True)
    for degrees, local, checkpoint, precision in product(
        list(_degrees(config, ranks, nodes_of)), _local_batches(config, step_sequences), CHECKPOINTING, precisions
    ):
        try:
            changed = _changed(config, degrees, local, CHECKPOINTING[checkpoint], precision, step_sequences)
        except ValueError as error:
            found.refusals[str(error)] += 1
            continue
        variants = [changed, *(each.config for each in less_precise(Change("", changed)))] if stores else [changed]
        for variant in variants:
            if variant is not None:
                found.add(variant, ranks)
    unique = {each.config: each for each in reversed(found.candidates)}
    found.candidates = list(unique.values())[::-1]
    return found


def precisions_of(block_length: int | None, is_multiplied: bool) -> list[str]:
    """bfloat16, and the recipes that a search tries on a GPU with matmuls of such blocks.

    Args:
        is_multiplied: whether the GPU multiplies float8.
    """
    if not is_multiplied:
        return [BFLOAT16]
    blocks = {128: ["blockwise"], 32: ["mxfp8"]}.get(block_length or 0, [])
    return [BFLOAT16, "tensorwise", "rowwise", *blocks]


def with_precision(config: TrainConfig, precision: str, *, gathers: bool) -> TrainConfig:
    """The run in bfloat16 or a recipe; with the float8 all-gather if `gathers` and a weight has one set of codes."""
    float8 = config.float8
    if precision == BFLOAT16:
        defaults = {each.name: each.default for each in fields(Float8)}
        kept = {name: getattr(float8, name) for name in ("filter_fqns", "auto_filter", "emulate", "recipe_name")}
        changed = Float8(**{**defaults, **kept, "enable_float8_linear": False})
    else:
        one_byte = gathers and has_one_cast(precision)
        names = (each.name for each in fields(Float8) if each.name.startswith("delayed_"))
        delayed = {name: getattr(Float8(), name) for name in names}
        changed = replace(
            float8,
            **delayed,
            enable_float8_linear=True,
            recipe_name=precision,
            enable_fsdp_float8_all_gather=one_byte,
            precompute_float8_dynamic_scale_for_fsdp=one_byte,
            cast_weights_once=float8.cast_weights_once and one_byte,
        )
    metrics = replace(config.metrics, float8_scales_freq=min(1, config.metrics.float8_scales_freq))
    return replace(config, float8=changed, metrics=metrics)


def _changed(
    config: TrainConfig,
    degrees: tuple[int, int, int, int],
    local: int,
    checkpoint: ActivationCheckpoint,
    precision: str,
    step_sequences: int | None,
) -> TrainConfig:
    replicate, shard, tensor, expert = degrees
    changed = with_precision(config, precision, gathers=shard > 1)
    return replace(
        changed,
        parallelism=replace(
            config.parallelism,
            data_parallel_replicate_degree=replicate,
            data_parallel_shard_degree=shard,
            tensor_parallel_degree=tensor,
            expert_parallel_degree=expert,
        ),
        training=replace(
            config.training, local_batch_size=local, global_batch_size=-1 if step_sequences is None else step_sequences
        ),
        activation_checkpoint=replace(checkpoint, store_in_float8=config.activation_checkpoint.store_in_float8),
    )


def _degrees(config: TrainConfig, ranks: int, nodes_of: int) -> Iterator[tuple[int, int, int, int]]:
    """Replicas, shards, tensor and expert parallel ranks; tensor parallelism stays in a node."""
    model, configured = config.model, config.parallelism
    tensors = {1} if model.n_experts else {*_powers_of_2(min(nodes_of, ranks)), configured.tensor_parallel_degree}
    for tensor in sorted(each for each in tensors if ranks % each == 0):
        groups = ranks // tensor
        shards = {groups, configured.data_parallel_shard_degree}
        shards |= {each for each in _powers_of_2(groups) if each * tensor >= min(nodes_of, groups)}
        for shard in sorted((each for each in shards if each > 0 and groups % each == 0), reverse=True):
            experts = [each for each in _powers_of_2(min(shard, MOST_EXPERT_RANKS)) if model.n_experts]
            for expert in experts or [1]:
                if shard % expert == 0 and (expert == 1 or model.n_experts % expert == 0):
                    yield groups // shard, shard, tensor, expert


def _local_batches(config: TrainConfig, step_sequences: int | None) -> list[int]:
    most = min(MOST_LOCAL_BATCH, step_sequences or MOST_LOCAL_BATCH)
    return sorted({*_powers_of_2(most), config.training.local_batch_size})


def _powers_of_2(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]

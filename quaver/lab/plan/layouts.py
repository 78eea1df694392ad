"""Lists the configs that `quaver plan` tries: every combination of these choices that the trainer accepts.

    parallelism     FSDP2, or HSDP with shard groups of whole nodes; tensor parallelism inside a node; experts split
    all-gather      in float8 or bfloat16; once per microbatch, or again for the backward (fsdp_reshard_after_forward)
    reduction       gradients reduced after each microbatch or after the last (training.reduce)
    the rest        local batch size, activation checkpointing and recipe; on request float8 optimizer states and
                    saved activations

`Layouts` counts the reasons for which the trainer refuses the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from quaver.activations.policy import parse_selective_option
from quaver.lab.plan.changes import ACTIVATION_CHECKPOINTS, Change, iter_with_less_precise_storage, with_precision
from quaver.lab.plan.planned_run import recipe_reuses_weight_codes
from quaver.lab.settings import ActivationCheckpoint, Float8, TrainConfig
from quaver.lab.settings.float8 import BFLOAT16
from quaver.lab.settings.parallel_dims import ParallelDims, resolve_parallel_dims
from quaver.lab.settings.training import Training
from quaver.lab.terminal.counts import format_count
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.roofline.cost import find_unsupported_scales
from quaver.roofline.device_specs import DeviceSpec
from quaver.runtime.errors import InputError

MAX_LOCAL_BATCH = 16
"""The largest of the published runs (benchmarks/plan/published_runs.toml). Twice as much gains 1% in Llama 3 8B with
sequences of 8192 tokens, and 5% with 1024."""
MAX_EXPERT_RANKS = 64
"""The expert parallel ranks of DeepSeek-V3, 8 nodes of 8 (arXiv 2412.19437, section 3.2)."""


@dataclass(frozen=True)
class Candidate:
    """A layout and a recipe of the run, as a config that the trainer accepts."""

    config: TrainConfig
    """The config with its global batch size resolved."""
    dims: ParallelDims
    is_configured: bool = False

    @property
    def precision_label(self) -> str:
        """The recipe with its backward and serving engine, or bfloat16."""
        float8 = self.config.float8
        return float8.label if float8.enable_float8_linear else BFLOAT16

    @property
    def checkpointing_label(self) -> str:
        """Checkpointing, and what is stored in float8: "op", "1/2" (every second block), "full+opt", "none+opt+act"."""
        checkpoint = self.config.activation_checkpoint
        every = parse_selective_option(checkpoint.selective_ac_option)
        stored = [checkpoint.mode if checkpoint.mode != "selective" else "op" if every is None else f"1/{every}"]
        stored += ["opt"] if self.config.optimizer.has_float8_states else []
        return "+".join([*stored, *(["act"] if checkpoint.store_in_float8 else [])])

    @property
    def gathering_label(self) -> str:
        """The dtype in which a block's weights are gathered, and how often in a microbatch; "" without shards.

        "fp8x2" gathers for the forward and again for the backward, "bf16x1" once for both.
        """
        if self.dims.dp_shard == 1:
            return ""
        dtype = "fp8" if self.config.float8.enable_fsdp_float8_all_gather else "bf16"
        return f"{dtype}x{1 if self.config.parallelism.fsdp_reshard_after_forward == 'never' else 2}"

    @property
    def reduction(self) -> str:
        """training.reduce, or "" for one microbatch or one rank."""
        training, dims = self.config.training, self.dims
        return training.reduce if has_reductions(training.step_batch_size, training.local_batch_size, dims) else ""

    @property
    def description(self) -> str:
        """The layout, the batch and the checkpointing as text."""
        dims, training = self.dims, self.config.training
        degrees = {"FSDP2": dims.dp_shard, "HSDP": dims.dp_replicate, "TP": dims.tp}
        mesh = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one GPU"
        mesh += f" EP {dims.ep}" if dims.ep > 1 else ""  # ranks of a shard group
        micro_batches, sequences = dims.count_micro_batches(training), training.local_batch_size
        batch = f"{format_count(micro_batches, 'microbatch')} of {format_count(sequences, 'sequence')}"
        gathers = f", gathers {self.gathering_label}" if self.gathering_label else ""
        batch += f" with gradients reduced after {self.reduction}" if self.reduction else ""
        return f"{mesh}{gathers}, {batch}, AC {self.checkpointing_label}"


@dataclass
class Layouts:
    """The layouts that a search tries, and the reasons why the trainer refuses others."""

    candidates: list[Candidate] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    configured_refusal: str = ""
    """The reason why the configured layout is not a candidate."""

    def add(self, config: TrainConfig, ranks: int, *, is_configured: bool = False) -> None:
        """Add a candidate if the trainer accepts its run."""
        try:
            resolved, dims = resolve_parallel_dims(config, rank=0, world_size=ranks)
        except InputError as error:
            self.count_refusal(error, is_configured=is_configured)
            return
        self.candidates.append(Candidate(resolved, dims, is_configured))

    def drop_configured_if_unsupported(self, spec: DeviceSpec) -> None:
        """Drop the configured run if the GPU does not multiply float8 with the scales of its recipe."""
        if not self.candidates or not self.candidates[0].is_configured:
            return
        float8 = self.candidates[0].config.float8
        if float8.enable_float8_linear and find_unsupported_scales(spec, float8.recipe):
            message = f"float8.recipe_name {float8.recipe}: {spec.name} does not multiply float8 with such scales"
            self.count_refusal(InputError(message), is_configured=True)
            del self.candidates[0]

    def count_refusal(self, error: InputError, *, is_configured: bool = False) -> None:
        """Count a run that the trainer refuses."""
        self.refusals[str(error)] += 1
        if is_configured:
            self.configured_refusal = str(error)


def list_layouts(
    config: TrainConfig,
    ranks: int,
    *,
    gpus_per_node: int,
    precisions: list[str],
    step_batch_size: int | None,
    less_precise_storage: bool,
) -> Layouts:
    """Return all candidates, with the configured run first if the trainer accepts it with `step_batch_size`.

    Args:
        step_batch_size: the sequences of every candidate's step on all ranks. None: one microbatch per data-parallel
            rank, so that layouts have different steps.
        less_precise_storage: also try less precise storage between the matmuls and in the optimizer.
    """
    layouts = Layouts()
    size = config.training.global_batch_size if step_batch_size is None else step_batch_size
    try:
        training = replace(config.training, global_batch_size=size)
    except InputError as error:
        layouts.count_refusal(error, is_configured=True)
    else:
        layouts.add(replace(config, training=training), ranks, is_configured=True)
    for dims, local_batch, checkpoint, precision in product(
        list(_iter_dims(config, ranks, gpus_per_node)),
        _list_local_batches(config, step_batch_size),
        ACTIVATION_CHECKPOINTS.values(),
        precisions,
    ):
        for gathering, reduce in product(
            _list_gatherings(dims.dp_shard, precision, config.float8),
            _list_reductions(dims, local_batch, step_batch_size),
        ):
            try:
                changed = _configure(
                    config,
                    dims,
                    precision=precision,
                    local_batch=local_batch,
                    step_batch_size=step_batch_size,
                    checkpoint=checkpoint,
                    gathering=gathering,
                    reduce=reduce,
                )
            except InputError as error:
                layouts.count_refusal(error)
                continue
            less_precise = (
                [change.config for change in iter_with_less_precise_storage(Change((), changed))]
                if less_precise_storage
                else []
            )
            for variant in [changed, *less_precise]:
                if variant is not None:
                    layouts.add(variant, ranks)
    unique = {candidate.config: candidate for candidate in reversed(layouts.candidates)}
    layouts.candidates = list(unique.values())[::-1]
    return layouts


def list_precisions(spec: DeviceSpec, recipes: Sequence[str] = ()) -> list[str]:
    """Return bfloat16 and `recipes`, which a search tries on a GPU; by default the recipes that suit the GPU.

    Raises:
        InputError: the GPU does not multiply float8 with the scales of one of `recipes`.
    """
    if not recipes:
        blocks = {128: ["blockwise"], 32: ["mxfp8"]}.get(spec.block_length or 0, [])
        return [BFLOAT16] if spec.float8_tflops is None else [BFLOAT16, "tensorwise", "rowwise", *blocks]
    names = [name if name == BFLOAT16 else canonicalize_recipe(name) for name in recipes]
    for name in names:
        if name != BFLOAT16 and find_unsupported_scales(spec, name):
            raise InputError(f"--recipes {name}: {spec.name} does not multiply float8 with such scales")
    return list(dict.fromkeys((BFLOAT16, *names)))


def round_step_batch_size(tokens: int, training: Training, ranks: int) -> int:
    """Return the number of sequences nearest to a step of `tokens` that layouts of `ranks` can divide.

    Fewer sequences than ranks become a power of two. More become a multiple of the configured run's smallest step, or
    of the ranks if that is larger, unless the ranks divide them already.
    """
    sequences = tokens // training.seq_len
    if sequences < ranks:
        powers = (1 << power for power in range(ranks.bit_length()))
        return min(powers, key=lambda power: abs(power - sequences))
    if sequences % ranks == 0:
        return sequences
    smallest_step = ranks * training.local_batch_size
    unit = smallest_step if smallest_step <= sequences else ranks
    return round(sequences / unit) * unit


class _Gathering(NamedTuple):
    """How FSDP2 gathers the weights of a block."""

    float8_all_gather: bool
    reshard_after_forward: str
    """A value of parallelism.fsdp_reshard_after_forward."""


def _list_gatherings(dp_shard: int, precision: str, float8: Float8) -> list[_Gathering]:
    """Return the gatherings to try, without "always", which only frees the embedding sooner than "default"."""
    if dp_shard == 1:
        return [_Gathering(float8_all_gather=False, reshard_after_forward="default")]
    sends_codes = precision != BFLOAT16 and recipe_reuses_weight_codes(float8.append_backward(precision))
    choices = [True, False] if sends_codes else [False]
    return [_Gathering(*gathering) for gathering in product(choices, ("default", "never"))]


def has_reductions(step_batch_size: int, local_batch: int, dims: ParallelDims) -> bool:
    """Return whether data-parallel ranks reduce gradients in a step of several microbatches."""
    return dims.data_parallel_degree > 1 and step_batch_size > local_batch * dims.data_parallel_degree


def _list_reductions(dims: ParallelDims, local_batch: int, step_batch_size: int | None) -> list[str]:
    """Return the values of training.reduce to try. With replicas, "every" sends more than "last_all_reduce"."""
    if not has_reductions(step_batch_size or 0, local_batch, dims):
        return ["every"]
    return ["last_all_reduce" if dims.dp_replicate > 1 else "every", "last"]


def _configure(
    config: TrainConfig,
    dims: ParallelDims,
    *,
    precision: str,
    local_batch: int,
    step_batch_size: int | None,
    checkpoint: ActivationCheckpoint,
    gathering: _Gathering,
    reduce: str,
) -> TrainConfig:
    changed = with_precision(config, precision, float8_all_gather=gathering.float8_all_gather)
    return replace(
        changed,
        parallelism=replace(
            dims.apply_to(config.parallelism), fsdp_reshard_after_forward=gathering.reshard_after_forward
        ),
        training=replace(
            config.training,
            local_batch_size=local_batch,
            global_batch_size=-1 if step_batch_size is None else step_batch_size,
            reduce=reduce,
        ),
        activation_checkpoint=replace(checkpoint, store_in_float8=config.activation_checkpoint.store_in_float8),
    )


def _iter_dims(config: TrainConfig, ranks: int, gpus_per_node: int) -> Iterator[ParallelDims]:
    """Yield the degrees that use all ranks, with tensor parallelism inside a node."""
    model, configured = config.model, config.parallelism
    tp_degrees = {configured.tensor_parallel_degree, *_list_powers_of_2(min(gpus_per_node, ranks))}
    tp_degrees = {1} if model.n_experts else tp_degrees
    for tp in sorted(degree for degree in tp_degrees if ranks % degree == 0):
        groups = ranks // tp
        shards = {groups, configured.data_parallel_shard_degree}
        shards |= {degree for degree in _list_powers_of_2(groups) if degree * tp >= min(gpus_per_node, groups)}
        for dp_shard in sorted((degree for degree in shards if degree > 0 and groups % degree == 0), reverse=True):
            for ep in _list_powers_of_2(min(dp_shard, MAX_EXPERT_RANKS)) if model.n_experts else [1]:
                if dp_shard % ep == 0 and (ep == 1 or model.n_experts % ep == 0):
                    yield ParallelDims(groups // dp_shard, dp_shard, tp, ep=ep)


def _list_local_batches(config: TrainConfig, step_batch_size: int | None) -> list[int]:
    largest = min(MAX_LOCAL_BATCH, step_batch_size or MAX_LOCAL_BATCH)
    return sorted({*_list_powers_of_2(largest), config.training.local_batch_size})


def _list_powers_of_2(maximum: int) -> list[int]:
    return [1 << power for power in range(maximum.bit_length()) if 1 << power <= maximum]

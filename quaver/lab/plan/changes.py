"""Changes of a run's settings that affect its peak memory, single and combined, with the flags that apply them."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from quaver.lab.settings import ActivationCheckpoint, Float8, TrainConfig
from quaver.lab.settings.float8 import BFLOAT16
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.lab.settings.training import REDUCE_MODES
from quaver.runtime.errors import InputError

ACTIVATION_CHECKPOINTS = {
    "activations: none checkpointed": ActivationCheckpoint(mode="none"),
    "activations: selective, op": ActivationCheckpoint(mode="selective"),
    "activations: selective, every 2nd block": ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    "activations: full": ActivationCheckpoint(mode="full"),
}
TRIED_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Tried in addition to the high-precision dtype."""

Edit = Callable[[TrainConfig], TrainConfig]


@dataclass(frozen=True)
class Change:
    """A variant of a run's config."""

    labels: tuple[str, ...]
    config: TrainConfig | None
    """None if the config refuses the change; `refusal` has the error."""
    refusal: str = ""

    @property
    def name(self) -> str:
        """The labels as one text."""
        return "; ".join(self.labels)


def list_single_changes(config: TrainConfig, dims: ParallelDims, step_batch_size: int) -> list[Change]:
    """Return changes of one setting each that differ from `config`.

    Args:
        step_batch_size: the sequences of one optimizer step over all ranks, which no change affects.
    """
    edits = [
        *_iter_checkpointing_edits(),
        *_iter_precision_edits(config),
        *_iter_communication_edits(config, dims, step_batch_size),
    ]
    edits += [*_iter_storage_edits(config), *list(_iter_batch_edits(config, step_batch_size))[1:2]]
    changes = [_apply_edits(config, (label,), [edit]) for label, edit in edits]
    return [change for change in changes if change.config != config]


def list_combinations(config: TrainConfig, step_batch_size: int) -> list[Change]:
    """Return all combinations of checkpointing, precision and local batch size that the config accepts.

    The local batch size is halved as often as possible; `step_batch_size` as in `list_single_changes`.
    """
    checkpointing_edits, precisions = (
        _prepend_unchanged(_iter_checkpointing_edits()),
        _prepend_unchanged(_iter_precision_edits(config)),
    )
    changes = []
    for chosen in product(checkpointing_edits, precisions, _iter_batch_edits(config, step_batch_size)):
        labels = tuple(label for label, _ in chosen if label)
        changes.append(_apply_edits(config, labels, [edit for _, edit in chosen]))
    by_config = {change.config: change for change in reversed(changes) if change.config is not None}
    return list(by_config.values())[::-1]


def iter_with_less_precise_storage(change: Change) -> Iterator[Change]:
    """Yield `change` with one, two and three additional settings that store less precisely."""
    config, edits = change.config, list[tuple[str, Edit]]()
    if config is None:
        return
    for label, edit in _iter_storage_edits(config):
        added = _apply_edits(config, (label,), [edit])
        if added.config in (None, config):
            continue
        edits.append((label, edit))
        labels = *change.labels, *(added_label for added_label, _ in edits)
        yield _apply_edits(config, labels, [edit for _, edit in edits])


def with_fewest_gathered_weights(change: Change, dims: ParallelDims) -> Change | None:
    """Return `change` with the fewest gathered weights, or None if that changes nothing."""
    config = change.config
    if config is None or dims.dp_shard == 1:
        return None
    edits = [_make_edit("parallelism", fsdp_reshard_after_forward="always")]
    if config.float8.enable_float8_linear:
        edits.append(_make_edit("float8", enable_fsdp_float8_all_gather=True))
    fewer = _apply_edits(config, (*change.labels, "least gathered weights"), edits)
    return None if fewer.config in (None, config) else fewer


def format_flags(config: TrainConfig, changed: TrainConfig) -> str:
    """Return the flags that turn `config` into `changed`."""
    flags: list[str] = []
    before, after = asdict(config), asdict(changed)
    for section, values in after.items():
        for name, value in values.items():
            if value != before[section][name]:
                parts = value if isinstance(value, (tuple, list)) else [value]
                flags.append(f"--{section}.{name}")
                flags += (str(part).lower() if isinstance(part, bool) else str(part) for part in parts)
    return shlex.join(flags)


def with_precision(config: TrainConfig, precision: str, *, float8_all_gather: bool | None = None) -> TrainConfig:
    """Return `config` in BFLOAT16, or in a recipe with dynamic scales for all linears that the filters admit.

    In BFLOAT16, job.compare is off, because the run would be its own baseline.

    Args:
        float8_all_gather: whether FSDP2 gathers weights in float8; None does not change it.
    """
    metrics = replace(config.metrics, float8_scales_freq=min(1, config.metrics.float8_scales_freq))
    job = replace(config.job, compare=config.job.compare and precision != BFLOAT16)
    return replace(
        config, float8=_with_precision(config.float8, precision, float8_all_gather), metrics=metrics, job=job
    )


@functools.lru_cache(maxsize=128)
def _with_precision(float8: Float8, precision: str, float8_all_gather: bool | None) -> Float8:
    if precision == BFLOAT16:
        unchanged = {name: getattr(float8, name) for name in ("recipe_name", "filter_fqns")}
        return Float8(enable_float8_linear=False, **unchanged)
    dynamic = Float8()
    delayed = [field.name for field in fields(Float8) if field.name.startswith("delayed_")]
    settings: dict[str, Any] = {name: getattr(dynamic, name) for name in delayed}
    if float8_all_gather is not None:
        settings |= {
            "enable_fsdp_float8_all_gather": float8_all_gather,
            "precompute_float8_dynamic_scale_for_fsdp": float8_all_gather,
            "cast_weights_once": float8.cast_weights_once and float8_all_gather,
        }
    return replace(float8, **settings, enable_float8_linear=True, recipe_name=precision)


def _apply_edits(config: TrainConfig, labels: tuple[str, ...], edits: list[Edit]) -> Change:
    try:
        for edit in edits:
            config = edit(config)
    except InputError as error:
        return Change(labels, None, str(error))
    return Change(labels, config)


def _make_edit(section: str, **values: Any) -> Edit:
    """Return an edit that sets values of one section."""

    def edit(config: TrainConfig) -> TrainConfig:
        changed: dict[str, Any] = {section: replace(getattr(config, section), **values)}
        return replace(config, **changed)

    return edit


def _prepend_unchanged(edits: Iterator[tuple[str, Edit]]) -> list[tuple[str, Edit]]:
    return [("", lambda config: config), *edits]


def _iter_checkpointing_edits() -> Iterator[tuple[str, Edit]]:
    for label, checkpoint in ACTIVATION_CHECKPOINTS.items():
        yield label, _make_edit("activation_checkpoint", **asdict(checkpoint))


def _iter_precision_edits(config: TrainConfig) -> Iterator[tuple[str, Edit]]:
    yield f"precision: {config.training.mixed_precision_param}", _make_precision_edit(BFLOAT16)
    for recipe in TRIED_RECIPES:
        yield f"precision: {recipe}", _make_precision_edit(recipe)


def _make_precision_edit(precision: str) -> Edit:
    return lambda config: with_precision(config, precision)


def _iter_communication_edits(
    config: TrainConfig, dims: ParallelDims, step_batch_size: int
) -> Iterator[tuple[str, Edit]]:
    local_batch = config.training.local_batch_size
    if step_batch_size > local_batch * dims.data_parallel_degree > local_batch:
        for reduce in REDUCE_MODES[: 3 if dims.dp_replicate > 1 else 2]:
            yield f"gradients reduced after microbatches: {reduce}", _make_edit("training", reduce=reduce)
    if dims.dp_shard == 1:
        return
    for policy in ("default", "always", "never"):
        edit = _make_edit("parallelism", fsdp_reshard_after_forward=policy)
        yield f"gathered weights freed after the forward: {policy}", edit
    if config.float8.enable_float8_linear:
        yield "float8 all-gather: on", _make_edit("float8", enable_fsdp_float8_all_gather=True)
        off = _make_edit("float8", enable_fsdp_float8_all_gather=False, precompute_float8_dynamic_scale_for_fsdp=False)
        yield "float8 all-gather: off", off


def _iter_storage_edits(config: TrainConfig) -> Iterator[tuple[str, Edit]]:
    """Yield changes that round more between the matmuls or in the optimizer, the smallest change first."""
    if "bfloat16" == config.training.mixed_precision_param != config.training.residual_stream_dtype:
        yield "residual stream: bfloat16", _make_edit("training", residual_dtype="bfloat16")
    if not config.optimizer.has_float8_states:
        yield "optimizer states: float8", _make_edit("optimizer", name=f"Float8{config.optimizer.name}")
    yield "saved activations: float8", _make_edit("activation_checkpoint", store_in_float8=True)


def _iter_batch_edits(config: TrainConfig, step_batch_size: int) -> Iterator[tuple[str, Edit]]:
    """Yield the local batch size unchanged, and then halved repeatedly with twice the microbatches."""
    sequences = config.training.local_batch_size
    yield "", lambda config: config
    while sequences % 2 == 0:
        sequences //= 2
        edit = _make_edit("training", local_batch_size=sequences, global_batch_size=step_batch_size)
        yield f"local batch size: {sequences}", edit

"""The settings that would lower the peak of a run's memory: each alone, and together, with the flags that say so."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from quaver.trainer.config import ActivationCheckpoint, Float8, TrainConfig
from quaver.trainer.layout import Layout

CHECKPOINTING = {
    "activations: none checkpointed": ActivationCheckpoint(mode="none"),
    "activations: selective, op": ActivationCheckpoint(mode="selective"),
    "activations: selective, every 2nd block": ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    "activations: full": ActivationCheckpoint(mode="full"),
}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Besides the high-precision dtype."""

Edit = Callable[[TrainConfig], TrainConfig]


@dataclass(frozen=True)
class Change:
    """A setting of a run, as a difference to what is configured."""

    name: str
    config: TrainConfig | None
    """None for one that the trainer refuses."""
    refusal: str = ""


def single_changes(config: TrainConfig, layout: Layout, batch: int) -> list[Change]:
    """What could be changed about `config`, one thing at a time, without what is so already.

    Args:
        batch: sequences of one optimizer step over all ranks, which stay the same.
    """
    edits = [*_checkpointing(), *_precisions(config), *_communication(config, layout)]
    edits += list(_batches(config, batch))[1:2]
    changes = [_change(config, name, [edit]) for name, edit in edits]
    return [change for change in changes if change.config != config]


def combinations(config: TrainConfig, batch: int) -> list[Change]:
    """All combinations of checkpointing, precision and local batch size that the trainer takes.

    The local batch size is halved as often as it goes; `batch` as in `single_changes`.
    """
    found = []
    for chosen in product(_with_present(_checkpointing()), _with_present(_precisions(config)), _batches(config, batch)):
        names = [name for name, _ in chosen if name]
        found.append(_change(config, "; ".join(names), [edit for _, edit in chosen]))
    by_config = {change.config: change for change in reversed(found) if change.config is not None}
    return list(by_config.values())[::-1]


def least_gathered(change: Change, layout: Layout) -> Change | None:
    """The same with as few gathered weights as there can be; None where it is so, or cannot be."""
    config = change.config
    if config is None or layout.shard == 1:
        return None
    edits = [_reshard("always")]
    if config.float8.enable_float8_linear:
        edits.append(_float8_all_gather(True))
    fewer = _change(config, f"{change.name}; least gathered weights", edits)
    return None if fewer.config in (None, config) else fewer


def words_of(config: TrainConfig, changed: TrainConfig) -> str:
    """The flags that make `changed` of `config`."""
    words = []
    before, after = asdict(config), asdict(changed)
    for section, values in after.items():
        for name, value in values.items():
            if value != before[section][name]:
                words += [f"--{section}.{name}", *_words_of_value(value)]
    return shlex.join(words)


def _words_of_value(value: Any) -> list[str]:
    if isinstance(value, bool):
        return [str(value).lower()]
    return [str(each) for each in value] if isinstance(value, (tuple, list)) else [str(value)]


def _change(config: TrainConfig, name: str, edits: list[Edit]) -> Change:
    try:
        for edit in edits:
            config = edit(config)
    except ValueError as error:
        return Change(name, None, str(error))
    return Change(name, config)


def _with_present(edits: Iterator[tuple[str, Edit]]) -> list[tuple[str, Edit]]:
    return [("", lambda config: config), *edits]


# ---- each setting ----------------------------------------------------------------------------------------------------


def _checkpointing() -> Iterator[tuple[str, Edit]]:
    for name, checkpoint in CHECKPOINTING.items():
        yield name, _checkpoint(checkpoint)


def _checkpoint(checkpoint: ActivationCheckpoint) -> Edit:
    return lambda config: replace(config, activation_checkpoint=checkpoint)


def _precisions(config: TrainConfig) -> Iterator[tuple[str, Edit]]:
    yield f"precision: {config.training.mixed_precision_param}", _high_precision
    for recipe in RECIPES:
        yield f"precision: {recipe}", _recipe(recipe)


def _high_precision(config: TrainConfig) -> TrainConfig:
    default = Float8(enable_float8_linear=False)
    kept = {name: getattr(config.float8, name) for name in ("recipe_name", "filter_fqns", "auto_filter", "emulate")}
    return _without_kept_scales(config, replace(default, **kept))


def _recipe(recipe: str) -> Edit:
    values: dict[str, Any] = {each.name: each.default for each in fields(Float8) if each.name.startswith("delayed_")}
    values |= {"enable_float8_linear": True, "recipe_name": recipe}
    return lambda config: _without_kept_scales(config, replace(config.float8, **values))


def _without_kept_scales(config: TrainConfig, float8: Float8) -> TrainConfig:
    metrics = replace(
        config.metrics, plot_float8_scales=False, float8_scales_freq=min(1, config.metrics.float8_scales_freq)
    )
    return replace(config, float8=float8, metrics=metrics)


def _communication(config: TrainConfig, layout: Layout) -> Iterator[tuple[str, Edit]]:
    if layout.shard == 1:
        return
    for policy in ("default", "always", "never"):
        yield f"gathered weights freed after the forward: {policy}", _reshard(policy)
    if config.float8.enable_float8_linear:
        yield "float8 all-gather: on", _float8_all_gather(True)
        yield "float8 all-gather: off", _float8_all_gather(False)


def _reshard(policy: str) -> Edit:
    return lambda config: replace(config, parallelism=replace(config.parallelism, fsdp_reshard_after_forward=policy))


def _float8_all_gather(is_on: bool) -> Edit:
    def edit(config: TrainConfig) -> TrainConfig:
        precompute = is_on and config.float8.precompute_float8_dynamic_scale_for_fsdp
        return replace(
            config,
            float8=replace(
                config.float8,
                enable_fsdp_float8_all_gather=is_on,
                precompute_float8_dynamic_scale_for_fsdp=precompute,
            ),
        )

    return edit


def _batches(config: TrainConfig, batch: int) -> Iterator[tuple[str, Edit]]:
    """As it is, then half as many sequences at a time and so on, each time in twice as many micro-batches."""
    sequences = config.training.local_batch_size
    yield "", lambda config: config
    while sequences % 2 == 0:
        sequences //= 2
        yield f"local batch size: {sequences}", _local_batch(sequences, batch)


def _local_batch(sequences: int, batch: int) -> Edit:
    return lambda config: replace(
        config, training=replace(config.training, local_batch_size=sequences, global_batch_size=batch)
    )

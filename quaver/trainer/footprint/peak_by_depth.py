"""The peak of a deep model's step, from predictions of shallow ones: for blocks that are alike.

Between one depth and the next every moment of a step gains the same: what a block keeps, and its parameters, gradients
and optimizer state. So each moment's bytes grow linearly with the blocks, and so does the highest of a part of the step
in which one moment stays the highest. The parts are the forward, the backward up to its last blocks, its last blocks,
and the optimizer's step; each is extrapolated on its own, for another one may be the highest in a deep model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quaver.activation_checkpointing import selected_every
from quaver.trainer.config import TrainConfig
from quaver.trainer.footprint.run import RunMemory, predict_memory

SHALLOWEST = 2
"""Blocks: one is the first and the last at once."""
SAVES_FROM = 8
"""Blocks from which on two shallow predictions are quicker than one."""

_RECOMPUTING = ("backward", "recompute")


def depths(config: TrainConfig) -> tuple[int, int, int]:
    """Three numbers of blocks of which the last and then all further ones can be extrapolated.

    With every n-th block checkpointed, what n blocks gain is alike, so they are n apart, and as many beyond a multiple
    of n as the model has.
    """
    checkpoint, blocks = config.activation_checkpoint, config.model.n_layers
    every = 1
    if checkpoint.mode == "selective":
        every = selected_every(checkpoint.selective_ac_option) or 1
    first = blocks % every
    while first < max(SHALLOWEST, every):
        first += every
    return first, first + every, first + 2 * every


def can_be_extrapolated(config: TrainConfig) -> bool:
    """Whether the blocks are alike, and enough of them that it saves time."""
    float8 = config.float8
    has_numbers = any(character.isdigit() for name in float8.filter_fqns for character in name)
    are_alike = not (float8.skip_first_layers or float8.skip_last_layers or has_numbers)
    return are_alike and config.model.n_layers >= max(SAVES_FROM, 2 * depths(config)[2])


def extrapolated_peak(config: TrainConfig, ranks: int, *, check: bool = False) -> int | None:
    """The peak in bytes of the model with all of its blocks, from two shallow predictions.

    Args:
        check: predict a third, and compare.
    Returns:
        None where it does not grow linearly as far as can be seen, or the blocks are not alike.
    Raises:
        What `predict_memory` does.
    """
    if not can_be_extrapolated(config):
        return None
    first, second, third = depths(config)
    parts = [_parts(predict_memory(_with_blocks(config, blocks), ranks)) for blocks in (first, second)]
    if parts[0].keys() != parts[1].keys():
        return None
    if check:
        there = predict_memory(_with_blocks(config, third), ranks).prediction.peak_bytes
        if there != _at(parts, first, second, third):
            return None
    return _at(parts, first, second, config.model.n_layers)


def _at(parts: list[dict[str, int]], first: int, second: int, blocks: int) -> int:
    steps = (blocks - first) // (second - first)
    return max(bytes + steps * (parts[1][name] - bytes) for name, bytes in parts[0].items())


def _with_blocks(config: TrainConfig, blocks: int) -> TrainConfig:
    return replace(config, model=replace(config.model, n_layers=blocks))


def _parts(memory: RunMemory) -> dict[str, int]:
    """The highest sum of each part of the step, by a name that models of other depths have, too."""
    report = memory.prediction.report
    totals = [sum(row[2:]) for row in report["timeline"]]
    blocks = memory.config.model.n_layers
    parts: dict[str, int] = {}
    for number, (phase, begin, end) in enumerate(_runs(report["spans"])):
        cut = end - (end - begin) // blocks if phase == "backward" else end
        parts[f"{number} {phase}"] = max(totals[begin : cut + 1])
        if cut < end:
            parts[f"{number} {phase}, last blocks"] = max(totals[cut : end + 1])
    return parts


def _runs(spans: list[list[Any]]) -> list[tuple[str, int, int]]:
    """The spans, with a backward and the recomputations in it as one."""
    runs: list[tuple[str, int, int]] = []
    for span_phase, begin, end in spans:
        phase = "backward" if span_phase in _RECOMPUTING else span_phase
        if runs and runs[-1][0] == phase:
            runs[-1] = (phase, runs[-1][1], end)
        else:
            runs.append((phase, begin, end))
    return runs

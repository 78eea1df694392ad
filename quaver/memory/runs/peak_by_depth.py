"""The peak of a deep model's step, from predictions of shallow ones: for blocks that are alike.

The whole timeline of the step is extrapolated, moment by moment (moments.py), from two depths, and a third one checks
all of it; the peak is its highest moment. Coarser parts, such as the highest moment of the backward, would not do:
another moment may be the highest in a deep model, and a part would have to end at the same moment in each model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quaver.activation_checkpointing import selected_every
from quaver.trainer.config import TrainConfig
from quaver.memory.runs.moments import growth_of, without_releases
from quaver.memory.runs.predict import predict_memory

SHALLOW = (3, 4, 6)
"""Depths: the first block, the last one, and one that is neither; one more; and a check that is not the next one."""
SAVES_FROM = 2
"""How many times as many blocks as the shallow models have together make it quicker than one full prediction."""


@dataclass(frozen=True)
class Extrapolated:
    """A peak that was not predicted in full."""

    peak_bytes: int
    depths: tuple[int, int, int]
    """Blocks of the models that were predicted: two, and the one that checked them."""


def depths(config: TrainConfig) -> tuple[int, int, int]:
    """Three numbers of blocks of which the last and then all further ones can be extrapolated.

    With every n-th block checkpointed, what n blocks gain is alike, so they are multiples of n apart, and as many
    beyond a multiple of n as the model has.
    """
    checkpoint, blocks = config.activation_checkpoint, config.model.n_layers
    every = 1
    if checkpoint.mode == "selective":
        every = selected_every(checkpoint.selective_ac_option) or 1
    first, second, third = (blocks % every + each * every for each in SHALLOW)
    return first, second, third


def can_be_extrapolated(config: TrainConfig) -> bool:
    """Whether the blocks are alike, and more than the shallow models have."""
    float8 = config.float8
    has_numbers = any(character.isdigit() for name in float8.filter_fqns for character in name)
    are_alike = not (float8.skip_first_layers or float8.skip_last_layers or has_numbers)
    return are_alike and config.model.n_layers > depths(config)[2]


def saves_time(config: TrainConfig) -> bool:
    """Whether it is quicker than to predict the model itself. Blocks that are alike are compiled once at any depth."""
    is_deep = config.model.n_layers >= SAVES_FROM * sum(depths(config))
    return is_deep and not config.training.compile and can_be_extrapolated(config)


def extrapolated_peak(config: TrainConfig, ranks: int) -> Extrapolated | None:
    """The peak of the model with all of its blocks, from three shallow predictions.

    Returns:
        None where the third is not what the other two say, or the blocks are not alike, or too few.
    Raises:
        What `predict_memory` does.
    """
    if not can_be_extrapolated(config):
        return None
    shallow = depths(config)
    step = shallow[1] - shallow[0]
    first, second, third = (_timeline(config, blocks, ranks) for blocks in shallow)
    growth = growth_of(first, second, third, (shallow[2] - shallow[0]) // step)
    if growth is None:
        return None
    return Extrapolated(max(growth.timeline((config.model.n_layers - shallow[0]) // step)), shallow)


def _timeline(config: TrainConfig, blocks: int, ranks: int) -> list[int]:
    """The bytes after each event of the step of this many blocks, but between releases."""
    shallow = replace(config, model=replace(config.model, n_layers=blocks))
    timeline = predict_memory(shallow, ranks).prediction.report["timeline"]
    return without_releases([sum(row[2:]) for row in timeline])

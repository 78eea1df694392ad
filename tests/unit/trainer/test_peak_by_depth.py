"""The peak of a deep model from shallow ones: that of a full prediction, or none where it cannot be checked."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from quaver.memory.faking.target import predicting_for
from quaver.memory.runs.changes import single_changes
from quaver.memory.runs.moments import growth_of, without_releases
from quaver.memory.runs.peak_by_depth import Extrapolated, depths, extrapolated_peak, saves_time
from quaver.memory.runs.predict import SEES_GATHERS, predict_memory
from quaver.trainer.config import Float8, Model
from quaver.trainer.config_io import load_config
from quaver.trainer.layout import resolve
from tests.unit.trainer.test_advise_memory import LLAMA_8B, MODES

PEAK_BY_DEPTH = "quaver.memory.runs.peak_by_depth"
RECIPES = {name: Float8(recipe_name=name) for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")}
RECIPES["bfloat16"] = Float8(enable_float8_linear=False)
on_ranks = pytest.mark.skipif(not SEES_GATHERS, reason="torch is too old")


def _with_blocks(config, blocks):
    return replace(config, model=replace(config.model, n_layers=blocks))


def _timeline(config, blocks, ranks):
    report = predict_memory(_with_blocks(config, blocks), ranks).prediction.report
    return without_releases([sum(row[2:]) for row in report["timeline"]])


@pytest.mark.parametrize(
    ("mode", "recipe", "ranks", "blocks"),
    [
        pytest.param("2", "bfloat16", 1, 14, marks=pytest.mark.nightly),
        pytest.param("full", "rowwise", 4, 7, marks=on_ranks),
        *(
            pytest.param(mode, recipe, ranks, 15, marks=pytest.mark.nightly)
            for mode in MODES
            for recipe in RECIPES
            for ranks in ((1, 4) if SEES_GATHERS else (1,))
        ),
    ],
)
def test_a_deep_model_is_predicted_from_shallow_ones(tiny_config, mode, recipe, ranks, blocks):
    config = replace(_with_blocks(tiny_config, blocks), activation_checkpoint=MODES[mode], float8=RECIPES[recipe])
    deep_bytes = predict_memory(config, ranks).prediction.peak_bytes
    assert extrapolated_peak(config, ranks) == Extrapolated(deep_bytes, depths(config))


@pytest.mark.nightly
def test_micro_batches_and_documents_are_extrapolated_too(tiny_config):
    config = replace(
        _with_blocks(tiny_config, 7),
        training=replace(tiny_config.training, global_batch_size=4),
        data=replace(tiny_config.data, document_mask=True),
    )
    assert extrapolated_peak(config, 1).peak_bytes == predict_memory(config).prediction.peak_bytes


def test_another_moment_may_be_the_highest_in_a_deep_model(tiny_config):
    """A large vocabulary makes the loss the peak of two blocks; of many it is the end of the backward, by gradients."""
    model = Model(dim=64, n_layers=9, n_heads=4, n_kv_heads=2, hidden_dim=2048, vocab_size=4096)
    training = replace(tiny_config.training, seq_len=64, local_batch_size=4)
    config = replace(tiny_config, model=model, training=training, activation_checkpoint=MODES["full"])
    shallow, deep = predict_memory(_with_blocks(config, 2)), predict_memory(config)
    assert "log_softmax" in shallow.prediction.operator_of_peak
    assert "log_softmax" not in deep.prediction.operator_of_peak
    assert extrapolated_peak(config, 1).peak_bytes == deep.prediction.peak_bytes


@on_ranks
def test_llama_8b_in_bfloat16():
    """From 2 and 3 blocks it came out 3% high: with 2, the last blocks' half of the backward began before its peak."""
    off = Float8(enable_float8_linear=False)
    config = load_config(LLAMA_8B)
    config = replace(config, float8=off, training=replace(config.training, compile=False))
    with predicting_for("cuda"):
        two, three, four, six, nine = (_timeline(config, blocks, 8) for blocks in (2, 3, 4, 6, 9))
    assert growth_of(two, three, four, 2) is None
    assert growth_of(three, four, six, 3).timeline(6) == nine


@pytest.mark.nightly
@on_ranks
def test_every_change_of_llama_8b_is_what_it_is_in_full():
    config = load_config(LLAMA_8B)
    resolved, layout = resolve(config, world_size=8)
    batch = resolved.training.step_batch_size
    extrapolated = 0
    for change in single_changes(config, layout, batch):
        eager = replace(change.config, training=replace(change.config.training, compile=False))
        if saves_time(eager):
            with predicting_for("cuda"):
                found, full = extrapolated_peak(eager, 8), predict_memory(eager, 8).prediction.peak_bytes
            assert found == Extrapolated(full, (3, 4, 6)), change.name
            extrapolated += 1
    assert extrapolated >= 8


def test_a_third_depth_that_disagrees_is_no_answer(tiny_config):
    config = _with_blocks(tiny_config, 8)
    predicted = {blocks: predict_memory(_with_blocks(config, blocks)) for blocks in (3, 4, 6)}
    with patch(f"{PEAK_BY_DEPTH}.predict_memory", lambda config, ranks: predicted[config.model.n_layers]):
        assert extrapolated_peak(config, 1) is not None
        predicted[6].prediction.report["timeline"][1][-1] += 1  # far from the peak
        assert extrapolated_peak(config, 1) is None


def test_blocks_that_differ_are_not_extrapolated(tiny_config):
    deep = _with_blocks(tiny_config, 32)
    for float8 in (Float8(skip_first_layers=1), Float8(skip_last_layers=2), Float8(filter_fqns=("layers.15",))):
        assert extrapolated_peak(replace(deep, float8=float8), 1) is None
        assert not saves_time(replace(deep, float8=float8))
    assert extrapolated_peak(_with_blocks(deep, 6), 1) is None


def test_depths_leave_the_same_rest(tiny_config):
    def of(blocks, mode):
        return depths(replace(_with_blocks(tiny_config, blocks), activation_checkpoint=mode))

    assert of(32, MODES["op"]) == of(32, MODES["none"]) == (3, 4, 6)
    assert of(32, MODES["2"]) == (6, 8, 12)
    assert of(33, MODES["2"]) == (7, 9, 13)
    assert of(32, replace(MODES["2"], selective_ac_option="3")) == (11, 14, 20)


def test_what_is_as_quick_in_full_is_predicted_in_full(tiny_config):
    deep = _with_blocks(tiny_config, 32)
    assert saves_time(deep)
    assert saves_time(_with_blocks(deep, 26))
    assert not saves_time(_with_blocks(deep, 25))
    assert not saves_time(replace(deep, activation_checkpoint=MODES["2"]))
    assert saves_time(replace(_with_blocks(deep, 126), activation_checkpoint=MODES["2"]))
    assert not saves_time(replace(deep, training=replace(deep.training, compile=True)))

"""The peak of a run from shallow models is that of the whole one, to the byte."""

import multiprocessing
import os
import signal
from dataclasses import replace

import pytest
import torch

from quaver.lab.memory.faking.gpu import predicting_for
from quaver.lab.memory.predict import Prediction
from quaver.lab.memory.runs.predict import SEES_GATHERS, predict_memory
from quaver.lab.plan import memory
from quaver.lab.plan.depths import (
    Depths,
    NotLinearError,
    check_micro_batches,
    depths_of,
    highest_by_place,
    highest_of_whole,
)
from quaver.lab.plan.memory import Peak, Refusal, memory_key, peak_of, peaks_of
from quaver.lab.plan.workers import _interrupts_blocked, in_processes
from quaver.lab.recorder.recorder import CATEGORIES
from quaver.lab.trainer.trained_model import TrainedModel
from tests.lab.trainer.runs import changed
from tests.thinned import first

GATHERED = {"enable_float8_linear": True, "enable_fsdp_float8_all_gather": True}

LAYOUTS = first(
    2,
    [
        (1, 5, True, {"float8": {"enable_float8_linear": True}}),
        (
            1,
            5,
            False,
            {"float8": {"enable_float8_linear": True, "layer_recipes": ("model.layers.2.mlp.up_proj=rowwise",)}},
        ),
        (2, 6, True, {"float8": GATHERED, "training": {"global_batch_size": 20}}),
        (1, 6, True, {"float8": {"enable_float8_linear": True}, "training": {"global_batch_size": 8}}),
        (2, 6, True, {"float8": GATHERED, "training": {"compile": True}}),
        (4, 7, True, {"float8": {"enable_float8_linear": True}, "parallelism": {"tensor_parallel_degree": 2}}),
        (1, 5, False, {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}),
        (1, 12, True, {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}),
        (2, 12, True, {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}),
        (2, 8, True, {"float8": {"enable_float8_linear": True, "skip_first_layers": 1, "skip_last_layers": 1}}),
        (4, 6, True, {"model": {"n_experts": 4}, "parallelism": {"expert_parallel_degree": 2}}),
        (2, 6, True, {"parallelism": {"fsdp_reshard_after_forward": "never"}}),
        (1, 6, False, {"optimizer": {"name": "Float8AdamW"}}),
        (
            2,
            6,
            True,
            {"optimizer": {"name": "Muon"}, "data": {"document_mask": True}, "training": {"global_batch_size": 16}},
        ),
    ],
)
"""Ranks, blocks, whether two depths determine the peak, and settings."""


@pytest.mark.parametrize(("ranks", "n_layers", "is_extrapolated", "sections"), LAYOUTS)
def test_the_peak_is_that_of_the_whole_model(tiny_config, ranks, n_layers, is_extrapolated, sections):
    if ranks > 1 and not SEES_GATHERS:
        pytest.skip("gathers into fake tensors go unseen in this torch")
    config = changed(tiny_config, **{**sections, "model": {"n_layers": n_layers, **sections.get("model", {})}})
    peak = peak_of(config, ranks)
    with predicting_for("cuda"):
        whole = predict_memory(config, ranks).prediction
    assert (peak.bytes, peak.by_category) == (whole.peak_bytes, whole.by_category)
    assert peak.module == whole.module_of_peak
    assert bool(peak.why_whole) != peak.is_extrapolated
    assert peak.is_extrapolated == is_extrapolated


def test_the_second_step_is_recorded_and_one_micro_batch_comes_before(tiny_config, monkeypatch):
    sizes, train_step = [], TrainedModel.train_step

    def counted(trained, number, batches):
        sizes.append(len(batches))
        return train_step(trained, number, batches)

    monkeypatch.setattr(TrainedModel, "train_step", counted)
    size = 3 * tiny_config.training.local_batch_size
    predict_memory(changed(tiny_config, model={"n_layers": 1}, training={"global_batch_size": size}))
    assert sizes == [1, 3]


def test_equal_blocks_are_left_out_in_the_middle():
    def shallow(signatures: str, period: int = 1) -> list[tuple[int, int, int]]:
        found = depths_of(signatures, period)
        assert all(each.whole == len(signatures) and each.period == period for each in found)
        return [(each.shallow, each.repeats, each.before) for each in found]

    assert shallow("a" * 10) == [(3, 7, 0), (4, 6, 0), (5, 5, 0)]
    assert shallow("xaaaaaaaazz") == [(6, 5, 1), (7, 4, 1), (8, 3, 1)]
    assert shallow("ab" * 6, 2) == [(6, 3, 0), (8, 2, 0), (10, 1, 0)]
    assert shallow("a" * 11, 2) == [(7, 2, 0), (9, 1, 0)]
    assert shallow("aaaa") == shallow("ab" * 4) == shallow("abababab"[:7], 2) == []


DEPTHS = Depths(shallow=3, period=1, repeats=5, before=0)


def _prediction(depth: int, *, saved=lambda block, depth: 10, step=lambda depth: 0) -> Prediction:
    """A step in which each block holds 100 bytes, saves some and needs 7 more meanwhile."""
    live, rows, modules = 100 * depth, [], []

    def note(module: str, number: int) -> None:
        rows.append([0, 0.0, number, *[0] * (len(CATEGORIES) - 1)])
        modules.append(module)

    note("", live)
    note("model.embed_tokens", live)
    for block in range(depth):
        note(f"model.layers.{block}.mlp", live + 7)
        live += saved(block, depth)
        note("", live)
    note("lm_head", live + 30)
    middle = len(rows)
    for block in reversed(range(depth)):
        note("", live)
        note(f"model.layers.{block}.mlp", live + 9)
        live -= saved(block, depth)
    end = len(rows)
    note("", live + step(depth))
    spans = [["forward", 0, middle - 1], ["backward", middle - 1, end - 1], ["optimizer", end - 1, len(rows) - 1]]
    return Prediction({"timeline": rows, "spans": spans}, 0, "", "", 0, modules=tuple(modules[1:]))


def _top(**changes) -> tuple[str, int]:
    at = highest_of_whole(_prediction(3, **changes), _prediction(4, **changes), DEPTHS)
    return at.place.module, at.highest.bytes


def test_the_highest_place_may_be_another_than_in_the_shallow_models():
    assert max(map(sum, (row[2:] for row in _prediction(8).report["timeline"]))) == _top()[1]
    assert _top() == ("lm_head", 8 * 110 + 30)
    assert _top(saved=lambda block, depth: -30)[1] == 8 * 100 + 7  # the first block


def test_what_shallow_models_do_not_determine_is_refused():
    with pytest.raises(NotLinearError, match=r"bytes in block 6 in backward grow by \[130, 140\] with one period"):
        _top(saved=lambda block, depth: 10 * min(block, 1) * min(depth - 2, 2))
    with pytest.raises(NotLinearError, match=r"bytes in no module in optimizer grow by \[200\] with one period"):
        _top(step=lambda depth: 100 * depth)
    assert _top(step=lambda depth: depth)[0] == "lm_head"  # unlike any block, but too little to matter


def test_what_is_freed_after_its_block_is_at_no_place_of_the_block():
    step = _prediction(3)
    rows, modules, spans = list(step.report["timeline"]), list(step.modules), step.report["spans"]
    end = spans[0][2]
    rows.insert(end + 1, [*rows[end][:2], rows[end][2] - 1, *rows[end][3:]])
    modules.insert(end, "model.layers.0.mlp.gate_proj")  # freed after lm_head, as autocast's casts are
    spans = [["forward", 0, end + 1], *([name, begin + 1, last + 1] for name, begin, last in spans[1:])]
    changed = replace(step, report={"timeline": rows, "spans": spans}, modules=tuple(modules))
    assert highest_by_place(changed) == highest_by_place(step)


def test_micro_batches_after_the_third_are_left_out_only_if_the_third_repeats_the_second():
    step = _prediction(3)
    three = [row for _ in range(3) for row in step.report["timeline"][1:]]
    length, spans = len(step.modules), step.report["spans"]
    spans = [[name, begin + i * length, end + i * length] for i in range(3) for name, begin, end in spans]
    timeline = [step.report["timeline"][0], *three]
    report = {"timeline": timeline, "spans": spans}
    check_micro_batches(replace(step, report=report, modules=step.modules * 3))
    timeline[-3] = [*timeline[-3][:2], 10**6, *timeline[-3][3:]]
    with pytest.raises(NotLinearError, match="block 1 in backward has other bytes than in the micro-batch before"):
        check_micro_batches(replace(step, report=report, modules=step.modules * 3))


def test_a_peak_is_remembered_by_what_it_depends_on(tiny_config):
    def key(ranks: int = 2, **sections) -> str:
        return memory_key(changed(tiny_config, **sections), ranks, "cuda")

    assert key() == key(training={"steps": 9, "seed": 3}, checkpoint={"interval": 7}, optimizer={"lr": 1.0})
    assert key() == key(parallelism={"data_parallel_shard_degree": 2})
    others = [
        key(1),
        key(parallelism={"data_parallel_replicate_degree": 2}),
        key(training={"dtype": "bfloat16"}),
        key(optimizer={"name": "Muon"}),
        key(model={"n_layers": 3}),
        key(data={"document_mask": True}),
        key(training={"global_batch_size": 6}),  # refused
        memory_key(tiny_config, 2, "cpu"),
    ]
    torch.set_default_dtype(torch.float64)
    try:
        others.append(key())
    finally:
        torch.set_default_dtype(torch.float32)
    assert len({key(), *others}) == 10


def test_peaks_come_in_order_each_predicted_once_and_refusals_are_outcomes(tiny_config, monkeypatch):
    predicted = []

    def fake_peak(config, ranks, *, device):
        predicted.append(config.model.n_layers)
        if config.model.n_layers == 5:
            raise ValueError("no\nsuch depth")
        return Peak(config.model.n_layers, {}, "forward", "")

    monkeypatch.setattr(memory, "peak_of", fake_peak)
    monkeypatch.setattr(memory, "_remembered", {})
    configs = [changed(tiny_config, model={"n_layers": n}) for n in (3, 5, 3, 4)]
    found = list(peaks_of(configs, 1, processes=1))
    assert [getattr(each, "bytes", each) for each in found] == [3, Refusal("no such depth"), 3, 4]
    assert predicted == [3, 5, 4]
    assert list(peaks_of(configs[1:], 1, processes=1)) == found[1:]
    assert predicted == [3, 5, 4]


def _answer(item):
    if item == "die":
        os._exit(9)
    return 1 // item, torch.get_num_threads()


@pytest.mark.nightly
@pytest.mark.parametrize(("item", "message"), [("die", "died with exit code 9"), (0, "ZeroDivisionError")])
def test_workers_have_one_thread_and_a_dead_one_is_told(item, message):
    assert sorted(in_processes(_answer, [1, 1, 2], 2)) == [(0, (1, 1)), (1, (1, 1)), (2, (0, 1))]
    with pytest.raises(RuntimeError, match=f"item 1 .*{message}"):
        list(in_processes(_answer, [1, item, 2], 2))
    assert not multiprocessing.active_children()


def test_a_process_that_starts_never_gets_an_interrupt_and_its_parent_does():
    with _interrupts_blocked():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # the mask that a process inherits
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

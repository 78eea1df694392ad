"""Tests advice: the peak under other settings, the search for one that fits, recomputed FLOPs and simulated times."""

import math
import shlex
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from quaver.lab.cli.memory_views import summarize_advice
from quaver.lab.memory.faking.fakes import fake_tensors
from quaver.lab.model.llama import Llama, count_training_flops_per_token
from quaver.lab.model.loss import compute_next_token_loss
from quaver.lab.model.parallelize import parallelize
from quaver.lab.plan import advise as advise_module
from quaver.lab.plan.advise import AS_CONFIGURED, advise
from quaver.lab.plan.changes import (
    TRIED_RECIPES,
    Change,
    format_flags,
    list_combinations,
    list_single_changes,
    with_fewest_gathered_weights,
)
from quaver.lab.plan.compute_time import count_recomputed_flops
from quaver.lab.plan.planned_run import make_planned_run
from quaver.lab.plan.step_cost import StepCost, compute_step_cost
from quaver.lab.settings import ActivationCheckpoint, Float8, Training
from quaver.lab.settings.config_file import load_config, parse_arguments
from quaver.lab.settings.parallel_dims import resolve_parallel_dims
from quaver.roofline.device_specs import find_device_spec
from tests.lab.trainer.runs import CONFIGS, with_settings

LLAMA_8B = CONFIGS / "llama3_8b.toml"
H100 = find_device_spec("H100")
MODES = {
    "none": ActivationCheckpoint(),
    "op": ActivationCheckpoint(mode="selective"),
    "2": ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    "full": ActivationCheckpoint(mode="full"),
}


@pytest.mark.parametrize("mode", ["op", "full"])
def test_recomputed_flops_are_what_torch_counts_more(tiny_config, mode):
    config = replace(tiny_config, activation_checkpoint=MODES[mode], model=replace(tiny_config.model, n_layers=3))
    counted = []
    for checkpoint in (MODES["none"], MODES[mode]):
        with fake_tensors():
            model = Llama(config.model)
            parallelize(model, replace(config, activation_checkpoint=checkpoint), None)
            tokens = torch.zeros(2, 32, dtype=torch.int64)
            flops = lambda query, key, *_, **__: 4 * math.prod(query) * key[2]  # noqa: E731
            attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flops}
            with FlopCounterMode(display=False, custom_mapping=attention) as counter:
                compute_next_token_loss(model(tokens), tokens).backward()
        counted.append(counter.get_total_flops())
    configs = [replace(config, activation_checkpoint=MODES[name]) for name in (mode, "2")]
    run, every_2nd = (make_planned_run(*resolve_parallel_dims(config)) for config in configs)
    assert tokens.numel() * 3 * count_recomputed_flops(replace(run, seq_len=32)) == counted[1] - counted[0] > 0
    assert (run.checkpointed_blocks, every_2nd.checkpointed_blocks) == (3, 1)
    assert count_recomputed_flops(make_planned_run(*resolve_parallel_dims(tiny_config))) == 0


def compute_costs(words, ranks=8, spec=H100):
    config = load_config(*parse_arguments([str(LLAMA_8B), *shlex.split(words)]))
    return compute_step_cost(*resolve_parallel_dims(config, rank=0, world_size=ranks), spec)


def test_costs_follow_recomputation_precision_and_batch():
    none, op, full = (compute_costs(f"--activation_checkpoint.mode {mode}") for mode in ("none", "selective", "full"))
    model = load_config(LLAMA_8B).model
    assert none.step_flops == 8192 * count_training_flops_per_token(model, 8192)
    assert none.recomputed_flops == 0 < op.recomputed_flops < full.recomputed_flops
    assert full.step_flops == none.step_flops + full.recomputed_flops
    assert none.simulated_s < op.simulated_s < full.simulated_s
    alone = "--float8.enable_fsdp_float8_all_gather false --float8.precompute_float8_dynamic_scale_for_fsdp false"
    bfloat16 = compute_costs(f"{alone} --float8.enable_float8_linear false")
    assert bfloat16.simulated_s > op.simulated_s
    # The loss, the optimizer and the copies of FSDP2 count, and no GPU is faster than its data sheet says.
    assert bfloat16.step_flops / 989.4e12 < bfloat16.simulated_s < 2.5 * bfloat16.step_flops / 989.4e12
    twice = compute_costs("--training.global_batch_size 16")
    assert (twice.step_flops, twice.recomputed_flops) == (2 * op.step_flops, 2 * op.recomputed_flops)
    assert 1.9 * op.simulated_s < twice.simulated_s < 2 * op.simulated_s  # one optimizer step
    split = compute_costs("--parallelism.tensor_parallel_degree 2")
    assert split.step_flops == op.step_flops // 2
    assert op.simulated_s / 2 < split.simulated_s < op.simulated_s  # ranks wait for each other
    assert compute_costs("", spec=None).simulated_s is None
    assert compute_costs("--training.mixed_precision_param float32").simulated_s is None
    budget = compute_costs("--activation_checkpoint.mode memory_budget")
    assert (budget.recomputed_flops, budget.simulated_s, budget.step_flops) == (None, None, none.step_flops)


def test_flags_of_a_change_parse_to_its_config():
    config = with_settings(load_config(LLAMA_8B), training={"local_batch_size": 4})
    _, dims = resolve_parallel_dims(config, world_size=8)
    changes = [*list_single_changes(config, dims, 32), *list_combinations(config, 32)]
    assert len({change.name for change in changes}) > 40
    assert all(change.config is not None for change in changes)
    for change in changes[::4]:  # parsing takes long
        words = ["--training.local_batch_size", "4", *shlex.split(format_flags(config, change.config))]
        assert load_config(*parse_arguments([str(LLAMA_8B), *words])) == change.config
        assert resolve_parallel_dims(change.config, world_size=8)[0].training.step_batch_size == 32
    names = {change.name for change in list_single_changes(config, dims, 32)}
    assert "activations: full" in names
    assert "float8 all-gather: off" in names
    assert "local batch size: 2" in names
    assert not names & {"activations: selective, op", "precision: tensorwise", "local batch size: 1"}


def test_settings_that_the_trainer_refuses_have_its_error(tiny_config):
    config = with_settings(tiny_config, training={"compile": True}, parallelism={"tensor_parallel_degree": 2})
    changes = {
        change.name: change for change in list_single_changes(config, resolve_parallel_dims(config, world_size=2)[1], 2)
    }
    assert changes["activations: full"].config is None
    assert "torch 2.13 cannot compile" in changes["activations: full"].refusal
    assert changes["activations: selective, op"].config is not None
    assert "float8 all-gather: on" not in changes


def test_persistent_scales_are_left_behind(tiny_config):
    float8 = Float8(recipe_name="delayed", delayed_margin=1)
    config = replace(tiny_config, float8=float8, metrics=replace(tiny_config.metrics, float8_scales_freq=3))
    changes = {
        change.name: change.config for change in list_single_changes(config, resolve_parallel_dims(config)[1], 2)
    }
    assert changes["precision: rowwise"].float8 == Float8(recipe_name="rowwise")
    assert changes["precision: bfloat16"].float8 == Float8(enable_float8_linear=False, recipe_name="delayed")


class FakePeaks:
    """Computes peaks by arithmetic in place of predictions, and keeps the configs that it was called with."""

    def __init__(self):
        self.configs = []
        self.saves = {"residual": 0, "optimizer": 0, "stored": 0}

    def bytes(self, config):
        mode = config.activation_checkpoint
        sequence = {"none": 100, "selective": 60 if mode.selective_ac_option == "op" else 70, "full": 30}[mode.mode]
        sequence += 0 if config.float8.enable_float8_linear else 20
        gathered = {"default": 8, "always": 4, "never": 20}[config.parallelism.fsdp_reshard_after_forward]
        saved = self.saves["residual"] * (config.training.residual_dtype == "bfloat16")
        saved += self.saves["optimizer"] * (config.optimizer.name == "Float8AdamW")
        saved += self.saves["stored"] * config.activation_checkpoint.store_in_float8
        return 50 + sequence * config.training.local_batch_size + gathered - config.training.compile - saved

    def predict(self, config, ranks, device):
        assert device == "cuda"
        self.configs.append(config)
        return SimpleNamespace(prediction=SimpleNamespace(peak_bytes=self.bytes(config)))


@pytest.fixture
def peaks():
    peaks = FakePeaks()
    estimate = lambda config, ranks: peaks.bytes(config)  # noqa: E731
    with patch.multiple(advise_module, predict_run_memory=peaks.predict, estimate_peak=estimate):
        yield peaks


def advise_llama(fit_bytes, **settings):
    return advise(replace(load_config(LLAMA_8B), **settings), 8, fit_bytes=fit_bytes, time_on="H100")


EAGER = Training(seq_len=8192, local_batch_size=2)
HALF_THE_BATCH = "activations: none checkpointed; local batch size: 1"


@pytest.mark.parametrize(
    ("fit_bytes", "settings", "peak_bytes", "change"),
    [
        (200, {"activation_checkpoint": MODES["full"]}, 158, HALF_THE_BATCH),
        # In rowwise float8 it would be modeled as 1 % faster, which the model cannot tell.
        (1000, {"activation_checkpoint": MODES["none"]}, 258, AS_CONFIGURED),
        # The least that a batch of 2 without checkpointing takes is 254 bytes.
        (254, {}, 254, "activations: none checkpointed; least gathered weights"),
        (60, {}, None, None),
    ],
    ids=["half the batch", "as configured", "gathering less", "nothing fits"],
)
def test_the_fastest_setting_that_fits_is_found(peaks, fit_bytes, settings, peak_bytes, change):
    advice = advise_llama(fit_bytes, training=EAGER, **settings)
    if peak_bytes is None:
        assert advice.fastest_index is None
        assert advice.rows[advice.smallest_index].peak_bytes == min(
            row.peak_bytes for row in advice.rows if row.peak_bytes
        )
        assert not any(row.fits for row in advice.rows)
        (combination,) = (row.change for row in advice.rows if "activations: full; " in row.change)
        assert f"no combination can fit: the smallest is {combination}, and no other was predicted" in advice.notes
        assert summarize_advice(advice)[0].startswith("nothing that was tried fits 60 bytes; the smallest: ")
        return
    best = advice.rows[advice.fastest_index]
    assert (best.change, best.peak_bytes, best.note, best.fits) == (change, peak_bytes, "", True)
    assert advice.smallest_index is None
    # What is tried and clearly faster does not fit.
    assert not [row for row in advice.rows if row.fits and row.cost.simulated_s * 1.02 < best.cost.simulated_s]
    load_config(*parse_arguments([str(LLAMA_8B), *shlex.split(best.flags)]))  # the command parses
    assert ("--parallelism.fsdp_reshard_after_forward always" in best.flags) == ("gathered" in change)
    assert (best.flags == "") == (change == AS_CONFIGURED)


@pytest.mark.parametrize(
    ("fit_bytes", "best"),
    [
        (158, HALF_THE_BATCH),
        (145, f"{HALF_THE_BATCH}; residual stream: bfloat16; optimizer states: float8"),
        (40, None),
    ],
)
def test_less_precise_storage_comes_after_equally_fast_settings(peaks, fit_bytes, best):
    """A batch of 1 without checkpointing takes 158 bytes; what is less precise is added where that does not fit."""
    peaks.saves = {"residual": 4, "optimizer": 10, "stored": 20}
    advice = advise_llama(fit_bytes, training=EAGER)
    assert (None if advice.fastest_index is None else advice.rows[advice.fastest_index].change) == best
    singles = {row.change: row.difference_bytes for row in advice.rows if row.change.count(";") == 0}
    assert singles["optimizer states: float8"] == -10
    assert singles["saved activations: float8"] == -20
    assert any("change a run's numbers" in note for note in advice.notes)


def test_every_setting_is_predicted_once_as_the_run_is(peaks):
    advice = advise_llama(157, training=Training(seq_len=8192, local_batch_size=1, compile=True))
    assert len(set(peaks.configs)) == len(peaks.configs) == sum(row.peak_bytes is not None for row in advice.rows)
    assert all(config.training.compile for config in peaks.configs)
    assert peaks.configs[0].activation_checkpoint.mode == "selective"
    assert (advice.rows[0].change, advice.rows[0].difference_bytes) == (AS_CONFIGURED, 0)
    best = advice.rows[advice.fastest_index]
    assert (best.change, best.peak_bytes) == ("activations: none checkpointed", 157)
    assert best.difference_bytes == 157 - advice.rows[0].peak_bytes


@pytest.mark.parametrize(("fit_bytes", "is_near"), [(260, True), (1000, False)])
def test_an_estimate_near_the_limit_is_said_to_be(peaks, fit_bytes, is_near):
    config = replace(load_config(LLAMA_8B), training=EAGER, activation_checkpoint=MODES["none"])
    advice = advise(config, 8, fit_bytes=fit_bytes, time_on="H100", quick=True)
    assert advice.rows[advice.fastest_index].peak_bytes == 258
    assert any("predict its peak without --quick" in note for note in advice.notes) == is_near


def test_an_error_of_the_cost_model_is_no_refusal(peaks, monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("expected tasks that wait for earlier ones")

    monkeypatch.setattr(advise_module, "compute_step_cost", fail)
    with pytest.raises(ValueError, match="tasks that wait"):
        advise_llama(None)


@pytest.mark.parametrize("quick", [False, True])
def test_refused_settings_are_rows_and_refused_combinations_a_note(peaks, quick):
    """Refused combinations have no estimate, which must not count as one that may fit."""
    float8 = Float8(enable_float8_linear=False, filter_fqns=("proj", "lm_head"))
    config = replace(load_config(LLAMA_8B), float8=float8, training=EAGER)
    advice = advise(config, 8, fit_bytes=60, time_on="H100", quick=quick)
    refused = [row for row in advice.rows if row.peak_bytes is None]
    assert [row.change for row in refused] == [f"precision: {recipe}" for recipe in TRIED_RECIPES]
    assert all(row.cost is None and row.note.startswith("not possible: ") for row in refused)
    assert all(row.cost is not None for row in advice.rows if row not in refused)
    (note,) = {row.note for row in refused}
    assert f"24 combinations {note}" in advice.notes
    assert any(note.startswith("no combination can fit: the smallest is ") for note in advice.notes)


def test_refused_combinations_that_the_compiler_recomputes_are_a_note():
    budget = ActivationCheckpoint(mode="memory_budget", memory_budget=0.5)
    float8 = Float8(enable_float8_linear=False, filter_fqns=("proj", "lm_head"))
    config = replace(load_config(LLAMA_8B), float8=float8, training=replace(EAGER, compile=True))
    advice = advise(replace(config, activation_checkpoint=budget), 8, fit_bytes=60, time_on="H100", quick=True)
    assert any("combinations not possible: " in note for note in advice.notes)


def test_combinations_without_a_simulated_time_come_last():
    slow, fast, untimed = (Change((name,), None) for name in ("slow", "fast", "untimed"))
    costs = [(untimed, StepCost(1, None, None)), (slow, StepCost(9, 0, 2.0)), (fast, StepCost(9, 0, 1.0))]
    assert advise_module._sort_by_time(costs) == [[fast], [slow], [untimed]]


def test_fewest_gathered_weights_reshards_always_and_gathers_in_float8(tiny_config):
    config = replace(tiny_config, float8=Float8())
    _, dims = resolve_parallel_dims(config, world_size=2)
    (change,) = (change for change in list_combinations(config, 4) if change.config == config)
    fewer = with_fewest_gathered_weights(change, dims)
    assert fewer.config.parallelism.fsdp_reshard_after_forward == "always"
    assert fewer.config.float8.enable_fsdp_float8_all_gather
    assert (
        with_fewest_gathered_weights(fewer, dims)
        is with_fewest_gathered_weights(change, resolve_parallel_dims(config)[1])
        is None
    )

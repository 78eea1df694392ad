"""Tests that `[activation_checkpoint]` gives the same losses with less memory, also on two ranks."""

from dataclasses import replace

import pytest
import torch
import torch._functorch.config as compiler_config

from quaver.lab.data import Batch
from quaver.lab.model.llama import Block
from quaver.lab.settings import ActivationCheckpoint, Checkpoint, Float8, Parallelism, TrainConfig
from quaver.lab.trainer.train import train
from quaver.lab.trainer.training_run import TrainingRun, prepare_run
from tests.lab.trainer.runs import build_on_rank, read_numbers, run_to_end, with_settings
from tests.ranks import run as run_on_ranks

FULL, BY_POLICY = ActivationCheckpoint("full"), ActivationCheckpoint("selective")
SECTIONS = {"none": ActivationCheckpoint(), "full": FULL, "op": BY_POLICY, "2": ActivationCheckpoint("selective", "2")}


def run_with_checkpoint(config: TrainConfig, name: str, checkpoint: ActivationCheckpoint) -> TrainingRun:
    return run_to_end(replace(with_settings(config, job={"name": name}), activation_checkpoint=checkpoint))


@pytest.mark.parametrize("recipe", [pytest.param("rowwise", marks=pytest.mark.nightly), "delayed"])
def test_every_mode_trains_to_the_same_bits_and_full_needs_the_least_memory(recipe, tiny_config):
    config = replace(tiny_config, float8=Float8(recipe_name=recipe), checkpoint=Checkpoint(enable=False))
    config = with_settings(config, job={"compare": True})
    runs = {name: run_with_checkpoint(config, name, checkpoint) for name, checkpoint in SECTIONS.items()}
    expected = read_numbers(runs["none"])
    for name, run in runs.items():
        assert read_numbers(run) == expected, name
    for index in range(2):
        peaks = {name: run.models[index].peak_memory for name, run in runs.items()}
        sizes = {name: peak.peak_bytes for name, peak in peaks.items()}
        assert sizes["none"] > max(sizes["op"], sizes["2"]) >= min(sizes["op"], sizes["2"]) > sizes["full"]


def test_a_memory_budget_is_given_to_the_compiler(tiny_config, monkeypatch, memory_budget_restored):
    monkeypatch.setattr(Block, "compile", lambda block, **options: None)
    config = with_settings(tiny_config, training={"compile": True})
    prepare_run(replace(config, activation_checkpoint=ActivationCheckpoint("memory_budget", memory_budget=0.25)))
    assert compiler_config.activation_memory_budget == 0.25
    prepare_run(with_settings(replace(config, activation_checkpoint=BY_POLICY), job={"name": "next"}))
    assert compiler_config.activation_memory_budget == 1


def test_the_checkpoint_of_a_bad_step_is_searched_too(tiny_float8_config):
    run = prepare_run(replace(tiny_float8_config, activation_checkpoint=BY_POLICY))
    block = next(run.models[0].model.iter_blocks())
    block.mlp.up_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match=r"first in weight of model\.layers\.0\.mlp\.up_proj"):
        train(run)


def train_in_all_modes(config: TrainConfig) -> list[list[tuple[float, float]]]:
    """Train in each mode, and with stored activations, on this rank of two."""
    return [train_two_steps(config, *how) for how in (("none",), ("selective",), ("full",), ("none", True))]


def train_two_steps(config: TrainConfig, mode: str, store: bool = False) -> list[tuple[float, float]]:
    """Return the losses and gradient norms."""
    checkpoint = ActivationCheckpoint(mode, store_in_float8=store)
    trained, dims = build_on_rank(replace(config, activation_checkpoint=checkpoint), 2)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(dims.data_parallel_rank))
    results = [trained.train_step(step, [Batch(tokens, tokens.roll(-1, 1))]) for step in (1, 2)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize(
    ("float8", "degree"),
    [
        pytest.param({"recipe_name": "rowwise"}, 1, marks=pytest.mark.nightly),
        pytest.param({"recipe_name": "delayed", "enable_fsdp_float8_all_gather": True}, 1, marks=pytest.mark.nightly),
        ({}, 2),
    ],
    ids=["shard", "all_gather", "tensor"],
)
def test_ranks_recompute_the_same_bits(float8, degree, tiny_config):
    parallelism = Parallelism(tensor_parallel_degree=degree)
    config = replace(tiny_config, float8=Float8(**float8), parallelism=parallelism)
    for expected, selective, full, stored in run_on_ranks(2, train_in_all_modes, config):
        assert selective == full == expected
        for (loss, norm), (exact_loss, exact_norm) in zip(stored, expected, strict=True):
            assert loss == pytest.approx(exact_loss, rel=1e-3)
            assert norm == pytest.approx(exact_norm, rel=0.03)
        assert stored[0][0] == expected[0][0]
        assert stored[0][1] != expected[0][1]

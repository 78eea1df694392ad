"""Compares what --dry-run says with what a run then has."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from quaver.lab.cli import main
from quaver.lab.model import flops
from quaver.lab.model.flops import MASKED_FLOPS, count_flops_per_token_by_precision, list_linear_precisions
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import Float8
from quaver.lab.settings.config_file import load_config
from quaver.lab.trainer.dry_run import dry_run
from quaver.lab.trainer.run_setup import make_models, set_up_run
from quaver.linear import backends
from quaver.linear.backends import GemmBackend
from quaver.runtime import devices
from tests.lab.trainer.runs import CONFIGS, with_settings

PARAMETERS = {
    "llama3_8b": 8_030_261_248,
    "llama3_8b_8xh100": 8_030_261_248,
    "llama3_8b_blockwise": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}
"""As Meta counts them: 8.03, 70.6 and 406 billion; the sum of the shapes of their published checkpoints."""


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_would_run(path):
    ranks = 8 if path.stem.startswith("llama3_8b") else {"llama3_70b": 256, "llama3_405b": 512}.get(path.stem, 1)
    config = load_config(path)
    depth = config.model.n_layers
    result, deeper = (dry_run(with_settings(config, model={"n_layers": layers}), ranks) for layers in (2, 3))
    parameters = result.parameters + (depth - 2) * (deeper.parameters - result.parameters)
    assert parameters == PARAMETERS.get(path.stem, parameters)
    assert result.dims.world_size == ranks
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("recipe", "float8_matmuls"), [("tensorwise", 3), ("rowwise", 3), ("rowwise_with_gw_hp", 2), ("delayed", 3)]
)
def test_flops_count_by_the_precision_that_they_run_in(monkeypatch, recipe, float8_matmuls):
    """On a device that multiplies float8, which is pretended, on a CPU, and on one without bfloat16 instructions."""
    monkeypatch.setattr(flops, "has_bfloat16_units", lambda kind: True)
    config = replace(load_config(CONFIGS / "llama3_debug.toml"), float8=Float8(recipe_name=recipe))
    device = torch.device("cpu")
    _, model = make_models(config, device).first
    seq_len = config.training.seq_len
    count = partial(count_flops_per_token_by_precision, model, config.model, seq_len, "bfloat16", device)
    bfloat16 = count()
    masked = 6 * config.model.n_layers * config.model.dim * seq_len
    assert bfloat16 == {MASKED_FLOPS: masked, "bfloat16": sum(bfloat16.values()) - masked}
    monkeypatch.setattr(flops, "has_bfloat16_units", lambda kind: False)
    older = count()
    monkeypatch.setattr(backends, "choose_backend", lambda *args, **options: GemmBackend.NATIVE)
    native = count()
    assert sum(native.values()) == sum(bfloat16.values())
    weights = sum(layer.flops_per_token for layer in list_linear_precisions(model, "bfloat16", device)[:-1])
    assert native["float8"] == float8_matmuls * weights
    assert older == {MASKED_FLOPS: masked, "bfloat16": native["bfloat16"], "float32": native["float8"]}


def test_a_dry_run_prints_layers_and_layout_and_writes_nothing(run_quaver, tmp_path):
    argv = ["--ranks", 4, "--parallelism.tensor_parallel_degree", 2, "--float8.recipe_name", "rowwise_with_gw_hp"]
    printed = run_quaver("train", "--dry-run", *argv, "--job.dump_folder", tmp_path / "runs")
    for part in ("3,279,104 parameters", "dp_shard 2 x tp 2", "rowwise e4m3", "float8.filter_fqns has 'lm_head'"):
        assert part in printed
    assert not (tmp_path / "runs").exists()


def test_a_device_that_is_not_here_is_named(run_quaver, monkeypatch):
    monkeypatch.setattr(devices, "has_cuda", lambda: False)
    printed = run_quaver("train", "--dry-run", "--training.device", "cuda")
    assert printed.splitlines()[-1].startswith("this machine cannot train it: device cuda was asked")


def test_one_flag_turns_float8_off_and_says_what_goes_with_it(capsys):
    config = "train_configs/llama3_8b.toml"
    assert main(["train", config, "--dry-run", "--ranks", "8", "--float8.enable_float8_linear", "false"]) == 0
    output = capsys.readouterr()
    assert "tensorwise" not in output.out
    (line,) = (line for line in output.err.splitlines() if not line.startswith("..."))
    assert line.startswith(f"quaver: float8.enable_float8_linear = false also turns off, of {config}: float8.enable_fs")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--training.max_norm=inf", "training.max_norm must be finite, got inf"),
        ("--checkpoint.async_mode=async_with_pinned_mem", "disabled or async on a device that is not CUDA"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(flag, message, run_refused):
    assert message in run_refused("train", "--dry-run", "--training.device=cpu", flag)


def test_a_run_and_its_dry_run_count_the_gradients_of_a_rank_alike(tiny_config):
    config = with_settings(tiny_config, comm={"float8_gradients": True})
    message, messages = "comm.float8_gradients: the FSDP2 group of .* for each of 8 ranks", []
    for start in (lambda: dry_run(config, 8), lambda: set_up_run(config, Ranks(0, 0, 8))):
        with pytest.raises(ValueError, match=message) as error:
            start()
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    set_up_run(with_settings(config, model={"dim": 256, "hidden_dim": 512}), Ranks(0, 0, 2))
    assert not dist.is_initialized()

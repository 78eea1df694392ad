"""Tests what `quaver plan` prints, writes, and refuses in one line."""

import json
import re

import pytest
import torch

from quaver.lab.cli import plan as command
from quaver.lab.cli import plan_views
from quaver.lab.plan import search
from quaver.lab.plan.calibration import describe_sustained_share
from quaver.lab.plan.compute_time import BlockTimes
from quaver.lab.plan.step import ComputeTimes
from quaver.lab.plan.unsimulated import iter_unsimulated
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.config_file import load_config
from quaver.roofline.device_specs import find_device_spec
from tests.lab.trainer.runs import with_settings

GIB = 2**30
LLAMA_8B = "train_configs/llama3_8b.toml"
GPUS = "one of GB200, B200, H200, H100, H100-NVL"


def estimate_bytes(config, ranks):
    """In place of estimates: 20 GiB a sequence, 5 with checkpointing."""
    saves_all = config.activation_checkpoint.mode == "none"
    return GIB * config.training.local_batch_size * (20 if saves_all else 5)


@pytest.fixture(autouse=True)
def known_memory(monkeypatch):
    monkeypatch.setattr(search, "estimate_peak", estimate_bytes)


@pytest.fixture
def plan(run_quaver, tmp_path):
    """Run `quaver plan` with tensorwise and bfloat16, and return what it prints, wrapped nowhere, and its JSON."""

    def plan(*words, recipe="tensorwise"):
        output = tmp_path / "new" / "plan.json"
        few = ["--model.n_layers", 2, "--recipes", recipe, "--output", output]
        printed = run_quaver("plan", LLAMA_8B, *few, *words)
        return " ".join(printed.split()), json.loads(output.read_text())

    return plan


def test_the_command_prints_draws_and_writes_a_run(plan, run_quaver, tmp_path, monkeypatch):
    described, describe = [], command.describe_limits
    spy = lambda row, cluster: described.append(row) or describe(row, cluster)  # noqa: E731
    monkeypatch.setattr(command, "describe_limits", spy)
    chosen, picture = tmp_path / "chosen.toml", tmp_path / "step.png"
    files = "--explain", "1", "--png", picture, "--write", chosen, "--row", "2"
    printed, written = plan("--gpus", "16", *files)
    rows = written["rows"]
    assert written["environment"]["torch"] == torch.__version__
    assert len(described) == len(rows)
    speeds = [row["tokens_per_second_per_gpu"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert {row["precision"] for row in rows} == {"bfloat16", "tensorwise"}
    assert sum(row["is_configured"] for row in rows) == 1
    assert all(row["peak_bytes"] <= 0.94 * 85.5e9 for row in rows)
    assert f"{speeds[0]:,.0f}" in printed
    assert "times the tokens/s of the best layout in bfloat16" in printed
    assert "Links in a step" in printed
    assert "memory is estimated, typically within 10%" in printed
    assert describe_sustained_share(find_device_spec("h100")) in printed
    assert len({row["step_tokens"] for row in rows}) > 1
    assert "the config has no global batch, so steps have different tokens" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    config = load_config(chosen)
    assert config.training.local_batch_size == rows[1]["config"]["training"]["local_batch_size"]
    assert config.float8.recipe_name == rows[1]["config"]["float8"]["recipe_name"]
    for suffix in (".torchrun.sh", ".slurm.sbatch", ".jobset.yaml"):
        assert chosen.with_suffix(suffix).is_file()
    run_quaver("train", chosen, "--dry-run", "--ranks", 16)


def test_settings_that_are_not_simulated_are_listed():
    config = with_settings(TrainConfig(), training={"compile": True})
    assert list(iter_unsimulated(config)) == []
    settings = {
        "training": {"compile": False},
        "data": {"document_mask": True},
        "optimizer": {"name": "Muon"},
        "job": {"compare": True},
        "float8": {
            "high_precision_schedule": ("all: last 3 steps",),
            "serving": "deepgemm",
            "layer_recipes": ("*.down_proj=rowwise", "*.up_proj=high_precision"),
        },
    }
    sentences = list(iter_unsimulated(with_settings(config, **settings)))
    names = ["layer_recipes", "high_precision_schedule", "serving", "training.compile", "document_mask", "Muon"]
    assert len(sentences) == len([*names, "compare"])
    assert [name for name in [*names, "compare"] if not any(name in sentence for sentence in sentences)] == []
    only_high = with_settings(config, float8={"layer_recipes": ("*.up_proj=high_precision",)})
    assert list(iter_unsimulated(only_high)) == []
    (sentence,) = iter_unsimulated(with_settings(config, activation_checkpoint={"mode": "memory_budget"}))
    assert sentence.endswith("the run has no row")


def test_a_rounded_global_batch_is_reported(plan):
    printed, written = plan("--gpus", "8", "--global-batch", "130k tokens", "--top", "2")
    assert {row["step_tokens"] for row in written["rows"]} == {16 * 8192}  # 130k / 8192 are 15.9 sequences
    assert "--global-batch 130k tokens: a step has 131,072 tokens, 16 sequences of 8,192" in printed
    printed, written = plan("--gpus", "8", "--global-batch", "8192", "--top", "2")
    assert {row["step_tokens"] for row in written["rows"]} == {8192}
    assert not any(row["is_configured"] for row in written["rows"])
    assert "the configured layout is no row: training.global_batch_size" in printed
    assert "--global-batch 8192:" not in printed


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("h100", "a long run keeps 72% of the best rate of a matmul, as in fms-fsdp llama2-7b 96 H100"),
        ("b200", "FP8-CS TP1 PP1 CP1, with Megatron and TransformerEngine"),
        ("mi300x", "long run on MI300X keeps of a matmul's rate: assumed are the H100's 72%"),
        ("mi300x", "no published run says what a long run on MI300X keeps"),
    ],
)
def test_the_run_that_fixes_a_cards_share_is_said(gpu, words):
    assert words in describe_sustained_share(find_device_spec(gpu))


@pytest.mark.parametrize(
    ("network", "gbps"), {"400gbps": 400, "100Gb/s": 100, "100 Gbit/s": 100, "50GB/s": 400, "12.5GBps": 100}.items()
)
def test_rates_of_the_network_are_in_bits_or_bytes(network, gbps):
    assert plan_views.PlanOptions(network=network).network_gbit_per_s == gbps


@pytest.mark.parametrize("is_counted", [True, False])
def test_ledger_times_are_printed_beside_the_formulas(is_counted, plan, tmp_path, monkeypatch):
    def predict_times(config, ranks, run, cluster):
        assert (ranks, run.local_batch) == (8, config.training.local_batch_size)
        if not is_counted:
            raise NotImplementedError("expected code that compiles one forward")
        modeled = ComputeTimes.from_formulas(run, cluster)
        return modeled._replace(block=BlockTimes(*(2 * seconds for seconds in modeled.block)))

    monkeypatch.setattr(plan_views, "predict_ledger_times", predict_times)
    picture = tmp_path / "step.png"
    printed, written = plan("--gpus", "8", "--top", "1", "--explain", "1", "--ledger", "--png", picture)
    if not is_counted:
        assert "the kernels of its block are not counted: expected code that compiles one forward" in printed
        return
    seconds, by_formulas = re.search(r"a step ([\d.]+) s \(([\d.]+)\)", printed).groups()
    assert float(by_formulas) == pytest.approx(written["rows"][0]["step_seconds"], rel=0.01)
    assert 1.2 < float(seconds) / float(by_formulas) < 2


@pytest.mark.parametrize(
    ("gpus", "tokens", "sequences"),
    [
        *((gpus, "1M", sequences) for gpus, sequences in ((7, 3906), (8, 3904), (1000, 4000), (4096, 4096))),
        *((8, str(256 * asked), sequences) for asked, sequences in ((4, 4), (7, 8), (96, 96), (100, 128))),
    ],
)
def test_a_step_has_the_nearest_number_of_sequences_that_the_ranks_divide(gpus, tokens, sequences):
    """1M tokens are 3,906 sequences of 256; the configured batch of a GPU is 8."""
    assert plan_views.PlanOptions(gpus=gpus, global_batch=tokens).find_step_batch_size(TrainConfig()) == sequences


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--recipes tensorwise --memory 3GiB", "needs about 5 GiB, 2 GiB more; add GPUs with --gpus"),
        ("--gpus 7 --training.global_batch_size 16", "expected a layout of so many GPUs that the trainer accepts"),
        ("--memory much --gpu h300", "--memory must be a size above 0"),  # before the config and the GPU are read
        ("--gpu h300", f"--gpu: unknown device 'h300': expected the full name of {GPUS}, "),
        ("--spec no.toml", "--spec no.toml: expected a TOML file: No such file or directory"),
        (
            "--network 50gb/s",
            "--network must be a rate of 0.001 to 1,000,000 Gb/s with its unit: 400gbps or 400Gb/s for bits, 50GB/s",
        ),
        ("--spec no.toml --gpu b200", "--gpu must be its default, 'h100', with --spec, got 'b200'"),
        ("--network 400", "--network must be a rate of 0.001 to 1,000,000 Gb/s with its unit"),
        (f"--network {'9' * 400}gbps", "--network must be a rate of 0.001 to 1,000,000 Gb/s with its unit"),
        ("--global-batch some", "--global-batch must be tokens such as"),
        (f"--global-batch {'9' * 400}", "--global-batch must be tokens such as"),
        ("--global-batch 5", "at least those of a sequence, 8192, got '5'"),
        ("--recipes mxfp8", "--recipes mxfp8: H100 does not multiply float8 with such scales"),
        ("--recipes bf17", "bf17"),
        ("--recipes tensorwise --explain 99", "--explain must be a row of 1 to"),
        ("--row 2", "--row must be its default, 1, unless --write names a file"),
        ("--png a.png", "--png must not be given unless --explain names a row"),
        ("--ledger", "--ledger must be its default, False, unless --explain names a row"),
        ("--explain 1 --ledger --gpu a100", "--ledger: expected a GPU that is one of H100, H200, B200, got A100"),
        ("--storage 1e-320", "--storage must be a rate of 0.000001 to 1,000,000 GB/s, got 1e-320"),
        ("--write run.txt", "--write must be a file whose name ends with .toml"),
    ],
)
def test_bad_input_is_one_line(words, message, run_refused):
    assert message in run_refused("plan", LLAMA_8B, "--model.n_layers", "2", *words.split())


@pytest.mark.parametrize("name", ["run.toml", "run.jobset.yaml"])
def test_a_file_that_would_be_overwritten_is_refused_before_the_search(name, run_refused, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "search", lambda *_, **__: pytest.fail("searched"))
    (tmp_path / name).write_text("another")
    words = ["plan", LLAMA_8B, "--write", str(tmp_path / "run.toml"), "--output", str(tmp_path / "plan.json")]
    assert f"{name}' exists already" in run_refused(*words)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_largest_local_batch_of_a_search_is_said_to_be_it(plan):
    words, sentence = ["--gpus", "1", "--top", "1", "--memory", "400GiB"], "row 1 has the largest local batch of the"
    printed = plan(*words)[0]
    assert f"{sentence} search, 16; --training.local_batch_size adds another" in printed
    assert "--memory 400GiB: one H100 has only 79.63 GiB" in printed
    assert sentence not in plan(*words, "--training.local_batch_size", "64")[0]


def test_rows_name_the_backward(plan):
    _, written = plan("--gpus", "8", "--top", "4", recipe="rowwise:dequantized")
    assert "rowwise:dequantized" in {row["precision"] for row in written["rows"]}


def test_a_configured_recipe_that_the_gpu_does_not_multiply_has_no_row(plan):
    printed, written = plan("--float8.recipe_name", "mxfp8")
    assert "no row: float8.recipe_name mxfp8: H100 does not multiply float8 with such scales" in printed
    assert not any(row["is_configured"] for row in written["rows"])

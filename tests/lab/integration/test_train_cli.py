"""Tests `quaver train` as a user types it: exit codes, what it prints and what it leaves behind."""

import json
import os
from pathlib import Path

import pytest
import torch

from quaver.lab.cli import main
from quaver.lab.model.llama import Block
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.trainer.trained_model import TrainedModel
from tests import command_line
from tests.command_line import quaver
from tests.lab.integration.train_on_ranks import compile_quickly
from tests.thinned import at_night

TINY = [*command_line.TINY, "--validation.freq=2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(command_line.TEXT)
    return path


@pytest.fixture
def run_argv(tmp_path: Path, text: Path) -> list[str]:
    return ["--data", str(text), "--job.dump_folder", str(tmp_path / "runs"), "--job.name", "r"]


def test_a_run_from_another_folder_in_a_fresh_process(tmp_path, text, monkeypatch):
    argv = ["--data", "text.txt", "--compare", "--training.steps", "4", "--float8.recipe_name", "rowwise"]
    process = quaver(["train", *TINY, *argv], cwd=tmp_path).finished()
    assert (process.returncode, process.stderr) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("rowwise-compare-")
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["models"]) == ["rowwise", "bfloat16"]
    assert set(summary["comparison"]) == {"loss_gap", "tokens_per_s_ratio", "peak_memory_ratio"}
    for part in ("step     4", "validation loss", "peak memory", "compared", str(Path("runs") / folder.name)):
        assert part in process.stdout

    monkeypatch.chdir(tmp_path)
    assert main(["train", str(folder / "config.toml")]) == 0
    first, second = (read_json_lines(run / "metrics.jsonl") for run in sorted((tmp_path / "runs").iterdir()))
    for key in ("loss", "validation_loss"):  # the written config repeats the run bit for bit
        assert [record.get(key) for record in first] == [record.get(key) for record in second]


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("delayed", "aot_eager"),
        *at_night((recipe, "inductor") for recipe in ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp")),
    ],
)
def test_compiled_blocks_train_alike(run_argv, tmp_path, monkeypatch, recipe, backend):
    flags = ["--training.steps=3", "--training.global_batch_size=4", f"--float8.recipe_name={recipe}"]
    for number in range(300):  # a sequence has several documents
        path = tmp_path / "texts" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{number} times {number}\n")
    flags += ["--lr_scheduler.warmup_steps=1", "--model.n_layers=1", "--data.document_mask", f"--data={path.parent}"]
    tolerance = 2e-3
    if backend == "aot_eager":  # the same operations, which float32 shows to 4e-7
        monkeypatch.setattr(Block, "compile", compile_quickly)
        flags += ["--training.mixed_precision_param=float32"]
        tolerance = 5e-6
    assert main(["train", *TINY, *run_argv, *flags]) == 0
    torch._dynamo.utils.counters.clear()
    assert main(["train", *TINY, *run_argv, *flags, "--job.name", "c", "--training.compile"]) == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one to train, one to validate
    eager, compiled = (json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in "rc")
    loss, expected = (summary["models"][recipe]["validation_loss"] for summary in (compiled, eager))
    assert eager["models"][recipe]["compiled_graphs"] is None
    assert compiled["models"][recipe]["compiled_graphs"] >= 1
    assert not compiled["notes"]
    assert loss == pytest.approx(expected, rel=tolerance)
    peaks = [summary["models"][recipe]["peak_memory_bytes"] for summary in (eager, compiled)]
    assert 0.5 < peaks[1] / peaks[0] < 1.5


def test_a_diverging_run_stops_with_one_line(run_argv, tmp_path, capsys):
    flags = ["--optimizer.lr", "1e38", "--lr_scheduler.warmup_steps", "0", "--training.steps", "20"]
    assert main(["train", *TINY, *run_argv, *flags]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "quaver: error: tensorwise: step" in line
    assert " of model." in line or " of lm_head" in line
    summary = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())
    assert summary["status"] == "non-finite"
    assert summary["reason"] in line
    assert not list((tmp_path / "runs" / "r").glob("checkpoint/step-*")), "nothing to resume from a run that stopped"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["."], "config file '.' is a folder; give its config.toml"),
        (["--data", "short.txt"], "give more text or a smaller training.seq_len"),
        (["--job.dump_folder", "short.txt"], "cannot write the run folder 'short.txt/r'"),
        (["--float8.filter_fqns", "proj", "lm_head"], "nothing|no linear"),
        (["--float8.filter_fqns", "lm_haed"], "'lm_haed' is part of no linear's name"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, run_argv, tmp_path, monkeypatch, run_refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("to be")
    line = run_refused("train", *TINY, *run_argv, "--training.steps", "1", *argv)
    assert any(part in line for part in message.split("|")), line
    assert not (tmp_path / "runs" / "r").exists()  # nothing is written for a run that never starts


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(run_argv, run_refused):
    line = run_refused("train", *TINY, *run_argv, "--training.device", "cuda")
    assert "torch sees no CUDA device here; choose cpu" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(run_argv, tmp_path, run_refused):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    assert "cannot write the run folder" in run_refused("train", *TINY, *run_argv, "--job.dump_folder", locked)


def test_a_bug_in_training_is_a_traceback(run_argv, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr(TrainedModel, "train_step", fail)
    with pytest.raises(ValueError, match="a bug"):
        main(["train", *TINY, *run_argv])
    summary = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", "ValueError: a bug")


@pytest.mark.nightly
def test_blocks_of_five_recipes_compile_to_train_and_to_validate(run_argv, tmp_path, monkeypatch):
    monkeypatch.setattr(Block, "compile", compile_quickly)
    recipes = ("rowwise", "rowwise_with_gw_hp", "rowwise_with_tensorwise_weight", "high_precision")
    layers = ",".join(f"model.layers.{index}.mlp.down_proj={recipe}" for index, recipe in enumerate(recipes))
    argv = ["--model.n_layers=5", "--training.compile", f"--float8.layer_recipes={layers}", "--training.steps=2"]
    assert main(["train", *TINY, *run_argv, *argv, "--validation.freq=1", "--job.compare"]) == 0


def test_help_lists_flags_and_an_unknown_verb_is_refused(run_quaver, run_refused):
    assert all(verb in run_quaver("--help") for verb in ("train", "prepare-data"))
    assert run_quaver("--version").startswith("quaver ")
    assert "unknown command 'trian'; did you mean 'train'?" in run_refused("trian")
    assert "choose from train, doctor, bench" in run_refused("zzz")
    help_text = run_quaver("train", "--help")
    for flag in ("--float8.recipe_name", "--training.compile", "--compare", "--data"):
        assert flag in help_text
    assert "usage: quaver prepare-data [CONFIG.toml]" in run_quaver("prepare-data", "--help")

"""From a difference between two runs to the smallest module, the fewest settings, and a command that shows it."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from quaver.kernels import cpu
from quaver.memory.reports.compare import compare
from quaver.memory.runs.bisect import bisect_memory, row_to_explain
from quaver.memory.runs.case import case_of
from quaver.memory.runs.predict import SEES_GATHERS

needs_gathers = pytest.mark.skipif(not SEES_GATHERS, reason="gathers into fake tensors go unseen in this torch")
TINY = shlex.split(
    "--model.dim 64 --model.n_layers 2 --model.n_heads 4 --model.n_kv_heads 4 --model.hidden_dim 256 "
    "--training.seq_len 16 --training.local_batch_size 2 --data.path nowhere"
)
ROWWISE = [*TINY, *shlex.split("--float8.recipe_name rowwise --activation_checkpoint.mode selective")]
KEEP_ABS = shlex.split(
    "--activation_checkpoint.selective_ac_also_keep aten.abs --activation_checkpoint.selective_ac_never_keep aten.amax"
)


@pytest.fixture
def casts_in_pytorch(monkeypatch):
    """So that an eager cast consists of operators, `abs` among them."""
    monkeypatch.setattr(cpu, "AVAILABLE", False)


def _compared(case):
    return compare(case.predict(other=False), case.predict(other=True), label_a="A", label_b="B")


def _bisected(case, **options):
    lines = []
    row = row_to_explain(_compared(case))
    return row, bisect_memory(case, row, tell=lines.append, **options), lines


def _case_of_command(command):
    """As `quaver memory` reads its words."""
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("quaver", "memory")
    own = {"--ranks": "1", "--module": "", "--device": "cuda", "--vs": ""}
    for name in own:
        if name in words:
            place = words.index(name)
            own[name] = words[place + 1]
            del words[place : place + 2]
    assert own["--device"] == "cpu"  # what these predictions are for
    case = case_of(words, shlex.split(own["--vs"]), int(own["--ranks"]))
    return replace(case, module=own["--module"])


def test_what_the_whole_of_a_block_does_is_left_at_the_block():
    """The residual stream between attention and feed-forward is kept by neither of them."""
    words = [*TINY, "--float8.enable_float8_linear", "false"]
    case = case_of(words, ["--activation_checkpoint.mode", "full"])
    comparison = _compared(case)
    row = next(each for each in comparison.at("kept") if each.module == "model.layers.*")
    lines = []
    smallest = bisect_memory(case, row, limit=6, tell=lines.append)
    assert len(lines) == 1  # its own code made it, not what is inside of it
    assert smallest.module == "model.layers.0"
    assert smallest.settings == ("--activation_checkpoint.mode", "full")
    assert smallest.difference_bytes < 0
    again = _compared(_case_of_command(smallest.command))
    assert smallest.difference_bytes in {each.difference_bytes for each in again.at("kept")}


def test_a_module_outside_of_the_blocks():
    """A projection in float8 keeps its input in float8."""
    words = [*TINY, "--activation_checkpoint.mode", "full"]
    _, smallest, _ = _bisected(case_of(words, ["--float8.filter_fqns", "self_attn"]), limit=2)
    assert smallest.module.startswith(("lm_head", "model.norm"))
    assert smallest.difference_bytes == _compared(_case_of_command(smallest.command)).at("kept")[0].difference_bytes


def test_predictions_are_counted():
    words = [*TINY, "--model.n_layers=3", "--float8.enable_float8_linear=false"]
    _, smallest, lines = _bisected(case_of(words, ["--training.seq_len=32"]), limit=2)
    assert smallest.module == "model.layers.0"
    assert [line for line in lines if "not tried, 0 predictions are left" in line] == lines[1:]
    assert len(lines) > 1
    _, smallest, lines = _bisected(case_of(words, ["--training.seq_len=32"]), limit=0)
    assert smallest.module == ""
    assert smallest.text.startswith("the whole model shows it in one process: ")


def test_the_search_begins_at_a_module_that_is_given():
    words = [*TINY, "--float8.enable_float8_linear", "false"]
    case = replace(case_of(words, ["--training.seq_len", "32"]), module="model.layers.1.mlp")
    _, smallest, lines = _bisected(case, limit=2)
    assert lines[0].startswith("model.layers.1.mlp.")
    assert smallest.module.startswith("model.layers.1.mlp")


def test_settings_that_differ_by_chance_go():
    words = [*TINY, "--float8.enable_float8_linear", "false"]
    vs = shlex.split("--training.seq_len 32 --optimizer.lr 0.5 --training.seed 3 --job.name other --training.steps 7")
    case = case_of(words, vs)
    assert set(case.vs) == {"training.seq_len", "optimizer.lr", "training.seed", "training.steps"}  # no job
    _, smallest, _ = _bisected(case, limit=20)
    assert smallest.settings == ("--training.seq_len", "32")


def test_two_files(tmp_path):
    """What differs between them becomes flags over the first."""
    first, other = tmp_path / "first.toml", tmp_path / "other.toml"
    first.write_text("[model]\nn_layers = 2\n[float8]\nrecipe_name = 'rowwise'\n[job]\nname = 'a'")
    other.write_text("[model]\nn_layers = 2\n[training]\ncompile = true\nseq_len = 128\n[job]\nname = 'b'")
    case = case_of([str(first), "--model.dim", "64"], [str(other), "--model.dim", "64", "--model.n_heads", "2"])
    assert case.path == Path(first)
    assert case.flags == {"model.dim": 64}
    assert case.vs == {"model.n_heads": 2, "training.seq_len": 128, "training.compile": True} | {
        "float8.recipe_name": "tensorwise"
    }
    assert case.config(other=True).training.seq_len == 128
    assert case.command == (
        f"quaver memory {first} --model.dim 64 --device cpu --vs '--model.n_heads 2 --training.seq_len 128 "
        "--training.compile true --float8.recipe_name tensorwise'"
    )
    assert _case_of_command(case.command) == case


@pytest.mark.parametrize(
    ("words", "vs"),
    [
        (["--training.max_norm", "2", "--float8.filter_fqns", "a b", "lm_head"], ["--float8.filter_fqns", "up proj"]),
        (["--float8.no-fused_producers"], ["--training.global_batch_size", "-1", "--training.seq_len", "16"]),
        (["--activation_checkpoint.mode=selective"], KEEP_ABS),
    ],
)
def test_commands_are_read_back(words, vs):
    case = replace(case_of([*TINY, *words], vs, 2), module="lm_head")
    assert _case_of_command(case.command).config(other=True) == case.config(other=True)
    assert _case_of_command(case.command) == replace(case, flags=_case_of_command(case.command).flags)


def test_a_run_like_itself_has_no_row():
    case = case_of([*TINY, "--model.n_layers", "1"], ["--job.name", "x"])
    assert row_to_explain(_compared(case)) is None


@pytest.mark.parametrize(
    ("words", "vs", "message"),
    [
        ([], ["--training.seqlen", "3"], "unknown flag: 'training.seqlen'"),
        ([], ["nowhere.toml"], "config file 'nowhere.toml' does not exist"),
        (["nowhere.toml"], [], "config file 'nowhere.toml' does not exist"),
    ],
)
def test_words_that_are_none(words, vs, message):
    with pytest.raises((ValueError, OSError), match=message):
        case_of(words, vs)


@needs_gathers
def test_tensor_parallel_runs_are_taken_apart_without_it():
    words = [*ROWWISE, "--parallelism.tensor_parallel_degree", "2", "--activation_checkpoint.mode", "none"]
    _, smallest, lines = _bisected(case_of(words, ["--float8.enable_float8_linear", "false"], 2))
    assert smallest.module.startswith("model.layers.0")
    assert "--ranks" not in shlex.split(smallest.command)
    assert not any("cannot be" in line for line in lines)

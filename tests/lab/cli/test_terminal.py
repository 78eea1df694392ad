"""Tests that help and tables fit 80 columns, and that colours appear only where they are wanted."""

import importlib
import io
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from quaver.conversion.layer_recipes import LayerRecipes
from quaver.lab.bench.ledger.entries import list_entries
from quaver.lab.bench.ledger.launches import BufferAccess, CompiledGraph, Launch
from quaver.lab.bench.ledger.ledger import Ledger
from quaver.lab.cli import (
    VERBS,
    bench,
    bench_ledger,
    bench_roofline,
    convert,
    doctor_gpu,
    dry_run,
    main,
    memory_views,
    plan_views,
)
from quaver.lab.cli.doctor_model import SHOWN_RECIPES
from quaver.lab.cli.doctor_model import iter_views as survey_views
from quaver.lab.cli.errors import print_error
from quaver.lab.doctor.gpu import LayersOnGpu, describe_gpu
from quaver.lab.doctor.linear_survey import SurveyedLinear
from quaver.lab.doctor.model_survey import ModelSurvey
from quaver.lab.doctor.sum_survey import MatmulSums
from quaver.lab.memory.train_step.traffic import EqualCollectives, StepTraffic
from quaver.lab.plan.advise import Advice, AdvisedSetting
from quaver.lab.plan.step_cost import StepCost
from quaver.lab.settings.config_file import load_config
from quaver.lab.settings.float8 import RECIPES
from quaver.lab.terminal import progress
from quaver.lab.terminal.console import print_line, print_views
from quaver.lab.terminal.progress import show_progress
from quaver.lab.terminal.tables import make_table
from quaver.lab.trainer.display import print_results
from quaver.numerics.matmul_sums import MatmulSqnrs
from quaver.roofline.device_specs import find_device_spec

COMMANDS = [
    *([verb] for verb in VERBS),
    *(["bench", verb] for verb in bench.VERBS),
    *(["convert", conversion] for conversion in convert.CONVERSIONS),
]
GIB = 1 << 30
LONGEST = max(RECIPES, key=len)
CONFIG = Path(__file__).parents[3] / "train_configs" / "llama3_8b.toml"
NAME = "model.layers.100.self_attn.q_proj"
EXPERTS = "layers.*.feed_forward.experts.gate_up_proj"
SOURCE = "quaver/lab/model/mixture.py:123"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """Return a function that runs a command on 80 columns: the exit code, and what stdout and stderr show."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*argv):
        with redirect_stdout(Terminal()) as out, redirect_stderr(Terminal()) as err:
            code = main([*argv])
        return code, out.getvalue(), err.getvalue()

    return run


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_help_fits_80_columns_without_broken_words_or_colors(command, on_terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    code, text, _ = on_terminal(*command, "--help")
    assert code == 0
    assert text.startswith("usage: quaver")
    assert max(map(len, text.splitlines())) <= 80
    assert not [line for line in text.splitlines() if line.endswith("-")], "a word is broken at its hyphen"
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("command", "verbs"), {"": VERBS, "bench": bench.VERBS, "convert": convert.CONVERSIONS}.items()
)
def test_a_command_without_its_verb_lists_the_verbs(command, verbs, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    printed = capsys.readouterr().out
    assert "usage: quaver" in printed
    assert all(f"  {verb}" in printed for verb in verbs)


ROOFLINE = ["bench", "roofline", "--model", "llama-8b", "--pictures", "--recipes", "rowwise", "--output"]


def test_text_of_a_file_does_not_control_the_terminal(capsys):
    text = "x\x1b]0;pwn\x07\ny"
    print_line(text)
    print_views([text, make_table(text, [text], rows=[[text]])])
    print_views([make_table(None, [text], rows=[[text]], wrapped=[text])])
    print_error(text)
    printed = "".join(capsys.readouterr())
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert printed.count(r"x\x1b]0;pwn\x07") == 8


@pytest.mark.parametrize("wants_colour", [True, False])
def test_only_a_terminal_gets_colours(wants_colour, on_terminal, monkeypatch, tmp_path):
    if not wants_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    code, out, err = on_terminal(*ROOFLINE, str(tmp_path))
    assert code == 0
    assert ("\x1b" in out) == wants_colour
    assert "\x1b" not in err


@pytest.fixture
def count_twice(monkeypatch):
    """Return a command of two activities, each of which ends when its line is on stderr. The clock stands still."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(progress, "REDRAW_INTERVAL_S", 0.001)
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.001)

    def wait_for(line):
        while line not in sys.stderr.getvalue():
            time.sleep(0.001)

    def count_twice(argv=()):
        with show_progress("counting") as set_activity:
            wait_for("... counting, 0 s")
            set_activity("counting again")
            wait_for("... counting again, 0 s")
        return 0

    return count_twice


def test_only_a_terminal_gets_progress_which_is_erased_at_the_end(on_terminal, monkeypatch, count_twice):
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(main=count_twice))
    code, out, err = on_terminal("train")
    assert (code, out) == (0, "")
    assert [line.rstrip() for line in err.split("\r")][-4:] == ["... counting, 0 s", "... counting again, 0 s", "", ""]
    assert max(map(len, err.split("\r"))) == 79


def test_a_pipe_gets_no_colours_and_no_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(progress, "REDRAW_INTERVAL_S", 0.001)
    assert main([*ROOFLINE, str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out
    assert err == ""


def test_progress_in_a_pipe_has_whole_lines(count_twice, capsys):
    count_twice()
    out, err = capsys.readouterr()
    assert out == ""
    assert set(err.splitlines()) == {"... counting, 0 s", "... counting again, 0 s"}


def make_bench_views(verb):
    row = {"timing": {"median_us": 9998.9, "p10_us": 1234.5, "p90_us": 99999.9}, "mode": "compiled"}
    row |= {"shape": "2048 x 8192 x 28672 (llama-70b gate,up)", "gemm": "grad_weight"} | dict.fromkeys("mkn", 28672)
    row |= {"matrix": "2048 x 28672 (llama-70b input)", "cast": "rowwise_both", "library": "torchao", "recipe": LONGEST}
    row |= {"backend": "torch.mm", "same_codes": False, "operations": 100, "kernels": None}
    row |= {"contestant": "tensorwise, exact accumulation", "tflops_per_s": 0.00123, "share_of_peak": 1.0}
    row |= {"floor_bytes_per_element": 5, "gb_per_s": 1234.56, "share_of_copy": 1.0, "tokens_per_s": 1234567.0}
    row |= dict.fromkeys(("time_over_bfloat16", "time_over_high_precision", "torchao_time_over_this"), 10.0)
    row |= dict.fromkeys(("resident_bytes", "peak_bytes", "tensor_peak_bytes", "saved_bytes"), 80 * GIB)
    row |= dict.fromkeys(("peak_over_bfloat16", "peak_over_high_precision"), 1.0)
    if verb != "cast":
        row["library"] = "quaver"
    about = {"device": "NVIDIA H100 80GB HBM3", "threads": 16, "torch": "2.13.0+cu130", "commit": "0123456+"}
    result = {"environment": about, "rows": [row, row], "complete": True}
    options = SimpleNamespace(
        case_fields=bench.TIMED[verb].case_fields,
        tables=bench.TIMED[verb].tables,
        format_note=lambda result: "",
        result_file="x",
    )
    return bench.iter_views(options, result)


def make_advice_views():
    change = "activations: selective, every 2nd block; optimizer states: float8"
    row = AdvisedSetting(change, "--a b", 1023 * GIB, -1023 * GIB, StepCost(10**15, 10**14, 0.000123), "", True)
    return [memory_views.make_advice_table(Advice([row, row], 80 * GIB, 1, None, "H200"))]


def make_memory_views():
    """Return the largest tensors, categories, and two runs compared, with the numbers of a large model."""
    row = {"count": 128, "dtype": "bfloat16", "shape": "[8, 8192, 14336]", "bytes": 60 * GIB, "phase": "forward"}
    row |= {"category": "saved_activations", "operator": "aten._scaled_mm", "module": EXPERTS, "source": SOURCE}
    sizes = {"saved_activations": 60 * GIB, "optimizer_states": 200 * GIB}
    numbers = {"peak_bytes": 300 * GIB, "by_category": sizes, "at_peak": [], "saved_by_forward_bytes": 60 * GIB}
    prediction = SimpleNamespace(**numbers)
    compared = {"label_a": "x", "label_b": "x", "peak_at_a": "forward", "peak_at_b": "forward"}
    compared |= dict.fromkeys(("peak_bytes_a", "peak_bytes_b", "saved_bytes_a", "saved_bytes_b"), GIB)
    comparison = SimpleNamespace(at=lambda table: (), **compared)
    with mock.patch.object(memory_views, "merge_blocks", return_value=[row] * 3):
        tensors = memory_views.make_tensor_table(prediction, 3)
    differences = next(memory_views.iter_comparison_views(comparison, prediction, prediction, 1))
    return [tensors, memory_views.make_category_table(prediction), differences]


def make_plan_views():
    """Layouts of 16,384 GPUs that wait for tens of percents of a step."""
    numbers = [("2x16", "bf16x2", "15x32 A", 98765, 104.5, 99, 20), ("512x32", "fp8x2", "1x1 L", 1209, 9.8, 8, 10)]
    rows = []
    for degrees, gather, batch, speed, seconds, mfu, wait in numbers:
        cells = ("tensorwise", degrees, "8x4", gather, batch, "1/2", "174.9", "67.1M", f"{seconds}", f"{speed:,}")
        rows.append((f"{len(rows) + 1}*", *cells, f"{mfu}", f"{wait}"))
    return [plan_views.make_layout_table(rows, 80 * GIB)]


def make_gpu_views():
    layers = LayersOnGpu("model.layers.*.self_attn.q_proj", 126, 16384, 128256, True, "float8.filter_fqns has 'x'")
    return doctor_gpu.iter_views(replace(describe_gpu(find_device_spec("B200")), recipe="rowwise", layers=[layers]))


def make_traffic_views():
    collectives = EqualCollectives("dp_replicate", "reduce_scatter", "bfloat16", 512, 1024, 12345, 1022 * GIB)
    return memory_views.iter_traffic_views(
        StepTraffic("8: dp_shard 8", "rowwise", 10**11, 8, (collectives, collectives), 10**12), None
    )


def make_survey_views():
    db = {recipe: {"grad_output": 25.1, "weight": 31.5} for recipe in SHOWN_RECIPES}
    surveyed = [SurveyedLinear(NAME, 10, db)]
    recipes = LayerRecipes(recipe="tensorwise", layers={NAME: LONGEST})
    sums = [MatmulSums(NAME, "grad_weight", MatmulSqnrs(13.2, 63.6, 41.9), True)]
    return survey_views(ModelSurvey(surveyed, recipes, "tensorwise", 25.0, 0.9, [], [], "text", "h100", sums), None)


def make_ledger_views():
    access = BufferAccess("codes", (16384, 28672), (28672, 1), torch.float8_e4m3fn, 80 * GIB)
    launch = Launch("quaver.to_column_major", (), (access,), (access,), (), "", {}, False)
    graphs = (CompiledGraph(False, (launch,) * 20, (), ""),)
    ledgers = [Ledger(f"torchao {LONGEST}", "H200", list_entries(graphs, 0), graphs)]
    options = bench_ledger.LedgerOptions(kernels=True)
    return bench_ledger.iter_views(
        options, ledgers, bench_ledger.CodeBySource(), find_device_spec("H200"), options.make_module_config()
    )


def make_roofline_views():
    from quaver.lab.bench.roofline import RooflineSettings, predict_roofline, require_device_specs
    from quaver.lab.bench.roofline_layers import list_model_layers

    models = (list_model_layers("llama-70b"),)
    return bench_roofline.iter_views(
        predict_roofline(RooflineSettings(require_device_specs(["H200"]), RECIPES, 16384, models))
    )


TABLES = {
    "memory": (
        make_memory_views,
        ["60.000", "20.0%", "saved activations: 128 x bfloat16", "_scaled_mm", EXPERTS, SOURCE, f"{300 * GIB:,}"],
    ),
    "memory --fit": (make_advice_views, ["1023 GiB", "0.000123 s", "10.0%"]),
    "plan": (make_plan_views, ["tensorwise", "98,765", "wait", "  20 \n", "  10 \n", "15x32 A"]),
    "doctor --gpu --model": (make_gpu_views, ["model.layers.*.", "self_attn.q_proj", "128,256"]),
    "memory --traffic": (make_traffic_views, ["dp_replicate", "512 / 1024", "reduce_scatter", "12,345", "1022 GiB"]),
    "doctor --model": (make_survey_views, [NAME, "grad_output", LONGEST, "25.1"]),
    "train --dry-run": (
        lambda: dry_run.iter_views(dry_run.dry_run(load_config(CONFIG), 8)),
        ["model.layers.*.self_attn.q_proj", "4,096 -> 14,336", "(2)"],
    ),
    "bench roofline": (make_roofline_views, [LONGEST, "28,672", "60%"]),
    "bench ledger": (make_ledger_views, [LONGEST, "(20)", "quaver.to_column_major"]),
}
TABLES = {f"bench {verb}": (partial(make_bench_views, verb), []) for verb in bench.VERBS} | TABLES


@pytest.mark.parametrize("table", TABLES)
def test_tables_fit_80_columns_and_lose_no_word(table, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    make, words = TABLES[table]
    tables = [view for view in make() if not isinstance(view, str)]
    assert tables
    print_views(tables)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert [word for word in words if word not in text] == []


def test_a_table_of_more_numbers_than_80_columns_is_wider_and_cuts_none(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    numbers = [f"{10**place:,}" for place in range(12, 22)]
    columns = ("what", *map(str, range(len(numbers))))
    print_views([make_table("title", columns, rows=[("a long text", *numbers)], wrapped=("what",), right=columns[1:])])
    text = capsys.readouterr().out
    assert [number for number in numbers if number not in text] == []
    assert "…" not in text


def test_results_of_a_run_cut_no_number(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    sizes = {
        "skipped_steps": 0,
        "validation_loss": 2.5,
        "tokens_per_s": 123456789.0,
        "tflops": 1.0,
        "mfu": 0.5,
        "mfu_by_precision": 0.5,
    }
    run = sizes | {"peak_memory_bytes": 150_123_456_789, "peak_memory_source": "CUDA's allocator"}
    compared = {"loss_gap": -0.0123, "tokens_per_s_ratio": 1.25, "peak_memory_ratio": 0.75}
    about = {"status": "finished", "steps": 1, "bfloat16_peak": {"is_measured": False}, "comparison": compared}
    print_results(about | {"models": {f"{LONGEST}:dequantized": run, "bfloat16": run}})
    text = capsys.readouterr().out
    assert text.count("139.8 GiB") == text.count("123,456,789") == 2
    assert "-1.23%" in text
    assert "…" not in text

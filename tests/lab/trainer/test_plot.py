"""Tests curves.png of whole, interrupted and empty runs."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from quaver.lab.trainer.plot import draw_curves, smooth


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict]], Figure]:
    """Return a function that draws curves of records and returns the figure."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))

    def draw(records: list[dict]) -> Figure:
        (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        draw_curves(tmp_path / "records.jsonl", tmp_path / "image.png", title="a run $x_{$")
        assert (tmp_path / "image.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return figures[-1]

    return draw


def make_records(name: str, steps: int) -> list[dict]:
    train = [{"model": name, "step": s, "loss": 5 / s, "tokens_per_s": 100.0} for s in range(1, steps + 1)]
    return train + [{"model": name, "step": s, "validation_loss": 5 / s} for s in range(5, steps + 1, 5)]


@pytest.mark.parametrize("runs", [{"tensorwise": 30, "bfloat16": 29}, {"bfloat16": 1}, {}], ids=str)
def test_curves_have_a_panel_of_the_loss_gap_with_two_models(draw, runs):
    figure = draw([record for name, steps in runs.items() for record in make_records(name, steps)])
    gap = ["Loss gap of tensorwise to bfloat16 (%)"] if len(runs) == 2 else []
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert titles == ["Loss (nats per token)", *gap, "Tokens per second"]


def test_the_loss_gap_compares_the_same_steps_after_a_skipped_one(draw):
    skipped = [record for record in make_records("tensorwise", 30) if record["step"] != 5]
    figure = draw(skipped + make_records("bfloat16", 30))
    gaps = [line for line in figure.axes[1].lines if line.get_label()[0] != "_"]
    assert [list(line.get_ydata()) for line in gaps] == [[0] * 29, [0] * 5]
    assert list(gaps[0].get_xdata()) == [step for step in range(1, 31) if step != 5]


def test_a_matplotlibrc_that_needs_latex_has_no_effect(draw):
    with matplotlib.rc_context({"text.usetex": True}):
        draw(make_records("tensorwise", 5))


def test_smoothing_keeps_a_straight_line_and_halves_noise():
    line = [float(i) for i in range(100)]
    assert smooth(line)[10:-10] == line[10:-10]
    assert max(map(abs, smooth([(-1.0) ** i for i in range(100)])[10:-10])) < 0.2
    assert smooth([1.0, 2.0]) == [1.0, 2.0]


def test_a_run_misses_matplotlib_before_it_draws(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "quaver.lab.figure")
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("quaver.lab.figure")
    assert error.value.name == "matplotlib"

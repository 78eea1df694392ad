"""curves.png and float8_scales.png of whole, interrupted and empty runs."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from quaver.trainer.float8_scales import MAX_LABELS, draw_scales, panels_of, short_names
from quaver.trainer.plot import _smooth, draw_curves


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Figure]:
    """Draws records with a function of the trainer and returns the figure."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))

    def draw(function: Callable[..., None], records: list[dict]) -> Figure:
        (tmp_path / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        function(tmp_path / "records.jsonl", tmp_path / "image.png", title="a run")
        assert (tmp_path / "image.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return figures[-1]

    return draw


def titles(figure: Figure) -> list[str]:
    return [axis.get_title() for axis in figure.axes if axis.get_title()]


def losses(name: str, steps: int) -> list[dict]:
    train = [{"run": name, "step": s, "loss": 5 / s, "tokens_per_s": 100.0} for s in range(1, steps + 1)]
    return train + [{"run": name, "step": s, "validation_loss": 5 / s} for s in range(5, steps + 1, 5)]


@pytest.mark.parametrize("runs", [{"tensorwise": 30, "bfloat16": 29}, {"bfloat16": 1}, {}], ids=str)
def test_panels_of_curves(drawn, runs):
    figure = drawn(draw_curves, [record for name, steps in runs.items() for record in losses(name, steps)])
    gap = ["Loss gap of tensorwise to bfloat16 (%)"] if len(runs) == 2 else []
    assert titles(figure) == ["Loss (nats per token)", *gap, "Tokens per second"]


def test_smoothing_keeps_a_straight_line_and_halves_noise():
    line = [float(i) for i in range(100)]
    assert _smooth(line)[10:-10] == line[10:-10]
    assert max(map(abs, _smooth([(-1.0) ** i for i in range(100)])[10:-10])) < 0.2
    assert _smooth([1.0, 2.0]) == [1.0, 2.0]


def record(step: int, names: list[str], **fields: object) -> dict:
    numbers = {name: 2.0**step for name in names}
    empty = {"used_over_ideal": {}, "saturated": {}, "dynamic": [], "nonfinite": []}
    return {"step": step, "run": "r", "quant_scale": numbers, "amax": dict.fromkeys(names, 1.0), **empty, **fields}


def block(layer: int) -> list[str]:
    linears = {"q_proj": ("input", "weight"), "k_proj": ("weight",), "o_proj": ("input", "weight", "grad_output")}
    return [f"model.layers.{layer}.attn.{name}.{operand}" for name, ops in linears.items() for operand in ops]


def test_each_operand_has_panels_of_scales_and_of_saturation(drawn):
    figure = drawn(draw_scales, [record(step, block(0) + block(1), dynamic=block(0)) for step in range(1, 6)])
    expected = [f"{o}: {what}" for o in ("input", "weight", "grad_output") for what in ("scale", "saturation")]
    assert sorted(titles(figure)) == sorted(expected)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["0 q_proj", "0 o_proj", "1 q_proj", "1 o_proj"]


def test_the_grids_of_a_panel():
    a, b, c = (f"layers.{i}.input" for i in range(3))
    records = [
        record(2, [a, c], dynamic=[a], saturated={c: 5}),
        record(4, [a, b, c], saturated={a: 7}),
        record(6, [b], nonfinite=[c], quant_scale={b: 64.0, c: 16.0}),
    ]
    panel = panels_of(records)["input"]
    nan = np.nan
    assert panel.names == [a, b, c]  # the order of the model, not of first appearance
    np.testing.assert_array_equal(panel.exponent, [[2, 4, nan], [nan, 4, 6], [2, 4, 4]])
    np.testing.assert_array_equal(panel.saturated, [[0, 7, nan], [nan, 0, 0], [5, 0, 0]])
    np.testing.assert_array_equal(panel.dynamic, [[1, 0, nan], [nan, 0, 0], [0, 0, 0]])


def test_many_tensors_leave_labels_out(drawn):
    figure = drawn(draw_scales, [record(1, [name for layer in range(25) for name in block(layer)])])
    assert all(len(axis.get_yticks()) <= MAX_LABELS for axis in figure.axes if axis.get_title())


@pytest.mark.parametrize("records", [[], [record(1, [])], [record(3, block(0))]], ids=["none", "nothing cast", "one"])
def test_scales_of_little(drawn, records):
    drawn(draw_scales, records)


def test_short_names_still_tell_tensors_apart():
    assert short_names(["model.layers.3.mlp.up_proj.input", "lm_head.input"]) == ["3 up_proj", "lm_head"]
    assert short_names(["a.1.to_q.weight", "b.1.to_q.weight"]) == ["a.1.to_q", "b.1.to_q"]
    assert short_names(["input"]) == [""]  # the model is the linear

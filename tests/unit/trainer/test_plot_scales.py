"""What the picture of the scales shows, of whole and of odd records; how it looks is for the eye."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from quaver.trainer.records.plot_scales import MOST_COLUMNS, MOST_LABELS, draw_scales, panels_of, short_names

PNG = b"\x89PNG\r\n\x1a\n"


def record(step: int, names: list[str], **fields: object) -> dict:
    numbers = {name: 2.0**step for name in names}
    empty = {"used_over_ideal": {}, "saturated": {}, "dynamic": [], "nonfinite": []}
    return {"step": step, "run": "r", "quant_scale": numbers, "amax": dict.fromkeys(names, 1.0), **empty, **fields}


def block(layer: int) -> list[str]:
    linears = {"q_proj": ("input", "weight"), "k_proj": ("weight",), "o_proj": ("input", "weight", "grad_output")}
    return [f"model.layers.{layer}.attn.{name}.{operand}" for name, ops in linears.items() for operand in ops]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))

    def draw(records: list[dict]) -> Figure:
        (tmp_path / "scales.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        draw_scales(tmp_path / "scales.jsonl", tmp_path / "scales.png", title="a run")
        assert (tmp_path / "scales.png").read_bytes().startswith(PNG)
        return figures[-1]

    return draw


def titles(figure: Figure) -> list[str]:
    return [axis.get_title() for axis in figure.axes if axis.get_title()]


def test_a_panel_of_scales_and_one_of_saturation_for_each_operand(drawn):
    figure = drawn([record(step, block(0) + block(1), dynamic=block(0)) for step in range(1, 6)])
    operands = ("input", "weight", "grad_output")
    assert titles(figure) == [f"{o}: scale" for o in operands] + [f"{o}: saturation" for o in operands]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0 q_proj", "0 o_proj"] + [
        "1 q_proj", "1 o_proj"
    ]  # fmt: skip
    bars = {axis.get_ylabel() for axis in figure.axes}
    assert bars >= {"log2 of quant_scale", "saturated elements"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "scaled dynamically",
        "none saturated",
        "not cast",
    ]


def test_an_operand_without_kept_scales_has_no_panel(drawn):
    names = [name for name in block(0) if not name.endswith("weight")]
    assert titles(drawn([record(1, names)])) == ["input: scale", "grad_output: scale"] + [
        "input: saturation", "grad_output: saturation"
    ]  # fmt: skip


def test_cells():
    a, b, c = (f"layers.{i}.input" for i in range(3))
    records = [
        record(2, [a, c], dynamic=[a], saturated={c: 5}),
        record(4, [a, b, c], saturated={a: 7}),
        record(6, [b], nonfinite=[c], quant_scale={b: 64.0, c: 16.0}),
    ]
    (panel,) = panels_of(records)
    nan = np.nan
    assert (panel.operand, panel.names) == ("input", [a, b, c])  # the order of the model, not of first appearance
    np.testing.assert_array_equal(panel.exponent, [[2, 4, nan], [nan, 4, 6], [2, 4, 4]])
    np.testing.assert_array_equal(panel.saturated, [[0, 7, nan], [nan, 0, 0], [5, 0, 0]])
    np.testing.assert_array_equal(panel.dynamic, [[1, 0, nan], [nan, 0, 0], [0, 0, 0]])
    (joined,) = panels_of(records, per_column=2)  # the smallest scale, the most saturation
    np.testing.assert_array_equal(joined.exponent, [[2, nan], [4, 6], [2, 4]])
    np.testing.assert_array_equal(joined.saturated, [[7, nan], [0, 0], [5, 0]])
    np.testing.assert_array_equal(joined.dynamic, [[1, nan], [0, 0], [0, 0]])


def test_many_tensors_and_steps(drawn):
    names = [name for layer in range(25) for name in block(layer)]
    steps = range(10, 10 * 2 * MOST_COLUMNS + 11, 10)
    records = [{**record(1, names), "step": step} for step in steps]
    figure = drawn(records)
    assert all(len(axis.get_yticks()) <= MOST_LABELS for axis in figure.axes if axis.get_title())
    meshes = [mesh for axis in figure.axes[:3] for mesh in axis.collections if hasattr(mesh, "_coordinates")]
    assert [mesh.get_array().shape[1] <= MOST_COLUMNS for mesh in meshes] == [True] * 3
    assert "up to 3 recorded steps in a column" in figure._suptitle.get_text()


@pytest.mark.parametrize("records", [[], [record(1, [])], [record(3, block(0))]], ids=["none", "nothing cast", "one"])
def test_little_to_draw(drawn, records):
    drawn(records)


def test_short_names_still_tell_tensors_apart():
    assert short_names(["model.layers.3.mlp.up_proj.input", "lm_head.input"]) == ["3 up_proj", "lm_head"]
    twice = ["a.1.to_q.weight", "b.1.to_q.weight"]
    assert short_names(twice) == ["a.1.to_q", "b.1.to_q"]
    assert short_names(["input"]) == [""]  # the model is the linear

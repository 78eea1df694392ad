"""The curves of whole, broken-off and empty runs; the picture itself is for the eye."""

import json

import pytest
from matplotlib.figure import Figure

from quaver.trainer.records.plot import _smooth, draw_curves

PNG = b"\x89PNG\r\n\x1a\n"


def records(name: str, steps: int, offset: float) -> list[dict]:
    train = [{"run": name, "step": s, "loss": 5 / s + offset, "tokens_per_s": 100.0} for s in range(1, steps + 1)]
    return train + [{"run": name, "step": s, "validation_loss": 5 / s} for s in range(5, steps + 1, 5)]


@pytest.mark.parametrize(
    ("runs", "titles"),
    [
        ({"tensorwise": 30, "bfloat16": 30}, ["Loss (nats per token)", "Loss gap of tensorwise", "Tokens per second"]),
        ({"tensorwise": 30, "bfloat16": 29}, ["Loss (nats per token)", "Loss gap of tensorwise", "Tokens per second"]),
        ({"bfloat16": 1}, ["Loss (nats per token)", "Tokens per second"]),
        ({}, ["Loss (nats per token)", "Tokens per second"]),
    ],
    ids=["twins", "stopped between twins", "one step", "nothing"],
)
def test_panels(tmp_path, monkeypatch, runs, titles):
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    lines = [json.dumps(r) for name, steps in runs.items() for r in records(name, steps, 0.0)]
    metrics, image = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    metrics.write_text("\n".join(lines))
    draw_curves(metrics, image, title="a run")
    assert image.read_bytes().startswith(PNG)
    axes = drawn[0].axes
    assert [axis.get_title()[: len(title)] for axis, title in zip(axes, titles, strict=True)] == titles


def test_smoothing_keeps_a_straight_line_and_halves_noise():
    line = [float(i) for i in range(100)]
    assert _smooth(line)[10:-10] == line[10:-10]
    assert max(map(abs, _smooth([(-1.0) ** i for i in range(100)])[10:-10])) < 0.2
    assert _smooth([1.0, 2.0]) == [1.0, 2.0]

"""The tables of `quaver memory` fit 80 columns with the numbers of a large model, and break no word."""

from types import SimpleNamespace

from rich.console import Console

from quaver.lab.cli.memory import views

GIB = 1 << 30
MODULE = "layers.*.feed_forward.experts.gate_up_proj"
SOURCE = "quaver/lab/trainer/model/mixture_of_experts.py:123"


def printed(view):
    console = Console(width=80, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def prediction(peak_bytes, monkeypatch):
    row = {"count": 128, "dtype": "bfloat16", "shape": "[8, 8192, 14336]", "bytes": 60 * GIB, "phase": "forward"}
    row |= {"category": "saved_activations", "operator": "aten._scaled_mm", "module": MODULE, "source": SOURCE}
    monkeypatch.setattr(views, "merged_layers", lambda rows: [row] * 3)
    sizes = {"saved_activations": 60 * GIB, "optimizer_states": 200 * GIB}
    return SimpleNamespace(peak_bytes=peak_bytes, by_category=sizes, at_peak=[], saved_by_forward_bytes=60 * GIB)


def test_the_largest_tensors(monkeypatch):
    text = printed(views._tensor_table(prediction(300 * GIB, monkeypatch), 3))
    assert max(map(len, text.splitlines())) <= 80
    for word in ("60.000", "20.0%", "saved activations: 128 x bfloat16", "_scaled_mm", MODULE, SOURCE):
        assert text.count(word) == 3, word


def test_the_numbers_of_categories_are_whole(monkeypatch):
    found = prediction(300 * GIB, monkeypatch)
    comparison = SimpleNamespace(at=lambda moment: (), **dict.fromkeys(("label_a", "label_b"), "x"))
    for name in ("peak_a", "peak_b", "saved_a", "saved_b"):
        setattr(comparison, name, GIB)
    comparison.peak_at_a = comparison.peak_at_b = "forward"
    compared = next(views.comparison_views(comparison, found, found, 1))
    for table in (views._category_table(found), compared):
        text = printed(table)
        assert max(map(len, text.splitlines())) <= 80
        assert f"{300 * GIB:,}" in text
        assert "…" not in text

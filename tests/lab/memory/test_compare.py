"""Tests the comparison of two predictions: what differs, by how much, in which words, and what to do about it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from quaver.activations import apply_activation_checkpointing
from quaver.lab.cli.memory_views import iter_comparison_lines
from quaver.lab.memory import predict_step_memory
from quaver.lab.memory.reports.compare import compare
from quaver.lab.memory.reports.pitfalls import (
    SavedByRuns,
    find_hint,
    is_operator,
    shorten_operator,
    strip_phase,
)
from quaver.lab.recorder.modules import ModuleTracker
from quaver.lab.recorder.recorder import Recorder
from quaver.lab.terminal.byte_sizes import format_bytes, format_change
from tests.lab.memory.models import build_stack


def explain_stack(activation=torch.relu, layers=3, **checkpoint):
    model = build_stack(activation, layers)
    if checkpoint:
        apply_activation_checkpointing(model.layers, preserve_rng_state=False, **checkpoint)
    return predict_step_memory(model, (torch.empty(128, 64),))


def compare_reports(a, b):
    return compare(a, b, label_a="one", label_b="other")


HIDDEN_BYTES = 128 * 256 * 4


@pytest.fixture(scope="module")
def relu():
    return explain_stack()


@pytest.fixture(scope="module")
def silu():
    return explain_stack(nn.functional.silu)


def test_a_tensor_that_one_model_saves_is_counted_per_layer_in_both_orders(relu, silu):
    """silu saves its input, relu its result, which is saved anyway: as the input of the next matmul."""
    comparison, reverse = compare_reports(relu, silu), compare_reports(silu, relu)
    row = comparison.list_rows("saved")[0]
    assert (row.module, row.operator, row.shape, row.dtype) == ("layers.*.up", "aten.mm", (128, 256), "float32")
    assert (row.count_a, row.count_b, row.num_layers) == (0, 3, 3)
    assert (row.difference_bytes, row.per_layer_bytes) == (3 * HIDDEN_BYTES, HIDDEN_BYTES)
    assert row.sentence.startswith("+128 KiB per layer x 3: `mm` of ")
    assert "float32 (128, 256)" in row.sentence
    assert "saved by autograd" in row.sentence
    assert comparison.saved_bytes_b - comparison.saved_bytes_a == pytest.approx(3 * HIDDEN_BYTES, abs=8)
    assert reverse.list_rows("saved")[0].difference_bytes == -3 * HIDDEN_BYTES
    assert reverse.list_rows("saved")[0].sentence.startswith("-128 KiB per layer x 3: `mm`")
    assert len(reverse.rows) == len(comparison.rows)
    sizes = [abs(row.difference_bytes) for row in comparison.rows]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(row.difference_bytes for row in comparison.list_rows("peak")) == silu.peak_bytes - relu.peak_bytes
    assert sum(row.difference_bytes for row in comparison.list_rows("saved")) == silu.saved_bytes - relu.saved_bytes
    written = json.loads(json.dumps(comparison.to_dict()))
    assert (written["label_a"], written["label_b"]) == ("one", "other")
    assert written["rows"][0]["difference_bytes"] == written["rows"][0]["bytes_b"] - written["rows"][0]["bytes_a"]


def test_equal_reports_have_no_differences(relu):
    """Nor have reports of two operators that save their results, or of rows that name either of two operands."""
    same = compare_reports(relu, explain_stack())
    assert same.rows == ()
    assert same.peak_bytes_a == same.peak_bytes_b == relu.peak_bytes
    assert compare_reports(relu, explain_stack(torch.tanh)).list_rows("saved") == ()
    report = dict(relu.report)
    for name in ("at_peak", "saved_for_backward"):
        report[name] = [row | {"of": row["of"].replace("aten.relu", "aten.mul.Tensor")} for row in report[name]]
    assert report != relu.report
    assert compare_reports(relu, replace(relu, report=report)).rows == ()


def test_fewer_layers_are_a_difference_of_bytes_only_and_one_has_its_own_name(relu):
    row = compare_reports(relu, explain_stack(layers=2)).list_rows("saved")[0]
    assert (row.count_a, row.count_b, row.num_layers) == (3, 2, 3)
    assert row.difference_bytes == -HIDDEN_BYTES
    assert "384 KiB in all became 256 KiB" in row.sentence
    row = compare_reports(explain_stack(layers=1), explain_stack(nn.functional.silu, layers=1)).list_rows("saved")[0]
    assert row.module == "layers.0.up"
    assert " per layer" not in row.sentence


def test_a_policy_that_saves_an_unread_tensor_gets_a_hint():
    """A scale that has no gradient: the recomputation makes it of the amax, if that is saved, else of the abs."""

    def multiply_by_amax(rows):
        return torch.relu(rows) * rows.detach().abs().amax()

    a, b = (explain_stack(multiply_by_amax, mode="selective", also_save=kept) for kept in ([], ["aten.abs"]))
    row = compare_reports(a, b).list_rows("saved")[0]
    assert (row.operator, row.saved_by, row.difference_bytes) == ("aten.abs", "selective policy", 3 * HIDDEN_BYTES)
    assert row.first_use is None  # its amax is saved, too
    assert "saved by the selective policy; no operator of the backward reads it: the policy need not" in row.sentence


def make_row(**values):
    about = {"category": "saved_activations", "module": "ffn.w3", "operator": "aten.abs", "of": "ffn.w3.weight"}
    return {**about, "shape": [4096, 16384], "dtype": "bfloat16", "bytes": 1 << 27, "count": 1, **values}


AMAX = {"operator": "aten.amax", "module": "ffn.w3", "source": "linear.py:1"}


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        (make_row(first_use=AMAX), "saving the amax instead would cost at most 32 KiB"),
        (make_row(first_use=AMAX, operator="quaver::amax (aten.abs)"), "at most 32 KiB"),
        (make_row(first_use={**AMAX, "operator": "aten.mul.Tensor"}), ""),
        (make_row(first_use=AMAX, operator="aten.mm"), ""),
        (make_row(first_use=AMAX, shape=[16384, 1]), ""),
        (make_row(first_use=None, saved_by="selective policy"), "no operator of the backward reads it"),
        (make_row(first_use=None, saved_by="autograd"), ""),
        (make_row(category="gathered_weights"), "parallelism.fsdp_reshard_after_forward"),
        (make_row(of="ffn.w3.weight, unsharded", first_use=None), "compute it again there"),
        (make_row(of="ffn.w3.weight, unsharded", operator="quaver.cast_tensorwise"), "compute it again there"),
        (make_row(of="ffn.w3.weight, unsharded", operator="quaver.cast_tensorwise", shape=[4096, 1]), ""),
        (make_row(of="unsharded.w3.weight", first_use=None), ""),
        (make_row(of="ffn.w3.weight, unsharded", operator="aten.amax"), ""),
        (make_row(of="ffn.w3.weight, unsharded", operator="aten.mm"), ""),
    ],
)
def test_a_row_has_the_hint_of_its_cause(row, hint):
    actual = find_hint(row, SavedByRuns([row], []))
    assert hint in actual
    assert bool(hint) == bool(actual)


CASTS = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("quaver::cast_"))


def test_all_casts_are_known_by_their_prefix():
    """A weight's float8 codes have a category of their own, and a hint says that the backward can cast again."""
    assert {"cast_tensorwise", "cast_rowwise", "cast_with_scale"} <= {name.partition("::")[2] for name in CASTS}
    operators = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("quaver::")]
    assert not [name for name in operators if "cast" in name and name not in CASTS]
    recorder, weight = Recorder(ModuleTracker(nn.Identity()), []), torch.zeros(4, 4)
    recorder.categorize("parameters", [weight], parameter="weight")
    for operator in (name.replace("::", ".") for name in CASTS):
        row = make_row(of="ffn.w3.weight, unsharded", operator=operator, dtype="float8_e4m3fn")
        assert "compute it again there" in find_hint(row, SavedByRuns([row], []))
        recorder.on_operator_called(getattr(torch.ops.quaver, operator.partition(".")[2]).default, [weight])
        codes = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
        recorder.follow(codes, operator)
        assert recorder.log[-1].allocation.category == "float8_weights", operator


def test_float8_and_widened_copies_of_saved_tensors_get_hints():
    source = make_row(operator="aten.silu", of="aten.mm")
    codes = make_row(operator="quaver.cast_tensorwise", of="aten.silu", dtype="float8_e4m3fn")
    wide = make_row(operator="aten._to_copy", of="aten.silu", dtype="float32")
    hint = find_hint(codes, SavedByRuns([codes, source], []))
    assert hint.startswith("the input of the cast is saved, too, in bfloat16 (128 MiB)")
    assert find_hint(wide, SavedByRuns([wide, source], [])).startswith("a copy in float32 of a bfloat16 tensor")
    for alone in (codes, wide, make_row(operator="aten._to_copy", of="aten.silu")):
        assert find_hint(alone, SavedByRuns([alone], [])) == ""
    assert find_hint(codes, SavedByRuns([codes, {**source, "module": "another"}], [])) == ""


def test_names_of_operators_are_shortened():
    assert all(map(is_operator, ["aten.mm", "aten.add.Tensor", "quaver::gemm (aten.mm)", "fused_abs_amax"]))
    assert not any(map(is_operator, ["", "an input", "model.layers.0.w1.weight", "w3.weight, unsharded"]))
    assert strip_phase("quaver::cast (aten.abs)") == "aten.abs"
    assert [shorten_operator(name) for name in ("aten.add.Tensor", "quaver::gemm (aten.mm)", None)] == ["add", "mm", ""]
    short = shorten_operator("fused__to_copy_abs_amax_bitwise_and_clamp_exact_float8_mm_isnan")
    assert short == "fused__to_copy_abs_amax_bitwise_and_clamp_exact..."


def test_binary_sizes_are_below_1024_of_their_unit():
    sizes = {
        0: "0 bytes",
        1023: "1023 bytes",
        1024: "1 KiB",
        2**20 - 1: "1 MiB",
        2**30: "1 GiB",
        2**50: "1.049e+06 GiB",
    }
    assert {size: format_bytes(size) for size in sizes} == sizes
    assert [format_change(size) for size in (-17, 0, 2**17)] == ["-17 bytes", "0 bytes", "+128 KiB"]


def test_lines_for_a_terminal_say_peaks_and_rows(relu, silu):
    comparison = compare_reports(relu, silu)
    lines = list(iter_comparison_lines(comparison, top=1))
    assert lines[0] == "first      one"
    peak = f"{comparison.peak_bytes_a:,} bytes = {format_bytes(comparison.peak_bytes_a)}"
    assert lines[1] == f"           peak {peak}, in the {comparison.peak_at_a}"
    assert comparison.peak_at_a.startswith("backward of layers.")
    assert lines[6].endswith(f"saved {format_change(comparison.saved_bytes_b - comparison.saved_bytes_a)}")
    assert f"    {comparison.list_rows('saved')[0].sentence}" in lines
    (left,) = comparison.list_rows("peak")[1:]
    assert f"    and 1 more row, {format_change(left.difference_bytes)} in all" in lines
    same = list(iter_comparison_lines(compare_reports(relu, relu)))
    assert [line for line in same if line.endswith(": nothing")] == same[-3:-2] + same[-1:]

"""Tests predictions of compiled code against measurements and by arithmetic, and that they leave nothing behind."""

import ast
import json
import subprocess
import textwrap
from itertools import product

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering

from benchmarks.memory import MAX_PREDICTION_ERROR, RECORD, compare
from benchmarks.memory_modules import CHECKPOINTING, PRECISIONS, Size
from quaver.lab.memory import predict_step_memory
from quaver.lab.memory.compiling.compiled import leave_out_kernels
from quaver.lab.memory.compiling.compiled_tracker import CompiledTracker, find_recording
from quaver.lab.memory.compiling.wrapper_code import name_operator, rewrite
from quaver.lab.memory.faking.fakes import fake_tensors
from quaver.lab.memory.predict_step import record_fake_step
from quaver.lab.memory.train_step import predict_run
from quaver.lab.memory.train_step.predict_run import predict_run_memory
from quaver.lab.recorder.allocator import measure_usage
from quaver.lab.recorder.modules import ModuleTracker
from quaver.lab.recorder.recorder import Recorder
from quaver.lab.settings import Model, TrainConfig
from quaver.lab.settings.training import Training
from quaver.torch_private.compiler import count_graphs
from tests.lab.memory.models import CPU, Block, needs_gathers

ROWS = 512
FILE = "tests/lab/memory/test_compiled.py"
RECORDED = json.loads(RECORD.read_text())
is_recorded_torch = torch.__version__.partition("+")[0] == RECORDED["environment"]["torch"].partition("+")[0]


class _Squaring(Block):
    """One line of code for all that is compiled; without biases."""

    def __init__(self):
        super().__init__(hidden=128)

    def forward(self, rows):
        return self.down(nn.functional.silu(self.up(rows)).square())


class _Broken(_Squaring):
    def forward(self, rows):
        hidden = nn.functional.silu(self.up(rows))
        torch._dynamo.graph_break()
        return self.down(hidden.square())


def build_compiled(kind=_Squaring, **options):
    model = kind()
    model.compile(**options)
    return model


QUICK = {(1, "ffn", "rowwise", "none"), (2, "linear", "tensorwise", "full")}
"""The rows of the record that each run of the tests compares; the others are for the night."""

CASES = [
    # At night also attention, whose recomputation is given the state of the random numbers.
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.nightly)
    for case in product((1, 2), ("linear", "attention", "ffn", "1 block"), PRECISIONS, CHECKPOINTING)
    if case != (2, "attention", "rowwise", "none")  # where gloo's threads kept a buffer in both measured steps
    # the record checkpoints no lone float8 linear
    and not (case[1] == "linear" and case[2] != "bfloat16" and case[3] != "none")
]


@pytest.mark.skipif(not is_recorded_torch, reason="another torch plans other buffers than the recorded one")
@pytest.mark.parametrize(("ranks", "module", "precision", "checkpointing"), CASES)
def test_a_prediction_is_what_was_measured(ranks, module, precision, checkpointing):
    case = {"module": module, "precision": precision, "checkpointing": checkpointing, "ranks": ranks, "compiled": True}
    measured = next(row for row in RECORDED["rows"] if case.items() <= row.items())
    row = compare(measured, Size(**RECORDED["size"]))
    assert row["peak"] == pytest.approx(1, abs=0.001)
    assert row["saved"] == pytest.approx(1, abs=0.001)


def test_real_code_is_compiled_after_a_prediction_and_takes_what_was_predicted():
    """The model has real kernels before a prediction, after it, and where they come from a cache."""
    torch.manual_seed(0)
    model, rows = _Squaring(), torch.randn(ROWS, 64)
    expected = model(rows).detach()
    model.compile(fullgraph=True)
    torch.testing.assert_close(model(rows), expected)
    loaded = len(PyCodeCache.modules)
    prediction = predict_step_memory(model, (rows,))
    assert len(PyCodeCache.modules) == loaded
    torch.testing.assert_close(model(rows), expected)
    fresh = _Squaring()
    fresh.load_state_dict(model.state_dict())
    fresh.compile(fullgraph=True)
    train_step(fresh, rows, lambda: None)
    with measure_usage(CPU) as measured:
        train_step(fresh, rows, measured.mark)
    torch.testing.assert_close(fresh(rows), expected)
    assert prediction.step_peak_bytes == pytest.approx(measured.usage.tensor_peak_bytes, abs=64)
    assert prediction.saved_by_forward_bytes == pytest.approx(measured.usage.saved_bytes, abs=64)


def train_step(model, rows, forward_is_done):
    loss = model(rows).sum(dtype=torch.float32)
    forward_is_done()
    loss.backward()
    model.zero_grad(set_to_none=True)


FUSED = "fused_pow_silu (aten.pow.Tensor_Scalar)"


def test_rows_of_compiled_code_say_what_made_them_and_who_keeps_them():
    """A graph saves its input, the first matmul's result for silu, and the square for the second weight's gradient."""
    model = nn.Sequential(build_compiled(fullgraph=True), build_compiled(fullgraph=True))
    prediction = predict_step_memory(model, (torch.empty(ROWS, 64),), optimizer=torch.optim.AdamW)
    saved = [row for row in prediction.saved_for_backward if row["category"] == "saved_activations"]
    assert {row["saved_by"] for row in saved} == {"compiled graph"}
    assert {(row["operator"], row["of"], row["module"], row["saved_in"], row["bytes"]) for row in saved} == {
        ("aten.mm", "an input", "0.up", "0", 4 * ROWS * 128),
        (FUSED, "aten.mm", "0", "0", 4 * ROWS * 128),
        ("aten.mm", FUSED, "0.down", "1", 4 * ROWS * 64),
        ("aten.mm", "aten.mm", "1.up", "1", 4 * ROWS * 128),
        (FUSED, "aten.mm", "1", "1", 4 * ROWS * 128),
    }
    assert {row["source"] for row in saved} == {f"{FILE}:{_Squaring.forward.__code__.co_firstlineno + 1}"}
    assert sum(prediction.by_category.values()) == prediction.peak_bytes
    assert prediction.phase_of_peak == "backward"
    assert {row["phase"] for row in prediction.at_peak} == {"before", "forward", "backward"}
    uses = {row["first_use"]["operator"] for row in saved if row["module"] == "1"}
    assert uses == {"aten.mm"}  # of the second weight's gradient


def test_what_a_graph_saved_is_released_when_its_backward_ends():
    recorder, held = Recorder(tracker := CompiledTracker(nn.Identity()), []), torch.zeros(4)
    tracker.record_saved(recorder, [held, 3])
    tracker.record_saved(recorder, [held])
    for saved in (1, 0):
        tracker.begin_backward(recorder, [held, torch.zeros(4)])
        assert recorder.log[-1].save_count == saved + 1
        tracker.end_backward(recorder)
        assert recorder.log[-1].save_count == saved


def test_layers_that_are_alike_are_compiled_once():
    with fake_tensors(compiled=True) as fake_mode:
        model = nn.Sequential(*(build_compiled() for _ in range(4)))
        rows, before = torch.randn(ROWS, 64), count_graphs()
        prediction = record_fake_step(lambda: train_step(model, rows, lambda: None), model, None, fake_mode)
        assert count_graphs() - before == 2  # the first, whose input has no gradient, and the rest
    saved = [row for row in prediction.saved_for_backward if row["operator"] == FUSED]
    assert [row["module"] for row in saved] == ["0", "1", "2", "3"]


def test_ways_to_compile_save_different_tensors():
    """Compiled code computes silu again. Breaks in graphs, dynamic shapes and other backends change what is saved."""
    inputs, hidden_bytes = (torch.empty(ROWS, 64),), 4 * ROWS * 128
    eager, whole = predict_step_memory(_Squaring(), inputs), predict_step_memory(build_compiled(), inputs)
    for model, more_bytes in (
        (build_compiled(), 0),
        (torch.compile(_Squaring()), 0),
        (build_compiled(_Broken), hidden_bytes),
        (build_compiled(backend="eager"), hidden_bytes),
    ):
        saved_bytes = predict_step_memory(model, inputs).saved_by_forward_bytes
        assert saved_bytes - whole.saved_by_forward_bytes == pytest.approx(more_bytes, abs=64)
    assert eager.saved_by_forward_bytes - whole.saved_by_forward_bytes == pytest.approx(hidden_bytes, abs=64)
    dynamic = predict_step_memory(build_compiled(dynamic=True), inputs)
    assert dynamic.step_peak_bytes == pytest.approx(whole.step_peak_bytes, rel=MAX_PREDICTION_ERROR)


def test_a_block_in_a_block_restores_what_the_outer_one_set():
    outer, inner = (Recorder(CompiledTracker(nn.Identity()), []) for _ in range(2))
    run = GraphLowering.run
    with outer, leave_out_kernels():
        left_out = GraphLowering.run
        with inner, Recorder(ModuleTracker(nn.Identity()), []), leave_out_kernels():
            assert find_recording() == (inner, inner.modules)
        assert find_recording() == (outer, outer.modules)
        assert GraphLowering.run is left_out is not run
    assert find_recording() is None
    assert GraphLowering.run is run


def test_no_process_is_started(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"a prediction started {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("os.posix_spawn", refuse)
    assert predict_step_memory(build_compiled(), (torch.empty(3, 64),)).peak_bytes > 0


class _Restless(_Squaring):
    tag = ""

    def forward(self, rows):
        self.tag += "x"
        return super().forward(rows) * len(self.tag)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "max-autotune"}, "default kernels in Python code, got max_autotune"),
        ({"options": {"cpp_wrapper": True}}, "default kernels in Python code, got cpp_wrapper"),
        ({"options": {"memory_planning": True}}, "default kernels in Python code, got memory_planning"),
        ({"kind": _Restless}, "a step that compiles nothing after 4 others"),
    ],
    ids=["max-autotune", "cpp_wrapper", "pools", "compiled in each step"],
)
def test_refused_compile_options_leave_settings_as_before(options, message):
    before = GraphLowering.run, torch._inductor.config.fx_graph_cache, cpu_vec_isa.valid_vec_isa_list
    with pytest.raises(NotImplementedError, match=message) as error:
        predict_step_memory(build_compiled(**options), (torch.empty(3, 64),))
    assert "\n" not in str(error.value)
    assert (GraphLowering.run, torch._inductor.config.fx_graph_cache, cpu_vec_isa.valid_vec_isa_list) == before


def test_several_ranks_need_a_torch_that_shows_gathers(monkeypatch):
    monkeypatch.setattr(predict_run, "HAS_VISIBLE_RESIZES", False)
    with pytest.raises(NotImplementedError, match="memory on several ranks is predicted with torch 2.13 or newer"):
        predict_run_memory(TrainConfig(), 2)


@pytest.mark.nightly  # test_gpu.py predicts a run that compiles a part of its linears
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_gathers)])
def test_a_run_that_compiles_is_predicted_as_compiled_code(ranks):
    small = Model(dim=64, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=128)
    config = TrainConfig(model=small, training=Training(compile=True, seq_len=64, local_batch_size=2))
    memory = predict_run_memory(config, ranks)
    assert not any("compile" in note for note in memory.notes)
    modules = {row["module"] for row in memory.prediction.saved_for_backward if row["saved_by"] == "compiled graph"}
    assert "model.layers.0.mlp.gate_proj" in modules
    cast = "quaver::cast (quaver.cast_tensorwise)"
    casts = [row for row in memory.prediction.saved_for_backward if row["operator"] == cast]
    assert {row["dtype"] for row in casts if row["shape"]} == {"float8_e4m3fn"}
    weights = [row for row in memory.prediction.at_peak if row["category"] == "float8_weights"]
    assert all(row["of"].startswith(row["module"]) for row in weights)


STATEMENTS = [
    ("", "received(args)"),
    ("primals_1, = args", "primals_1, = args"),
    ("args.clear()", "args.clear()"),
    ("assert_size_stride(primals_1, (4,), (1,), 'input')", "assert_size_stride(primals_1, (4,), (1,), 'input')"),
    (
        "buf0 = empty_strided_cpu((4,), (1,), torch.float32)",
        "buf0 = origin_0.allocate((4,), (1,), torch.float32, {'primals_1': primals_1})",
    ),
    ("buf1 = reinterpret_tensor(buf0, (2,), (1,), 2)  # alias", "buf1 = reinterpret_tensor(buf0, (2,), (1,), 2)"),
    ("cpp_fused_add_0(primals_1, buf1)", "origin_1.call(cpp_fused_add_0, primals_1, buf1)"),
    ("buf2 = torch.ops.aten.neg.default(buf0)", "buf2 = origin_2.call(torch.ops.aten.neg.default, buf0)"),
    ("buf3 = buf2", "buf3 = buf2"),
    ("del buf2", "del buf2"),
    (
        "buf4 = reinterpret_tensor(buf0, (2, 2), (2, 1), 0); del buf0  # reuse",
        "buf4 = layout_of(reinterpret_tensor(buf0, (2, 2), (2, 1), 0))\n"
        "del buf0\n"
        "buf4 = origin_3.allocate(*buf4, {'buf3': buf3})",
    ),
    ("extern_kernels.mm(buf3, buf3, out=buf4)", "origin_4.call(extern_kernels.mm, buf3, buf3, out=buf4)"),
    ("return (buf4, buf3, )", "return returned((buf4, buf3))"),
]
"""Of Inductor's wrapper code, and what each becomes."""


def test_each_statement_is_rewritten_as_promised():
    origins = []

    def add_origin(buffer, kernel):
        origins.append((buffer, kernel))
        return f"origin_{len(origins) - 1}"

    before, after = zip(*STATEMENTS, strict=True)
    head = "from torch._inductor.async_compile import AsyncCompile\ndef call(self, args):\n"
    code = ast.unparse(rewrite(head + textwrap.indent("\n".join(before), "    "), add_origin))
    assert textwrap.dedent(code.partition("\n")[2]) == ast.unparse(ast.parse("\n".join(after)))
    assert origins == [("buf0", "fused_add"), ("buf0", "fused_add"), ("buf2", ""), ("buf4", ""), ("buf4", "")]
    assert "import" not in code
    kernels = {"cpp_fused_abs_amax_12": "fused_abs_amax", "triton_poi_fused_add_0": "fused_add", "assert_size": ""}
    assert {name: name_operator(name) for name in kernels} == kernels

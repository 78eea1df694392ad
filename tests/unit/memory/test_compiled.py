"""Predictions of compiled code: against measurements, by arithmetic, and what they leave behind, which is nothing."""

import ast
import json
import subprocess
from itertools import product

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering

from benchmarks.memory import RECORD, WITHIN, compare
from benchmarks.memory_modules import CHECKPOINTING, PRECISIONS, Size
from quaver.memory import explain
from quaver.memory.compiling.compiled import are_kernels_left_out, compiled_graphs, kernels_left_out
from quaver.memory.compiling.wrapper_code import kernel_operator, rewritten
from quaver.memory.faking.fakes import fake_tensors
from quaver.memory.predict import predict_step
from quaver.memory.runs.predict import SEES_GATHERS, predict_memory
from quaver.recorder.allocator import measure_usage
from quaver.trainer.config import Model, TrainConfig
from quaver.trainer.config.training import Training

CPU = torch.device("cpu")
ROWS = 512
FILE = "tests/unit/memory/test_compiled.py"
RECORDED = json.loads(RECORD.read_text())


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, rows):
        return self.down(nn.functional.silu(self.up(rows)).square())


class _Broken(_Block):
    def forward(self, rows):
        hidden = nn.functional.silu(self.up(rows))
        torch._dynamo.graph_break()
        return self.down(hidden.square())


def _quick(ranks, module, precision, checkpointing):
    """Whether each run of the tests compares this row with the record; the others are for the night."""
    return (ranks, module, precision, checkpointing) in {
        (1, "ffn", "rowwise", "none"),
        (1, "attention", "bfloat16", "op"),  # whose recomputation is given the state of the random numbers
        (2, "linear", "tensorwise", "full"),
    }


CASES = [
    pytest.param(*case, marks=() if _quick(*case) else pytest.mark.nightly)
    for case in product((1, 2), ("linear", "attention", "ffn", "1 block"), PRECISIONS, CHECKPOINTING)
    if case != (2, "attention", "rowwise", "none")  # where gloo's threads kept a buffer in both measured steps
    # recorded when a lone float8 linear was left out of its checkpoint
    and not (case[1] == "linear" and case[2] != "bfloat16" and case[3] != "none")
]


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != RECORDED["environment"]["torch"].partition("+")[0],
    reason="another torch plans other buffers than the recorded one",
)
@pytest.mark.parametrize(("ranks", "module", "precision", "checkpointing"), CASES)
def test_a_prediction_is_what_was_measured(ranks, module, precision, checkpointing):
    case = {"module": module, "precision": precision, "checkpointing": checkpointing, "ranks": ranks, "compiled": True}
    measured = next(row for row in RECORDED["rows"] if case.items() <= row.items())
    row = compare(measured, Size(**RECORDED["size"]))
    assert row["peak"] == pytest.approx(1, abs=0.001)
    assert row["saved"] == pytest.approx(1, abs=0.001)


def test_real_code_is_compiled_after_a_prediction_and_takes_what_was_predicted():
    """Before a prediction, after it and from a cache a model has kernels; and so it has if it was compiled before."""
    torch.manual_seed(0)
    model, rows = _Block(), torch.randn(ROWS, 64)
    expected = model(rows).detach()
    model.compile(fullgraph=True)
    torch.testing.assert_close(model(rows), expected)
    loaded = len(PyCodeCache.modules)
    prediction = explain(model, (rows,))
    assert len(PyCodeCache.modules) == loaded
    torch.testing.assert_close(model(rows), expected)
    fresh = _Block()
    fresh.load_state_dict(model.state_dict())
    fresh.compile(fullgraph=True)
    _step(fresh, rows, lambda: None)
    with measure_usage(CPU) as measured:
        _step(fresh, rows, measured.mark)
    torch.testing.assert_close(fresh(rows), expected)
    assert prediction.step_peak_bytes == pytest.approx(measured.usage.tensor_peak_bytes, abs=64)
    assert prediction.saved_by_forward_bytes == pytest.approx(measured.usage.saved_bytes, abs=64)


def _step(model, rows, forward_is_done):
    loss = model(rows).sum(dtype=torch.float32)
    forward_is_done()
    loss.backward()
    model.zero_grad(set_to_none=True)


FUSED = "fused_pow_silu (aten.pow.Tensor_Scalar)"


def test_rows_of_compiled_code_say_what_made_them_and_who_keeps_them():
    """The graph keeps its input, the first product, for silu, and the square, for the second weight's gradient."""
    model = nn.Sequential(_Block(), _Block())
    for block in model:
        block.compile(fullgraph=True)
    prediction = explain(model, (torch.empty(ROWS, 64),), optimizer=torch.optim.AdamW)
    saved = [row for row in prediction.saved_for_backward if row["category"] == "saved_activations"]
    assert {row["saved_by"] for row in saved} == {"compiled graph"}
    made = {(row["operator"], row["of"], row["module"], row["saved_in"], row["bytes"]) for row in saved}
    assert made == {
        ("aten.mm", "an input", "0.up", "0", 4 * ROWS * 128),
        (FUSED, "aten.mm", "0", "0", 4 * ROWS * 128),
        ("aten.mm", FUSED, "0.down", "1", 4 * ROWS * 64),
        ("aten.mm", "aten.mm", "1.up", "1", 4 * ROWS * 128),
        (FUSED, "aten.mm", "1", "1", 4 * ROWS * 128),
    }
    lines = {row["source"] for row in saved}
    first = _Block.forward.__code__.co_firstlineno
    assert lines == {f"{FILE}:{first + 1}"}
    assert sum(prediction.by_category.values()) == prediction.peak_bytes
    assert prediction.phase_of_peak == "backward"
    assert {row["phase"] for row in prediction.at_peak} == {"before", "forward", "backward"}
    uses = {row["first_use"]["operator"] for row in saved if row["module"] == "1"}
    assert uses == {"aten.mm"}  # of the second weight's gradient


def test_layers_that_are_alike_are_compiled_once():
    with fake_tensors(compiled=True) as fakes:
        model = nn.Sequential(*(_Block() for _ in range(4)))
        for block in model:
            block.compile(fullgraph=True)
        rows = torch.randn(ROWS, 64)
        prediction = predict_step(lambda: _step(model, rows, lambda: None), model, None, fakes)
        # forward and backward: of the first, whose input has no gradient, and of the rest
        assert compiled_graphs() == 4
    saved = [row for row in prediction.saved_for_backward if row["operator"] == FUSED]
    assert [row["module"] for row in saved] == ["0", "1", "2", "3"]


def _compiled_in_place(model):
    model.compile()
    return model


@pytest.mark.parametrize("compiled_model", [_compiled_in_place, torch.compile])
def test_a_compiled_model_keeps_less_than_an_eager_one(compiled_model):
    model, inputs = _Block(), (torch.empty(ROWS, 64),)
    eager = explain(model, inputs)
    compiled = explain(compiled_model(model), inputs)
    less_bytes = eager.saved_by_forward_bytes - compiled.saved_by_forward_bytes
    assert less_bytes == pytest.approx(4 * ROWS * 128, abs=64)  # silu's result
    assert not are_kernels_left_out()


def test_code_with_a_graph_break_and_with_sizes_that_may_change():
    model, inputs = _Block(), (torch.empty(ROWS, 64),)
    model.compile()
    whole = explain(model, inputs)
    model.compile(dynamic=True)
    assert explain(model, inputs).step_peak_bytes == pytest.approx(whole.step_peak_bytes, rel=WITHIN)
    broken = _Broken()
    broken.compile()
    more_bytes = explain(broken, inputs).saved_by_forward_bytes - whole.saved_by_forward_bytes
    assert more_bytes == pytest.approx(4 * ROWS * 128, abs=64)


def test_other_backends_run_as_they_are():
    model, inputs = _Block(), (torch.empty(ROWS, 64),)
    eager = explain(model, inputs)
    model.compile(backend="eager")
    assert explain(model, inputs).saved_by_forward_bytes == eager.saved_by_forward_bytes


def test_no_process_is_started(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"a prediction started {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("os.posix_spawn", refuse)
    model = _Block()
    model.compile()
    assert explain(model, (torch.empty(3, 64),)).peak_bytes > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [({"mode": "max-autotune"}, "max_autotune"), ({"options": {"cpp_wrapper": True}}, "cpp_wrapper")],
    ids=["max-autotune", "cpp_wrapper"],
)
def test_code_that_cannot_be_followed_is_refused(options, named):
    run, model = GraphLowering.run, _Block()
    model.compile(**options)
    with pytest.raises(NotImplementedError, match=f"default kernels in Python code, got {named}") as caught:
        explain(model, (torch.empty(3, 64),))
    assert "\n" not in str(caught.value)
    assert GraphLowering.run is run
    assert not are_kernels_left_out()


class _Restless(_Block):
    tag = ""

    def forward(self, rows):
        self.tag += "x"
        return super().forward(rows) * len(self.tag)


def test_a_model_that_is_compiled_in_each_step_is_refused():
    model = _Restless()
    model.compile()
    with pytest.raises(NotImplementedError, match="a step that compiles nothing after 4 others"):
        explain(model, (torch.empty(3, 64),))


def test_settings_are_as_before():
    before = torch._inductor.config.fx_graph_cache, cpu_vec_isa.valid_vec_isa_list
    with kernels_left_out():
        assert are_kernels_left_out()
        assert not torch._inductor.config.fx_graph_cache
    assert (torch._inductor.config.fx_graph_cache, cpu_vec_isa.valid_vec_isa_list) == before
    assert compiled_graphs() == 0


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_run_that_compiles_is_predicted_as_compiled_code(ranks):
    if ranks > 1 and not SEES_GATHERS:
        pytest.skip("gathers into fake tensors go unseen in this torch")
    small = Model(dim=64, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=128)
    config = TrainConfig(model=small, training=Training(compile=True, seq_len=64, local_batch_size=2))
    memory = predict_memory(config, ranks)
    assert not any("compile" in note for note in memory.notes)
    modules = {row["module"] for row in memory.prediction.saved_for_backward if row["saved_by"] == "compiled graph"}
    assert "model.layers.0.mlp.gate_proj" in modules
    cast = "quaver::cast (quaver.cast_tensorwise)"
    casts = [row for row in memory.prediction.saved_for_backward if row["operator"] == cast]
    assert {row["dtype"] for row in casts if row["shape"]} == {"float8_e4m3fn"}
    weights = [row for row in memory.prediction.at_peak if row["category"] == "float8_weights"]
    assert all(row["of"].startswith(row["module"]) for row in weights)


SOURCE = """
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
cpp_fused_add_0 = async_compile.cpp_pybinding([], '''code''')

class Runner:
    def call(self, args):
        primals_1, = args
        args.clear()
        assert_size_stride(primals_1, (4,), (1,), 'input')
        buf0 = empty_strided_cpu((4,), (1,), torch.float32)
        buf1 = reinterpret_tensor(buf0, (2,), (1,), 2)  # alias
        cpp_fused_add_0(primals_1, buf1)
        buf2 = torch.ops.aten.neg.default(buf0)
        buf3 = buf2
        del buf2
        buf4 = reinterpret_tensor(buf0, (2, 2), (2, 1), 0); del buf0  # reuse
        extern_kernels.mm(buf3, buf3, out=buf4)
        return (buf4, buf3, )
"""


def test_each_statement_is_rewritten_as_promised():
    asked = []

    def maker_of(buffer, kernel):
        asked.append((buffer, kernel))
        return f"made_{len(asked) - 1}"

    code = ast.unparse(rewritten(SOURCE, maker_of))
    body = [line.strip().removeprefix("return ") for line in code.partition("def call")[2].splitlines()[1:]]
    promised = [
        "received(args)",
        "(primals_1,) = args",
        "args.clear()",
        "assert_size_stride(primals_1, (4,), (1,), 'input')",
        "buf0 = made_0.allocate((4,), (1,), torch.float32, {'primals_1': primals_1})",
        "buf1 = reinterpret_tensor(buf0, (2,), (1,), 2)",
        "made_1.call(cpp_fused_add_0, primals_1, buf1)",
        "buf2 = made_2.call(torch.ops.aten.neg.default, buf0)",
        "buf3 = buf2",
        "del buf2",
        "buf4 = layout_of(reinterpret_tensor(buf0, (2, 2), (2, 1), 0))",
        "del buf0",
        "buf4 = made_3.allocate(*buf4, {'buf3': buf3})",
        "made_4.call(extern_kernels.mm, buf3, buf3, out=buf4)",
        "return returned((buf4, buf3))",
    ]
    assert body == ast.unparse(ast.parse("\n".join(promised).replace("return ", ""))).splitlines()
    assert asked == [("buf0", "fused_add"), ("buf0", "fused_add"), ("buf2", ""), ("buf4", ""), ("buf4", "")]
    assert "import" not in code


def test_names_of_kernels():
    assert kernel_operator("cpp_fused_abs_amax_12") == "fused_abs_amax"
    assert kernel_operator("triton_poi_fused_add_0") == "fused_add"
    assert kernel_operator("assert_size_stride") == ""

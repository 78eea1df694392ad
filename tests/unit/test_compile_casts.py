"""Compiled linears whose casts are quaver's operations: which they call, eager's bits, what Inductor writes.

Code for a GPU is written in a process of its own, which is told that it has one (benchmarks/inductor_for_gpu.py).
"""

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn

from quaver import Float8LinearConfig, convert_to_float8_training
from quaver.casts import MatrixCasts
from quaver.kernels import layout_ops, zero_pairs
from quaver.memory.compiling.compiled import COMPILES_FOR_A_GPU
from tests.reference import KEPT_RECIPES, RECIPES
from tests.triton_kernels import interpreting_process, process

TOKENS, INPUTS, OUTPUTS = 512, 256, 768


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def make(recipe, dtype=torch.bfloat16):
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(nn.Sequential(nn.Linear(48, 80, bias=False, dtype=dtype)), config=config)


# ---- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "calls"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_setting_is_read_from_the_environment(value, calls):
    name = "QUAVER_KERNELS_IN_COMPILED_CODE"
    environment = {key: each for key, each in os.environ.items() if key != name} | (
        {} if value is None else {name: value}
    )
    program = "from quaver.kernels import layout_ops; print(layout_ops.COMPILED_CODE_CALLS_KERNELS)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{calls}\n"


def test_results_of_operations_begin_where_compiled_code_wants_them():
    """Inductor asserts that results of an operation on a GPU begin on 16 bytes."""
    pairs = [zero_pairs.zero_pair(torch.empty(1)) for _ in range(5)]
    assert [pair.data_ptr() % 16 for pair in pairs] == [0] * 5
    assert all(pair.is_contiguous() for pair in pairs)


# ---- what is written for a GPU ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    pytest.importorskip("triton")
    if not COMPILES_FOR_A_GPU:
        pytest.skip("code for a GPU is written with torch 2.13 or newer")
    folder = str(tmp_path_factory.mktemp("inductor"))
    with process(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=folder) as call:
        yield call


def _written(recipe, calls_kernels, dynamic=False):
    """The casts that are called, by name; how many matmuls; and how many Triton kernels load or store float8."""
    from benchmarks.inductor_for_gpu import written_for_a_gpu
    from benchmarks.kernel_accesses import reads_or_writes_bytes

    layout_ops.COMPILED_CODE_CALLS_KERNELS = calls_kernels
    with written_for_a_gpu() as (_, backend, written):
        module = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16))
        convert_to_float8_training(module, config=Float8LinearConfig.from_recipe_name(recipe))
        rows = torch.empty(TOKENS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
        output = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic or None)(rows)
        output.backward(torch.empty_like(output))
    called = Counter(operator.name for code in written for operator in code.operators if "cast" in operator.name)
    matmuls = sum(code.source.count("extern_kernels._scaled_mm(") for code in written)
    of_float8 = sum(reads_or_writes_bytes(code.kernels[name]) for code in written for name in code.launches)
    return called, matmuls, of_float8


@pytest.mark.parametrize(
    ("recipe", "casts", "expected"),
    [
        ("tensorwise", "kernels", {"cast_layouts": 3, "cast_with_scales": 1}),
        ("rowwise", "kernels", {"cast_axes": 4}),
        ("delayed", "compiler", {"cast_layouts_with_persistent_scale": 3, "cast_with_scales": 1}),
        nightly("rowwise_with_gw_hp", "kernels", {"cast_axes": 3, "cast_with_scales": 1}),
        nightly("delayed", "kernels", {"cast_layouts_with_persistent_scale": 3, "cast_with_scales": 1}),
    ],
)
def test_casts_are_operations_and_nothing_else_makes_or_copies_float8(elsewhere, recipe, casts, expected):
    called, matmuls, of_float8 = elsewhere(_written, recipe, casts == "kernels")
    assert called == expected
    assert matmuls == (2 if recipe == "rowwise_with_gw_hp" else 3)
    assert of_float8 == 0


def test_by_default_the_compiler_makes_the_casts_of_dynamic_scales(elsewhere):
    called, matmuls, of_float8 = elsewhere(_written, "tensorwise", False)
    assert not called
    assert (matmuls, of_float8) == (3, 4)


@pytest.mark.nightly
def test_sizes_may_be_unknown(elsewhere):
    called, matmuls, _ = elsewhere(_written, "rowwise", True, True)
    assert sum(called.values()) == 4
    assert matmuls == 3


# ---- the same bits ---------------------------------------------------------------------------------------------------


def _kept_and_results(forward, module, inputs):
    """What is kept in float8 for the backward, the results and the gradients, of each step."""
    made = []

    def pack(tensor):
        if tensor.dtype.itemsize == 1:
            made.append(tensor.contiguous().view(torch.uint8))
        return tensor

    for rows in inputs:
        rows = rows.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = forward(rows)
        module.zero_grad()
        output.backward(torch.ones_like(output) * 1.5)
        made += [output.detach(), rows.grad, module[0].weight.grad.clone()]
    return made


def _differences(recipe, dynamic, rows=(35, 64, 35)):
    """How many results of compiled code differ from eager's in any bit, of how many; and its casts, by `on Triton`."""
    torch.manual_seed(0)
    module = make(recipe)
    inputs = [torch.randn(height, 48).mul(3).bfloat16() for height in rows]
    expected = _kept_and_results(module, module, inputs)
    torch.manual_seed(0)
    module = make(recipe)
    asked = Counter()
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(error_on_recompile=dynamic):
        patch.setattr(MatrixCasts, "lays_out", lambda self, hp: torch.compiler.is_compiling())
        patch.setattr(layout_ops, "runs_on_triton", _counted(layout_ops.runs_on_triton, asked))
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=dynamic or None)
        got = _kept_and_results(compiled, module, inputs)
    differ = sum(not g.equal(e) for g, e in zip(got, expected, strict=True))
    return differ, len(got), dict(asked)


def _counted(function, counted):
    def asked(*args):
        answer = function(*args)
        counted[answer] += 1
        return answer

    return asked


@pytest.mark.parametrize(
    ("recipe", "dynamic"),
    [
        *(nightly(recipe, False) if "_" in recipe else (recipe, False) for recipe in (*RECIPES, *KEPT_RECIPES)),
        ("rowwise", True),
        nightly("tensorwise", True),
    ],
)
def test_compiled_code_has_eagers_bits(recipe, dynamic):
    differ, count, casts = _differences(recipe, dynamic)
    assert differ == 0
    assert count >= 3 * 3
    assert casts == {False: 3 * 4}  # input and grad_output once, the weight in forward and backward


@pytest.mark.parametrize("recipe", ["rowwise", nightly("tensorwise"), nightly("delayed")])
def test_compiled_code_has_eagers_bits_from_the_kernels(recipe):
    pytest.importorskip("triton")
    with interpreting_process() as call:
        differ, _, casts = call(_differences, recipe, False, (35,))
    assert differ == 0
    assert casts == {True: 4}

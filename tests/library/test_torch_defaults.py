"""Tests quaver under torch's process-wide defaults: a default dtype, a default device, a fake mode at its import."""

import re
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import quaver
from quaver import convert_to_float8_training, float8_scaling_state, sync_float8_amax_and_scale_history
from quaver.kernels import cpu, widen
from quaver.kernels.native_mm import ScaleKind
from quaver.linear import backends, gemm
from quaver.optim import Float8AdamW
from quaver.recipes.linear_casts import MatmulOptions
from tests.steps import assert_same, compute_results

IMPORTED_LATE = """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode(), torch.device("meta"):
        import quaver
    torch.set_default_dtype(torch.float32)

    from quaver.recipes.scaling import amax_to_quant_scale
    for dtype, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        for amax in (0.0, 1e-20, 0.7, 3e4):
            expected = torch.tensor(largest / max(amax, 1e-12), dtype=torch.float64).float()
            scale = amax_to_quant_scale(torch.tensor(amax), dtype)
            assert torch.equal(scale, expected.clamp(max=largest / 1e-12)), (amax, scale)
    for recipe in ("tensorwise", "rowwise", "delayed"):
        model = quaver.convert_to_float8_training(torch.nn.Linear(128, 128), config=recipe)
        model(torch.randn(128, 128)).sum().backward()
        assert model.weight.grad.isfinite().all()
"""


TENSOR_CONSTANT = re.compile(
    r"^\w+(?:: .+?)? = (?!.*device=).*\btorch\.(?:arange|empty|full|linspace|logspace|ones|tensor|zeros)\(", re.M
)


def test_no_constant_is_a_tensor_of_the_default_device():
    """It would have the default dtype and device of the moment when its module is imported."""
    files = Path(quaver.__file__).parent.rglob("*.py")
    assert [file.name for file in files if TENSOR_CONSTANT.search(file.read_text())] == []


@pytest.mark.nightly
def test_an_import_under_other_defaults_succeeds():
    subprocess.run([sys.executable, "-c", textwrap.dedent(IMPORTED_LATE)], check=True, timeout=120)


@contextmanager
def other_defaults(name):
    """Set the default device "meta", or another default dtype."""
    if name == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = pytest.mark.parametrize("defaults", ["float64", "bfloat16", "meta"])


@DEFAULTS
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp", "delayed"])
def test_a_step_ignores_torch_defaults(recipe, defaults, monkeypatch):
    monkeypatch.setattr(cpu, "HAS_EXTENSION", False)  # casts by PyTorch
    model = convert_to_float8_training(nn.Linear(128, 128), config=recipe)
    input = torch.randn(128, 128)

    def step():
        widen.make_pair_table.cache_clear()
        return compute_results(model, input, grad_output=1.0)

    expected = step()
    with other_defaults(defaults):
        results = step()
        sync_float8_amax_and_scale_history(model)
        float8_scaling_state(model).reset()
    assert_same(results, expected)


@DEFAULTS
def test_a_step_of_an_optimizer_ignores_torch_defaults(defaults):
    def step():
        weight = nn.Parameter(torch.linspace(-1, 1, 4096, device="cpu", dtype=torch.float32).view(64, 64))
        weight.grad = weight.detach().cos()
        Float8AdamW([weight], lr=0.1).step()
        return weight

    expected = step()
    with other_defaults(defaults):
        assert torch.equal(step(), expected)


@DEFAULTS
def test_other_defaults_do_not_change_a_sample(defaults):
    """The sums of a GPU lose bits in another dtype than float32, or raise."""
    model, input = convert_to_float8_training(nn.Linear(128, 128)), torch.randn(128, 128)

    def sample():
        with quaver.monitor(model, every=1, emulate_sums_of="h100") as watched:
            model(input).sum().backward()
            watched.step()
        return watched.samples[0]

    expected = sample()
    with other_defaults(defaults):
        assert sample() == expected


@DEFAULTS
@pytest.mark.parametrize("kind", [ScaleKind.TENSORWISE, ScaleKind.BLOCKS_OF_128])
def test_other_defaults_do_not_change_the_trial_of_a_gpu(kind, defaults, monkeypatch):
    """With scales of another dtype `_scaled_mm` fails, and the process would multiply exactly instead of natively."""
    scale_dtypes = []

    def multiply(a, b, bias, out_dtype, use_fast_accum):
        scale_dtypes.extend([a.dequant_scale.dtype, b.dequant_scale.dtype])
        return gemm.multiply_operands(a, b, MatmulOptions(), out_dtype, bias)

    with other_defaults(defaults):
        monkeypatch.setattr(backends, "native_mm", multiply)
        assert backends.try_native_mm(torch.device("cpu"), kind) is None
        assert set(scale_dtypes) == {torch.float32}
        monkeypatch.setattr(backends, "native_mm", lambda *args, **options: multiply(*args, **options) * 1.1)
        assert "wrong result" in backends.try_native_mm(torch.device("cpu"), kind)

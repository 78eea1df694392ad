"""quaver bench gemm, cast and host: the operands of matmuls, the bytes that a cast moves, counted operations."""

import pytest
import torch

from quaver.lab.bench import cast
from quaver.lab.bench.cast import KINDS
from quaver.lab.bench.gemm import GRANULARITIES, Matmul, matmuls_of, share_of_peak
from quaver.lab.bench.host import count_operations
from quaver.lab.bench.shapes import Shape
from quaver.roofline.device_specs import PeakFlops

CPU = torch.device("cpu")
SHAPE = Shape((32, 48, 64))


def test_the_three_matmuls_are_those_of_autograd():
    input, weight = torch.randn(32, 48, requires_grad=True), torch.randn(64, 48, requires_grad=True)
    output = input @ weight.t()
    sizes = {matmul.name: matmul.sizes[::2] for matmul in matmuls_of(SHAPE)}
    assert sizes == {"output": output.shape, "grad_input": input.shape, "grad_weight": weight.shape}
    for matmul in matmuls_of(SHAPE):
        m, k, n = matmul.sizes
        assert m * k * n == 32 * 48 * 64
        left, right = matmul.hp_operands(CPU)
        assert (left.shape, right.shape) == ((m, k), (k, n))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_float8_operands_multiply_to_what_bfloat16_does(granularity, monkeypatch):
    for matmul in matmuls_of(SHAPE):
        hp = matmul.hp_operands(CPU)
        monkeypatch.setattr(Matmul, "hp_operands", lambda self, device, hp=hp: hp)
        a, b, a_scale, b_scale = matmul.float8_operands(granularity, CPU)
        expected = hp[0].float() @ hp[1].float()
        got = (a.float() * a_scale) @ (b.float() * b_scale)
        assert (got - expected).norm() < 0.1 * expected.norm()
        assert a_scale.shape == ((matmul.sizes[0], 1) if granularity == "rowwise" else ())
        is_gradient = matmul.name != "output"
        e5m2 = torch.float8_e5m2 if is_gradient and granularity == "tensorwise" else torch.float8_e4m3fn
        assert (a.dtype, b.dtype) == (e5m2, torch.float8_e4m3fn)
        monkeypatch.undo()


def test_the_share_is_of_the_precisions_own_peak():
    peak = PeakFlops(100e12, "data sheet", 200e12)
    assert share_of_peak(50e12, "bfloat16", peak) == 0.5
    assert share_of_peak(50e12, "rowwise", peak) == 0.25
    assert share_of_peak(50e12, "rowwise", PeakFlops(100e12, "data sheet")) is None


def test_the_floor_of_a_cpu_and_of_hardware_that_multiplies_float8(monkeypatch):
    floors = {name: kind.floor(2, CPU) for name, kind in KINDS.items()}
    assert floors == {"tensorwise": 5, "delayed": 3, "rowwise": 3, "rowwise_both": 6}
    monkeypatch.setattr(cast, "reads_along_contracted", lambda device: True)
    floors = {name: kind.floor(2, torch.device("cuda")) for name, kind in KINDS.items()}
    assert floors == {"tensorwise": 6, "delayed": 4, "rowwise": 3, "rowwise_both": 6}


def test_operations_are_counted_by_name():
    a = torch.zeros(2, 3)
    assert count_operations(lambda: (a + 1 + a).t()) == {"aten.add.Tensor": 2, "aten.t.default": 1}

"""SwiGLU and RMSNorm in float8 on a GPU: the oracle's codes; gradients; no synchronisation; in a CUDA graph; compiled.

Where exp and the sums of squares are exact, every bit must be the oracle's. Elsewhere a code may be the next one, for
few elements; there scales are powers of two, which hide the last bit of an amax.
"""

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from quaver.kernels import fused_producers, triton_blocks, triton_rms_norm
from tests.triton_kernels import E4M3, E5M2
from tests.unit.test_fused_producers import EPS, everything, leaves
from tests.unit.test_triton_producers import (
    NORMS,
    WANTED,
    assert_norm_gradients,
    assert_rms_norm,
    assert_swiglu,
    varied,
    whole,
)

pytestmark = pytest.mark.gpu
FLOAT8 = pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
BF16 = torch.bfloat16
NAN, INF = math.nan, math.inf
SHARE = 0.01
"""Of codes that may be the next one: two roundings of 8 bits hide differences in the last of 24, but for one in
thousands; the amax of a row may be one of them."""


@pytest.fixture(autouse=True)
def _needs_a_gpu_that_rounds_once():
    if not triton_blocks.takes(torch.ones(1, device="cuda"), E4M3):
        pytest.skip("needs a GPU that converts to float8 in one rounding")
    torch.manual_seed(0)


def exact_gates(rows, columns, dtype):
    """silu of them is themselves or 0: exp(-gate) vanishes beside 1, or is infinite."""
    gates = torch.randint(20, 300, (rows, columns)).float()
    gates[torch.rand(rows, columns) < 0.2] *= -10
    gates[torch.rand(rows, columns) < 0.2] = 0
    return gates.to(dtype)


def check_swiglu(gate, up, float8_dtype, **options):
    assert_swiglu(gate.cuda(), up.cuda(), float8_dtype, F.silu(gate) * up, **options)


@FLOAT8
@HP
def test_swiglu_is_exact_where_exp_is(hp_dtype, float8_dtype):
    for shape in ((1, 1), (1, 40), (33, 1), (127, 129), (128, 64), (144, 80), (2000, 1008)):
        gate, up = exact_gates(*shape, hp_dtype), varied(*shape, hp_dtype)
        check_swiglu(gate, up, float8_dtype, scales=(0.0, 0.01), power_of_2=shape == (33, 1))


@HP
def test_swiglu_of_random_numbers(hp_dtype):
    gate, up = varied(1000, 1040, hp_dtype), torch.randn(1000, 1040).to(hp_dtype)
    check_swiglu(gate, up, E4M3, power_of_2=True, share=SHARE)


@HP
def test_swiglu_of_unusual_numbers(hp_dtype):
    gate = torch.tensor([[0.0, -0.0], [3e4, -6e4], [-1e3, 50.0], [99.0, INF], [-INF, 99.0], [99.0, NAN]]).to(hp_dtype)
    for up in (1.0, 0.0, -3.0, INF, NAN):
        check_swiglu(gate, torch.full_like(gate, up), E4M3)


def test_rows_of_swiglu_of_every_width():
    for width in (7, 100, 4096, 32768, 32784, 50_001):
        gate, up = exact_gates(40, width, BF16), varied(40, width, BF16)
        check_swiglu(gate, up, E4M3, scales=(), wanted=WANTED[1:2])


@pytest.mark.parametrize("dtypes", NORMS, ids=str)
def test_rms_norm_is_exact_where_sums_are(dtypes):
    hidden_dtype, weight_dtype, hp_dtype = dtypes
    for shape in ((1, 1), (33, 2), (129, 64), (1000, 512), (600, 4096), (40, triton_rms_norm.WIDEST)):
        hidden, weight = whole(*shape, hidden_dtype), torch.randn(shape[1]).to(weight_dtype)
        assert_rms_norm(hidden.cuda(), weight.cuda(), hp_dtype, E4M3, power_of_2=shape[0] == 33)


@pytest.mark.parametrize("dtypes", NORMS, ids=str)
def test_rms_norm_of_random_numbers(dtypes):
    hidden_dtype, weight_dtype, hp_dtype = dtypes
    for width in (45, 1040, 5120, triton_rms_norm.WIDEST + 16):
        hidden, weight = varied(300, width, hidden_dtype), torch.randn(width).to(weight_dtype)
        assert_rms_norm(hidden.cuda(), weight.cuda(), hp_dtype, E5M2, power_of_2=True, share=SHARE)


def test_rms_norm_of_unusual_numbers():
    hidden = torch.tensor([[0.0, -0.0], [3e4, -3e4], [1.0, INF], [1.0, NAN], [2.0**-65, 2.0**-65]])
    for weight in ([1.0, -0.5], [1.0, INF], [NAN, 1.0]):
        for eps in (EPS, 0.0):
            assert_rms_norm(hidden[1:].cuda(), torch.tensor(weight).cuda(), BF16, E4M3, eps=eps)
            assert_rms_norm(hidden[1:2].cuda(), torch.tensor(weight).cuda(), BF16, E4M3, eps=eps)
    assert_rms_norm(hidden.cuda(), torch.ones(2, device="cuda"), BF16, E4M3)


@HP
def test_gradients_of_swiglu(hp_dtype):
    for shape in ((1, 1), (127, 129), (1000, 1040)):
        grad, gate, up = (torch.randn(shape, device="cuda").mul(3).to(hp_dtype) for _ in range(3))
        exact = [each.double().requires_grad_() for each in (gate, up)]
        expected = torch.autograd.grad(F.silu(exact[0]) * exact[1], exact, grad.double())
        size = grad.double().abs() * torch.stack([up.double().abs(), F.silu(gate.double()).abs()])
        made = fused_producers.swiglu_backward(grad, gate, up)
        last_place = {torch.float32: 1e-6, BF16: 2**-7, torch.float16: 2**-10}[hp_dtype]
        for got, e, terms in zip(made, expected, size, strict=True):
            assert got.dtype is hp_dtype
            assert ((got.double() - e).abs() <= 1.2 * last_place * terms + 1e-7).all()


@pytest.mark.parametrize("dtypes", NORMS, ids=str)
def test_gradients_of_rms_norm(dtypes):
    hidden_dtype, weight_dtype, hp_dtype = dtypes
    for shape in ((1, 1), (70, 45), (2000, 1040), (300, 8192), (100, triton_rms_norm.WIDEST)):
        hidden, weight = varied(*shape, hidden_dtype), torch.randn(shape[1]).to(weight_dtype)
        assert_norm_gradients(torch.randn(shape).to(hp_dtype).cuda(), hidden.cuda(), weight.cuda())


def test_the_gradient_of_a_weight_is_the_same_in_every_run():
    grad, hidden = (torch.randn(5000, 1040, device="cuda", dtype=BF16) for _ in range(2))
    args = (hidden, torch.randn(1040, device="cuda"), torch.rand(5000, device="cuda"))
    first = fused_producers.rms_norm_backward(grad, *args)[1]
    assert all(fused_producers.rms_norm_backward(grad, *args)[1].equal(first) for _ in range(5))


def test_more_than_2_to_the_31_elements():
    rows, columns = 2**17 + 16, 2**14
    if torch.cuda.mem_get_info()[0] < 14 * rows * columns:
        pytest.skip("needs 31 GB of free GPU memory")
    gate = torch.zeros(rows, columns, dtype=BF16, device="cuda")
    up = torch.ones_like(gate)
    gate[-1, -9:] = torch.arange(64.0, 73.0)
    for both in (True, False):
        made = fused_producers.swiglu_cast_layouts(gate, up, E4M3, rows=True, columns=both, power_of_2=True)
        for codes in (made.row_codes, made.column_codes):
            if codes is not None:
                assert codes[-1, -9:].float().div(made.quant_scale).tolist() == [64.0] * 5 + [72.0] * 4
                assert codes.view(torch.uint8).count_nonzero() == 9


def args_of_everything():
    gate, up = (torch.randn(304, 144, device="cuda", dtype=BF16) for _ in range(2))
    return gate, up, torch.randn(144, device="cuda"), True, True


def assert_the_same(made, expected):
    for got, e in zip(made, expected, strict=True):
        assert got.stride() == e.stride()
        assert got.reshape(-1).view(torch.uint8).equal(e.reshape(-1).view(torch.uint8))


def test_no_synchronisation():
    args = args_of_everything()
    everything(*args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_follows_the_scale_and_the_data():
    gate, up, quant_scale = torch.randn(304, 144, device="cuda"), torch.randn(304, 144, device="cuda"), torch.zeros(())
    quant_scale = quant_scale.cuda()

    def casts():
        options = {"rows": True, "columns": True}
        return leaves(
            (
                fused_producers.swiglu_cast_with_persistent_scale(gate, up, quant_scale, E4M3, **options),
                fused_producers.rms_norm_cast_with_persistent_scale(
                    gate, up[0], EPS, BF16, quant_scale, E4M3, rows=True, columns=False
                ),
            )
        )

    casts()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = casts()
    for scale, magnitude in ((0.0, 1.0), (100.0, 3.0), (0.0, 0.1), (20.0, 50.0)):
        quant_scale.fill_(scale)
        gate.normal_(0, magnitude)
        graph.replay()
        made, expected = ([each for each in made if each is not None] for made in (captured, casts()))
        assert_the_same(made, expected)


def test_compiled_code_is_eager_code():
    args = args_of_everything()
    assert_the_same(torch.compile(everything, fullgraph=True)(*args), everything(*args))

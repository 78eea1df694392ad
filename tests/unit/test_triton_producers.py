"""SwiGLU and RMSNorm in float8 without a GPU, in Triton's interpreter: codes, gradients, and the bytes that are moved.

Where the interpreter's exp is NumPy's, and where sums of squares are exact, every bit must be the oracle's; everywhere
else a code may be the next one, for few elements. tests/unit/test_triton_cast.py says what an interpreter can show.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from quaver import scaling
from quaver.kernels import (
    fused_producers,
    triton_producer_grads,
    triton_rms_norm,
    triton_rows,
    triton_swiglu,
)
from tests.triton_kernels import (
    E4M3,
    E5M2,
    assert_same_bits,
    counting_bytes,
    every_value,
    interpreting_process,
)

FLOAT8 = pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NORMS = ((F32, BF16, BF16), (BF16, F32, BF16), (F32, F32, F32), (F16, F16, BF16))
"""Dtypes of hidden, weight and result."""
WANTED = ((True, True), (True, False), (False, True))
NAN, INF = math.nan, math.inf
EPS = 1e-5


def assert_codes(got, expected, *, share, along_rows):
    """The same codes, or for at most this share of them the next one; NaNs at the same places."""
    assert (got if along_rows else got.t()).is_contiguous()
    if share == 0:
        assert_same_bits(got, expected)
        return
    got, expected = got.cpu(), expected.cpu()
    nan = expected.float().isnan()
    assert got.float().isnan().equal(nan)
    steps = (_in_order(got) - _in_order(expected)).abs()[~nan]
    assert steps.max() <= 1
    assert (steps > 0).float().mean() <= share


def _in_order(codes):
    """Integers that order like the float8 numbers: a step from each to the next."""
    bits = codes.contiguous().view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 0x7F), bits)


def assert_scales(got, expected, *, share):
    """Two scales of one amax, or of the next amax."""
    if share == 0:
        assert_same_bits(got, expected)
    else:
        torch.testing.assert_close(got.cpu(), expected.cpu(), rtol=2**-7, atol=0, equal_nan=True)


def assert_cast(made, expected, *, share):
    """Codes of rows, codes of columns, and two scales; `expected` has the codes once."""
    for got, along_rows in zip(made[:2], (True, False), strict=True):
        if got is not None:
            assert_codes(got, expected[0], share=share, along_rows=along_rows)
    for got, e in zip(made[2:], expected[1:], strict=True):
        assert_scales(got, e, share=share)


def assert_casts(cast, result, float8_dtype, *, scales=(0.0, 20.0), power_of_2=False, wanted=WANTED, share=0.0):
    """The three casts of a producer are the oracle's of its result.

    Args:
        cast: called with the cast's name, what goes before float8_dtype, float8_dtype, and keywords.
        result: on the CPU.
        share: of codes that may be the next one.
    """
    with np.errstate(all="ignore"):  # the interpreter's infinities and NaNs are wanted
        for rows, columns in wanted:
            options = {"rows": rows, "columns": columns, "power_of_2": power_of_2}
            made = cast("layouts", float8_dtype, **options)
            assert ([each is not None for each in made]) == [rows, columns, True, True, False]
            expected = scaling.dynamic_cast(result, float8_dtype, power_of_2=power_of_2)
            assert_cast(made[:4], expected, share=share)
            for scale in map(torch.tensor, scales):
                made, observed = cast("with_kept_scale", scale, float8_dtype, **options)
                *expected, seen = scaling.cast_with_persistent_scale(result, scale, float8_dtype, power_of_2=power_of_2)
                assert_cast(made[:4], expected, share=share)
                assert_scales(observed[0], seen[0], share=share)
                assert (observed[1].cpu() - seen[1]).abs() <= share * result.numel()
            made = cast("axes", float8_dtype, **options)
            assert [each is not None for each in made] == [rows, columns, False]
            for each, dim in ((made.rows, 1), (made.columns, 0)):
                if each is not None:
                    expected = scaling.dynamic_cast(result, float8_dtype, dim, power_of_2=power_of_2)
                    codes = (each.codes, None) if dim == 1 else (None, each.codes)
                    assert_cast((*codes, *each[1:]), expected, share=share)


def assert_swiglu(gate, up, float8_dtype, product=None, **options):
    def cast(name, *args, **keywords):
        args = [arg.to(gate.device) if isinstance(arg, torch.Tensor) else arg for arg in args]
        return getattr(fused_producers, f"swiglu_cast_{name}")(gate, up, *args, **keywords)

    assert_casts(cast, numpy_swiglu(gate, up) if product is None else product, float8_dtype, **options)


def assert_rms_norm(hidden, weight, hp_dtype, float8_dtype, eps=EPS, **options):
    normed, inverse_rms = expected_norm(hidden.cpu(), weight.cpu(), eps, hp_dtype)

    def cast(name, *args, **keywords):
        args = [arg.to(hidden.device) if isinstance(arg, torch.Tensor) else arg for arg in args]
        function = getattr(fused_producers, f"rms_norm_cast_{name}")
        *made, of_rows = function(hidden, weight, eps, hp_dtype, *args, **keywords)
        assert of_rows.dtype is F32
        torch.testing.assert_close(of_rows.cpu(), inverse_rms, rtol=4e-7, atol=0, equal_nan=True)
        return made if len(made) > 1 else made[0]

    assert_casts(cast, normed, float8_dtype, **options)


def numpy_swiglu(gate, up):
    """With the interpreter's exp and division; rounded where PyTorch rounds."""
    with np.errstate(all="ignore"):
        wide = gate.float().numpy()
        silu = torch.from_numpy(wide / (np.float32(1) + np.exp(-wide))).to(gate.dtype)
    return silu * up


def expected_norm(hidden, weight, eps, hp_dtype):
    """The result, and inverse_rms."""
    normed = F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps).to(hp_dtype)
    return normed, 1 / (hidden.float().square().mean(1) + eps).sqrt()


def varied(rows, columns, dtype):
    """Rows of different sizes, one of zeros, and a last element that matters."""
    hp = torch.randn(rows, columns) * torch.exp2(torch.randint(-6, 4, (rows, 1)).float())
    hp[rows // 2] = 0
    hp[-1, -1] = -7.25
    return hp.to(dtype)


def whole(rows, columns, dtype):
    """Small integers, whose squares are added up exactly, times a power of two a row."""
    hp = torch.randint(-9, 10, (rows, columns)) * torch.exp2(torch.randint(-4, 5, (rows, 1)).float())
    hp[rows // 2] = 0
    hp[-1, -1] = 9
    return hp.to(dtype)


# What runs in the interpreter's process.


def _every_gate(hp_dtype, float8_dtype):
    torch.manual_seed(0)
    gate, up = every_value(hp_dtype), every_value(hp_dtype)[torch.randperm(2**16)]
    if hp_dtype is F32:  # every value of bfloat16, with noise: a quarter does
        gate, up = gate[::4], up[::4]
    gate, up = gate.view(-1, 256), up.view(-1, 256)
    assert_swiglu(gate, up, float8_dtype, wanted=WANTED[:1], scales=(1.0, 1e-30, INF))
    finite = (gate.abs() < 60) & (up.abs() < 60)
    assert_swiglu(gate.where(finite, 0), up.where(finite, 0), float8_dtype, power_of_2=True, wanted=WANTED[:1])


def _swiglu_shapes(hp_dtype, float8_dtype):
    for shape in ((1, 1), (3, 5), (70, 45), (144, 80)):
        gate, up = varied(*shape, hp_dtype), varied(*shape, hp_dtype)
        wanted = WANTED if shape == (70, 45) else WANTED[:1]
        assert_swiglu(gate, up, float8_dtype, scales=(20.0,), wanted=wanted, power_of_2=shape == (3, 5))
    assert_swiglu(gate, up, float8_dtype, F.silu(gate) * up, wanted=WANTED[:1], share=0.01)
    flat = varied(6, 16, hp_dtype).view(-1)
    on, off = flat[:80].view(5, 16), flat[1:81].view(5, 16)  # 16 bytes
    for gate, up in ((on, off), (off, on)):
        assert_swiglu(gate, up, float8_dtype, scales=(20.0,), wanted=WANTED[:1])


def _swiglu_unusual(hp_dtype):
    gate = torch.tensor([[0.0, -0.0], [1e-20, 1.0], [3e4, -6e4], [-1e3, 5.0], [1.0, INF], [1.0, NAN], [-INF, NAN]])
    gate = gate.repeat(3, 1).to(hp_dtype)
    up = torch.tensor([[1.0, 1.0], [0.0, -3.0], [INF, 1e-30]]).repeat_interleave(7, 0).to(hp_dtype)
    for power_of_2, float8_dtype in ((False, E4M3), (True, E5M2)):
        for chosen in (slice(0, 4), slice(0, 5), slice(None)):  # finite, no NaN, all
            options = {"power_of_2": power_of_2, "wanted": WANTED[:1], "scales": (0.0, -3.0, 20.0)}
            assert_swiglu(gate[chosen], up[chosen], float8_dtype, **options)
        assert_swiglu(gate.t().contiguous(), up.t().contiguous(), float8_dtype, power_of_2=power_of_2, scales=())
    assert_swiglu(gate, up, E4M3, scales=(NAN,), wanted=WANTED[1:2])


def _swiglu_joins_programs():
    """Amaxes over several programs, several tiles of each, and rows that do not fit on the chip."""
    triton_swiglu.BLOCK_ROWS, triton_swiglu.AMAX_PROGRAMS = 32, 2
    for position in (0, 2 * 4096, 210 * 40 - 1):
        gate, up = (torch.zeros(210, 40, dtype=BF16) for _ in range(2))
        gate.view(-1)[position], up.view(-1)[position] = 3.0, -5.0
        assert_swiglu(gate, up, E4M3, wanted=WANTED[:1], scales=(0.0,))
    triton_swiglu.WIDEST_BYTES = 64
    assert_swiglu(varied(40, 80, BF16), varied(40, 80, BF16), E5M2, wanted=WANTED[1:2], scales=())


def _swiglu_gradients(hp_dtype):
    torch.manual_seed(0)
    gate = every_value(hp_dtype).view(256, 256)
    grad, up = (torch.randn(256, 256).mul(5).to(hp_dtype) for _ in range(2))
    with np.errstate(all="ignore"):
        made = fused_producers.swiglu_backward(grad, gate, up)
    expected = torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate) * grad
    for got, e in zip(made, expected, strict=True):
        assert got.dtype is hp_dtype
        assert got.isnan().equal(e.isnan())
        fine = e.float().isfinite() & (e.float().abs() > 1e-30)
        # 1 - sigmoid(gate) cancels: grad_gate is what remains of terms of this size.
        size = e.float().abs() if e is expected[1] else (grad * up).float().abs() * 1.1 + e.float().abs()
        last_place = {F32: 4e-7, BF16: 2**-8, F16: 2**-10}[hp_dtype]
        assert ((got.float() - e.float()).abs() <= size * (last_place if e is expected[1] else 4e-7 + last_place))[
            fine
        ].all()
        if hp_dtype is not F32:
            assert (got != e)[fine].float().mean() < 1e-2


def _norm_shapes(hidden_dtype, weight_dtype, hp_dtype, float8_dtype):
    for shape in ((1, 1), (3, 5), (70, 45), (144, 80)):
        hidden, weight = whole(*shape, hidden_dtype), torch.randn(shape[1]).to(weight_dtype)
        wanted = WANTED if shape == (70, 45) else WANTED[:2]
        options = {"wanted": wanted, "power_of_2": shape == (3, 5), "scales": (20.0,)}
        assert_rms_norm(hidden, weight, hp_dtype, float8_dtype, **options)
    hidden = varied(*shape, hidden_dtype)
    assert_rms_norm(hidden, weight, hp_dtype, float8_dtype, scales=(0.0,), wanted=WANTED[:1], share=0.02)
    hidden = whole(6, 16, hidden_dtype).view(-1)[1:81].view(5, 16)  # starts off 16 bytes
    assert_rms_norm(hidden, torch.ones(16, dtype=weight_dtype), hp_dtype, float8_dtype, wanted=WANTED[:1])


def _norm_unusual():
    weight = torch.tensor([1.0, -0.5])
    hidden = torch.tensor([[0.0, -0.0], [3e4, -3e4], [1e25, 1.0], [1e-25, -1e-25], [1.0, INF], [1.0, NAN], [-INF, NAN]])
    for eps, power_of_2 in ((EPS, False), (0.0, True)):
        options = {"eps": eps, "power_of_2": power_of_2, "wanted": WANTED[:2], "scales": (0.0, 3.0)}
        for chosen in (slice(0, 3), slice(3, 4), slice(None)):  # with an eps of 0 the first row is NaN
            assert_rms_norm(hidden[chosen], weight, F32, E4M3, **options)
        assert_rms_norm(hidden[1:].bfloat16(), weight, BF16, E5M2, **options)
    subnormal = torch.tensor([[2.0**-65, -(2.0**-65)]])  # the mean square is
    assert_rms_norm(subnormal, weight, F32, E4M3, eps=0.0, scales=(3.0,), wanted=WANTED[:2])
    for bad in (INF, NAN):  # tiles reach beyond three rows and two columns: nothing there may be seen
        options = {"wanted": WANTED[:2], "scales": (0.0,)}
        assert_rms_norm(torch.ones(3, 2), torch.tensor([1.0, bad]), BF16, E4M3, **options)


def _norm_joins_programs():
    """Statistics over several programs, several tiles of each; rows too wide for the chip."""
    triton_rows.TILE_ELEMENTS, triton_rms_norm.STATISTICS_PROGRAMS = 256, 3
    for load_ahead in (triton_rms_norm.load_ahead, lambda width: False):
        triton_rms_norm.load_ahead = load_ahead
        assert_rms_norm(whole(100, 48, F32), torch.randn(48), BF16, E4M3, scales=(0.0,), wanted=WANTED[:2])
    triton_rms_norm.WIDEST = 64
    assert not triton_rms_norm.fits(torch.empty(2, 80))
    assert_rms_norm(whole(20, 80, F32), torch.randn(80), BF16, E4M3, scales=(0.0,), wanted=WANTED[:1], share=0.02)


def _norm_gradients():
    triton_rows.TILE_ELEMENTS, triton_rows.SUM_BLOCKS, triton_rows.SUM_ROWS = 512, 3, 1
    torch.manual_seed(0)
    for load_ahead in (triton_producer_grads.load_ahead, lambda width: False):
        triton_producer_grads.load_ahead = load_ahead
        for shape in ((1, 1), (70, 45), (300, 48)):
            for hidden_dtype, weight_dtype, hp_dtype in NORMS:
                hidden, weight = varied(*shape, hidden_dtype), torch.randn(shape[1]).to(weight_dtype)
                grad = torch.randn(shape).to(hp_dtype)
                assert_norm_gradients(grad, hidden, weight)


def assert_norm_gradients(grad, hidden, weight):
    """Those of the formula in float64, to the last places of the dtype that they are written in."""
    with np.errstate(all="ignore"):
        inverse_rms = 1 / (hidden.float().square().mean(1) + EPS).sqrt()
        made = fused_producers.rms_norm_backward(grad, hidden, weight, inverse_rms)
    exact = [each.cpu().double().requires_grad_() for each in (hidden, weight)]
    formula = exact[0] * (exact[0].square().mean(1, keepdim=True) + EPS).rsqrt() * exact[1]
    expected = torch.autograd.grad(formula, exact, grad.cpu().double())
    for got, e, like in zip(made, expected, (hidden, weight), strict=True):
        assert got.dtype is like.dtype
        assert got.is_contiguous()
        tolerance = {F32: 1e-5, BF16: 2**-8, F16: 2**-9}[like.dtype]
        error, size = (got.cpu().double() - e).abs(), e.abs().amax(-1, keepdim=True)
        assert (error <= tolerance * size + 1e-6).all()


def _grad_weight_is_a_sum_of_all_rows():
    """Exactly, where nothing is rounded: rows of 1 and -1 have the root mean square 1."""
    triton_rows.SUM_BLOCKS, triton_rows.SUM_ROWS = 5, 1
    hidden, grad = torch.randint(0, 2, (700, 32)) * 2.0 - 1, torch.randint(-9, 10, (700, 32)).float()
    _, grad_weight = fused_producers.rms_norm_backward(grad, hidden, torch.ones(32), torch.ones(700))
    assert grad_weight.equal((grad * hidden).sum(0))


def _bytes(producer, cast):
    """The bytes that a cast moves for each element, of what it reads and of codes; and of all else."""
    first, second = varied(128, 256, BF16), varied(128, 256, BF16)
    if producer == "rms_norm":
        second = torch.randn(256)
    moved = []
    for rows, columns in WANTED[1:] + WANTED[:1]:
        scale = {"known": [torch.tensor(2.0)], "unknown": [torch.tensor(0.0)]}.get(cast, [])
        function = getattr(fused_producers, f"{producer}_cast_{'with_kept_scale' if scale else cast}")
        args = [EPS, BF16] if producer == "rms_norm" else []
        with counting_bytes() as counted:
            function(first, second, *args, *scale, E4M3, rows=rows, columns=columns)
        of_elements = counted.pop("bf16") + counted.pop("fp8e4nv")
        moved.append((of_elements / first.numel(), sum(counted.values()) / first.numel()))
    return moved


def _bytes_of_gradients():
    grad, gate, up = (varied(128, 256, BF16) for _ in range(3))
    with counting_bytes() as of_swiglu:
        fused_producers.swiglu_backward(grad, gate, up)
    with counting_bytes() as of_norm:
        fused_producers.rms_norm_backward(grad, gate, torch.randn(256), torch.ones(128))
    return of_swiglu["bf16"] / grad.numel(), of_norm["bf16"] / grad.numel()


@pytest.fixture(scope="module")
def interpreter():
    with interpreting_process() as call:
        yield call


@pytest.mark.parametrize(("hp_dtype", "float8_dtype"), [(F32, E5M2), (BF16, E4M3), (BF16, E5M2), (F16, E4M3)], ids=str)
def test_every_gate(interpreter, hp_dtype, float8_dtype):
    interpreter(_every_gate, hp_dtype, float8_dtype)


@pytest.mark.parametrize(("hp_dtype", "float8_dtype"), [(F32, E4M3), (BF16, E4M3), (F16, E5M2)], ids=str)
def test_shapes_of_swiglu(interpreter, hp_dtype, float8_dtype):
    interpreter(_swiglu_shapes, hp_dtype, float8_dtype)


@HP
def test_unusual_numbers_in_swiglu(interpreter, hp_dtype):
    interpreter(_swiglu_unusual, hp_dtype)


@HP
def test_gradients_of_swiglu(interpreter, hp_dtype):
    interpreter(_swiglu_gradients, hp_dtype)


@pytest.mark.parametrize("dtypes", NORMS, ids=str)
def test_shapes_of_rms_norm(interpreter, dtypes):
    interpreter(_norm_shapes, *dtypes, E4M3)


def test_unusual_numbers_in_rms_norm(interpreter):
    interpreter(_norm_unusual)


@pytest.mark.parametrize(
    ("producer", "cast", "of_rows", "of_columns", "of_both"),
    [
        ("swiglu", "layouts", 9, 9, 10),
        ("swiglu", "known", 5, 5, 6),
        ("swiglu", "unknown", 9, 9, 10),
        ("swiglu", "axes", 5, 9, 10),
        ("rms_norm", "layouts", 5, 5, 6),
        ("rms_norm", "known", 3, 5, 6),
        ("rms_norm", "unknown", 5, 5, 6),
        ("rms_norm", "axes", 3, 5, 6),
    ],
)
def test_bytes_of_a_bfloat16_element(interpreter, producer, cast, of_rows, of_columns, of_both):
    moved = interpreter(_bytes, producer, cast)
    assert [elements for elements, _ in moved] == [of_rows, of_columns, of_both]
    rest = {"swiglu": 0.5, "rms_norm": 1.6}[producer]  # scales, and the weight for each program of a small matrix
    assert max(others for _, others in moved) < rest


def test_gradients_read_once_and_write_once(interpreter):
    assert interpreter(_bytes_of_gradients) == (10, 6)


# Last, because they change the interpreter's modules.
def test_programs_of_swiglu_are_joined(interpreter):
    interpreter(_swiglu_joins_programs)


def test_programs_of_rms_norm_are_joined(interpreter):
    interpreter(_norm_joins_programs)


def test_gradients_of_rms_norm(interpreter):
    interpreter(_norm_gradients)
    interpreter(_grad_weight_is_a_sum_of_all_rows)

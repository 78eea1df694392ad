"""float8_mm: exact against float64, on every path; the hardware's rules checked without the hardware."""

import functools
import itertools
from unittest import mock

import pytest
import torch

from quaver import gemm
from quaver.gemm import GemmBackend, backend_for, float8_mm, native_operands
from quaver.kernels import cpu, exact_mm
from quaver.kernels.exact_mm import exact_float8_mm
from quaver.scaling import dynamic_cast, dynamic_cast_blocks, multiply_scale_
from quaver.slow_paths import error_on_slow_path
from tests.reference import assert_matmul_exact
from tests.thinned import thinned

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALINGS = ("tensorwise", "rowwise", "mixed_a", "mixed_b")


@pytest.fixture(autouse=True, params=["library", *(["own"] if cpu.HAS_MM else [])])
def multiplier(request, monkeypatch):
    """Who multiplies in the exact backend on a CPU: a library or, where it runs, quaver's matmul."""
    monkeypatch.setattr(cpu, "HAS_MM", request.param == "own")


def operands(m, k, n, scaling="tensorwise", *, a_dtype=E4M3, b_dtype=E4M3, power_of_2=False):
    """Two cast matrices with an outlier column and a different magnitude per row."""
    a = torch.randn(m, k) * torch.logspace(-3, 0, m).view(m, 1)
    b = torch.randn(k, n) * torch.logspace(1, -2, n)
    if k:
        a[:, 0] *= 30
    a_dim = 1 if scaling in ("rowwise", "mixed_a") else None
    b_dim = 0 if scaling in ("rowwise", "mixed_b") else None
    return (
        *dynamic_cast(a, a_dtype, a_dim, power_of_2=power_of_2)[::2],
        *dynamic_cast(b, b_dtype, b_dim, power_of_2=power_of_2)[::2],
    )


SHAPES = [(16, 16, 16), (128, 256, 64), (1, 300, 7), (33, 17, 5), (256, 1, 256), (128, 128, 128)]
FORMATS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]


@pytest.mark.parametrize(
    ("scaling", "out_dtype", "power_of_2", "shape", "formats"),
    thinned(SCALINGS, DTYPES, (False, True), SHAPES, FORMATS),
)
def test_matches_float64_on_the_same_operands(scaling, out_dtype, power_of_2, shape, formats):
    a_dtype, b_dtype = formats
    a, a_scale, b, b_scale = operands(*shape, scaling, a_dtype=a_dtype, b_dtype=b_dtype, power_of_2=power_of_2)
    out = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, scales_are_powers_of_2=power_of_2)
    assert out.dtype is out_dtype
    assert_matmul_exact(out, a, b, a_scale, b_scale)


@pytest.mark.parametrize(
    ("scaling", "out_dtype", "shape", "power_of_2", "transposed"),
    thinned(SCALINGS, DTYPES, [(301, 70), (70, 301)], (False, True), (False, True)),
)
def test_panels_make_up_the_whole(scaling, out_dtype, shape, power_of_2, transposed, monkeypatch):
    """The larger operand in panels of rows or columns, which need not be contiguous, all in the same memory."""
    monkeypatch.setattr(exact_mm, "PANEL_LENGTH", 90)
    monkeypatch.setattr(exact_mm, "PANEL_ELEMENTS", 1)
    m, n = shape
    a, a_scale, b, b_scale = operands(m, 128, n, scaling, power_of_2=power_of_2)
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    bias = torch.randn(n)
    panels = exact_mm._panels(a, 0) if m > n else exact_mm._panels(b, 1)
    assert [start for start, _ in panels] == [0, 75, 150, 225]
    assert [length for _, length in panels] == [75, 75, 75, 76]
    out = exact_float8_mm(a, b, a_scale, b_scale, None, out_dtype, power_of_2)
    assert_matmul_exact(out, a, b, a_scale, b_scale)
    with_bias = exact_float8_mm(a, b, a_scale, b_scale, bias, out_dtype, power_of_2)
    off = (with_bias.float() - (out.float() + bias)).abs()
    assert (off <= 2**-7 * (out.float().abs() + bias.abs())).all()  # as many roundings to out_dtype as there are terms


VARYING = ("blocks", "rows")


def stored_once(kind, n, k, *, power_of_2):
    """A weight [N, K] cast once, by blocks or by rows, and its scale spread over every element."""
    weight = torch.randn(n, k) * torch.logspace(-2, 2, n).view(-1, 1)
    cast = dynamic_cast_blocks if kind == "blocks" else functools.partial(dynamic_cast, dim=1)
    codes, _, scale = cast(weight, E4M3, power_of_2=power_of_2)
    return codes, scale, multiply_scale_(torch.ones(n, k), scale)


@pytest.mark.parametrize(
    ("kind", "out_dtype", "power_of_2", "shape", "panels"),
    thinned(VARYING, DTYPES, (False, True), [(16, 128, 256), (300, 129, 1), (5, 300, 513), (1, 1, 1)], (False, True)),
)
def test_a_weight_stored_once_multiplies_exactly_both_ways(kind, out_dtype, power_of_2, shape, panels, monkeypatch):
    if panels:
        monkeypatch.setattr(exact_mm, "PANEL_LENGTH", 200)
        monkeypatch.setattr(exact_mm, "PANEL_ELEMENTS", 1)
    m, n, k = shape
    codes, scale, spread = stored_once(kind, n, k, power_of_2=power_of_2)
    for b, b_scale, b_spread in ((codes.t(), scale.t(), spread.t()), (codes, scale, spread)):
        a, _, a_scale = dynamic_cast(torch.randn(m, b.shape[0]), E4M3, 1, power_of_2=power_of_2)
        out = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, scales_are_powers_of_2=power_of_2)
        assert_matmul_exact(out, a, b, a_scale, b_spread)
        padded = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, scales_are_powers_of_2=power_of_2, pad=True)
        assert_matmul_exact(padded, a, b, a_scale, b_spread)


def test_scales_along_the_contracted_dim_never_go_to_the_hardware(monkeypatch):
    monkeypatch.setattr(gemm, "backend_for", lambda *args, **kwargs: GemmBackend.NATIVE)
    a, one = torch.ones(16, 256).to(E4M3), torch.tensor(1.0)
    b = torch.ones(256, 160).to(E4M3)
    chosen = {rows: gemm._backend_of(a, b, one, torch.ones(rows), False) for rows in [(1, 160), (256, 1), (2, 2)]}
    assert chosen == {(1, 160): GemmBackend.NATIVE, (256, 1): GemmBackend.EXACT, (2, 2): GemmBackend.EXACT}


@pytest.mark.parametrize(("scaling", "out_dtype"), list(zip(SCALINGS, (*DTYPES, torch.bfloat16), strict=True)))
def test_compiled_is_exact_too(scaling, out_dtype):
    a, a_scale, b, b_scale = operands(128, 96, 160, scaling, power_of_2=True)
    compiled = torch.compile(float8_mm, fullgraph=True)
    for word in (False, True):
        out = compiled(a, b, a_scale, b_scale, out_dtype=out_dtype, scales_are_powers_of_2=word)
        assert_matmul_exact(out, a, b, a_scale, b_scale)


def test_any_strides():
    a, a_scale, b, b_scale = operands(128, 128, 128)
    expected = float8_mm(a, b, a_scale, b_scale, out_dtype=torch.float32)
    a_columns = a.t().contiguous().t()
    b_strided = torch.zeros(128, 256).to(E4M3)
    b_strided.view(torch.uint8)[:, ::2] = b.view(torch.uint8)
    assert float8_mm(a_columns, b_strided[:, ::2], a_scale, b_scale, out_dtype=torch.float32).equal(expected)


@pytest.mark.parametrize(
    ("scaling", "shape", "out_dtype"), thinned(SCALINGS, [(33, 17, 5), (128, 100, 130), (16, 16, 16)], DTYPES)
)
def test_padding_never_changes_a_result(scaling, shape, out_dtype):
    a, a_scale, b, b_scale = operands(*shape, scaling)
    bias = torch.randn(shape[2])
    plain = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, bias=bias)
    padded = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, bias=bias, pad=True)
    torch.testing.assert_close(padded, plain, rtol=torch.finfo(out_dtype).eps, atol=1e-4 * plain.abs().max().item())
    unbiased = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, pad=True)
    assert_matmul_exact(unbiased, a, b, a_scale, b_scale)


@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str)
def test_empty_operands(shape):
    a, a_scale, b, b_scale = operands(*shape)
    out = float8_mm(a, b, a_scale, b_scale, out_dtype=torch.bfloat16, bias=torch.ones(shape[2]))
    assert out.equal(torch.ones(shape[0], shape[2], dtype=torch.bfloat16))


@pytest.mark.parametrize(("bad", "out_dtype", "size"), thinned([float("nan"), float("inf")], DTYPES, (16, 128)))
def test_non_finite_values_reach_the_result(bad, out_dtype, size):
    hp = torch.randn(size, size)
    hp[3, 4] = bad
    b, _, b_scale = dynamic_cast(torch.randn(size, size), E4M3)
    a, _, a_scale = dynamic_cast(hp, E4M3)
    assert float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype).isnan().all()
    a, _, a_scale = dynamic_cast(hp, E4M3, 1)
    out = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype)
    assert out[3].isnan().all()
    assert out[:3].isfinite().all()


def test_float32_matmul_setting_is_restored():
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    a, a_scale, b, b_scale = operands(128, 128, 128)
    float8_mm(a, b, a_scale, b_scale, out_dtype=torch.float32)
    assert setting.fp32_precision == before
    with pytest.raises(RuntimeError):
        exact_float8_mm(a, b[:5], a_scale, b_scale, None, torch.float32, False)
    assert setting.fp32_precision == before


def test_the_operation_has_a_faithful_fake():
    for scaling, bias, out_dtype in itertools.product(SCALINGS, (None, torch.ones(8)), DTYPES):
        a, a_scale, b, b_scale = operands(16, 32, 8, scaling)
        args = (a, b, a_scale, b_scale, bias, out_dtype, False)
        # The schema test multiplies every argument, which torch cannot do in float8.
        torch.library.opcheck(torch.ops.quaver.exact_float8_mm, args, test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, s, t: (a.float(), b, s, t), "expected two float8 matrices"),
        (lambda a, b, s, t: (a.float().to(E5M2), b.float().to(E5M2), s, t), "no hardware multiplies e5m2 by e5m2"),
        (lambda a, b, s, t: (a[:, :5], b, s, t), r"expected \[M, K\] and \[K, N\], got \[16, 5\] and \[16, 16\]"),
        (lambda a, b, s, t: (a[0], b, s, t), r"expected \[M, K\] and \[K, N\]"),
        (lambda a, b, s, t: (a, b, torch.ones(16), t), "a_dequant_scale: expected float32 of shape"),
        (lambda a, b, s, t: (a, b, s, torch.ones(15, 1)), "b_dequant_scale: expected float32 of shape"),
        (lambda a, b, s, t: (a, b, s.double(), t), "a_dequant_scale: expected float32 of shape"),
    ],
)
def test_bad_operands(change, message):
    a, a_scale, b, b_scale = operands(16, 16, 16)
    a, b, a_scale, b_scale = change(a, b, a_scale, b_scale)
    with pytest.raises(ValueError, match=message):
        float8_mm(a, b, a_scale, b_scale, out_dtype=torch.float32)


def test_a_cpu_never_takes_the_native_path():
    assert backend_for(torch.device("cpu"), rowwise=False) is GemmBackend.EXACT
    assert gemm.native_failure(0, False) == "no CUDA device" or torch.cuda.is_available()


def test_emulate_never_takes_the_native_path():
    with mock.patch.object(gemm, "_native_works", return_value=True):
        assert backend_for(torch.device("cuda"), rowwise=True) is GemmBackend.NATIVE
        assert backend_for(torch.device("cuda"), rowwise=True, emulate=True) is GemmBackend.EXACT


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(16, 16, 16), (33, 17, 5), (1, 64, 48), (40, 100, 16)], ids=str)
def test_native_operands_obey_the_hardware_and_mean_the_same(scaling, shape):
    a, a_scale, b, b_scale = operands(*shape, scaling)
    na, nb, na_scale, nb_scale = native_operands(a.t().contiguous().t(), b, a_scale, b_scale)
    assert na.shape[1] % 16 == nb.shape[0] % 16 == nb.shape[1] % 16 == 0
    assert na.is_contiguous()
    assert nb.t().is_contiguous()
    assert (na_scale.dim() == 0) == (nb_scale.dim() == 0) == (scaling == "tensorwise")
    if scaling != "tensorwise":
        assert na_scale.shape == (na.shape[0], 1)
        assert nb_scale.shape == (1, nb.shape[1])
        assert na_scale.is_contiguous()
        assert nb_scale.is_contiguous()
    product = (na.double() * na_scale) @ (nb.double() * nb_scale)
    expected = (a.double() * a_scale) @ (b.double() * b_scale)
    torch.testing.assert_close(product[:, : shape[2]], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("scaling", "out_dtype", "bias_dtype"), thinned(SCALINGS, DTYPES, (None, torch.bfloat16, torch.float32))
)
def test_native_call_passes_torchs_checks_for_a_gpu(scaling, out_dtype, bias_dtype):
    """torch's own checks of strides, sizes and dtypes of a CUDA call, run on meta tensors, on any machine."""
    m, k, n = 33, 17, 5
    a = torch.empty(m, k, device="meta", dtype=E4M3)
    b = torch.empty(k, n, device="meta", dtype=E5M2)
    a_scale = torch.empty((m, 1) if scaling in ("rowwise", "mixed_a") else (), device="meta")
    b_scale = torch.empty((1, n) if scaling in ("rowwise", "mixed_b") else (), device="meta")
    bias = None if bias_dtype is None else torch.empty(n, device="meta", dtype=bias_dtype)
    with (
        mock.patch("torch._meta_registrations.device_hint", return_value="cuda") as hint,
        mock.patch.object(gemm, "backend_for", return_value=GemmBackend.NATIVE),
    ):
        out = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, bias=bias)
        assert hint.called
        with pytest.raises(RuntimeError, match="divisible by 16|row_major|col_major"):
            torch._scaled_mm(a, b, torch.empty((), device="meta"), torch.empty((), device="meta"))
    assert out.shape == (m, n)
    assert out.dtype is out_dtype


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: operation not permitted when stream is capturing"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_probe_that_fails_for_a_passing_reason_raises_and_is_tried_again(error, gpu_probe):
    probe = gpu_probe([error])
    with pytest.raises(RuntimeError, match=r"memory|ALLOC|captur"):
        gemm.native_failure(0, False)
    assert gemm.native_failure(0, False) is None
    assert gemm.native_failure(0, False) is None
    assert probe == ["failed", "multiplied", "multiplied"]  # of two formats, once


def test_a_verdict_about_the_hardware_is_remembered_and_said_once(gpu_probe, caplog):
    probe = gpu_probe([RuntimeError("torch._scaled_mm is only supported on compute capability >= 9.0\nat line 1")])
    for _ in range(3):
        assert gemm.backend_for(torch.device("cuda", 0), rowwise=True) is gemm.GemmBackend.EXACT
    assert probe == ["failed"]
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert "row-wise scales exactly" in said[0]
    assert said[0].endswith("compute capability >= 9.0")
    with error_on_slow_path(), pytest.raises(RuntimeError, match="only supported"):
        gemm.backend_for(torch.device("cuda", 0), rowwise=True)


def test_no_probe_runs_while_a_graph_is_captured(gpu_probe, monkeypatch):
    probe = gpu_probe([])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run a step before the capture"):
        gemm.native_failure(0, False)
    assert probe == []


@pytest.fixture
def gpu_probe(monkeypatch):
    """A GPU whose native matmul raises the given errors, one a call, and is then right."""

    def install(errors):
        calls = []

        def native_mm(a, b, a_scale, b_scale, *options):
            calls.append("failed" if errors else "multiplied")
            if errors:
                raise errors.pop()
            return ((a.float() * a_scale) @ (b.float() * b_scale)).bfloat16()

        monkeypatch.setattr(gemm, "_native_failures", {})
        monkeypatch.setattr(gemm, "_native_mm", native_mm)
        monkeypatch.setattr(gemm, "probe_native_mm", lambda device, rowwise: real_probe(torch.device("cpu"), rowwise))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return calls

    real_probe = gemm.probe_native_mm
    return install

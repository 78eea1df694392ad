"""Tests float8_mm against float64 on every path, and the hardware's rules without the hardware."""

import functools
import itertools

import pytest
import torch

from quaver import CastConfig, Float8LinearConfig, ScalingGranularity
from quaver.kernels import cpu, exact_mm, native_mm
from quaver.kernels.exact_mm import exact_float8_mm
from quaver.kernels.native_mm import ScaleKind, native_block_mm, prepare_native_operands
from quaver.kernels.operands import Operand
from quaver.linear import backends
from quaver.linear.backends import GemmBackend, choose_backend
from quaver.linear.gemm import float8_mm
from quaver.recipes.scale_layout import TENSORWISE, infer_layout
from quaver.recipes.scaling import dynamic_cast, dynamic_cast_blocks, multiply_scale_
from quaver.runtime.slow_paths import error_on_slow_path
from tests.recipes import E4M3, E5M2
from tests.reference import assert_matmul_exact
from tests.thinned import at_night, thinned
from tests.virtual_gpu import matmuls, virtual_gpu
from tests.virtual_gpu.runtime import simulate_capture

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALINGS = ("tensorwise", "rowwise", "mixed_a", "mixed_b")


@pytest.fixture(autouse=True, params=["library", *(["own"] if cpu.HAS_MM else [])])
def multiplier(request, monkeypatch):
    """Multiply by a library, or by quaver's matmul where it runs, in the exact backend on a CPU."""
    monkeypatch.setattr(cpu, "HAS_MM", request.param == "own")


def make_operands(m, k, n, scaling="tensorwise", *, a_dtype=E4M3, b_dtype=E4M3, power_of_2=False):
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
def test_products_match_float64_on_the_same_operands(scaling, out_dtype, power_of_2, shape, formats):
    a_dtype, b_dtype = formats
    a, a_scale, b, b_scale = make_operands(*shape, scaling, a_dtype=a_dtype, b_dtype=b_dtype, power_of_2=power_of_2)
    out = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, scales_are_powers_of_2=power_of_2)
    assert out.dtype is out_dtype
    assert_matmul_exact(out, a, b, a_scale, b_scale)


@pytest.mark.parametrize(
    ("scaling", "out_dtype", "shape", "power_of_2", "transposed"),
    thinned(SCALINGS, DTYPES, [(301, 70), (70, 301)], (False, True), (False, True)),
)
def test_exact_matmul_in_panels_equals_the_whole_matmul(scaling, out_dtype, shape, power_of_2, transposed, monkeypatch):
    """The larger operand in panels of rows or columns, which need not be contiguous, all in the same memory."""
    monkeypatch.setattr(exact_mm, "MAX_PANEL_LENGTH", 90)
    monkeypatch.setattr(exact_mm, "MIN_PANEL_ELEMENTS", 1)
    m, n = shape
    a, a_scale, b, b_scale = make_operands(m, 128, n, scaling, power_of_2=power_of_2)
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    bias = torch.randn(n)
    panels = exact_mm.split_panels(a, 0) if m > n else exact_mm.split_panels(b, 1)
    assert [start for start, _ in panels] == [0, 75, 150, 225]
    assert [length for _, length in panels] == [75, 75, 75, 76]
    layouts = infer_layout(a_scale, a.shape), infer_layout(b_scale, b.shape)
    out = exact_float8_mm(a, b, a_scale, b_scale, None, out_dtype, power_of_2, *layouts)
    assert_matmul_exact(out, a, b, a_scale, b_scale)
    with_bias = exact_float8_mm(a, b, a_scale, b_scale, bias, out_dtype, power_of_2, *layouts)
    off = (with_bias.float() - (out.float() + bias)).abs()
    assert (off <= 2**-7 * (out.float().abs() + bias.abs())).all()  # as many roundings to out_dtype as there are terms


def cast_weight_once(kind, n, k, *, power_of_2):
    """Return the codes and scale of a weight [N, K], cast by blocks or rows, and its scale for each element."""
    weight = torch.randn(n, k) * torch.logspace(-2, 2, n).view(-1, 1)
    cast = dynamic_cast_blocks if kind == "blocks" else functools.partial(dynamic_cast, dim=1)
    codes, _, scale = cast(weight, E4M3, power_of_2=power_of_2)
    return codes, scale, multiply_scale_(torch.ones(n, k), scale)


@pytest.mark.parametrize(
    ("kind", "out_dtype", "power_of_2", "shape", "panels"),
    thinned(
        ("blocks", "rows"),
        DTYPES,
        (False, True),
        [(16, 128, 256), (300, 129, 1), (5, 300, 513), (1, 1, 1)],
        (False, True),
    ),
)
def test_a_weight_stored_once_multiplies_exactly_both_ways(kind, out_dtype, power_of_2, shape, panels, monkeypatch):
    if panels:
        monkeypatch.setattr(exact_mm, "MAX_PANEL_LENGTH", 200)
        monkeypatch.setattr(exact_mm, "MIN_PANEL_ELEMENTS", 1)
    m, n, k = shape
    codes, scale, spread = cast_weight_once(kind, n, k, power_of_2=power_of_2)
    for b, b_scale, b_spread in ((codes.t(), scale.t(), spread.t()), (codes, scale, spread)):
        a, _, a_scale = dynamic_cast(torch.randn(m, b.shape[0]), E4M3, 1, power_of_2=power_of_2)
        for pad in (False, True):
            options = {"out_dtype": out_dtype, "scales_are_powers_of_2": power_of_2, "pad": pad}
            assert_matmul_exact(float8_mm(a, b, a_scale, b_scale, **options), a, b, a_scale, b_spread)


def find_scale_kind(a, b, a_scale, b_scale):
    """Return the kind of scales of a matmul, by the shapes of the scales."""
    pairs = (a, a_scale), (b, b_scale)
    return native_mm.find_scale_kind(
        *(Operand(codes, scale, infer_layout(scale, codes.shape)) for codes, scale in pairs)
    )


@pytest.mark.parametrize(
    ("scaling", "out_dtype", "backend"),
    [
        ("tensorwise", torch.float32, "inductor"),
        ("mixed_a", torch.bfloat16, "aot_eager"),
        *at_night([("rowwise", torch.float16, "aot_eager"), ("mixed_b", torch.bfloat16, "aot_eager")]),
    ],
)
def test_compiled_matmul_is_exact(scaling, out_dtype, backend):
    a, a_scale, b, b_scale = make_operands(128, 96, 160, scaling, power_of_2=True)
    compiled = torch.compile(float8_mm, fullgraph=True, backend=backend)
    for power_of_2 in (False, True):
        out = compiled(a, b, a_scale, b_scale, out_dtype=out_dtype, scales_are_powers_of_2=power_of_2)
        assert_matmul_exact(out, a, b, a_scale, b_scale)


def test_strides_change_no_bit():
    a, a_scale, b, b_scale = make_operands(128, 128, 128)
    expected = float8_mm(a, b, a_scale, b_scale, out_dtype=torch.float32)
    a_columns = a.t().contiguous().t()
    b_strided = torch.zeros(128, 256).to(E4M3)
    b_strided.view(torch.uint8)[:, ::2] = b.view(torch.uint8)
    assert float8_mm(a_columns, b_strided[:, ::2], a_scale, b_scale, out_dtype=torch.float32).equal(expected)


@pytest.mark.parametrize(
    ("scaling", "shape", "out_dtype"), thinned(SCALINGS, [(33, 17, 5), (128, 100, 130), (16, 16, 16)], DTYPES)
)
def test_padding_never_changes_a_result(scaling, shape, out_dtype):
    a, a_scale, b, b_scale = make_operands(*shape, scaling)
    bias = torch.randn(shape[2])
    plain = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, bias=bias)
    padded = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, bias=bias, pad=True)
    torch.testing.assert_close(padded, plain, rtol=torch.finfo(out_dtype).eps, atol=1e-4 * plain.abs().max().item())
    unbiased = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, pad=True)
    assert_matmul_exact(unbiased, a, b, a_scale, b_scale)


def test_padding_completes_scales_along_the_contracted_dim():
    a, _, b, b_scale = make_operands(33, 17, 5)
    a_scale = torch.rand(1, 17)
    padded = float8_mm(a, b, a_scale, b_scale, out_dtype=torch.float32, pad=True)
    assert_matmul_exact(padded, a, b, a_scale, b_scale)


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("large", [0, 1], ids=["a", "b"])
def test_results_of_large_amaxes_are_finite(size, large):
    """A sum times the dequant_scale of 1e36 is no float32 number; the result is."""
    matrices = [torch.randn(size, size).clamp(-3, 3) for _ in range(2)]
    matrices[large] *= 3e35
    (a, _, a_scale), (b, _, b_scale) = (dynamic_cast(matrix, E4M3) for matrix in matrices)
    out = float8_mm(a, b, a_scale, b_scale, out_dtype=torch.float32)
    expected = (a.double() * a_scale) @ (b.double() * b_scale)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str)
def test_empty_operands_give_the_bias(shape):
    a, a_scale, b, b_scale = make_operands(*shape)
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
    a, a_scale, b, b_scale = make_operands(128, 128, 128)
    float8_mm(a, b, a_scale, b_scale, out_dtype=torch.float32)
    assert setting.fp32_precision == before
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        exact_float8_mm(a, b[:5], a_scale, b_scale, None, torch.float32, False, TENSORWISE, TENSORWISE)
    assert setting.fp32_precision == before


def test_the_operation_has_a_faithful_fake():
    for scaling, bias, out_dtype in itertools.product(SCALINGS, (None, torch.ones(8)), DTYPES):
        a, a_scale, b, b_scale = make_operands(16, 32, 8, scaling)
        layouts = [*infer_layout(a_scale, a.shape)], [*infer_layout(b_scale, b.shape)]
        args = (a, b, a_scale, b_scale, bias, out_dtype, False, *layouts)
        # The schema test multiplies every argument, which torch cannot do in float8.
        torch.library.opcheck(torch.ops.quaver.exact_float8_mm, args, test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, s, t: (a.float(), b, s, t), "expected two float8 matrices"),
        (
            lambda a, b, s, t: (a.float().to(E5M2), b.float().to(E5M2), s, t),
            "expected an operand in e4m3, got two in e5m2",
        ),
        (lambda a, b, s, t: (a[:, :5], b, s, t), r"expected \[M, K\] and \[K, N\], got \[16, 5\] and \[16, 16\]"),
        (lambda a, b, s, t: (a[0], b, s, t), r"expected \[M, K\] and \[K, N\]"),
        (lambda a, b, s, t: (a, b, torch.ones(16), t), r"a_dequant_scale: expected a scale of shape \[\]"),
        (lambda a, b, s, t: (a, b, s, torch.ones(15, 1)), r"b_dequant_scale: expected a scale of .* got \[15, 1\]"),
        (lambda a, b, s, t: (a, b, s.double(), t), "a_dequant_scale: expected float32, got torch.float64"),
    ],
)
def test_bad_operands_are_refused(change, message):
    a, a_scale, b, b_scale = make_operands(16, 16, 16)
    with pytest.raises(ValueError, match=message):
        float8_mm(*change(a, b, a_scale, b_scale), out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"out_dtype": dtype}, f"expected an out_dtype of torch.float32, .* got {dtype}")
            for dtype in (torch.float64, torch.int32, E4M3)
        ),
        ({"bias": torch.ones(16, dtype=torch.complex64)}, "expected a bias of torch.float32, .* got torch.complex64"),
        ({"bias": torch.ones(1)}, r"expected a bias of \[16\], got \[1\]"),
        ({"bias": torch.ones(16, 1)}, r"expected a bias of \[16\], got \[16, 1\]"),
    ],
)
def test_bad_options_are_refused(options, message):
    a, a_scale, b, b_scale = make_operands(16, 16, 16)
    with pytest.raises(ValueError, match=message):
        float8_mm(a, b, a_scale, b_scale, **{"out_dtype": torch.float32, **options})


def test_a_cpu_and_emulation_never_take_the_native_path():
    assert choose_backend(torch.device("cpu"), ScaleKind.TENSORWISE) is GemmBackend.EXACT
    assert backends.find_native_failure(0, ScaleKind.TENSORWISE) == "no CUDA device" or torch.cuda.is_available()
    with virtual_gpu("h100"):
        assert choose_backend(torch.device("cpu"), ScaleKind.ROWWISE) is GemmBackend.NATIVE
        assert choose_backend(torch.device("cpu"), ScaleKind.ROWWISE, emulate=True) is GemmBackend.EXACT


def test_the_trial_of_cuda_without_an_index_is_of_the_current_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tried = []
    choose_backend(torch.device("cuda"), ScaleKind.ROWWISE, is_native=lambda index, kind: tried.append(index))
    assert tried == [1]


@pytest.mark.parametrize(
    ("scaling", "shape", "out_dtype", "bias_dtype"),
    thinned(
        SCALINGS, [(16, 16, 16), (33, 17, 5), (1, 64, 48), (40, 100, 16)], DTYPES, (None, torch.bfloat16, torch.float32)
    ),
)
def test_native_matmul_meets_hardware_rules_and_keeps_the_result(scaling, shape, out_dtype, bias_dtype):
    a, a_scale, b, b_scale = make_operands(*shape, scaling, b_dtype=E5M2)
    bias = None if bias_dtype is None else torch.randn(shape[2], dtype=bias_dtype)
    expected = (a.double() * a_scale) @ (b.double() * b_scale)
    rounding = 2**-7 * (expected.abs() + (0 if bias is None else bias.abs())) + 2**-24  # subnormal in float16
    expected = expected if bias is None else expected + bias
    with virtual_gpu("h100") as card:
        assert choose_backend(torch.device("cpu"), find_scale_kind(a, b, a_scale, b_scale)) is GemmBackend.NATIVE
        card.calls.clear()  # of the trial
        out = float8_mm(a.t().contiguous().t(), b, a_scale, b_scale, out_dtype=out_dtype, bias=bias)
    assert list(card.calls) == [("_scaled_mm", "tensorwise" if scaling == "tensorwise" else "rowwise")]
    assert out.dtype is out_dtype
    assert ((out.double() - expected).abs() <= rounding).all()


def test_native_matmuls_read_scales_at_multiples_of_16_bytes():
    """As cuBLAS requires of pointers; experts' scales and FSDP2's are elements of one tensor."""
    scales, codes = torch.arange(1.0, 9.0), torch.ones(16, 16).to(E4M3)
    for index in range(1, 6):
        *_, a_scale, b_scale = prepare_native_operands(
            Operand(codes, scales[index]), Operand(codes.t(), scales[index + 1])
        )
        assert (a_scale.item(), b_scale.item()) == (index + 1, index + 2)
        assert a_scale.data_ptr() % 16 == b_scale.data_ptr() % 16 == 0


BLOCK_SHAPES = [(33, 200, 300), (128, 256, 128), (5, 17, 7), (160, 64, 48), (130, 1000, 260)]


def make_block_operands(m, k, n, length, is_square):
    """Return a [m, k] and b [k, n], and their scales."""
    a = torch.randn(m, k) * torch.logspace(-3, 0, m).view(m, 1)
    b = torch.randn(k, n) * torch.logspace(1, -2, n)
    options = {"power_of_2": True, "rule": {32: "rceil", 128: ""}[length]}
    a, _, a_scale = dynamic_cast_blocks(a, E4M3, block_size=(1, length), **options)
    b, _, b_scale = dynamic_cast_blocks(b, E4M3, block_size=(length, length if is_square else 1), **options)
    return a, b, a_scale, b_scale


@pytest.mark.parametrize(("shape", "length", "is_square"), thinned(BLOCK_SHAPES, (128, 32), (True, False)))
def test_blocks_reach_the_hardware_in_its_layouts(shape, length, is_square):
    """Every scale is read where the hardware reads it; ragged blocks are completed with zeros."""
    a, b, a_scale, b_scale = make_block_operands(*shape, length=length, is_square=is_square)
    expected = float8_mm(a, b, a_scale, b_scale, out_dtype=torch.float32, scales_are_powers_of_2=True)
    with virtual_gpu({128: "h100", 32: "b200"}[length]) as card:
        out = native_block_mm(a, b, a_scale, b_scale, length, is_square)
    assert card.calls.total() == 1
    torch.testing.assert_close(out, expected.bfloat16(), rtol=2**-7, atol=1e-6)
    if min(shape) > length:
        assert find_scale_kind(a, b, a_scale, b_scale).block_length == length


def test_padding_keeps_the_memory_layout_of_codes():
    stored = torch.randn(17, 40).to(E4M3)
    for codes in (stored, stored.t()):
        padded = native_mm.pad_codes(codes, 3, 5)
        assert padded.shape == (codes.shape[0] + 3, codes.shape[1] + 5)
        assert padded.is_contiguous() == codes.is_contiguous()
        assert padded.t().is_contiguous() == codes.t().is_contiguous()
        assert padded[: codes.shape[0], : codes.shape[1]].float().equal(codes.float())
        assert padded.float().count_nonzero() == codes.float().count_nonzero()


@pytest.mark.parametrize(
    ("kind", "card", "bits"),
    [(ScaleKind.BLOCKS_OF_128, "h100", torch.int32), (ScaleKind.BLOCKS_OF_32, "b200", torch.uint8)],
)
def test_a_trial_sees_a_wrong_scale(kind, card, bits, monkeypatch):
    def exchange_scales_of_a(card, a, b, scale_a, *rest):
        exchanged = scale_a[0].view(bits).t().flip(0).t().view(scale_a[0].dtype)
        return matmuls.scaled_mm_v2(card, a, b, [exchanged], *rest)

    monkeypatch.setitem(matmuls.OPERATOR_MODELS, "_scaled_mm_v2", exchange_scales_of_a)
    with virtual_gpu(card), backends.replace_trial_results({}):
        assert "wrong result" in backends.find_native_failure(0, kind)


def test_a_trial_sees_nans(monkeypatch):
    def multiply(*args, **options):
        return matmuls.scaled_mm(*args, **options) * float("nan")

    monkeypatch.setitem(matmuls.OPERATOR_MODELS, "_scaled_mm", multiply)
    with virtual_gpu("h100"), backends.replace_trial_results({}):
        assert "wrong result" in backends.find_native_failure(0, ScaleKind.TENSORWISE)


@pytest.mark.parametrize(
    ("recipe", "kind"), [("blockwise", ScaleKind.BLOCKS_OF_128), ("mxfp8", ScaleKind.BLOCKS_OF_32)]
)
def test_the_hardware_is_asked_for_each_matmul_of_a_recipe(recipe, kind):
    """On a device whose blocks work all three are native; 1 x 32 with scales that have mantissas is not."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    assert {backends.predict_scale_kind(*pair) for pair in backends.list_matmul_casts(config).values()} == {kind}
    plain = CastConfig(scaling_granularity=ScalingGranularity.BLOCKWISE, block_size=(1, 32), target_dtype=E4M3)
    assert backends.predict_scale_kind(plain, plain) is None


@pytest.fixture
def device_errors(monkeypatch):
    """Return errors that the virtual GPU's next matmuls raise, and the names of the cards that were called."""
    errors, called = [], []

    def multiply(card, *args, **options):
        called.append(card.name)
        if errors:
            raise errors.pop()
        return matmuls.scaled_mm(card, *args, **options)

    monkeypatch.setitem(matmuls.OPERATOR_MODELS, "_scaled_mm", multiply)
    return errors, called


def make_device_error(text, code):
    error = torch.AcceleratorError(text)
    error.error_code = code  # as PyTorch sets it
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasLtMatmul"),
        make_device_error("CUDA error: operation not permitted when stream is capturing", 900),
        make_device_error("CUDA error: an illegal memory access was encountered", 700),
    ],
)
def test_a_trial_that_fails_temporarily_raises_and_is_retried(error, device_errors):
    errors, called = device_errors
    errors.append(error)
    with virtual_gpu("h100"):
        with pytest.raises(RuntimeError, match=r"memory|_FAILED|captur"):
            backends.find_native_failure(0, ScaleKind.TENSORWISE)
        for _ in range(2):
            assert backends.find_native_failure(0, ScaleKind.TENSORWISE) is None
    assert len(called) == 1 + 2  # of two formats, once


def test_a_failure_of_the_hardware_is_its_first_line():
    assert backends.describe_hardware_failure(NotImplementedError()) == "NotImplementedError"
    unsupported = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"
    assert backends.describe_hardware_failure(RuntimeError(unsupported)) == unsupported
    missing = make_device_error("CUDA error: no kernel image is available\nCompile with", 209)
    assert backends.describe_hardware_failure(missing) == "CUDA error: no kernel image is available"


def test_a_failed_trial_is_cached_and_warns_once(device_errors, caplog):
    with virtual_gpu("rtx5090"):
        for _ in range(3):
            assert choose_backend(torch.device("cpu"), ScaleKind.ROWWISE) is GemmBackend.EXACT
        with error_on_slow_path(), pytest.raises(RuntimeError, match="no rowwise scales on sm_120"):
            choose_backend(torch.device("cpu"), ScaleKind.ROWWISE)
    assert device_errors[1] == ["rtx5090"]
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "rowwise scales on the exact backend" in warning
    assert warning.endswith("no rowwise scales on sm_120")


def test_no_trial_runs_while_a_graph_is_captured():
    with virtual_gpu("h100") as card, simulate_capture():
        with pytest.raises(RuntimeError, match="run a step before the capture"):
            backends.find_native_failure(0, ScaleKind.TENSORWISE)
        assert not card.calls

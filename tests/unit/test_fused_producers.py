"""SwiGLU and RMSNorm in float8 where no Triton runs: the expression and its cast; operations of a compiler; errors."""

import pytest
import torch
import torch.nn.functional as F

from quaver import producers
from quaver.kernels import fused_producers, layouts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F32 = torch.bfloat16, torch.float32
WANTED = pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True)])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def inputs(dtype=BF16, shape=(6, 10), device="cpu"):
    """gate and up, or grad and hidden; and a weight."""
    return torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, device=device).to(dtype) * 3


def leaves(made):
    """The tensors of nested tuples, in their order; None stays."""
    if isinstance(made, tuple):
        return [leaf for each in made for leaf in leaves(each)]
    return [made]


def assert_same(made, expected):
    for got, e in zip(leaves(made), leaves(expected), strict=True):
        assert (got is None) == (e is None)
        if e is not None:
            assert got.dtype is e.dtype
            assert got.stride() == e.stride()
            assert got.reshape(-1).view(torch.uint8).equal(e.reshape(-1).view(torch.uint8))


@WANTED
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
def test_swiglu_is_the_cast_of_the_expression(dtype, rows, columns):
    gate, up = inputs(dtype)
    product, wanted = F.silu(gate) * up, {"rows": rows, "columns": columns, "power_of_2": True}
    kept = torch.tensor(0.3)
    assert_same(
        fused_producers.swiglu_cast_layouts(gate, up, E4M3, **wanted), layouts.cast_layouts(product, E4M3, **wanted)
    )
    assert_same(
        fused_producers.swiglu_cast_with_persistent_scale(gate, up, kept, E5M2, **wanted),
        layouts.cast_with_persistent_scale(product, kept, E5M2, **wanted),
    )
    assert_same(fused_producers.swiglu_cast_axes(gate, up, E4M3, **wanted), layouts.cast_axes(product, E4M3, **wanted))


@WANTED
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "hp_dtype"), [(F32, BF16, BF16), (BF16, F32, BF16), (F32, F32, F32)], ids=str
)
def test_rms_norm_is_the_cast_of_the_expression(dtype, weight_dtype, hp_dtype, rows, columns):
    hidden, weight = inputs(dtype)[1], torch.randn(10, dtype=weight_dtype)
    normed = producers.rms_norm(hidden, weight, EPS, hp_dtype)
    inverse_rms = (hidden.float().square().mean(1) + EPS).rsqrt()
    wanted, kept = {"rows": rows, "columns": columns}, torch.tensor(0.0)
    norm = (hidden, weight, EPS, hp_dtype)
    assert_same(
        fused_producers.rms_norm_cast_layouts(*norm, E4M3, **wanted),
        (layouts.cast_layouts(normed, E4M3, **wanted), inverse_rms),
    )
    assert_same(
        fused_producers.rms_norm_cast_with_persistent_scale(*norm, kept, E4M3, **wanted),
        (*layouts.cast_with_persistent_scale(normed, kept, E4M3, **wanted), inverse_rms),
    )
    assert_same(
        fused_producers.rms_norm_cast_axes(*norm, E5M2, **wanted),
        (layouts.cast_axes(normed, E5M2, **wanted), inverse_rms),
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gradients_are_those_of_the_unfused_producers(dtype):
    (gate, up), grad = inputs(dtype), torch.randn(6, 10, dtype=dtype)
    leaf = [each.clone().requires_grad_() for each in (gate, up)]
    expected = torch.autograd.grad(producers.swiglu(*leaf), leaf, grad)
    assert_same(fused_producers.swiglu_backward(grad, gate, up), expected)

    hidden, weight = up, torch.randn(10)
    leaf = [each.clone().requires_grad_() for each in (hidden, weight)]
    expected = torch.autograd.grad(producers.rms_norm(*leaf, EPS, BF16), leaf, grad.bfloat16())
    _, inverse_rms = fused_producers.rms_norm_cast_axes(hidden, weight, EPS, BF16, E4M3, rows=True, columns=False)
    made = fused_producers.rms_norm_backward(grad.bfloat16(), hidden, weight, inverse_rms)
    for got, e in zip(made, expected, strict=True):
        assert got.dtype is e.dtype
        assert (got - e).norm() <= (1e-6 if e.dtype is F32 else 2**-8) * e.norm()


def test_strides_do_not_matter():
    gate, up = inputs(shape=(10, 12))
    dense = fused_producers.swiglu_cast_layouts(
        gate.t().contiguous(), up.t().contiguous(), E4M3, rows=True, columns=True
    )
    assert_same(fused_producers.swiglu_cast_layouts(gate.t(), up.t(), E4M3, rows=True, columns=True), dense)
    assert all(each.is_contiguous() for each in fused_producers.swiglu_backward(gate.t(), gate.t(), up.t()))


def test_bad_arguments():
    gate, up = inputs()
    weight, inverse_rms, wanted = torch.ones(10), torch.ones(6), {"rows": True, "columns": True}
    swiglu, norm = fused_producers.swiglu_cast_layouts, fused_producers.rms_norm_cast_layouts
    with pytest.raises(ValueError, match=r"expected gate to be a matrix of .*, got torch.bfloat16 of \[60\]"):
        swiglu(gate.view(-1), up.view(-1), E4M3, **wanted)
    with pytest.raises(ValueError, match=r"expected up to have the shape and dtype of gate, .*, got torch.float32"):
        swiglu(gate, up.float(), E4M3, **wanted)
    with pytest.raises(ValueError, match="expected row codes, column codes or both to be wanted, got neither"):
        swiglu(gate, up, E4M3, rows=False, columns=False)
    with pytest.raises(ValueError, match=r"expected a float8 dtype .*, got torch.bfloat16"):
        norm(up, weight, EPS, BF16, BF16, **wanted)
    with pytest.raises(ValueError, match=r"expected a weight of shape \[10\], one a column of hidden, got \[6\]"):
        norm(up, inverse_rms, EPS, BF16, E4M3, **wanted)
    with pytest.raises(ValueError, match="expected a result of .*, got torch.float64"):
        norm(up, weight, EPS, torch.float64, E4M3, **wanted)
    with pytest.raises(ValueError, match="expected grad to have the shape and dtype of gate"):
        fused_producers.swiglu_backward(gate.float(), gate, up)
    with pytest.raises(ValueError, match=r"expected a grad of hidden's shape \[6, 10\], got \[10, 6\]"):
        fused_producers.rms_norm_backward(gate.t(), up, weight, inverse_rms)
    with pytest.raises(ValueError, match=r"expected an inverse_rms of torch.float32 and shape \[6\], .* got .* \[10\]"):
        fused_producers.rms_norm_backward(gate, up, weight, weight)


# ---- compiled ----------------------------------------------------------------------------------------------------


def everything(gate, up, weight, rows, columns):
    """All that the functions return, which is not None."""
    kept, wanted = gate.new_full((), 0.25, dtype=F32), {"rows": rows, "columns": columns}
    norm = (up, weight, EPS, BF16)
    made = (
        fused_producers.swiglu_cast_layouts(gate, up, E4M3, **wanted),
        fused_producers.swiglu_cast_with_persistent_scale(gate, up, kept, E5M2, **wanted),
        fused_producers.swiglu_cast_axes(gate, up, E4M3, **wanted),
        fused_producers.swiglu_backward(gate, gate, up),
        fused_producers.rms_norm_cast_layouts(*norm, E4M3, **wanted),
        fused_producers.rms_norm_cast_with_persistent_scale(*norm, kept, E5M2, **wanted),
        axes := fused_producers.rms_norm_cast_axes(*norm, E4M3, **wanted),
        fused_producers.rms_norm_backward(gate, up, weight, axes[1]),
    )
    return tuple(tensor for tensor in leaves(made) if tensor is not None)


@WANTED
def test_compiled_code_is_eager_code(rows, columns):
    gate, up = inputs(shape=(48, 32))
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    assert_same(compiled(gate, up, torch.ones(32), rows, columns), everything(gate, up, torch.ones(32), rows, columns))


@pytest.mark.parametrize("shape", [(6, 10), (1, 10), (0, 4), (4, 0)], ids=str)
@WANTED
def test_operations_keep_their_promises(rows, columns, shape):
    """Fake results have the shapes, dtypes and strides of real ones."""
    gate, up = inputs(F32, shape, DEVICE)
    one, weight, inverse_rms = (torch.ones(size, device=DEVICE) for size in ((), shape[1:], shape[:1]))
    wanted, norm, ops = (rows, columns, False), (up, weight, EPS, BF16), torch.ops.quaver
    for operation, args in (
        (ops.swiglu_cast_layouts, (gate, up, E4M3, *wanted)),
        (ops.swiglu_cast_with_persistent_scale, (gate, up, one, E4M3, *wanted)),
        (ops.swiglu_cast_axes, (gate, up, E4M3, *wanted)),
        (ops.swiglu_backward, (up, gate, up)),
        (ops.rms_norm_cast_layouts, (*norm, E4M3, *wanted)),
        (ops.rms_norm_cast_with_persistent_scale, (*norm, one, E4M3, *wanted)),
        (ops.rms_norm_cast_axes, (*norm, E4M3, *wanted)),
        (ops.rms_norm_backward, (gate, up, weight, inverse_rms)),
    ):
        torch.library.opcheck(operation.default, args, test_utils=("test_schema", "test_faketensor"))

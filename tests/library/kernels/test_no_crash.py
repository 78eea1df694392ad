"""Tests that the C extension never reads or writes out of bounds; what might crash runs in its own process."""

from __future__ import annotations

import contextlib
from collections import namedtuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import quaver.distributed  # noqa: F401 - registers operations
from quaver.kernels import cpu
from quaver.recipes.scale_layout import ScaleLayout
from tests.isolated import isolated
from tests.library.kernels.extension_calls import (
    COLUMNS,
    ROWS,
    check_is_refused,
    codes,
    iter_casts,
    ones,
    recorded_amax,
    run_calls,
    scale,
)
from tests.recipes import E4M3

pytestmark = pytest.mark.skipif(not cpu.HAS_EXTENSION, reason=f"the C extension is off: {cpu.UNAVAILABLE_REASON}")


def refuse_real_tensors_under_modes() -> None:
    def answer(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "data_ptr":
            return 8
        return self.make(out) if "empty" in name else out

    class Dispatch(TorchDispatchMode):
        __torch_dispatch__ = answer

    class Functions(TorchFunctionMode):
        __torch_function__ = answer

    class FakeDispatch(Dispatch):
        make = FakeTensorMode(allow_non_fake_inputs=True).from_tensor

    class MetaDispatch(Dispatch):
        make = staticmethod(lambda out: torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta"))

    class FakeFunctions(Functions):
        make = FakeDispatch.make

    class MetaFunctions(Functions):
        make = staticmethod(MetaDispatch.make)

    modes = [FakeTensorMode(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta")]
    for mode in (*modes, FakeDispatch(), MetaDispatch(), FakeFunctions(), MetaFunctions()):
        transposed = codes.t()
        with mode:
            assert not cpu.supports(ones, E4M3), mode
            assert not cpu.supports(codes, torch.bfloat16), mode
            for call in iter_casts():
                check_is_refused(call)
            check_is_refused(cpu.widen, codes, torch.bfloat16, scale)
            assert cpu.mm(codes, transposed, scale, scale, None, torch.float32) is None, mode
            run_calls()
    assert cpu.supports(ones, E4M3)
    assert cpu.supports(codes, torch.bfloat16)
    expected = cpu.dynamic_cast(ones * 3, E4M3, 1)
    with torch.device("meta"):  # a function mode, which the operation is called without
        actual = torch.ops.quaver.cast_rowwise(ones * 3, E4M3, True, False, False, "")[:3]
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(actual, expected, strict=True))


def refuse_tensors_without_memory() -> None:
    mode = FakeTensorMode()
    negated = torch._neg_view(ones)
    tensors = [mode.from_tensor(ones), ones.to("meta"), torch._efficientzerotensor((ROWS, COLUMNS)), negated]
    tensors += [ones.to_sparse(), ones.to_sparse_csr(), ones.to_mkldnn(), torch._to_functional_tensor(ones)]
    tensors += [torch.nested.nested_tensor([ones[0], ones[1]]), ones.as_subclass(type("Sub", (torch.Tensor,), {}))]
    for hp in (*tensors, torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)):
        assert not cpu.supports(hp, E4M3)
        run_calls(hp=hp)
        run_calls(scale=hp, recorded_amax=hp)
    negated_codes, *_ = torch.ops.quaver.cast_tensorwise(negated, E4M3, True, False, False, "")
    assert negated_codes.float().unique().tolist() == [-448.0]
    run_calls(codes=mode.from_tensor(negated_codes), scale=mode.from_tensor(scale))


def refuse_tensors_inside_functorch_transforms() -> None:
    def inside(x):
        assert not cpu.supports(x, E4M3)
        assert not cpu.supports(ones, E4M3)
        for call in iter_casts():
            check_is_refused(call)
        check_is_refused(cpu.widen, codes, torch.bfloat16, scale)
        run_calls()
        run_calls(hp=x, scale=x.sum(), recorded_amax=x)
        return x.sum()

    torch.func.grad(inside)(ones)
    torch.func.vmap(inside)(ones.expand(2, ROWS, COLUMNS))
    torch.func.functionalize(inside)(ones)
    torch.func.jvp(inside, (ones,), (ones,))
    escaped = []
    torch.func.grad(lambda x: (escaped.append(x * 2), x.sum())[1])(ones)
    run_calls(hp=escaped[0], scale=escaped[0], recorded_amax=escaped[0])


def refuse_shapes_strides_and_scales_that_do_not_fit() -> None:
    huge = torch.ones(1).expand(1 << 20, 1 << 40)
    for hp in (ones.t(), ones[:, ::2], ones[:, 1:], ones[0], ones[None], scale, huge, ones[:1].expand(4, -1)):
        for call in iter_casts(hp):
            check_is_refused(call)
    for float8 in (codes.t(), codes[:, ::2], codes[0], codes[:1].expand(4, -1), huge.to("meta").to(E4M3)):
        check_is_refused(cpu.widen, float8, torch.bfloat16)
    scales = [torch.ones(shape) for shape in ((ROWS - 1, 1), (COLUMNS, 1), (1, ROWS), (0, 1))]
    for bad in (*scales, torch.ones(ROWS, 1).double(), torch.ones(ROWS, 2)[:, :1], scale.expand(ROWS, 1)):
        check_is_refused(cpu.cast_with_scale, ones, bad, E4M3)
        check_is_refused(cpu.cast_and_record_amax, ones, bad, E4M3, False, recorded_amax)
        check_is_refused(cpu.cast_and_record_amax, ones, scale, E4M3, False, bad)
        check_is_refused(cpu.widen, codes, torch.bfloat16, bad)
        if cpu.HAS_MM and bad.is_contiguous():
            check_is_refused(cpu.mm, codes, codes.t(), bad, scale, None, torch.float32)
            check_is_refused(cpu.mm, codes, codes.t(), scale, bad.t(), None, torch.float32)
    apart = torch.ones(ROWS, 2).double()[:, :1]
    check_is_refused(cpu.observe, ones, codes, apart, apart, ScaleLayout(1, 0))
    for dtype in (torch.float16, torch.float64, torch.int8, E4M3):
        check_is_refused(cpu.widen, codes, dtype)
        check_is_refused(cpu.dynamic_cast, ones, dtype if dtype is not E4M3 else torch.float8_e4m3fnuz)
    for dim in (-1, 2, 1 << 70):
        check_is_refused(cpu.dynamic_cast, ones, E4M3, dim)
    for empty in (torch.ones(0, 4), torch.ones(4, 0), torch.ones(0, 0)):
        run_calls(hp=empty, codes=empty.to(E4M3))


CastSizes = namedtuple(
    "CastSizes", "rows columns code_stride hp_kind float8_kind dim power_of_2 threads block_rows block_columns"
)
"""The last arguments of the entries that cast."""
MatmulArguments = namedtuple(
    "MatmulArguments",
    "out a a_kind a_line_stride a_stride a_scale a_has_line_scales b b_kind b_line_stride b_stride b_scale "
    "b_has_line_scales m k n out_kind bias threads",
)
"""The arguments of the entry `mm`. A line is a row of a or a column of b."""


def refuse_impossible_arguments_of_entries() -> None:
    from quaver import _cpu  # type: ignore[attr-defined]

    hp, float8 = ones.data_ptr(), codes.data_ptr()
    sizes, too_many = CastSizes(ROWS, COLUMNS, COLUMNS, 0, 0, -1, 0, 1, 0, 0), 1 << 61
    room = [hp] * 6
    casts = _cpu.cast_and_record_amax, _cpu.dynamic_cast_both_dims, _cpu.cast_with_scale, _cpu.dynamic_cast
    for entry in (*casts, _cpu.widen):
        check_is_refused(entry, 0, *room, *sizes)
        check_is_refused(entry, hp, 0, *room[1:], *sizes)
        bad = {"rows": (-1, too_many), "columns": (-1, too_many), "code_stride": (0, too_many), "hp_kind": (-1, 3)}
        bad |= {"float8_kind": (-1, 2), "dim": (-2, 3), "block_rows": (-1,), "block_columns": (-1,)}
        for name, values in bad.items():
            for value in values:
                check_is_refused(entry, hp, *room, *sizes._replace(**{name: value}))
        check_is_refused(entry, hp, *room, *sizes._replace(rows=1 << 40, columns=1 << 40))
        check_is_refused(entry, hp, error=TypeError)
    for entry in (_cpu.block_amax, _cpu.cast_with_scale, _cpu.widen):
        for rows, columns in ((0, 128), (128, 0), (-1, 128), (1, 2049)):
            check_is_refused(entry, hp, *room, *sizes._replace(dim=2, block_rows=rows, block_columns=columns))
        check_is_refused(entry, hp, *room, *sizes[:-1], error=TypeError)
    check_is_refused(_cpu.block_amax, hp, hp, 0, *room[2:], *sizes._replace(dim=2, block_rows=1, block_columns=128))
    for missing in range(2, 7):
        check_is_refused(_cpu.dynamic_cast_both_dims, hp, *[0 if i == missing else hp for i in range(1, 7)], *sizes)
    for missing in range(2, 6):
        check_is_refused(_cpu.cast_and_record_amax, hp, *[0 if i == missing else hp for i in range(1, 7)], *sizes)
    factor = float8, 0, COLUMNS, 1, hp, 0
    good, error = MatmulArguments(hp, *factor, *factor, 4, 4, 4, 0, 0, 1), ValueError if cpu.HAS_MM else RuntimeError
    bad = dict.fromkeys(("out", "a", "a_scale", "b", "b_scale"), (0,)) | dict.fromkeys(("m", "k", "n"), (-1, too_many))
    bad |= dict.fromkeys(("a_kind", "b_kind", "out_kind", "a_has_line_scales", "b_has_line_scales"), (-1, 2))
    bad |= dict.fromkeys(("a_line_stride", "b_line_stride"), (-1,)) | dict.fromkeys(
        ("a_stride", "b_stride"), (-1, 0, 2)
    )
    for name, values in bad.items():
        for value in values:
            check_is_refused(_cpu.mm, *good._replace(**{name: value}), error=error)


@pytest.mark.parametrize(
    "refuse",
    [
        refuse_real_tensors_under_modes,
        refuse_tensors_without_memory,
        refuse_tensors_inside_functorch_transforms,
        refuse_shapes_strides_and_scales_that_do_not_fit,
        refuse_impossible_arguments_of_entries,
    ],
)
def test_the_extension_refuses(refuse):
    isolated(refuse)


def arguments(schema, name: str) -> dict[str, object]:
    """Return ordinary arguments of the operation `name`, by their names."""
    codes = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    values = {"hp": torch.randn(ROWS, COLUMNS), "codes": codes, "a": codes, "b": codes.t(), "bias": torch.rand(ROWS)}
    values |= {"quant_scale": torch.tensor(2.0), "is_known": torch.tensor(True), "recorded_amax": torch.ones(2)}
    values |= {"row_scale": torch.rand(ROWS, 1) + 1, "column_scale": torch.rand(1, COLUMNS) + 1}
    values |= {"a_dequant_scale": torch.rand(ROWS, 1) + 1, "b_dequant_scale": torch.rand(1, ROWS) + 1}
    values |= {"scale": torch.full((ROWS, 1), 0.5), "amax_buffer": torch.zeros(2), "float8_dtype": codes.dtype}
    values |= {"out_dtype": torch.bfloat16, "dtype": torch.bfloat16, "row": True, "group_name": "none", "rule": ""}
    values |= {"block_size": 128, "dot_products": 1, "length": 128, "granularity": "axiswise", "matmul": "output"}
    values |= {"ends": torch.tensor([250, ROWS], dtype=torch.int32), "num_groups": 2}
    values |= {"group": torch.arange(2).repeat_interleave(ROWS // 2)}
    values |= dict.fromkeys(("a_layout", "b_layout", "layout"), [1, 0])
    values |= dict.fromkeys(("a_outer_scale", "b_outer_scale"))
    if name == "adamw_":
        codes = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8)
        values |= dict.fromkeys(("param", "grad"), values["hp"]) | {"exp_avg": codes, "exp_avg_sq": codes.clone()}
        values |= dict.fromkeys(("exp_avg_scale", "exp_avg_sq_scale"), torch.zeros(ROWS, 2))
        values |= {"skipped": torch.tensor(0), "scalars": torch.rand(8) + 0.1, "key": 7}
        values |= {"grid": [ROWS, COLUMNS, 0, 0, ROWS, 0, 2]}
        values = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    if name == "grouped_mm":
        values |= {"b": codes, "b_dequant_scale": torch.rand(ROWS, 1) + 1}
    ordinary = {"Tensor": torch.ones(3), "bool": False, "str": "", "int": 1}
    return {
        argument.name: values[argument.name] if argument.name in values else ordinary[str(argument.type)]
        for argument in schema
    }


def resized(tensor: torch.Tensor, size: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(size)
    return tensor


def behind_another(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor.float(), tensor.float()]).to(tensor.dtype)[1]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


WITHOUT_MEMORY = {
    "freed": lambda tensor: resized(tensor.clone(), 0),
    "freed, at an offset": lambda tensor: resized(behind_another(tensor), 0),
    "freed, transposed": lambda tensor: resized(transposed(tensor), 0),
    "half": lambda tensor: resized(tensor.clone(), tensor.nbytes // 2),
    "half, transposed": lambda tensor: resized(transposed(tensor), tensor.nbytes // 2),
    "huge": lambda tensor: tensor.reshape(-1)[:1].expand(1 << 20, 1 << 40),  # a number per row fits into memory
}
WITH_MEMORY = {
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "negated": torch._neg_view,
    "overlapping": lambda tensor: tensor.as_strided(tensor.shape, [1] * tensor.dim()),
    "one element": lambda tensor: tensor.reshape(-1)[:1].expand(tensor.shape) if tensor.dim() else tensor,
    "strided": lambda tensor: torch.stack([tensor.float()] * 2, -1).to(tensor.dtype)[..., 0],
}
TORCH_REFUSES = {"codes", "a", "b", "amax_buffer", "is_known", "ends", "group"}
"""PyTorch negates no float8 and no booleans, writes into no zero tensor and no element twice; negated ends descend, and
negated groups are no indices."""
ADAMW_REFUSES = {"param", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "skipped"}
"""adamw_ writes into contiguous memory alone."""
UNREAD = {("to_column_major_after", "gradient"), ("wait_for", "waiting"), ("wait_for", "computed")}


def hand_to_every_operation(kind: str) -> None:
    """Replace each argument of each operation by one of this kind: an error of one line, or the result of a copy."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("quaver::")]
    assert len(names) >= 9
    for name in sorted(names):
        short = name.removeprefix("quaver::")
        if short.startswith("observe_"):  # they read nothing but while a monitor samples; numerics/test_monitor.py
            continue
        if short == "native_block_mm" and kind in WITH_MEMORY:  # of a GPU alone; gpu/test_native.py
            continue
        operation = getattr(torch.ops.quaver, short)
        schema = operation.default._schema.arguments
        for argument, value in arguments(schema, short).items():
            where = operation.__name__, argument
            if not isinstance(value, torch.Tensor) or where in UNREAD:
                continue
            hostile = {**WITHOUT_MEMORY, **WITH_MEMORY}[kind](value)
            torch.manual_seed(0)
            message = ""
            try:
                results = call(operation, {**arguments(schema, short), argument: hostile})
            except (RuntimeError, ValueError, NotImplementedError) as error:
                message = str(error)
            if message:
                assert len(message.splitlines()) == 1, (where, message)
                assert kind in WITHOUT_MEMORY or argument in TORCH_REFUSES | ADAMW_REFUSES, (where, message)
                continue
            assert kind in WITH_MEMORY, where
            torch.manual_seed(0)
            plain = {**arguments(schema, short), argument: hostile.clone(memory_format=torch.contiguous_format)}
            for result, expected in zip(results, call(operation, plain), strict=True):
                assert torch.allclose(result.float(), expected.float(), rtol=0, atol=0, equal_nan=True), where


def call(operation, arguments: dict[str, object]) -> list[torch.Tensor]:
    """Return the tensors that an operation returns or writes."""
    result = operation(**arguments)
    if result is None:
        return [arguments[name] for name in ("amax_buffer", "param") if name in arguments]
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("kind", [*WITHOUT_MEMORY, *WITH_MEMORY])
def test_every_operation_takes_or_refuses(kind):
    isolated(hand_to_every_operation, kind)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode])
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [("rule", "floors", "rule: expected .* got 'floors'"), ("float8_dtype", torch.int8, "expected a float8 dtype")],
    ids=["rule", "dtype"],
)
def test_every_cast_refuses_unknown_rules_and_dtypes(argument, value, message, mode):
    names = {"tensorwise", "rowwise", "blockwise", "groups", "with_scale"}
    for name in names | ({"with_persistent_scale"} if argument == "float8_dtype" else set()):
        operation = getattr(torch.ops.quaver, f"cast_{name}")
        with mode(), pytest.raises(ValueError, match=message):
            operation(**arguments(operation.default._schema.arguments, f"cast_{name}") | {argument: value})


@pytest.mark.nightly
def test_casts_index_more_elements_than_an_int32_counts():
    """14 GiB, half a minute."""
    rows, columns = 1 << 16, (1 << 15) + 16
    hp = torch.ones(rows, columns, dtype=torch.bfloat16)
    hp[-1] = 2
    for dim in (None, 1, 0):
        codes, quant_scale, _ = cpu.dynamic_cast(hp, torch.float8_e4m3fn, dim)
        first = codes[0].float() / (quant_scale if dim is None else quant_scale[0])
        assert torch.equal(first, torch.ones(columns))
        assert codes[-1].float().unique().tolist() == [448]
        del codes
    del hp
    codes = torch.full((rows, columns), 2.0, dtype=torch.float8_e4m3fn)
    codes[-1] = 3.0
    rest = torch.tensor(1.0), torch.tensor(1.0), None, torch.float32, False, [0, 0], [0, 0]
    for b in (torch.ones(columns, 16), torch.ones(16, columns).t()):
        out = torch.ops.quaver.exact_float8_mm(codes, b.to(codes.dtype), *rest)
        assert torch.equal(out[:-1], torch.full((rows - 1, 16), 2.0 * columns))
        assert torch.equal(out[-1], torch.full((16,), 3.0 * columns))
    wide = cpu.widen(codes, torch.bfloat16)
    assert wide[0].unique().tolist() == [2.0]
    assert wide[-1].unique().tolist() == [3.0]

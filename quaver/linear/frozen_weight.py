"""`FrozenFloat8Weight`: a weight that does not train, stored once as float8 codes and scales.

It presents the shape and dtype of the high-precision weight, so that PEFT, autocast and FSDP2 treat it as one. It
stores one byte per element and the scales of its granularity: (), [N, 1] or one per block of 128 x 128 or 32 x 32. Both
matmuls of a linear read the same codes. The weights of experts are stacks of matrices, [E, N, K] or [E, K, N], with
scales [E], [E, N, 1] or [E, 1, N], or one per block of each matrix.

    reads       An op on the weight runs on all of its dequantized values. The slow path is reported once
                (slow_paths.py), except for copies and checks of the values.
    writes      An in-place op, or an assignment to `.data`, runs on the dequantized values and quantizes the result
                with new scales. So merging an adapter loses what float8 cannot represent; `requantized_sqnr_db` is the
                signal-to-noise ratio of the last such write. Writing equal values changes nothing. NaN and inf raise,
                because all elements that share a scale with one would become NaN.
    views       Views raise, because a write to a view of the dequantized values would be lost. FSDP2 may select rows,
                and DistributedDataParallel may read `view(-1)`, which is read-only, to broadcast the weight.

[Note: parts]
FSDP2 shards a weight between any two rows, and a stack between matrices. A shard, or part, has the codes of its rows
and the scales of the whole weight, at most 4 / K bytes per element. So an all-gather sends codes only, and ranks may
split a block. Only the unsharded weight, and a part in a state_dict, whose first row is known, can be dequantized.
"""

from __future__ import annotations

import functools
import logging
import math
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quaver.kernels.operands import Operand, require
from quaver.linear.tensor import Float8Tensor
from quaver.linear.weight_form import (
    COLLECTIVE_NAMESPACES,
    COPY_OPS,
    ReadOnly,
    WeightForm,
    is_parameter,
    is_view,
    match_inference_mode,
)
from quaver.recipes.formats import FLOAT8_FORMATS, HP_DTYPES
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scale_layout import ALL, BLOCK_SIZES, COLUMNWISE, ROWWISE, TENSORWISE, ScaleLayout
from quaver.recipes.scaling import compute_amax, dequantize, dynamic_cast, dynamic_cast_blocks
from quaver.recipes.sqnr import to_decibels
from quaver.runtime.collectives import pad_rows
from quaver.runtime.slow_paths import report_slow_path
from quaver.torch_private.dispatch import OpOverload
from quaver.torch_private.dtensor import get_local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

logger = logging.getLogger(__name__)
aten = torch.ops.aten

FROZEN_LAYOUTS = (TENSORWISE, ROWWISE, COLUMNWISE, *(ScaleLayout(*size) for size in BLOCK_SIZES if size[0] == size[1]))
"""The scale layouts of frozen weights. Only stacks [E, K, N] may be COLUMNWISE."""


class FrozenFloat8Weight(WeightForm, Float8Tensor):
    """A frozen weight [N, K], or a stack of matrices, in float8; see the top of the file.

    Attributes:
        data_fp8: float8 [N, K] or [E, rows, columns]; a part has fewer in the first dim, or is flat.
        dequant_scale: float32; (), [N, 1] or one number per block of the whole weight. The top of the file gives the
            shapes for stacks.
    """

    whole_rows: int = 0
    """For a shard, the number of rows, or matrices, of the whole weight; else 0. See [Note: parts]."""
    first_row: int = 0
    """For a shard in a state_dict, its first row, or matrix, in the whole weight."""
    requantized_sqnr_db: float | None = None
    """The SQNR of the last write in high precision; None before one."""

    @staticmethod
    def __new__(
        cls, row: Operand | Tensor, column: Operand | None = None, dtype: torch.dtype | None = None, **options: bool
    ) -> Self:
        """Use `from_codes`. A call with a tensor and `requires_grad` makes a parameter, as `nn.Parameter` does.

        Accelerate moves a parameter by `type(parameter)(tensor, requires_grad=...)`. High-precision values, which it
        reads from a disk, stay in high precision, and the module quantizes them when it multiplies.
        """
        if isinstance(row, Tensor):
            return nn.Parameter(_convert_to_frozen(row), **options)  # type: ignore[return-value]
        return Float8Tensor.__new__(cls, row, column, typing.cast(torch.dtype, dtype))

    def __init__(
        self, row: Operand | Tensor, column: Operand | None = None, dtype: torch.dtype | None = None, **options: bool
    ) -> None:
        if isinstance(row, Tensor):
            return
        super().__init__(row, column, typing.cast(torch.dtype, dtype))

    @classmethod
    def from_codes(
        cls, codes: Tensor, dequant_scale: Tensor, dtype: torch.dtype, layout: ScaleLayout | None = None
    ) -> Self:
        """Make a weight from `codes` (float8 [N, K], or a stack) and `dequant_scale` (float32) that presents `dtype`.

        `layout`: which elements of a matrix share a scale; None for the first of `FROZEN_LAYOUTS` that fits the scale.

        Raises:
            ValueError: codes, scale and dtype do not fit together.
        """
        if codes.dtype not in FLOAT8_FORMATS or codes.dim() not in (2, 3):
            raise ValueError(f"codes: expected a float8 matrix, or a stack, got {codes.dtype} of {list(codes.shape)}")
        if dtype not in HP_DTYPES:
            raise ValueError(f"dtype: expected {', '.join(map(str, HP_DTYPES))}, got {dtype}")
        *stack, rows, columns = codes.shape
        layouts = [
            candidate
            for candidate in FROZEN_LAYOUTS
            if (stack or candidate != COLUMNWISE) and layout in (None, candidate)
        ]
        shapes = [[*stack, *candidate.get_scale_shape(rows, columns)] for candidate in layouts]
        if dequant_scale.dtype is not torch.float32 or list(dequant_scale.shape) not in shapes:
            expected = ", ".join(f"{shape} ({name})" for shape, name in zip(shapes, layouts, strict=True))
            raise ValueError(
                f"dequant_scale: expected float32 of shape {expected} for a weight of {list(codes.shape)}, got "
                f"{dequant_scale.dtype} of {list(dequant_scale.shape)}"
            )
        operand = Operand(codes.detach(), dequant_scale.detach(), layouts[shapes.index(list(dequant_scale.shape))])
        return cls.from_operands(operand, operand, dtype)

    def with_codes(
        self,
        codes: Tensor,
        dequant_scale: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        part: bool = False,
    ) -> Self:
        """Make a weight with other codes, and other scales if given. `part`: the codes belong to a shard."""
        operand = Operand(codes, self.dequant_scale if dequant_scale is None else dequant_scale, self.scale_layout)
        weight = type(self)(operand, operand, dtype or self.dtype)
        weight.whole_rows = self.whole_rows or (self.shape[0] if part else 0)
        weight.first_row, weight.requantized_sqnr_db = self.first_row, self.requantized_sqnr_db
        return weight

    @property
    def is_part(self) -> bool:
        """Whether this is a shard or a slice of rows; see [Note: parts]."""
        return self.whole_rows > 0

    @property
    def has_power_of_2_scales(self) -> bool:
        """Whether every scale is a power of two. It may be subnormal: the E8M0 scale of zeros is 2^-127."""
        return bool(torch.frexp(self.dequant_scale)[0].eq(0.5).all())

    @property
    def scale_layout(self) -> ScaleLayout:
        """Which elements of a stored matrix share a scale. The rows of a stored [E, K, N] are columns of a linear."""
        return self.layouts[0]

    @property
    def granularity(self) -> str:
        """ "tensorwise", "rowwise" or "blockwise ROWS x COLUMNS"."""
        return str(ROWWISE if self.scale_layout == COLUMNWISE else self.scale_layout)

    @property
    def scales_per_matrix(self) -> int:
        return math.prod(self.dequant_scale.shape[-2:]) if self.dequant_scale.dim() > 1 else 1

    def list_matrices(self) -> list[Operand]:
        """Return the codes and scale of each matrix of a stack, or of the only one; views, unless this is a part."""
        scale, layout, end = self.dequant_scale, self.scale_layout, self.first_row + self.shape[0]
        if self.is_part and self.data_fp8.dim() == 3:
            scale = scale[self.first_row : end]
        elif self.is_part and layout.rows != ALL:
            scale = scale.repeat_interleave(layout.rows, 0)[self.first_row : end]
            layout = ScaleLayout(1, layout.columns)
        if self.data_fp8.dim() == 2:
            return [Operand(self.data_fp8, scale, layout)]
        return [Operand(*matrix, layout) for matrix in zip(self.data_fp8, scale, strict=True)]

    def to_high_precision(self) -> Tensor:
        """Dequantize to the weight's dtype. Raises RuntimeError for a part."""
        if self.is_part:
            raise RuntimeError(
                "a part of a frozen float8 weight (a slice, or a shard of FSDP2) does not know which of the scales are "
                "its own; slice weight.to_high_precision(), or read the weight while FSDP2 holds it unsharded "
                "(model.unshard()), or this rank's values in the state_dict"
            )
        return self.dequantize_codes()

    def dequantize_codes(self) -> Tensor:
        """Dequantize to the weight's dtype; also for a part, if its `first_row` is known."""
        with torch.no_grad():
            values = torch.empty_like(self.data_fp8, dtype=self.dtype)
            for target, operand in self.zip_matrices(values):
                target.copy_(
                    dequantize(
                        operand.data, require(operand.dequant_scale, "the dequant_scale"), self.dtype, operand.layout
                    )
                )
            return values

    def zip_matrices(self, tensor: Tensor) -> Iterator[tuple[Tensor, Operand]]:
        """Yield each matrix of `tensor` with the codes and scale of the corresponding matrix of this weight."""
        return zip([tensor] if tensor.dim() == 2 else tensor, self.list_matrices(), strict=True)

    def write(self, hp: Tensor) -> None:
        """Quantize `hp` in the granularity of this weight, into its memory.

        Raises:
            ValueError: another shape or dtype, NaN or inf. The weight is then unchanged.
            RuntimeError: this is a part, whose scales other parts share.
        """
        if self.is_part:
            raise RuntimeError(
                "a part of a frozen float8 weight (a slice, or a shard of FSDP2) cannot be written to: its scales are "
                "those of other rows, too; write the whole weight"
            )
        if hp.dtype not in HP_DTYPES:
            hint = "call convert_to_high_precision before you change the dtype"
            if hp.dtype.itemsize == 1:  # as in diffusers
                hint = "exclude its module from layerwise casting (skip_modules_classes=(FrozenFloat8Linear,))"
            expected = ", ".join(map(str, HP_DTYPES))
            raise ValueError(f"a write into a frozen float8 weight: expected {expected}, got {hp.dtype}; {hint}")
        current = self.dequantize_codes()
        if hp.shape != self.shape:
            raise ValueError(f"expected a weight of shape {list(self.shape)}, got {list(hp.shape)}")
        if torch.equal(current, hp.to(current)):  # as when DistributedDataParallel broadcasts parameters
            return
        if not bool(compute_amax(hp).isfinite()):
            raise ValueError(
                f"expected finite values for a frozen float8 weight {list(self.shape)}, got NaN or inf; the weight "
                "is unchanged"
            )
        power_of_2, layout = self.has_power_of_2_scales, self.scale_layout
        float8_dtype, norms = self.data_fp8.dtype, []
        for matrix, operand in self.zip_matrices(hp.contiguous()):
            if layout.is_blockwise:
                cast = dynamic_cast_blocks(matrix, float8_dtype, power_of_2=power_of_2, block_size=layout)
            else:
                dim = None if layout.is_tensorwise else layout.index(ALL)
                cast = dynamic_cast(matrix, float8_dtype, dim, power_of_2=power_of_2)
            scale = require(operand.dequant_scale, "the dequant_scale")
            operand.data.copy_(cast[0])
            scale.copy_(cast[2])
            norms.append(dequantize(operand.data, scale, layout=layout).sub_(matrix).norm().item())
        self.requantized_sqnr_db = to_decibels(hp.float().norm().item(), math.hypot(*norms))
        logger.info("a frozen float8 weight was quantized again: SQNR %.1f dB", self.requantized_sqnr_db)
        log_merge_cost()

    def check_codes_and_scales(self, *, power_of_2: bool) -> None:
        """Raise ValueError unless codes and scales are finite and scales above 0; with `power_of_2`, powers of two."""
        fmt, codes = FLOAT8_FORMATS[self.data_fp8.dtype], self.data_fp8.view(torch.uint8)
        nonfinite_codes = torch.tensor(fmt.nan_codes + fmt.infinity_codes, dtype=torch.uint8, device=codes.device)
        if any(bool(torch.isin(part, nonfinite_codes).any()) for part in (codes if codes.dim() == 3 else [codes])):
            raise ValueError("expected finite codes, got NaN or inf")
        if not bool(((self.dequant_scale > 0) & self.dequant_scale.isfinite()).all()):
            raise ValueError("expected finite dequant_scales above 0")
        if power_of_2 and not self.has_power_of_2_scales:
            raise ValueError("expected scales that are powers of two, as config.round_scales_to_power_of_2 promises")

    def check_same_format(self, weight: FrozenFloat8Weight) -> None:
        """Raise ValueError if the granularity or the float8 dtype of `weight` differs."""
        is_same = weight.scale_layout == self.scale_layout and weight.data_fp8.dtype is self.data_fp8.dtype
        if weight.dequant_scale.shape != self.dequant_scale.shape or not is_same:
            raise ValueError(f"expected {self.granularity} {self.data_fp8.dtype} codes, got {weight}")

    def copy_codes(self, source: Any) -> bool:
        """Copy codes and scales if `source` is a frozen weight, and return whether it is.

        Raises:
            ValueError: see `check_same_format`.
        """
        if not isinstance(source, FrozenFloat8Weight) or not source.has_codes:
            return False
        self.check_same_format(source)
        self.data_fp8.copy_(source.data_fp8)
        if source.dequant_scale is not self.dequant_scale:
            self.dequant_scale.copy_(source.dequant_scale)
        return True

    @property
    def has_codes(self) -> bool:
        """Whether codes and scales hold the current values, as they always do in a module."""
        return True

    def explain_cast_mismatch(self, casts: OperandCasts, *, transposed: bool = False) -> str:
        dtype, scales = casts.row.float8_dtype, casts.row.granularity
        has_same_granularity = self.granularity == scales or self.scales_per_matrix == 1
        if (
            (casts.has_equal_casts or casts.column.is_disabled)
            and self.data_fp8.dtype is dtype
            and has_same_granularity
        ):
            return ""
        return (
            f"a frozen weight {list(self.shape)} is stored as {self.granularity} {self.data_fp8.dtype}, and its module "
            f"casts weights as {casts.row}; convert it back (convert_to_high_precision) and freeze it again"
        )

    def assign(self, new: Tensor) -> None:
        """Quantize high-precision values into this weight, or use the codes and scales of another frozen weight."""
        if not isinstance(new, FrozenFloat8Weight):
            self.write(new)
        elif new.shape != self.shape:
            raise RuntimeError(f".data of a frozen float8 weight: expected {list(self.shape)}, got {list(new.shape)}")
        elif new.dtype is not self.dtype:  # the dtype of a wrapper subclass cannot change
            torch.utils.swap_tensors(
                self, nn.Parameter(new, requires_grad=False) if is_parameter(self) else new.detach()
            )
        else:
            operand = Operand(new.data_fp8, new.dequant_scale, new.scale_layout)
            self.set_operands(operand, operand)
            self.requantized_sqnr_db = new.requantized_sqnr_db

    @property
    def requires_grad(self) -> bool:
        """False. Setting it to True raises RuntimeError."""
        return False

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        if requires_grad:
            raise RuntimeError(
                "a frozen float8 weight cannot require a gradient: float8 cannot hold an optimizer's updates. Leave "
                "the layer out of freeze_to_float8 (module_filter_fn), or train an adapter"
            )

    def requires_grad_(self, requires_grad: bool = True) -> FrozenFloat8Weight:
        """Raise RuntimeError for True."""
        self.requires_grad = requires_grad
        return self

    def element_size(self) -> int:
        """Return 1. transformers' get_memory_footprint multiplies it by the number of elements."""
        return self.data_fp8.element_size()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the codes and the scales."""
        return self.data_fp8.nbytes + self.dequant_scale.nbytes

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], tuple[Operand, torch.Size]]:
        """Return the codes of this shard as one uint8 tensor, padded to the largest shard."""
        codes = pad_rows(self.data_fp8.view(torch.uint8), -(-outer_size[0] // mesh.size()))
        return (codes,), (Operand(self.data_fp8, self.dequant_scale, self.scale_layout), outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Operand, torch.Size],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make the unsharded weight in the memory that FSDP2 all-gathered into."""
        shard, size = metadata
        operand = shard._replace(data=all_gather_outputs[0].view(-1)[: size.numel()].view(size).view(shard.data.dtype))
        if out is None:
            return self.from_operands(operand, operand, param_dtype), ()
        typing.cast(FrozenFloat8Weight, get_local_tensor(out)).set_operands(operand, operand)
        return None

    def get_memory(self) -> Tensor:
        return self.data_fp8

    def get_state(self) -> tuple[Any, ...]:
        layout, rows = tuple(self.scale_layout), (self.whole_rows, self.first_row)
        return self.data_fp8, self.dequant_scale, self.dtype, layout, *rows, self.requantized_sqnr_db

    @classmethod
    def from_state(cls, *state: Any) -> Self:
        codes, scale, dtype, layout, whole_rows, first_row, requantized_sqnr_db = state
        operand = Operand(codes, scale, ScaleLayout(*layout))
        weight = cls(operand, operand, dtype)
        weight.whole_rows, weight.first_row, weight.requantized_sqnr_db = whole_rows, first_row, requantized_sqnr_db
        return weight

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_fp8", "dequant_scale"], (self.dtype, self.scale_layout, self.whole_rows)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, outer_size: object, outer_stride: object
    ) -> FrozenFloat8Weight:
        return FrozenFloat8Weight.from_state(inner["data_fp8"], inner["dequant_scale"], *meta, 0, None)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        part = "a part of " if self.is_part else ""
        codes, device = self.data_fp8.dtype, self.device
        return f"FrozenFloat8Weight({part}{list(self.shape)}, {self.granularity} {codes} for {self.dtype}, {device})"

    def run_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                target.copy_(source)
            return None
        if args[0] is not self:
            return NotImplemented
        if func in ALIAS_OPS or is_as_strided_of_all(func, args):
            return self.with_codes(aten.alias.default(self.data_fp8))
        if func in COPY_OPS and kwargs.get("dtype", self.dtype) in HP_DTYPES:
            options = {name: value for name, value in kwargs.items() if name != "dtype"}
            copies = (func(tensor, **options) for tensor in (self.data_fp8, self.dequant_scale))
            return self.with_codes(*copies, dtype=kwargs.get("dtype"))
        if (selects_rows := _ROW_OPS.get(func)) and selects_rows(self, args):
            rows = func(self.data_fp8, *args[1:], **kwargs)
            return tree_map_only(Tensor, lambda codes: self.with_codes(codes, part=True), rows)
        if func is aten.copy_.default and self.copy_codes(args[1]):
            return self
        if func is aten.view.default and list(args[1]) == [-1]:
            with match_inference_mode(self):
                return ReadOnly.wrap(self.to_high_precision().view(-1))
        if is_view(func):
            raise NotImplementedError(
                f"{func}: a frozen float8 weight has no views in high precision, since a write to one would be lost; "
                "call to_high_precision() first; FSDP2 can shard dim 0 alone"
            )
        return NotImplemented

    def get_values(self, func: OpOverload, is_written: bool) -> Tensor:
        if is_written and func.namespace in COLLECTIVE_NAMESPACES:
            raise NotImplementedError(
                f"{func}: a frozen float8 weight has no high-precision memory that a collective could write to; "
                "send the codes and scales of state_dict(), and load them"
            )
        if func not in _READ_OPS and not is_written:
            report_slow_path(
                f"{func} on a frozen weight",
                f"{func} dequantizes a whole frozen float8 weight, {list(self.shape)}, to {self.dtype}: it does not "
                "run on float8 codes, as the forward and backward of a FrozenFloat8Linear do",
            )
        return self.to_high_precision()

    def handle_write(self, func: OpOverload, args: tuple[Any, ...], values: Tensor) -> None:
        self.write(values)


torch.serialization.add_safe_globals([FrozenFloat8Weight])


def _convert_to_frozen(value: Tensor) -> Tensor:
    """Return a weight with the codes of `value`, which may be a `FrozenState`; or `value` if it has no codes."""
    if isinstance(value, FrozenFloat8Weight) and value.has_codes:
        return FrozenFloat8Weight.from_state(*value.get_state())
    report_slow_path(
        "frozen weights from values",
        f"a frozen module was given values in high precision, {list(value.shape)}, as Accelerate's disk offload stores "
        "them: it quantizes them at each use",
    )
    return value.to_high_precision() if isinstance(value, FrozenFloat8Weight) else value


def is_as_strided_of_all(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether the op is `as_strided` with the weight's own size and strides, which FSDP2 calls."""
    if func is not aten.as_strided.default or tuple(args[1]) != tuple(args[0].shape):
        return False
    return tuple(args[2]) == args[0].stride() and not any(args[3:])


ALIAS_OPS = frozenset({aten.alias.default, aten.detach.default})
_ROW_OPS: dict[Any, Any] = {
    aten.split.Tensor: lambda weight, args: len(args) < 3 or args[2] == 0,
    aten.slice.Tensor: lambda weight, args: (args[1] if len(args) > 1 else 0) == 0,
    aten.new_zeros.default: lambda weight, args: tuple(args[1][1:]) == tuple(weight.shape[1:]),
    aten.new_empty.default: lambda weight, args: math.prod(args[1]) == 0,  # of a rank without rows
    aten.view.default: lambda weight, args: weight.is_part,
}
"""The ops that FSDP2 calls on rows of a weight, and whether a call with these arguments selects rows."""
_READ_OPS = frozenset(
    {aten.copy_.default, aten.view.default, aten.equal.default, aten.eq.Tensor, aten.abs.default, aten.isnan.default}
)
"""Ops that may dequantize without a report: copies, also in DistributedDataParallel's broadcast, and checks such as
`isfinite`, which PEFT's safe merge calls."""


@functools.cache
def log_merge_cost() -> None:
    """Log once at WARNING what a merge into float8 costs; docs/fine-tuning.md has the measurement."""
    logger.warning(
        "a write into frozen float8 weights quantizes them again. Merging an adapter into them changes the logits by "
        "10% to 25% (2% in bfloat16); merge into the high-precision model instead. conversion_report has the SQNR of "
        "each weight"
    )

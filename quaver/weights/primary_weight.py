"""`Float8PrimaryWeight`: a parameter that holds the codes of its matmuls, over a master in high precision.

any op on a primary weight    runs on the master; a write quantizes the codes again
state_dict                    the master, under the weight's name (primary.py)
"""

from __future__ import annotations

import itertools
import typing
from typing import Any

import torch
from torch import Tensor

from quaver.experts.function import quantize_weight
from quaver.kernels.operands import Operand, Operands, require
from quaver.linear.quantize import Quantizer
from quaver.linear.tensor import Float8Tensor
from quaver.linear.weight_form import COLLECTIVE_NAMESPACES, WrapperWeight
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.linear_casts import OperandCasts
from quaver.torch_private.dispatch import OpOverload
from quaver.torch_private.versions import get_version

aten = torch.ops.aten

_STAND_IN_VERSIONS = itertools.count(-2, -1)
"""Distinct numbers instead of versions, which inference tensors do not have."""
_NEVER_QUANTIZED = -1, -1
"""The versions that mark codes as older than the master."""


class Float8PrimaryWeight(WrapperWeight, Float8Tensor):
    """The codes of a weight [N, K], or of experts' [E, rows, columns], and its master, whose dtype it presents."""

    config: Float8LinearConfig
    """How to quantize the master, which is `wrapped`. Both are None in a tensor that a compiler traces."""
    transposed: bool
    """Whether experts are stored [E, K, N]."""
    _quantized_versions: tuple[int, int]
    """The versions of parameter and master at the last cast. A write through a view increments one of the two."""

    @staticmethod
    def __new__(
        cls, row: Operand, column: Operand | None, dtype: torch.dtype, master: Tensor | None = None, *_: object
    ) -> Float8PrimaryWeight:
        """Use `from_master`."""
        return Float8Tensor.__new__(cls, row, column, dtype) if master is None else cls.wrap(master)

    def __init__(
        self,
        row: Operand,
        column: Operand | None,
        dtype: torch.dtype,
        master: Tensor | None = None,
        config: Float8LinearConfig | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__(row, column, dtype)
        self.wrapped, self.config = typing.cast(Tensor, master), typing.cast(Float8LinearConfig, config)
        self.transposed = transposed
        self._quantized_versions = self._get_versions()

    @staticmethod
    def from_master(master: Tensor, config: Float8LinearConfig, transposed: bool = False) -> Float8PrimaryWeight:
        """Quantize `master`, high precision [N, K] or of experts, under `config`."""
        operands = _quantize_master(master, config, transposed)
        return Float8PrimaryWeight(*operands, master.dtype, master, config, transposed)

    def get_stored_operands(self) -> Operands:
        """Return the operands of both matmuls. Quantizes again if a write to the master bypassed the parameter.

        A master that was made in inference mode has no version counter, so it is quantized at each use.
        """
        if self._quantized_versions != self._get_versions():
            self.quantize()
        return super().get_stored_operands()

    @torch.no_grad()
    def quantize(self) -> None:
        """Quantize the master into the codes."""
        operands = _quantize_master(self.wrapped, self.config, self.transposed)
        for stored, operand in zip(super().get_stored_operands(), operands, strict=True):
            target = require(stored, "the stored operand")
            target.data.copy_(operand.data)
            require(target.dequant_scale, "the dequant_scale").copy_(
                require(operand.dequant_scale, "the dequant_scale")
            )
        self._quantized_versions = self._get_versions()

    def _get_versions(self) -> tuple[int, int]:
        if self.wrapped is None or torch.compiler.is_compiling():
            return 0, 0
        if self.wrapped.is_inference():
            return next(_STAND_IN_VERSIONS), 0
        return get_version(self), get_version(self.wrapped)

    def explain_cast_mismatch(self, casts: OperandCasts, *, transposed: bool = False) -> str:
        if self.config is None or self.config.casts.weight == casts:
            return ""
        return (
            f"a float8 primary weight {list(self.shape)} was quantized under another config ({self.config.short_str()})"
            "; convert with that one, or give the module a plain parameter and call use_float8_primary_weights again"
        )

    def assign(self, new: Tensor) -> None:
        """Write the values to the master."""
        if new.shape != self.shape or new.dtype != self.dtype or new.device != self.device:
            raise RuntimeError(
                f"cannot assign {list(new.shape)} of {new.dtype} on {new.device} to .data of a float8 primary weight "
                f"{list(self.shape)} of {self.dtype} on {self.device}; convert the model before "
                "use_float8_primary_weights"
            )
        with torch.no_grad():
            self.copy_(new)

    def get_state(self) -> tuple[Any, ...]:
        return self.wrapped, self.config, self.transposed

    @classmethod
    def from_state(cls, master: Tensor, config: Float8LinearConfig, transposed: bool = False) -> Float8PrimaryWeight:
        return cls.from_master(master, config, transposed)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Float8PrimaryWeight({self.data_fp8.dtype}, master={self.wrapped})"

    def run_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.wrapped is None:
            return Float8Tensor.run_op(self, func, args, kwargs)
        return self._alias() if func in (aten.detach.default, aten.alias.default) else NotImplemented

    def handle_write(self, func: OpOverload, args: tuple[Any, ...], values: Tensor) -> None:
        if func.namespace in COLLECTIVE_NAMESPACES:
            self._quantized_versions = _NEVER_QUANTIZED
        else:
            self.quantize()

    def wrap_copy(self, func: OpOverload, copied: Tensor) -> Tensor:
        if func is aten._to_copy.default and copied.dtype in HP_DTYPES:  # of module.to(), which keeps the class
            return self.from_master(copied, self.config, self.transposed)
        return copied

    def _alias(self) -> Float8PrimaryWeight:
        row, column = super().get_stored_operands()
        alias = Float8PrimaryWeight(
            require(row, "the row operand"), column, self.dtype, self.wrapped, self.config, self.transposed
        )
        alias._quantized_versions = self._quantized_versions
        return alias


@torch.inference_mode(False)  # codes are written in place later, even if the master is an inference tensor
@torch.no_grad()
def _quantize_master(master: Tensor, config: Float8LinearConfig, transposed: bool) -> tuple[Operand, Operand]:
    """Return the row and column operands of the stored weight, as one object if one cast serves both."""
    casts = config.casts.weight
    if master.dim() == 3:
        matrices = quantize_weight(master.detach().contiguous(), config, transposed, row=True, column=True)
        stored = [require(operand, "the stored operand") for operand in matrices]
        row, column = (operand._replace(data=operand.data.view(master.shape)) for operand in stored)
        row, column = (column, row) if transposed else (row, column)
        return row, row if column.data.data_ptr() == row.data.data_ptr() else column
    shared = casts.shares_codes
    operands = Quantizer(casts, master.dtype)(master.detach(), row=True, column=not shared)
    row = require(operands.row, "the row operand")
    return row, row if shared else require(operands.column, "the column operand")

"""`Float8Tensor`: float8 operands that stand for a high-precision tensor where one must cross a boundary.

FSDP2 hands a gathered weight to its module as a parameter, and tensor parallelism hands a gathered activation to a
module's forward. Both have been cast already, so what is handed over is this: codes and scales inside, the shape and
dtype of the high-precision tensor outside, gradients in high precision. `Float8Linear` takes the operands out again;
the hot path of a linear on one device never sees one.

A matrix is read twice, by the matmul that contracts its last dim and by the one that contracts its first. Where one
cast serves both (tensorwise), the two operands are one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.casts import Operand
from quaver.forward_reads import ForwardReads

aten = torch.ops.aten


class WrappedTensor(Tensor):
    """A tensor in high precision around a plain one, which a distributed wrapper can do more with."""

    def plain(self) -> Tensor:
        """The plain tensor inside, differentiably."""
        raise NotImplementedError


class Float8Tensor(Tensor):
    """Float8 operands with the shape and dtype of the tensor that they were cast from.

    Attributes:
        data_fp8, dequant_scale: as a matmul contracting the last dim reads it.
            float8 [..., K]; float32 () or [..., 1].
        first_data_fp8, first_dequant_scale: as a matmul contracting the first dim of the matrix [rows, K] reads it.
            float8 [..., K]; float32 () or [1, K]. The same objects as above where one cast serves both; None where
            there is no such cast.
        is_saved_by_value: whether the last forward that read it did so within hooks that read what is saved.
        forward_reads: who may read it in a forward again, where its memory can be let go before (distributed/fsdp.py).
    """

    data_fp8: Tensor
    dequant_scale: Tensor
    first_data_fp8: Tensor | None
    first_dequant_scale: Tensor | None
    is_saved_by_value: bool
    forward_reads: ForwardReads | None

    @staticmethod
    def __new__(cls, last: Operand, first: Operand | None, dtype: torch.dtype) -> Float8Tensor:
        """Use `from_operands`."""
        data = last.data
        return Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device, requires_grad=False
        )

    def __init__(self, last: Operand, first: Operand | None, dtype: torch.dtype) -> None:
        self.is_saved_by_value = False
        self.forward_reads = None
        self.set_operands(last, first)

    @classmethod
    def from_operands(cls, last: Operand, first: Operand | None, dtype: torch.dtype) -> Float8Tensor:
        """The tensor of `dtype` that `last` and `first` were cast from; every Float8Tensor is made here.

        Raises:
            ValueError: an operand that is not float8, or without a scale, or two of different shapes.
        """
        for operand in (last, first):
            if operand is not None and (operand.dequant_scale is None or operand.data.itemsize != 1):
                raise ValueError(f"expected float8 data with a scale, got {operand.data.dtype}")
        if first is not None and first.data.shape != last.data.shape:
            raise ValueError(f"expected two casts of one tensor, got {list(last.data.shape)}, {list(first.data.shape)}")
        return cls(last, first, dtype)

    def set_operands(self, last: Operand, first: Operand | None) -> None:
        """Replace codes and scales by others of the same shape."""
        self.data_fp8, self.dequant_scale = last.data, _scale(last)
        if first is None:
            self.first_data_fp8 = self.first_dequant_scale = None
        else:
            self.first_data_fp8, self.first_dequant_scale = first.data, _scale(first)

    def operand(self, contracted_dim: int) -> Operand:
        """The matrix [rows, K] as an operand of the matmul that contracts its dim `contracted_dim`, 0 or 1.

        Raises:
            RuntimeError: it was not cast for that matmul.
        """
        if contracted_dim == 1:
            scale = self.dequant_scale
            return Operand(_rows(self.data_fp8), scale if scale.dim() == 0 else scale.reshape(-1, 1))
        if self.first_data_fp8 is None:
            raise RuntimeError("this Float8Tensor was not cast for a matmul that contracts its rows")
        return Operand(_rows(self.first_data_fp8), self.first_dequant_scale)

    def to_high_precision(self) -> Tensor:
        """The values that the codes for the last dim stand for, in the tensor's dtype. Not differentiable."""
        self._note_unseen_read()
        with torch.no_grad():
            return (self.data_fp8.float() * self.dequant_scale).to(self.dtype)

    def _note_unseen_read(self) -> None:
        """Say that something other than an eager linear reads it."""
        if self.forward_reads is not None:
            self.forward_reads.read_unseen()

    # ---- what torch asks of a subclass ---------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, str]]:
        if self.forward_reads is not None and _is_called_by_torch():
            self._note_unseen_read()  # compiled code begins with this, each time
        names = ["data_fp8", "dequant_scale"]
        if self.first_data_fp8 is None:
            return names, (self.dtype, "none")
        if self.first_data_fp8 is self.data_fp8:
            return names, (self.dtype, "shared")
        return [*names, "first_data_fp8", "first_dequant_scale"], (self.dtype, "own")

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: tuple[torch.dtype, str], outer_size: object, outer_stride: object
    ) -> Float8Tensor:
        dtype, first = meta
        last = Operand(inner["data_fp8"], inner["dequant_scale"])
        firsts = {"none": None, "shared": last}
        own = Operand(inner["first_data_fp8"], inner["first_dequant_scale"]) if first == "own" else None
        return cls.from_operands(last, firsts.get(first, own), dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Float8Tensor(shape={list(self.shape)}, {self.data_fp8.dtype} for {self.dtype}, device={self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotImplementedError(
                f"{func} is not defined on a Float8Tensor: its codes mean nothing without their scales. "
                "Give it to a Float8Linear, or call to_high_precision() first"
            )
        return handler(func, *args, **(kwargs or {}))


class NeverRead(Tensor):
    """Stands for a matrix without memory in a matmul whose result a policy looks up; see kept_matmuls.py.

    torch makes no views of a matrix whose memory is too small for it, not even to hand it to a policy. And should no
    policy step in, the matmul raises instead of reading what is not there.
    """

    @classmethod
    def in_place_of(cls, matrix: Tensor) -> NeverRead:
        """Of the shape, strides, dtype and device of `matrix`; calls no operation that a policy would count."""
        return cls._of(matrix, matrix.shape, matrix.stride())

    @classmethod
    def _of(cls, matrix: Tensor, size: Sequence[int], stride: Sequence[int]) -> NeverRead:
        return Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=matrix.dtype, device=matrix.device)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"NeverRead(shape={list(self.shape)}, {self.dtype}, {self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.t.default:
            return cls._of(args[0], args[0].shape[::-1], args[0].stride()[::-1])
        raise RuntimeError(
            f"{func} would read a weight that was not gathered, because its module's policy had kept what is computed "
            "from it: a module under per-operator checkpointing has to compute in its recomputation what it has "
            "computed in its forward. If it cannot, give fully_shard reshard_after_forward=False"
        )


def _is_called_by_torch() -> bool:
    """Whether the caller's caller is torch, and not one who looks at the parts of a tensor."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")


def _scale(operand: Operand) -> Tensor:
    if operand.dequant_scale is None:
        raise ValueError("expected float8 data with a scale, got data in high precision")
    return operand.dequant_scale


def _rows(data: Tensor) -> Tensor:
    return data if data.dim() == 2 else data.reshape(-1, data.shape[-1])


def _map(
    tensor: Float8Tensor, of_data: Callable[[Tensor], Tensor], of_scale: Callable[[Tensor], Tensor]
) -> Float8Tensor:
    """Rebuild with `of_data` applied to the codes and `of_scale` to the scale of the last dim; what is shared stays so.

    The scales of the first dim are one per column, which no operation here moves.
    """
    last = Operand(of_data(tensor.data_fp8), of_scale(tensor.dequant_scale))
    if tensor.first_data_fp8 is None:
        first = None
    elif tensor.first_data_fp8 is tensor.data_fp8:
        first = last
    else:
        first = Operand(of_data(tensor.first_data_fp8), tensor.first_dequant_scale)
    return Float8Tensor.from_operands(last, first, tensor.dtype)


def _alias(func: Any, tensor: Float8Tensor) -> Tensor:
    alias = _map(tensor, func, func)
    alias.forward_reads = tensor.forward_reads  # it is read in place of what it stands for
    return alias


def _clone(func: Any, tensor: Float8Tensor, **kwargs: Any) -> Tensor:
    tensor._note_unseen_read()
    return _map(tensor, lambda data: func(data, **kwargs), lambda scale: scale)


def _view(func: Any, tensor: Float8Tensor, size: list[int]) -> Tensor:
    """Leading dims may be joined and split; the last one, along which scales run, stays."""
    if not size or size[-1] not in (-1, tensor.shape[-1]):
        raise NotImplementedError(
            f"a Float8Tensor of {list(tensor.shape)} cannot be viewed as {size}: keep the last dim"
        )
    leading = [*size[:-1], 1]

    def of_scale(scale: Tensor) -> Tensor:
        return scale if scale.dim() == 0 else scale.reshape(leading)

    if size[-1] == -1:
        size = [*size[:-1], tensor.shape[-1]]
    return _map(tensor, lambda data: func(data, size), of_scale)


def _as_strided(func: Any, tensor: Float8Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    if tuple(size) != tuple(tensor.shape) or tuple(stride) != tensor.stride() or storage_offset:
        raise NotImplementedError("a Float8Tensor can only be viewed with its own size and strides")
    return _alias(aten.alias.default, tensor)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _alias,
    aten.detach.default: _alias,
    aten.clone.default: _clone,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.as_strided.default: _as_strided,
}

"""`StoredFormat`: how a checkpoint stores its float8 weights. The shape of a scale gives its granularity:

    a scale for      shape of the scale of [N, K]; of a stack [E, N, K] with E in front
    the matrix       () [1] [1, 1]
    a row            [N] [N, 1]
    a column         [1, K], or [K] where K is not N
    a block          [n, k] or [n, 1, k, 1], with the block size of config.json or of powers of two

A block size that does not divide the matrix must be in config.json; otherwise the scale is ambiguous.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.scale_layout import BLOCK_SIZES, ScaleLayout
from quaver.recipes.scaling import dequantize
from quaver.runtime.errors import InputError

LINEAR_TARGET = "Linear"
"""The target of the group for all linears that no other group names."""


class StoredScale(NamedTuple):
    """The scale of a matrix [N, K]."""

    values: Tensor
    """float32: () for the whole matrix, [N, 1] for rows, or one for each block; a column counts as a block."""
    granularity: str
    """`tensor`, `channel`, or `block ROWS x COLUMNS`."""
    block_size: tuple[int, int] | None = None

    def dequantize(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return code * scale in float32, rounded to `dtype`."""
        return dequantize(codes, self.values, dtype, None if self.block_size is None else ScaleLayout(*self.block_size))


@dataclass
class StoredFormat:
    """The format of the float8 weights, from config.json; fields that it does not give keep their defaults."""

    method: str | None = None
    block_sizes: tuple[tuple[int, int], ...] = ()
    """The rows and columns of a block, for each group of linears."""
    token_scales: Mapping[str, bool] = field(default_factory=dict)
    """Whether activations have a scale per token, or per group of a token, by the target of a group."""
    is_file: bool = False
    """Whether the checkpoint is one file, where the values of a float8 tensor without a scale may be its codes."""
    marks: Collection[str] = ()
    """The names of tensors that are not tensors of the model, such as marks of quantized layers."""
    unpadded_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The shapes of matrices before padding, by name, if the file has them."""
    metadata_keys: ClassVar[tuple[str, ...]] = ()
    """The keys of metadata about quantization in the header of a file."""

    def get_padded_shape(self, name: str, shape: Sequence[int]) -> list[int] | None:
        """Return the shape with which a matrix is stored, or None if the format does not pad it."""
        return None

    def list_unscaled(self, float8: Collection[str], scaled: Collection[str]) -> list[str]:
        """Return the `float8` tensors whose values are their codes; `scaled` are the float8 tensors with a scale."""
        return []

    def has_token_scales(self, weights: Iterable[str]) -> bool:
        """Return whether the activations of any of these weights have a scale per token, or per group of a token."""
        return any(self._has_token_scales(name.removesuffix(".weight")) for name in weights)

    def _has_token_scales(self, module: str) -> bool:
        """Run `has_token_scales` for one module. As in compressed-tensors, names match before patterns and classes."""
        if module in self.token_scales:
            return self.token_scales[module]
        patterns = (target for target in self.token_scales if target.startswith("re:"))
        target = next((target for target in patterns if re.match(target.removeprefix("re:"), module)), LINEAR_TARGET)
        return self.token_scales.get(target, any(self.token_scales.values()))

    def parse_scales(self, name: str, shape: Sequence[int], stored: Tensor) -> list[StoredScale]:
        """Return the scale of the matrix `name`, or of each matrix of a stack. Raises what `parse_scale` raises."""
        if len(shape) == 2:
            return [self.parse_scale(name, shape, stored)]
        if stored.numel() == 1:
            return [self.parse_scale(name, (1, math.prod(shape)), stored.reshape(()))]
        if len(shape) != 3 or stored.shape[0] != shape[0]:
            raise InputError(
                f"{name} {shape}: expected a matrix, or a stack with a scale for each, got a scale {list(stored.shape)}"
            )
        return [self.parse_scale(name, shape[1:], scale) for scale in stored]

    def parse_scale(self, name: str, shape: Sequence[int], stored: Tensor) -> StoredScale:
        """Interpret the scale of the matrix `name` [N, K]; see the top of the file.

        Raises:
            ValueError: its shape fits no granularity, or several, or it is not finite.
            NotImplementedError: its dtype is unknown.
        """
        values = _to_float32(name, stored)
        rows, columns = shape
        if values.dim() == 4 and values.shape[1] == values.shape[3] == 1:
            values = values[:, 0, :, 0]
        elif values.dim() == 3 and values.shape[2] == 1:
            values = values[:, :, 0]
        counts = tuple(values.shape)
        sizes = [size for size in self.block_sizes if ScaleLayout(*size).get_scale_shape(rows, columns) == counts]
        is_of_config = bool(sizes) and (counts != (rows, 1) or all(size[0] == 1 for size in sizes))
        if not is_of_config:
            if math.prod(counts) == 1 and (len(counts) < 2 or not self.block_sizes):
                return StoredScale(values.reshape(()), "tensor")
            if counts in ((rows,), (rows, 1)) and rows > 1:
                return StoredScale(values.reshape(rows, 1), "channel")
            if counts == (columns,):
                counts = 1, columns
            if len(counts) == 2 and counts != (1, 1):
                sizes = list(_iter_exact_blocks(shape, counts))
        if len(sizes) != 1:
            scale_shapes = ((size, ScaleLayout(*size).get_scale_shape(rows, columns)) for size in self.block_sizes)
            blocks = [f"{list(counts)} ({size[0]} x {size[1]} blocks)" for size, counts in scale_shapes]
            blocks = blocks or ["one per block whose rows and columns are powers of two and divide it"]
            raise InputError(
                f"the scale of {name} {[rows, columns]}: expected [1], {[rows, 1]}, {[1, columns]} or "
                f"{' or '.join(blocks)}, got {list(stored.shape)}"
                + ("" if self.block_sizes else "; give the block size as weight_block_size in config.json")
            )
        values, size = _merge_rows_to_squares(values.reshape(counts), sizes[0])
        return StoredScale(values, f"block {size[0]} x {size[1]}", size)


def _to_float32(name: str, scale: Tensor) -> Tensor:
    if scale.dtype is torch.uint8:  # E8M0 as raw bytes
        scale = scale.contiguous().view(torch.float8_e8m0fnu)
    if scale.dtype is not torch.float8_e8m0fnu and (not scale.is_floating_point() or scale.itemsize == 1):
        raise NotImplementedError(f"the scale of {name}: expected F32, BF16, F16, F8_E8M0 or U8, got {scale.dtype}")
    scale = scale.float()
    if not scale.isfinite().all():
        raise InputError(f"the scale of {name} has an inf or a NaN: the model that was exported has diverged")
    return scale


def _merge_rows_to_squares(values: Tensor, size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Return the scales and size of square blocks if the scales of groups of a row are equal within each block.

    MXFP8 files store the square blocks of quaver's recipe in this way; frozen weights need the blocks.
    """
    length = size[1]
    squares, is_known = values[::length], size[0] == 1 and (length, length) in BLOCK_SIZES
    if is_known and squares.repeat_interleave(length, 0)[: len(values)].equal(values):
        return squares, (length, length)
    return values, size


def _iter_exact_blocks(shape: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the block size for `counts` blocks, if each length is a power of two or spans all rows or columns."""
    lengths = []
    for elements, count in zip(shape, counts, strict=True):
        length, remainder = divmod(elements, max(count, 1))
        if remainder or not (count == 1 or (length and length & (length - 1) == 0)):
            return
        lengths.append(length)
    rows, columns = lengths
    yield max(rows, columns if counts[0] == 1 else 0), max(columns, rows if counts[1] == 1 else 0)


def parse_block_size(size: Any) -> tuple[int, int]:
    """Return the block size in a config.json. Raises ValueError if it is not [rows, columns]."""
    if not is_block_size(size):
        raise InputError(f"blocks in config.json: expected [rows, columns], such as [128, 128], got {size!r}")
    return size[0], size[1]


def is_block_size(size: Any) -> bool:
    """Return whether a JSON value is [rows, columns]."""
    return isinstance(size, list) and len(size) == 2 and all(type(length) is int and length > 0 for length in size)


def make_block_format(method: str, quantization: Mapping[str, Any], *, by_token: bool = False) -> StoredFormat:
    """Return the format of a config with or without a `weight_block_size`.

    `by_token`: whether activations have a scale per token if there are no blocks.
    """
    size = quantization.get("weight_block_size")
    sizes = () if size is None else (parse_block_size(size),)
    return StoredFormat(method, sizes, {LINEAR_TARGET: by_token or size is not None})

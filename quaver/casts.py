"""The float8 casts of one matrix: each amax read once, each layout cast once, shared between all who ask.

A linear's operand enters two matmuls, and an activation may enter several linears (q, k and v; gate and up).
`MatrixCasts` remembers what was computed of one matrix; `casts_of_input` finds the memory of an activation again.

Nothing lives longer for it: the matrix and its casts are held by weak references. Amaxes and scales (a few numbers)
stay as long as the matrix, so a cast that has died is made again without another amax. A changed activation is never
taken for the old one: its version counter is compared, as autograd compares it for saved tensors.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.config import CastConfig, Float8LinearConfig
from quaver.gemm import along_contracted
from quaver.scaling import amax, amax_to_quant_scale, cast_to_float8, to_dequant_scale


class Operand(NamedTuple):
    """One operand of one matmul: float8 with its dequant_scale, or high precision with None."""

    data: Tensor
    dequant_scale: Tensor | None

    def t(self) -> Operand:
        return Operand(self.data.t(), None if self.dequant_scale is None else self.dequant_scale.t())


class MatrixCasts:
    """What has been computed of one matrix [rows, columns] under one config.

    The matrix is given to each call, not kept.
    """

    def __init__(self, config: Float8LinearConfig) -> None:
        self._power_of_2 = config.round_scales_to_power_of_2
        self._emulate = config.emulate
        self._amaxes: dict[int | None, Tensor] = {}
        self._scales: dict[object, tuple[Tensor, Tensor]] = {}
        self._tensors: dict[object, Tensor | weakref.ref[Tensor]] = {}

    def cast(self, hp: Tensor, config: CastConfig, contracted_dim: int, hp_dtype: torch.dtype) -> Operand:
        """`hp` [rows, columns] for the matmul that contracts `contracted_dim`, in the layout that it reads.

        A disabled config gives `hp` in `hp_dtype`.
        """
        if config.is_disabled:
            data = self._recall(hp_dtype)
            return Operand(self._remember(hp_dtype, hp.to(hp_dtype)) if data is None else data, None)
        dtype, dim = config.float8_dtype, contracted_dim if config.is_rowwise else None
        quant_scale, dequant_scale = self.scales(hp, config, contracted_dim)
        data = self._recall((dtype, dim, contracted_dim))
        if data is None:
            codes = self._recall((dtype, dim))
            if codes is None:
                codes = self._remember((dtype, dim), cast_to_float8(hp, quant_scale, dtype))
            data = along_contracted(codes, contracted_dim, emulate=self._emulate)
            self._remember((dtype, dim, contracted_dim), data)
        return Operand(data, dequant_scale)

    def scales(self, hp: Tensor, config: CastConfig, contracted_dim: int) -> tuple[Tensor, Tensor]:
        """quant_scale and dequant_scale of a cast: float32, shape () or that of `hp` with `contracted_dim` 1."""
        dim = contracted_dim if config.is_rowwise else None
        key = (config.float8_dtype, dim)
        if key not in self._scales:
            quant_scale = amax_to_quant_scale(self._amax(hp, dim), config.float8_dtype, power_of_2=self._power_of_2)
            self._scales[key] = quant_scale, to_dequant_scale(quant_scale)
        return self._scales[key]

    def adopt(self, scales: tuple[Tensor, Tensor], config: CastConfig) -> None:
        """Use these tensorwise scales for casts under `config`, instead of reading the matrix for an amax."""
        self._scales[config.float8_dtype, None] = scales

    def _amax(self, hp: Tensor, dim: int | None) -> Tensor:
        if dim not in self._amaxes:
            rows = None if dim is not None else next(iter(self._amaxes.values()), None)
            self._amaxes[dim] = amax(hp, dim) if rows is None else amax(rows)
        return self._amaxes[dim]

    def _remember(self, key: object, tensor: Tensor) -> Tensor:
        # The compiler shares equal computations itself, and traces no weak references.
        self._tensors[key] = tensor if torch.compiler.is_compiling() else weakref.ref(tensor)
        return tensor

    def _recall(self, key: object) -> Tensor | None:
        known = self._tensors.get(key)
        return known() if isinstance(known, weakref.ref) else known


class _InputRecord(NamedTuple):
    tensor: weakref.ref[Tensor]
    version: int
    casts: dict[tuple[bool, bool], MatrixCasts]


_inputs: dict[int, _InputRecord] = {}


def casts_of_input(input: Tensor, config: Float8LinearConfig) -> MatrixCasts:
    """The memory of an activation's casts: the same one for every linear that is given the same unchanged tensor.

    A new and empty one under the compiler, which shares equal computations itself, and for inference tensors, which
    count no versions.
    """
    if torch.compiler.is_compiling() or input.is_inference():
        return MatrixCasts(config)
    record = _inputs.get(id(input))
    if record is None or record.tensor() is not input or record.version != input._version:
        key = id(input)
        record = _InputRecord(weakref.ref(input, lambda _: _inputs.pop(key, None)), input._version, {})
        _inputs[key] = record
    settings = (config.round_scales_to_power_of_2, config.emulate)
    casts = record.casts.get(settings)
    if casts is None:
        casts = record.casts[settings] = MatrixCasts(config)
    return casts

"""The float8 casts of one matrix: each amax read once, each layout cast once, shared between all who ask.

A linear's operand enters two matmuls, and an activation may enter several linears (q, k and v; gate and up).
`MatrixCasts` remembers what was made of one matrix; `casts_of_activation` finds that of an activation again.

Nothing lives longer for it: the activation and its casts are held by weak references. Scales and amaxes (a few numbers)
stay as long as the activation, so a cast that has died is made again without another read for its amax. A changed
activation is never taken for the old one: its version counter is compared, as autograd compares it for saved tensors.
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


class Scales(NamedTuple):
    """The scale of one cast, both ways: float32, shape () or that of the matrix with the contracted dim 1."""

    quant: Tensor
    dequant: Tensor


class MatrixCasts:
    """What has been made of one matrix [rows, columns] under one config. The matrix is given to each call, not kept.

    A scale is known by the dim that it reduces, None for tensorwise; a cast by that and the dim its matmul contracts.
    """

    __slots__ = ("_data", "_row_amax", "_scales", "config", "hp_dtype")

    def __init__(self, config: Float8LinearConfig, hp_dtype: torch.dtype) -> None:
        self.config = config
        self.hp_dtype = hp_dtype
        self._row_amax: Tensor | None = None
        self._scales: dict[int | None, Scales] = {}
        self._data: dict[tuple[int | None, int], Tensor | weakref.ref[Tensor]] = {}

    def cast(self, hp: Tensor, cast: CastConfig, contracted_dim: int) -> Operand:
        """`hp` as an operand of the matmul that contracts `contracted_dim`, in the layout that it reads.

        A disabled cast gives `hp` in the high-precision dtype of the matmul.
        """
        if cast.is_disabled:
            return Operand(hp.to(self.hp_dtype), None)
        dim = contracted_dim if cast.is_rowwise else None
        quant_scale, dequant_scale = self.scales(hp, cast, contracted_dim)
        data = self._alive((dim, contracted_dim))
        if data is None:
            codes = self._alive((None, 1 - contracted_dim)) if dim is None else None
            if codes is None:
                codes = cast_to_float8(hp, quant_scale, cast.float8_dtype)
            data = along_contracted(codes, contracted_dim, emulate=self.config.emulate)
            # The compiler shares equal computations itself, and traces no weak references.
            compiling = torch.compiler.is_dynamo_compiling()
            self._data[dim, contracted_dim] = data if compiling else weakref.ref(data)
        return Operand(data, dequant_scale)

    def scales(self, hp: Tensor, cast: CastConfig, contracted_dim: int) -> Scales:
        """The scales of a cast; one read of `hp` unless they, or for a tensorwise cast row amaxes, are known."""
        dim = contracted_dim if cast.is_rowwise else None
        known = self._scales.get(dim)
        if known is not None:
            return known
        if dim is None and self._row_amax is not None:
            of_matrix = amax(self._row_amax)
        else:
            of_matrix = amax(hp, dim)
            self._row_amax = None if dim is None else of_matrix
        quant = amax_to_quant_scale(of_matrix, cast.float8_dtype, power_of_2=self.config.round_scales_to_power_of_2)
        scales = self._scales[dim] = Scales(quant, to_dequant_scale(quant))
        return scales

    def adopt_tensorwise(self, scales: Scales) -> None:
        """Cast tensorwise with these scales instead of reading the matrix for its amax."""
        self._scales[None] = scales

    def _alive(self, key: tuple[int | None, int]) -> Tensor | None:
        known = self._data.get(key)
        return known() if isinstance(known, weakref.ref) else known


class _Activation(NamedTuple):
    tensor: weakref.ref[Tensor]
    version: int
    casts: MatrixCasts


_activations: dict[int, _Activation] = {}


def casts_of_activation(activation: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype) -> MatrixCasts:
    """The casts of an activation: one object for all linears of one config that are given the same unchanged tensor.

    A new one under the compiler, which shares equal computations itself, and for inference tensors, which count no
    versions.
    """
    if torch.compiler.is_dynamo_compiling() or activation.is_inference():
        return MatrixCasts(config, hp_dtype)
    key = id(activation)
    known = _activations.get(key)
    if (
        known is not None
        and known.tensor() is activation
        and known.version == activation._version
        and known.casts.config is config
        and known.casts.hp_dtype is hp_dtype
    ):
        return known.casts
    casts = MatrixCasts(config, hp_dtype)
    # The default argument is the dictionary itself, which outlives this module's globals at interpreter exit.
    forget = weakref.ref(activation, lambda _, known=_activations: known.pop(key, None))
    _activations[key] = _Activation(forget, activation._version, casts)
    return casts

"""The float8 casts of one matrix: each amax read once, each layout cast once, shared between all who ask.

A linear's operand enters two matmuls, and an activation may enter several linears (q, k and v; gate and up).
`MatrixCasts` remembers what was made of one matrix; `casts_of_activation` finds that of an activation again.

Nothing lives longer for it: the activation and its casts are held by weak references. Scales (a few numbers) stay as
long as the activation, so a cast that has died is made again without another read for its amax. A changed
activation is never taken for the old one: its version counter is compared, as autograd compares it for saved tensors.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.config import CastConfig, Float8LinearConfig
from quaver.gemm import along_contracted
from quaver.kernels.cast import KeptScale, cast_with_kept_scale, cast_with_scale, dynamic_cast
from quaver.scaling import to_dequant_scale


class Operand(NamedTuple):
    """One operand of one matmul: float8 with its dequant_scale, or high precision with None."""

    data: Tensor
    dequant_scale: Tensor | None

    def t(self) -> Operand:
        scale = self.dequant_scale
        return Operand(self.data.t(), scale if scale is None or scale.dim() == 0 else scale.t())


class KeptScales(NamedTuple):
    """The kept scales of a linear's operands (delayed and static scaling); None for what is scaled dynamically."""

    input: KeptScale | None
    weight: KeptScale | None
    grad_output: KeptScale | None


NO_KEPT_SCALES = KeptScales(None, None, None)


class Scales(NamedTuple):
    """The scale of one cast, both ways: float32, shape () or that of the matrix with the contracted dim 1."""

    quant: Tensor
    dequant: Tensor


_CONVERTED = (None, -1)  # the key of a matrix in another high-precision dtype


class MatrixCasts:
    """What has been made of one matrix [rows, columns] under one config. The matrix is given to each call, not kept.

    A scale is known by the dim that it reduces, None for tensorwise; a cast by that and the dim its matmul contracts.
    """

    __slots__ = ("_data", "_scales", "_strong", "config", "hp_dtype", "kept")

    def __init__(
        self,
        config: Float8LinearConfig,
        hp_dtype: torch.dtype,
        kept: KeptScale | None = None,
        *,
        weak: bool = False,
    ) -> None:
        """`weak`: hold casts by weak references, for a memory that outlives the call that made it."""
        self.config = config
        self.hp_dtype = hp_dtype
        self.kept = kept
        self._strong = not weak
        self._scales: dict[int | None, Scales] = {}
        self._data: dict[tuple[int | None, int], Tensor | weakref.ref[Tensor]] = {}

    def cast(self, hp: Tensor, cast: CastConfig, contracted_dim: int) -> Operand:
        """`hp` as an operand of the matmul that contracts `contracted_dim`, in the layout that it reads.

        A disabled cast gives `hp` in the high-precision dtype of the matmul.
        """
        if cast.is_disabled:
            return Operand(hp if hp.dtype is self.hp_dtype else self._converted(hp), None)
        dim = contracted_dim if cast.is_rowwise else None
        key = (dim, contracted_dim)
        data = codes = None
        if self._data:
            data = self._alive(key)
            codes = self._alive((None, 1 - contracted_dim)) if dim is None else None
        if data is None:
            if codes is None:
                codes = self._cast(hp, cast.float8_dtype, dim)
            data = codes if codes.is_cpu else along_contracted(codes, contracted_dim, emulate=self.config.emulate)
            self._remember(key, data)
        return Operand(data, self._scales[dim].dequant)

    def tensorwise_scales(self) -> Scales | None:
        """The tensorwise scales of the matrix if it has been cast, without reading it again.

        After a row-wise cast it is the smallest quant_scale: a scale falls with its amax, rounding included, and is
        NaN where one amax is.
        """
        known = self._scales.get(None)
        if known is None and self._scales:
            of_rows = next(iter(self._scales.values())).quant
            if of_rows.numel():
                quant = of_rows.min()
                known = self._scales[None] = Scales(quant, to_dequant_scale(quant))
        return known

    def _cast(self, hp: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
        """Cast with the scales that are known for `dim`, or else with those of hp's own amaxes, known from then on."""
        known = None
        if self._scales:
            known = self.tensorwise_scales() if dim is None else self._scales.get(dim)
        if known is not None:
            return cast_with_scale(hp, known.quant, dtype)
        power_of_2 = self.config.round_scales_to_power_of_2
        if self.kept is None:
            codes, quant, dequant = dynamic_cast(hp, dtype, dim, power_of_2)
        else:
            codes, quant, dequant = cast_with_kept_scale(hp, self.kept, dtype, power_of_2)
        self._scales[dim] = Scales(quant, dequant)
        return codes

    def _converted(self, hp: Tensor) -> Tensor:
        """`hp` in the high-precision dtype of the matmul, where autocast asks for another than it has."""
        data = self._alive(_CONVERTED)
        return self._remember(_CONVERTED, hp.to(self.hp_dtype)) if data is None else data

    def _remember(self, key: tuple[int | None, int], data: Tensor) -> Tensor:
        self._data[key] = data if self._strong else weakref.ref(data)
        return data

    def _alive(self, key: tuple[int | None, int]) -> Tensor | None:
        known = self._data.get(key)
        return known() if isinstance(known, weakref.ref) else known


def cast_with(hp: Tensor, scales: Scales, cast: CastConfig, contracted_dim: int, config: Float8LinearConfig) -> Operand:
    """`hp` as an operand of the matmul that contracts `contracted_dim`, with scales made at an earlier cast of it."""
    codes = cast_with_scale(hp, scales.quant, cast.float8_dtype)
    return Operand(along_contracted(codes, contracted_dim, emulate=config.emulate), scales.dequant)


class _ActivationCasts(MatrixCasts):
    """The casts of an activation, and what it was when they were made."""

    __slots__ = ("tensor", "version")

    def __init__(
        self, activation: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: KeptScale | None
    ) -> None:
        super().__init__(config, hp_dtype, kept, weak=True)
        key = id(activation)

        def forget(_: weakref.ref[Tensor], known: dict[int, _ActivationCasts] = _activations) -> None:
            known.pop(key, None)  # the dictionary itself, which outlives this module's globals at interpreter exit

        self.tensor = weakref.ref(activation, forget)
        self.version = activation._version


_activations: dict[int, _ActivationCasts] = {}


def casts_of_activation(
    activation: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: KeptScale | None = None
) -> MatrixCasts:
    """The casts of an activation: one object for all linears of one config that are given the same unchanged tensor.

    Linears with a kept scale share it where they have the same one (`Float8LinearConfig.shared_inputs`).

    A new one under the compiler, which shares equal computations itself, and for inference tensors, which count no
    versions.
    """
    if torch.compiler.is_dynamo_compiling() or activation.is_inference():
        return MatrixCasts(config, hp_dtype, kept)
    known = _activations.get(id(activation))
    if (
        known is None
        or known.tensor() is not activation
        or known.version != activation._version
        or known.config is not config
        or known.hp_dtype is not hp_dtype
        or known.kept is not kept
    ):
        known = _activations[id(activation)] = _ActivationCasts(activation, config, hp_dtype, kept)
    return known

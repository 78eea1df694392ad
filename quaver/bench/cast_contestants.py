"""Who takes part in `quaver bench cast`: casts by several libraries, what they must move, and what they do move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quaver.bench.peer import torchao_cast
from quaver.bench.traffic import Traffic, count_compiled, count_extension, count_operators
from quaver.config import Float8LinearConfig
from quaver.formats import FORMATS
from quaver.gemm import GemmBackend, along_contracted, backend_for
from quaver.quantize import INPUT, Quantizer, cast_pair
from quaver.scaling import PersistentScale, amax, cast_with_persistent_scale, dynamic_cast

CastFunction = Callable[[Tensor], tuple[Tensor, ...]]
"""From a matrix [rows, columns] to its float8 codes, the scales, and whatever else the cast makes."""


@dataclass(frozen=True)
class CastKind:
    """One way to cast an operand: as the input of `recipe`, for the matmuls that contract `dims`."""

    recipe: str
    dims: tuple[int, ...]
    passes: int
    """Over the source, at least."""

    @property
    def config(self) -> Float8LinearConfig:
        return Float8LinearConfig.from_recipe_name(self.recipe)

    @property
    def is_rowwise(self) -> bool:
        return self.config.casts.input.is_rowwise

    @property
    def is_kept(self) -> bool:
        return self.config.casts.input.is_persistent

    def floor(self, itemsize: int, device: torch.device) -> int:
        """Bytes per element; see cast.py."""
        is_native = backend_for(device, rowwise=self.is_rowwise) is GemmBackend.NATIVE
        return self.passes * itemsize + (len(self.dims) if is_native or self.is_rowwise else 1)


KINDS = {
    "tensorwise": CastKind("tensorwise", (1, 0), 2),
    "delayed": CastKind("delayed", (1, 0), 1),
    "rowwise": CastKind("rowwise", (1,), 1),
    "rowwise_both": CastKind("rowwise", (1, 0), 2),
}
"""The casts by name: both layouts of a matrix, but for `rowwise`, which is one."""

COPY = "copy"
"""The contestant that moves the same matrix as it is."""


@dataclass(frozen=True)
class Contestant:
    """Bytes of `floor` are per element. `same_codes`: whether its float8 is that of `quaver.scaling`, bit for bit."""

    library: str
    mode: str
    function: CastFunction
    floor: int
    traffic: Traffic
    same_codes: bool | None

    @property
    def name(self) -> str:
        return f"{self.library} {self.mode}".strip()


def copy_of(source: Tensor) -> Contestant:
    """The copy, into one matrix of the size of `source`."""
    target = torch.empty_like(source)
    traffic = Traffic(2 * source.nbytes, "arithmetic")
    return Contestant(COPY, "", lambda hp: (target.copy_(hp),), 2 * source.itemsize, traffic, None)


def contestants_of(kind: CastKind, source: Tensor, with_torchao: bool) -> list[Contestant]:
    """All but the copy, called once: compiled ones have been compiled."""
    kept = _kept_scale(source, kind)
    ours, plain = _quaver_cast(kind, kept), _plain_cast(kind, kept)
    functions = {
        ("quaver", "eager"): ours,
        ("quaver", "compiled"): _compiled(ours),
        ("PyTorch", "compiled"): _compiled(plain),
    }
    if with_torchao and not kind.is_kept:
        peer = _torchao_cast(kind)
        functions |= {("torchao", "eager"): peer, ("torchao", "compiled"): _compiled(peer)}
    expected, floor = _codes(plain(source)), kind.floor(source.itemsize, source.device)
    contestants = []
    for (library, mode), function in functions.items():
        traffic = _traffic(library, mode, function, source, kind)
        same = _same(_codes(function(source)), expected)
        contestants.append(Contestant(library, mode, function, floor, traffic, same))
    return contestants


def _compiled(function: CastFunction) -> CastFunction:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _kept_scale(source: Tensor, kind: CastKind) -> PersistentScale | None:
    """A scale that fits `source`, as delayed scaling would have it after a step."""
    if not kind.is_kept:
        return None
    largest = FORMATS[kind.config.casts.input.float8_dtype].max
    quant_scale = largest / amax(source).float()
    return PersistentScale(quant_scale, torch.zeros(2, device=source.device), torch.tensor(True))


def _quaver_cast(kind: CastKind, kept: PersistentScale | None) -> CastFunction:
    config, dims = kind.config, kind.dims

    def cast(hp: Tensor) -> tuple[Tensor, ...]:
        made = Quantizer(cast_pair(config, INPUT, hp.dtype), kept)(hp, last=1 in dims, first=0 in dims)
        return tuple(part for operand in made[:2] if operand is not None for part in operand if part is not None)

    return cast


def _plain_cast(kind: CastKind, kept: PersistentScale | None) -> CastFunction:
    config, dims = kind.config, kind.dims
    float8_dtype, power_of_2 = config.casts.input.float8_dtype, config.round_scales_to_power_of_2
    is_rowwise = kind.is_rowwise

    def cast(hp: Tensor) -> tuple[Tensor, ...]:
        if is_rowwise:
            made = [dynamic_cast(hp, float8_dtype, dim, power_of_2=power_of_2) for dim in dims]
            layouts = [along_contracted(codes, dim) for (codes, _, _), dim in zip(made, dims, strict=True)]
            return (*layouts, *(dequant for _, _, dequant in made))
        if kept is None:
            codes, *rest = dynamic_cast(hp, float8_dtype, power_of_2=power_of_2)
        else:
            codes, *rest = cast_with_persistent_scale(hp, kept.quant_scale, float8_dtype, power_of_2=power_of_2)
        return (*(along_contracted(codes, dim) for dim in dims), *rest)

    return cast


def _torchao_cast(kind: CastKind) -> CastFunction:
    config, dims = kind.config, kind.dims
    float8_dtype, power_of_2 = config.casts.input.float8_dtype, config.round_scales_to_power_of_2
    of_dims = [torchao_cast(float8_dtype, dim, power_of_2=power_of_2) for dim in (dims if kind.is_rowwise else (None,))]

    def cast(hp: Tensor) -> tuple[Tensor, ...]:
        made = [cast_one(hp) for cast_one in of_dims]
        made = made if len(made) == len(dims) else made * len(dims)  # one set of codes, in each layout
        return tuple(along_contracted(codes, dim) for codes, dim in zip(made, dims, strict=True))

    return cast


# ---- what is known of them without a clock -----------------------------------------------------------------------


def _traffic(library: str, mode: str, cast: CastFunction, source: Tensor, kind: CastKind) -> Traffic:
    """Count; the first call of a compiled cast must be this one, which compiles it."""
    if library == "quaver" and source.is_cpu:
        return count_extension(lambda: cast(source), source.itemsize)
    least_bytes = kind.floor(source.itemsize, source.device) * source.numel()
    if mode == "compiled":
        return count_compiled(lambda: cast(source), least_bytes)
    return count_operators(lambda: cast(source), least_bytes)


def _codes(results: Sequence[Tensor]) -> list[Tensor]:
    return [each for each in results if each.dtype in FORMATS]


def _same(codes: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(codes, expected, strict=True)
    return all(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in pairs)

"""How a float8 checkpoint stores its weights, found by the names, dtypes and shapes of its tensors.

    weight      `<name>.weight` in e4m3 or e5m2 [N, K], or a stack of matrices [E, N, K]; value = code * scale
    scale       the tensor next to it with one of `SCALE_NAMES`: float32, bfloat16, float16 or E8M0, also as raw bytes
    its shape   one number        () [1] [1, 1]                            the whole matrix
                a row             [N] [N, 1]                               [E, N, 1] of a stack, and so on
                a column          [1, K], or [K] where K is not N
                a block           [n, k] or [n, 1, k, 1]                   of config.json, or of powers of two

A block that does not divide the matrix has the size that config.json gives; without it the scale is ambiguous. Scales
of a KV cache have a mapping of their own (kv_cache.py); those of activations are left out. ComfyUI's files mark their
layers, and may have float8 tensors without a scale (comfyui.py). docs/export.md lists who writes which layout.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.conversion.quantized_configs import QUANTIZATION_KEYS
from quaver.export.comfyui import Marks, plain_tensors
from quaver.export.kv_cache import LEAVES, stored_kv_scales
from quaver.recipes.scaling import BLOCK_LENGTHS, dequantize
from quaver.runtime.names import listed

CODES = ("F8_E4M3", "F8_E5M2")
"""Dtypes of weights, as headers of files name them."""

METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "mxfp8", "quark")
"""Values of `quant_method` whose float8 weights are codes times a scale."""

SCALE_NAMES = ("weight_scale", "weight_scale_inv", "scale", "scale_inv", "qscale_weight", "scale_weight")
"""Leaf names of the scale of a module's weight; the scales of a stack are `<stack>_scale`, `<stack>_scale_inv`."""

_OF_ACTIVATIONS = (
    "input_scale",
    "scale_input",
    "activation_scale",
    "input_scale_ub",
    "input_global_scale",
    "output_scale",
    "qscale_act",
)
_OF_CACHES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale")
_FOREIGN = (
    "weight_packed",
    "weight_zero_point",
    "weight_global_scale",
    "weight_scale_2",
    "pre_quant_scale",
    "qweight",
    "qzeros",
    "g_idx",
)
_HIGH_PRECISION = ("F64", "F32", "BF16", "F16")
_KNOWN = (
    f"known are weights in {' or '.join(CODES)} with one scale for each, called {', '.join(SCALE_NAMES)}, and "
    f"quant_method {', '.join(METHODS)}"
)


LINEARS = "Linear"
"""The target of a group that is for all linears, as far as no other names them."""


class StoredScale(NamedTuple):
    """The scale of a matrix [N, K]."""

    values: Tensor
    """float32: () of the whole matrix, [N, 1] of rows, [1, K] of columns, or one a block."""
    kind: str
    """tensor, channel, column, or block ROWS x COLUMNS."""
    block_size: tuple[int, int] | None = None

    def dequantized(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """RN(RN32(code * scale)) in `dtype`."""
        values = self.values
        if self.block_size not in (None, (128, 128), (32, 32)):
            rows, columns = self.block_size
            values = values.repeat_interleave(rows, 0)[: codes.shape[0]]
            values = values.repeat_interleave(columns, 1)[:, : codes.shape[1]]
            return codes.float().mul_(values).to(dtype)
        return dequantize(codes, values, dtype)


@dataclass(frozen=True)
class StoredFormat:
    """The format of the float8 weights as config.json states it; empty where it is silent."""

    method: str | None
    block_sizes: tuple[tuple[int, int], ...]
    """The rows and columns of the blocks of its groups."""
    rows: Mapping[str, bool]
    """Whether activations are quantized by token, or by groups of one, and not by tensor: by the target of a group."""

    def has_rows(self, weights: Iterable[str]) -> bool:
        """Whether the activations of any of these weights are quantized by token, or by groups of one."""
        return any(self._has_rows(name.removesuffix(".weight")) for name in weights)

    def _has_rows(self, module: str) -> bool:
        """Whether the group that compressed-tensors matches, by name, pattern or class, scales activations by token."""
        if module in self.rows:
            return self.rows[module]
        patterns = (each for each in self.rows if each.startswith("re:"))
        found = next((each for each in patterns if re.match(each.removeprefix("re:"), module)), LINEARS)
        return self.rows.get(found, any(self.rows.values()))

    def scale(self, name: str, shape: Sequence[int], stored: Tensor) -> StoredScale:
        """Interpret the scale of the matrix `name` [N, K]; see the top of the file.

        Raises:
            ValueError: it has the shape of no granularity, or of several, or is not finite.
            NotImplementedError: it has another dtype.
        """
        values = _float32(name, stored)
        rows, columns = shape
        if values.dim() == 4 and values.shape[1] == values.shape[3] == 1:
            values = values[:, 0, :, 0]
        counts = tuple(values.shape)
        sizes = [size for size in self.block_sizes if _block_counts(shape, size) == counts]
        is_of_config = bool(sizes) and (counts != (rows, 1) or all(size[0] == 1 for size in sizes))
        if not is_of_config:
            if math.prod(counts) == 1 and (len(counts) < 2 or not self.block_sizes):
                return StoredScale(values.reshape(()), "tensor")
            if counts in ((rows,), (rows, 1)) and rows > 1:
                return StoredScale(values.reshape(rows, 1), "channel")
            if counts in ((columns,), (1, columns)):
                return StoredScale(values.reshape(1, columns), "column")
            if len(counts) == 2 and counts != (1, 1):
                sizes = list(_exact_blocks(shape, counts))
        if len(sizes) != 1:
            blocks = [f"{list(_block_counts(shape, size))} ({size[0]} x {size[1]} blocks)" for size in self.block_sizes]
            blocks = blocks or ["one a block whose rows and columns are powers of two and divide it"]
            raise ValueError(
                f"the scale of {name} {[rows, columns]} must be [1], {[rows, 1]}, {[1, columns]} or "
                f"{' or '.join(blocks)}, got {list(stored.shape)}"
                + ("" if self.block_sizes else "; weight_block_size in config.json says which blocks")
            )
        values, size = _in_squares(values, sizes[0])
        return StoredScale(values, f"block {size[0]} x {size[1]}", size)


def _float32(name: str, scale: Tensor) -> Tensor:
    if scale.dtype is torch.uint8:  # E8M0 as raw bytes
        scale = scale.contiguous().view(torch.float8_e8m0fnu)
    if scale.dtype is not torch.float8_e8m0fnu and (not scale.is_floating_point() or scale.itemsize == 1):
        raise NotImplementedError(f"the scale of {name} must be F32, BF16, F16, F8_E8M0 or U8, got {scale.dtype}")
    scale = scale.float()
    if not scale.isfinite().all():
        raise ValueError(f"the scale of {name} has an inf or a NaN: the model that was exported has diverged")
    return scale


def _in_squares(values: Tensor, size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Scales of groups of a row as those of square blocks, where the rows of each block have the same ones.

    So files of MXFP8 hold the blocks of quaver's recipe, which frozen weights have.
    """
    length = size[1]
    squares = values[::length]
    if size[0] == 1 and length in BLOCK_LENGTHS and squares.repeat_interleave(length, 0)[: len(values)].equal(values):
        return squares, (length, length)
    return values, size


def _block_counts(shape: Sequence[int], size: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // size[0]), -(-shape[1] // size[1])


def _exact_blocks(shape: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The block whose rows and columns are powers of two and divide the matrix, or all of its rows or columns."""
    lengths = []
    for elements, count in zip(shape, counts, strict=True):
        length, rest = divmod(elements, max(count, 1))
        if rest or not (count == 1 or (length and length & (length - 1) == 0)):
            return
        lengths.append(length)
    rows, columns = lengths
    yield max(rows, columns if counts[0] == 1 else 0), max(columns, rows if counts[1] == 1 else 0)


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    """Return what a config.json says of float8 weights; a config of a part, as text_config, may say it.

    Raises:
        ValueError: its quantization_config is damaged.
        NotImplementedError: it has another format.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return StoredFormat(None, (), {})
    if not isinstance(quantization, dict):
        raise ValueError(f"quantization_config in config.json must be an object, got a {type(quantization).__name__}")
    method = quantization.get("quant_method")
    if method not in METHODS:
        raise NotImplementedError(
            f"quant_method in config.json is {method!r}; {_KNOWN}; dequantize the model with the library that made it"
        )
    if quantization.get("transform_config"):
        raise NotImplementedError(
            "transform_config in config.json: the weights are those of a rotated model; dequantize the model with "
            "compressed-tensors, which rotates them back"
        )
    if method != "compressed-tensors":
        size = quantization.get("weight_block_size")
        algorithm = str(quantization.get("quant_algo") or "")
        blocks = () if size is None else (_block(size),)
        has_rows = bool(blocks) or method in ("fbgemm_fp8", "mxfp8") or "TOKEN" in algorithm or "_PB" in algorithm
        return StoredFormat(str(method), blocks, {LINEARS: has_rows})
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(each, dict) for each in groups.values()):
        raise ValueError(f"config_groups in config.json must be an object of groups, got {type(groups).__name__}")
    rows: dict[str, bool] = {}
    for group in groups.values():
        inputs, targets = group.get("input_activations"), group.get("targets")
        has_rows = isinstance(inputs, dict) and inputs.get("strategy") != "tensor"
        rows |= dict.fromkeys(map(str, targets if isinstance(targets, list) else [LINEARS]), has_rows)
    sizes = dict.fromkeys(size for group in groups.values() for size in _blocks_of(group))
    return StoredFormat(str(method), tuple(sizes), rows)


def quantization_of(config: Mapping[str, Any]) -> Any:
    """The quantization_config of a config.json, or of a part of it; None if there is none."""
    parts = [each for each in config.values() if isinstance(each, dict)]
    found = (each.get(key) for each in (config, *parts) for key in QUANTIZATION_KEYS)
    return next((each for each in found if each is not None), None)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json, and its parts, without what says that the weights are quantized."""
    return {
        name: without_quantization(each) if isinstance(each, dict) else each
        for name, each in config.items()
        if name not in QUANTIZATION_KEYS
    }


def _blocks_of(group: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """The blocks of a group of compressed-tensors, if it has any."""
    weights = group.get("weights")
    weights = weights if isinstance(weights, dict) else {}
    got = {name: weights.get(name) for name in ("type", "num_bits", "strategy")}
    strategies = ("tensor", "channel", "block", "group")
    if (got["type"], got["num_bits"]) != ("float", 8) or got["strategy"] not in strategies:
        raise NotImplementedError(
            f"the weights in config.json must be 8-bit floats with one scale per {', '.join(strategies)}, got {got}; "
            "dequantize the model with compressed-tensors"
        )
    if got["strategy"] == "block":
        yield _block(weights.get("block_structure"))
    elif got["strategy"] == "group":
        yield _block([1, weights.get("group_size")])


def _block(size: Any) -> tuple[int, int]:
    is_size = isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)
    if not is_size:
        raise ValueError(f"blocks in config.json must be [rows, columns], such as [128, 128], got {size!r}")
    return size[0], size[1]


class Tensors(NamedTuple):
    """The tensors of a checkpoint by what they are."""

    scale_of: dict[str, str | None]
    """The name of the scale of each float8 weight; None for one whose values are its codes."""
    others: list[str]
    """The names of all tensors but scales; float8 weights among them."""
    of_cache: dict[str, tuple[str, ...]]
    """The names in a model of the scales of keys and values in a KV cache, by the name in the file."""
    left_out: list[str]
    """The scales of activations, and those of a cache that are none of keys or values."""


def sort_tensors(dtypes: Mapping[str, str], marks: Marks | None = None) -> Tensors:
    """Say what each tensor of a checkpoint is, from its name and its dtype.

    Args:
        dtypes: of the tensors, by name.
        marks: of a file, whose float8 tensors without a scale may be plain values (comfyui.py).
    Raises:
        ValueError: a float8 weight has no scale or several, or a scale no weight.
        NotImplementedError: weights have another dtype.
    """
    foreign = {
        name: dtype
        for name, dtype in dtypes.items()
        if name.rpartition(".")[2] in _FOREIGN
        or (
            name.endswith(".weight")
            and dtype not in (*_HIGH_PRECISION, *CODES)
            and any(s in dtypes for s in _scales(name))
        )
    }
    if foreign:
        found = [f"{name} ({dtype})" for name, dtype in foreign.items()]
        raise NotImplementedError(f"weights that are no float8: {listed(found)}; {_KNOWN}")
    found_scales = {
        name: [each for each in _scales(name) if each in dtypes] for name, dtype in dtypes.items() if dtype in CODES
    }
    scaled = [name for name, scales in found_scales.items() if scales]
    plain = [] if marks is None else plain_tensors(found_scales, scaled, marks)
    scale_of: dict[str, str | None] = {}
    for name, scales in found_scales.items():
        if len(scales) != 1 and name not in plain:
            found = [each for each in dtypes if each.startswith(f"{name.rpartition('.')[0]}.") and each != name]
            raise ValueError(
                f"{name} ({dtypes[name]}) must have one scale, got {listed(scales) or 'none'}"
                + (f", next to it {listed(found)}" if found and not scales else "")
                + ("" if scaled or marks else "; give the file and not its folder if the codes are the values")
                + f"; {_KNOWN}"
            )
        scale_of[name] = scales[0] if scales else None
    used = set(scale_of.values())
    unused, quantized = [name for name in dtypes if name not in used], _quantized_modules(found_scales)
    of_cache = _of_caches(unused, quantized)
    left_out = [name for name in unused if name in of_cache or _is_left_out(name, found_scales, quantized)]
    lost = [
        name
        for name in dtypes
        if name not in used and name.endswith((".weight_scale", ".weight_scale_inv", ".qscale_weight", ".scale_weight"))
    ]
    if lost:
        raise ValueError(f"scales without a float8 weight: {listed(sorted(lost))}; {_KNOWN}")
    others = [name for name in dtypes if name not in used.union(left_out)]
    return Tensors(scale_of, others, of_cache, [name for name in left_out if name not in of_cache])


def _scales(name: str) -> list[str]:
    """The names that the scale of a weight may have."""
    if not name.endswith(".weight"):
        return [f"{name}_scale", f"{name}_scale_inv"]
    return [f"{name.removesuffix('weight')}{leaf}" for leaf in SCALE_NAMES]


def _quantized_modules(float8: Iterable[str]) -> set[str]:
    """The modules that have a weight in float8, or have one inside."""
    modules = {weight.rpartition(".")[0] for weight in float8}
    return {parent for name in modules for parent in itertools.accumulate(name.split("."), "{}.{}".format)}


def _is_left_out(name: str, float8: Container[str], quantized: set[str]) -> bool:
    """Whether it is a scale that only a quantized module has. Models have parameters with such names, too:

    `altup.correct_output_scale` of Gemma 3n ends as the scale of a stack of experts, `gate_up_proj_input_scale`, does.
    """
    module, _, leaf = name.rpartition(".")
    if leaf in _OF_ACTIVATIONS:
        return module in quantized
    if leaf in _OF_CACHES:
        return not quantized.isdisjoint((module, module.rpartition(".")[0]))
    stacks = (name.removesuffix(f"_{each}") for each in _OF_ACTIVATIONS if name.endswith(f"_{each}"))
    return any(stack in float8 or f"{stack}_weight" in float8 for stack in stacks)


def _of_caches(names: list[str], quantized: set[str]) -> dict[str, tuple[str, ...]]:
    """The scales of keys and values in a KV cache, as `stored_kv_scales` names them.

    Both are there, or the attention is quantized.
    """
    found = stored_kv_scales(names)
    in_model = {each for of_model in found.values() for each in of_model}
    attention_of = {name: of_model[0].rpartition(".")[0] for name, of_model in found.items()}
    return {
        name: found[name]
        for name, attention in attention_of.items()
        if attention in quantized or in_model.issuperset(f"{attention}.{leaf}" for leaf in LEAVES)
    }

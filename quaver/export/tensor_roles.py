"""Finds the weights and scales of a float8 checkpoint by the names and dtypes of its tensors.

    weight      `<name>.weight` in e4m3 or e5m2 [N, K], or a stack of matrices [E, N, K]; value = code * scale
    scale       the tensor next to it with one of `SCALE_NAMES`: float32, bfloat16, float16 or E8M0, also as raw bytes

kv_cache.py maps the scales of a KV cache. Scales of activations are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from quaver.export.formats import FORMAT_READERS
from quaver.export.formats.stored import StoredFormat
from quaver.export.kv_cache import find_kv_scale_names
from quaver.foreign.transformers import QUANTIZATION_KEYS
from quaver.runtime.errors import InputError
from quaver.runtime.module_names import join_names

CODE_DTYPES = ("F8_E4M3", "F8_E5M2")
"""The dtypes of float8 weights, as the headers of files name them."""

SCALE_NAMES = ("weight_scale", "weight_scale_inv", "scale", "scale_inv", "qscale_weight", "scale_weight")
"""Leaf names of the scale of a module's weight. A stack's scale has the stack's name and one of `_STACK_SCALES`."""

_STACK_SCALES = ("_scale", "_scale_inv", "_weight_scale")

_ACTIVATION_SCALES = (
    "input_scale",
    "scale_input",
    "activation_scale",
    "input_scale_ub",
    "input_global_scale",
    "output_scale",
    "qscale_act",
)
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale")
_FOREIGN_LEAVES = (
    "weight_packed",
    "weight_zero_point",
    "weight_global_scale",
    "weight_scale_2",
    "pre_quant_scale",
    "qweight",
    "qzeros",
    "g_idx",
)
_HIGH_PRECISION_DTYPES = ("F64", "F32", "BF16", "F16")
_SUPPORTED_WEIGHTS = (
    f"quaver reads weights in {' or '.join(CODE_DTYPES)} with one scale for each, called {', '.join(SCALE_NAMES)}, and "
    f"quant_method {', '.join(FORMAT_READERS)}"
)


def read_stored_format(config: Mapping[str, Any]) -> StoredFormat:
    """Return the format of float8 weights that a config.json, or a part such as its text_config, describes.

    Raises:
        ValueError: its quantization_config is damaged.
        NotImplementedError: it describes a format that is not in `FORMAT_READERS`.
    """
    quantization = find_quantization(config)
    if quantization is None:
        return StoredFormat()
    if not isinstance(quantization, dict):
        raise InputError(f"quantization_config in config.json: expected an object, got a {type(quantization).__name__}")
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in FORMAT_READERS:
        raise NotImplementedError(
            f"quant_method in config.json is {method!r}; {_SUPPORTED_WEIGHTS}; dequantize the model with the library "
            "that made it"
        )
    return FORMAT_READERS[method](quantization)


def find_quantization(config: Mapping[str, Any]) -> Any:
    """Return the quantization_config of a config.json or of a part of it, or None."""
    parts = [part for part in config.values() if isinstance(part, dict)]
    quantizations = (part.get(key) for part in (config, *parts) for key in QUANTIZATION_KEYS)
    return next((quantization for quantization in quantizations if quantization is not None), None)


def remove_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the quantization_config of it and its parts."""
    return {
        name: remove_quantization(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in QUANTIZATION_KEYS
    }


class TensorRoles(NamedTuple):
    """The names of a checkpoint's tensors, sorted by their role."""

    scale_of: dict[str, str | None]
    """The name of the scale of each float8 weight; None if the codes are the values."""
    model_tensors: list[str]
    """All tensors except scales, float8 weights included."""
    cache_scales: dict[str, tuple[str, ...]]
    """The names in a model of the scales of keys and values in a KV cache, by the name in the file."""
    left_out: list[str]
    """The scales of activations, and scales of a KV cache for tensors other than keys and values."""


def sort_tensors(dtypes: Mapping[str, str], format: StoredFormat) -> TensorRoles:
    """Sort the tensors of a checkpoint by their role, from their names and dtypes.

    Args:
        dtypes: the dtype of each tensor, by name.
        format: the format of the checkpoint. It may allow float8 tensors without a scale.
    Raises:
        ValueError: a float8 weight has no scale or several, or a scale has no weight.
        NotImplementedError: weights are quantized to another dtype.
    """
    _check_no_foreign_weights(dtypes)
    candidates = {
        name: [scale for scale in _list_scale_names(name) if scale in dtypes]
        for name, dtype in dtypes.items()
        if dtype in CODE_DTYPES
    }
    scale_of = _choose_scales(candidates, dtypes, format)
    used = set(scale_of.values())
    unused, quantized = [name for name in dtypes if name not in used], _list_quantized_modules(scale_of)
    orphans = [
        name
        for name in unused
        if name.endswith((".weight_scale", ".weight_scale_inv", ".qscale_weight", ".scale_weight"))
    ]
    if orphans:
        raise InputError(f"scales without a float8 weight: {join_names(sorted(orphans))}; {_SUPPORTED_WEIGHTS}")
    cache_scales = find_kv_scale_names(unused, quantized)
    remaining = [name for name in unused if name not in cache_scales]
    left_out = [name for name in remaining if _is_unread_scale(name, scale_of, quantized)]
    model_tensors = [name for name in dtypes if name not in used.union(left_out, cache_scales)]
    return TensorRoles(scale_of, model_tensors, cache_scales, left_out)


def _check_no_foreign_weights(dtypes: Mapping[str, str]) -> None:
    foreign = [
        f"{name} ({dtype})"
        for name, dtype in dtypes.items()
        if name.rpartition(".")[2] in _FOREIGN_LEAVES
        or name.endswith("_weight_scale_2")
        or (
            name.endswith(".weight")
            and dtype not in (*_HIGH_PRECISION_DTYPES, *CODE_DTYPES)
            and any(scale in dtypes for scale in _list_scale_names(name))
        )
    ]
    if foreign:
        raise NotImplementedError(f"expected float8 weights, got {join_names(foreign)}; {_SUPPORTED_WEIGHTS}")


def _choose_scales(
    candidates: Mapping[str, list[str]], dtypes: Mapping[str, str], format: StoredFormat
) -> dict[str, str | None]:
    """Return the only candidate of each float8 weight, or None if the codes are the values."""
    scaled = [name for name, scales in candidates.items() if scales]
    unscaled = format.list_unscaled(candidates, scaled)
    for name, scales in candidates.items():
        if len(scales) != 1 and name not in unscaled:
            module = f"{name.rpartition('.')[0]}."
            neighbours = [tensor for tensor in dtypes if tensor.startswith(module) and tensor != name]
            raise InputError(
                f"{name} ({dtypes[name]}): expected one scale, got {join_names(scales) or 'none'}"
                + (f", next to it {join_names(neighbours)}" if neighbours and not scales else "")
                + ("" if scaled or format.is_file else "; give the file and not its folder if the codes are the values")
                + f"; {_SUPPORTED_WEIGHTS}"
            )
    return {name: scales[0] if scales else None for name, scales in candidates.items()}


def _list_scale_names(name: str) -> list[str]:
    if not name.endswith(".weight"):
        return [f"{name}{end}" for end in _STACK_SCALES]
    return [f"{name.removesuffix('weight')}{leaf}" for leaf in SCALE_NAMES]


def _list_quantized_modules(float8: Iterable[str]) -> set[str]:
    modules = {weight.rpartition(".")[0] for weight in float8}
    return {parent for name in modules for parent in itertools.accumulate(name.split("."), "{}.{}".format)}


def _is_unread_scale(name: str, float8: Container[str], quantized: set[str]) -> bool:
    """Return whether a tensor is a scale of activations or of a KV cache, not a parameter with a similar name.

    Gemma 3n has a parameter `altup.correct_output_scale`; a scale of a stack of experts is `gate_up_proj_input_scale`.
    """
    module, _, leaf = name.rpartition(".")
    if leaf in _ACTIVATION_SCALES:
        return module in quantized
    if leaf in _CACHE_SCALES:
        return not quantized.isdisjoint((module, module.rpartition(".")[0]))
    stacks = (name.removesuffix(f"_{leaf}") for leaf in _ACTIVATION_SCALES if name.endswith(f"_{leaf}"))
    return any(stack in float8 or f"{stack}_weight" in float8 for stack in stacks)

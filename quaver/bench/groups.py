"""Sorts profiled work into the parts of float8 training, by quaver's phases and operations, operators and kernel names.

    gemm        matrix multiplications, except attention's
    cast        changes of dtype: to float8, with an amax in the same kernel or call, and autocast's
    amax        passes that only compute the amax
    transpose   copies into another layout
    other       the rest: norms, activations, attention, additions; multiplications of casts in plain PyTorch

Quaver's phases (quaver/phases.py) are named ranges of eager code on any device, and decide first. Compiled code has no
phases; Inductor names its kernels after the operators that it fused.
"""

from __future__ import annotations

import re

GROUPS = ("gemm", "cast", "amax", "transpose", "other")

_CAST_PREFIX = "quaver::cast"
"""The phase of eager code, and the beginning of every registered operation that casts, which compiled code calls."""

_PHASES = {"quaver::amax": "amax", "quaver::gemm": "gemm", "quaver::exact_float8_mm": "gemm"}

_OPERATORS = {
    **dict.fromkeys(("mm", "addmm", "bmm", "matmul", "linear", "_scaled_mm", "mkldnn_linear"), "gemm"),
    **dict.fromkeys(("amax", "aminmax", "max"), "amax"),
    **dict.fromkeys(("_to_copy", "to"), "cast"),
    **dict.fromkeys(("contiguous", "clone"), "transpose"),
}
"""Of the aten namespace; the innermost one around a piece of work decides."""

_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|softmax", re.IGNORECASE)
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|split_?k|scaled_mm|_mm(_|$)|_addmm|_bmm|Cijk", re.IGNORECASE)
_FUSED = re.compile(r"^(graph_\d+_)?(cpp_fused|triton_(?!tem_)[a-z]+_fused)_")
_VIEWS = {"view", "reshape", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "unsafe", ""}
_COPIES = {"clone", "transpose", "permute", "contiguous", "mm", "addmm", "bmm", "scaled"}
"""A fused kernel named after a matmul copies an operand into the layout that the matmul reads."""


def group_of_ranges(names_outwards: list[str]) -> str:
    """The group of work in nested ranges, the innermost first."""
    operators = [name.removeprefix("aten::") for name in names_outwards if name.startswith("aten::")]
    by_operator = next((_OPERATORS[name] for name in operators if name in _OPERATORS), "other")
    phase = next(filter(None, map(_group_of_phase, names_outwards)), None)
    if phase == "gemm" and by_operator == "transpose":  # a copy of an operand in another layout
        return by_operator
    if phase:
        return phase
    fused = next((name for name in names_outwards if _is_fused(name)), None)
    return by_operator if fused is None or by_operator != "other" else group_of_kernel(fused)


def _group_of_phase(name: str) -> str | None:
    return "cast" if name.startswith(_CAST_PREFIX) else _PHASES.get(name)


def group_of_kernel(name: str) -> str:
    """The group of a device kernel, or of a loop that Inductor generated, by its name."""
    if _ATTENTION.search(name):
        return "other"
    if _is_fused(name):
        return _group_of_fused(name)
    if _GEMM.search(name):
        return "gemm"
    if re.search(r"(^|_)cast", name):
        return "cast"
    if re.search(r"amax", name):
        return "amax"
    return "transpose" if re.search(r"transpose", name, re.IGNORECASE) else "other"


def _is_fused(name: str) -> bool:
    """Whether Inductor fused this kernel from the operators in its name, and not from a matmul's template."""
    return _FUSED.match(name) is not None


def _group_of_fused(name: str) -> str:
    """A cast to float8 clamps and converts; an amax or a norm fused with it counts as the cast."""
    operators = _FUSED.sub("", name).replace("_to_copy", "_convert").replace("convert_element_type", "convert")
    parts = {part for part in operators.split("_") if not part.isdigit()} - _VIEWS
    if {"convert", "clamp"} <= parts:
        return "cast"
    if "amax" in parts or {"abs", "max"} <= parts:
        return "amax"
    if parts and parts <= _COPIES:
        return "transpose"
    return "cast" if "convert" in parts and parts <= {"convert", *_COPIES} else "other"

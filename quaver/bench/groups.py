"""To which part of float8 training a piece of profiled work belongs, by quaver's named phases, operators and kernels.

    gemm        matrix multiplications, attention's own apart
    cast        changes of dtype: to float8, with an amax that is part of the same kernel or call, and autocast's
    amax        passes that only look for the largest magnitude
    transpose   copies for another layout
    other       the rest: norms, activations, attention, additions; and multiplications of casts made of operators

Quaver's phases (quaver/phases.py) are named ranges around what eager code runs on any device, so they decide first.
Compiled code has none, and its kernels have names made of what was fused into them.
"""

from __future__ import annotations

import re

GROUPS = ("gemm", "cast", "amax", "transpose", "other")

_CAST_PREFIX = "quaver::cast"
"""Of the phase of eager code and of every cast that is a registered operation, as compiled code calls it."""

_PHASES = {"quaver::amax": "amax", "quaver::gemm": "gemm", "quaver::exact_float8_mm": "gemm"}

_OPERATORS = {
    **dict.fromkeys(("mm", "addmm", "bmm", "matmul", "linear", "_scaled_mm", "mkldnn_linear"), "gemm"),
    **dict.fromkeys(("amax", "aminmax", "max"), "amax"),
    **dict.fromkeys(("_to_copy", "to"), "cast"),
    **dict.fromkeys(("contiguous", "clone"), "transpose"),
}
"""Of the aten namespace. The innermost one around a piece of work decides."""

_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|softmax", re.IGNORECASE)
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|split_?k|scaled_mm|_mm(_|$)|_addmm|_bmm|Cijk", re.IGNORECASE)
_FUSED = re.compile(r"^(graph_\d+_)?(cpp_fused|triton_(?!tem_)[a-z]+_fused)_")
_VIEWS = {"view", "reshape", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "unsafe", ""}
_COPIES = {"clone", "transpose", "permute", "contiguous", "mm", "addmm", "bmm", "scaled"}
"""A loop that is named after a matmul copies an operand into the layout that it wants."""


def group_of_ranges(names_outwards: list[str]) -> str:
    """The group of work in nested ranges, given from the innermost to the outermost."""
    operators = [name.removeprefix("aten::") for name in names_outwards if name.startswith("aten::")]
    by_operator = next((_OPERATORS[name] for name in operators if name in _OPERATORS), "other")
    phase = next(filter(None, map(_group_of_phase, names_outwards)), None)
    if phase == "gemm" and by_operator == "transpose":  # an operand that came in another layout
        return by_operator
    if phase:
        return phase
    fused = next((name for name in names_outwards if _is_fused(name)), None)
    return by_operator if fused is None or by_operator != "other" else group_of_kernel(fused)


def _group_of_phase(name: str) -> str | None:
    return "cast" if name.startswith(_CAST_PREFIX) else _PHASES.get(name)


def group_of_kernel(name: str) -> str:
    """The group of a device kernel, or of a loop that the compiler made, by its name."""
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
    """Whether the compiler made this kernel, of the operators in its name, and not from a matmul's template."""
    return _FUSED.match(name) is not None


def _group_of_fused(name: str) -> str:
    """A cast to float8 clamps and converts; what comes with it, an amax or the norm before it, is in its kernel."""
    operators = _FUSED.sub("", name).replace("_to_copy", "_convert").replace("convert_element_type", "convert")
    parts = {part for part in operators.split("_") if not part.isdigit()} - _VIEWS
    if {"convert", "clamp"} <= parts:
        return "cast"
    if "amax" in parts or {"abs", "max"} <= parts:
        return "amax"
    if parts and parts <= _COPIES:
        return "transpose"
    return "cast" if "convert" in parts and parts <= {"convert", *_COPIES} else "other"

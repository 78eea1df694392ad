"""Autocast's rules for a GPU, applied to the fake CPU tensors of a prediction.

Autocast to a lower precision computes other operators in float32 on a GPU than on a CPU: RMSNorm, LayerNorm, softmax,
exp, pow, sum and their like. Their float32 inputs and results are part of a step's memory. Operators that are absent
here have the same rule on both devices, or differ in a way that changes no dtype of a transformer.

The lists are from ATen/autocast_mode.h of PyTorch 2.13. An older version has fewer rules, and gets only its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quaver.torch_private.dispatch import (
    DispatchKey,
    DispatchKeySet,
    exclude_keys,
    has_kernel,
    implement_operators,
)

FLOAT32_INPUTS = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm"),
    *("native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
    *("cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss"),
    *("multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp"),
    *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d")),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
)
"""Operators that cast their inputs to float32."""

FLOAT32_RESULT = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
"""Operators whose argument `dtype` defaults to float32."""

FLOAT32_OVERLOAD = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Operators without an argument `dtype`, and the overload that takes one."""

_AUTOCAST_CPU = DispatchKeySet(DispatchKey.AutocastCPU)


@contextmanager
def use_gpu_autocast() -> Iterator[None]:
    """Let `torch.autocast("cpu")` compute in float32 what `torch.autocast("cuda")` does, inside the block."""
    with implement_operators("aten") as library:
        for name in FLOAT32_INPUTS:
            _add_rule(library, name, partial(_cast_inputs, _get_overload(name)))
        for name in FLOAT32_RESULT:
            _add_rule(library, name, partial(_set_dtype, _get_overload(name)))
        for name, overload in FLOAT32_OVERLOAD.items():
            _add_rule(library, name, partial(_set_dtype, _get_overload(overload)))
        yield


def cast_to_float32(values: Any) -> Any:
    """Cast the floating-point tensors in nested lists, tuples and dicts to float32. float64 stays."""
    return tree_map_only(Tensor, lambda tensor: tensor.float() if _may_cast(tensor) else tensor, values)


def has_gpu_rule(name: str) -> bool:
    """Return whether this version of PyTorch has a rule of autocast for aten's operator `name` on a GPU."""
    return has_kernel(_get_overload(name), "AutocastCUDA")


def _may_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _get_overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _add_rule(library: torch.library.Library, name: str, rule: Callable[..., Any]) -> None:
    if has_gpu_rule(name) and not has_kernel(_get_overload(name), "AutocastCPU"):
        library.impl(name, rule, "AutocastCPU")


def _cast_inputs(operator: Any, *args: Any, **kwargs: Any) -> Any:
    with exclude_keys(_AUTOCAST_CPU):
        return operator(*cast_to_float32(args), **cast_to_float32(kwargs))


def _set_dtype(operator: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
    if _may_cast(args[0]) and arguments.get("dtype") is None:
        arguments["dtype"] = torch.float32
    with exclude_keys(_AUTOCAST_CPU):
        return operator(**arguments)

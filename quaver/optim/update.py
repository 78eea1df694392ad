"""The arithmetic of one AdamW step on blocks of parameters, in plain PyTorch; csrc/adamw.h is bit-identical.

    parameter = parameter * (1 - lr * weight_decay)
    exp_avg   = exp_avg * beta1 + grad * (1 - beta1)
    root      = sqrt(root^2 * beta2 + grad^2 * (1 - beta2))
    parameter = parameter - step_size * (exp_avg / (root / correction + eps))

Each operation is rounded to float32. If the gradient or a new moment of a block is not finite, the parameters and
moments of the block do not change, and the block is counted. This needs no extra pass over the gradients and no
communication.
"""

from __future__ import annotations

import math
import typing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels.stochastic_rounding import round_to_bfloat16
from quaver.optim.rounding import (
    dequantize_moment,
    draw_more_random_bits,
    draw_random_bits,
    quantize_moment,
    take_high16,
    take_low16,
)
from quaver.recipes.scaling import runs_eagerly_on_cpu


class AdamWScalars(NamedTuple):
    """The scalars of one AdamW step, as float32 (8,); the same for all parameters of a group."""

    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    correction: float
    eps: float

    @classmethod
    def from_group(cls, group: dict[str, Any], step: int) -> AdamWScalars:
        """Compute the scalars of a param group for step number `step`, from 1."""
        lr: float = float(group["lr"])
        beta1, beta2 = typing.cast(tuple[float, float], group["betas"])
        return cls(
            decay=1 - lr * group["weight_decay"],
            beta1=beta1,
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            step_size=lr / (1 - beta1**step),
            correction=math.sqrt(1 - beta2**step),
            eps=group["eps"],
        )


class ParameterBlocks(NamedTuple):
    """The tensors of one or more parameters, in blocks [B, 256].

    A moment is either uint8 codes with a scale [B], or bfloat16 or float32 without a scale. The codes of the second
    moment store its square root.
    """

    param: Tensor
    exp_avg: Tensor
    exp_avg_scale: Tensor | None
    exp_avg_sq: Tensor
    exp_avg_sq_scale: Tensor | None


def _update_moments(blocks: ParameterBlocks, grad: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new moments in float32: the mean, the square and its root."""
    _, beta1, one_minus_beta1, beta2, one_minus_beta2, *_ = scalars.unbind()
    gradient = grad.float()
    mean = load_moment(blocks.exp_avg, blocks.exp_avg_scale) * beta1 + gradient * one_minus_beta1
    square = load_moment(blocks.exp_avg_sq, blocks.exp_avg_sq_scale)
    if blocks.exp_avg_sq_scale is not None:
        square = square * square
    square = square * beta2 + gradient * gradient * one_minus_beta2
    return mean, square, _sqrt(square)


def compute_amaxes(blocks: ParameterBlocks, grad: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the amaxes of the mean and of the root after a step, float32 [B]. Takes `update_blocks`' arguments."""
    mean, _, root = _update_moments(blocks, grad, scalars)
    return mean.abs().amax(1), root.amax(1)


def update_blocks(
    blocks: ParameterBlocks, grad: Tensor, keys: Tensor, scalars: Tensor, amaxes: tuple[Tensor, Tensor] | None = None
) -> tuple[ParameterBlocks, Tensor]:
    """Make one step.

    Args:
        blocks: parameters in float32, or in bfloat16 with stochastic rounding, and their moments.
        grad: [B, 256], float32, bfloat16 or float16.
        keys: int32 [B], from `make_block_keys`.
        scalars: `AdamWScalars`, float32 (8,), on any device.
        amaxes: the results of `compute_amaxes`, reduced over all ranks that share the blocks.
    Returns:
        The new blocks in the same dtypes, and the number of skipped blocks, int64 ().
    """
    decay, _, _, _, _, step_size, correction, eps = scalars.unbind()
    mean, square, root = _update_moments(blocks, grad, scalars)
    mean_amax, root_amax = amaxes or (mean.abs().amax(1), root.amax(1))
    is_finite = mean_amax.isfinite() & root_amax.isfinite()

    bits = draw_random_bits(keys)
    param = blocks.param.float() * decay - step_size * (mean / (root / correction + eps))
    new_param = (
        round_to_bfloat16(param, take_low16(draw_more_random_bits(bits)))
        if blocks.param.dtype != torch.float32
        else param
    )
    exp_avg, exp_avg_scale = store_moment(mean, mean_amax, take_low16(bits), blocks.exp_avg.dtype, is_root=False)
    second = square if blocks.exp_avg_sq_scale is None else root
    exp_avg_sq, exp_avg_sq_scale = store_moment(
        second, root_amax, take_high16(bits), blocks.exp_avg_sq.dtype, is_root=True
    )
    new = ParameterBlocks(new_param, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)
    chosen = [_update_if_finite(is_finite, updated, old) for updated, old in zip(new, blocks, strict=True)]
    return ParameterBlocks(*chosen), (~is_finite).sum()  # type: ignore[arg-type]


def _sqrt(values: Tensor) -> Tensor:
    """Return the correctly rounded square root. On a CPU, eager float32 (MKL) is sometimes off by 1 ulp.

    Rounding a float64 root is exact: the root of a float32 is at least 2^-50 away from the midpoint of two float32.
    """
    return values.double().sqrt().float() if runs_eagerly_on_cpu(values) else values.sqrt()


def load_moment(moment: Tensor, scale: Tensor | None) -> Tensor:
    """Load a moment in float32 from the results of `store_moment`, [B, 256] and [B] or None."""
    return moment.float() if scale is None else dequantize_moment(moment, scale)


def store_moment(
    values: Tensor, amax: Tensor, bits16: Tensor, dtype: torch.dtype, *, is_root: bool
) -> tuple[Tensor, Tensor | None]:
    """Store a moment, float32 [B, 256], in `dtype`, where uint8 means codes with scales.

    Arguments as in `quantize_moment`.
    """
    if dtype is torch.uint8:
        return quantize_moment(values, amax, bits16, is_root=is_root)
    return (values if dtype is torch.float32 else round_to_bfloat16(values, bits16)), None


def _update_if_finite(is_finite: Tensor, updated: Tensor | None, old: Tensor | None) -> Tensor | None:
    if updated is None or old is None:
        return None
    return torch.where(is_finite if updated.dim() == 1 else is_finite[:, None], updated, old)

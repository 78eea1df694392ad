"""The precision and the FLOPs of each matmul of linears and experts, and the utilization of a device."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from quaver import Float8Linear, Float8LinearConfig
from quaver.experts.gemm import predict_grouped_backend
from quaver.experts.module import Float8Experts, get_expert_weights
from quaver.kernels.exact_mm import has_bfloat16_units
from quaver.lab.model.llama import Llama, count_attention_flops_per_token, count_training_flops_per_token
from quaver.lab.model.mixture import Experts
from quaver.lab.settings import Model
from quaver.linear.backends import GemmBackend, predict_backend
from quaver.recipes.linear_casts import MATMULS
from quaver.roofline.device_specs import PeakFlops

MASKED_FLOPS = "masked"
"""The key, next to precisions, of the half of attention's FLOPs that a causal kernel skips."""


@dataclass(frozen=True)
class LinearPrecision:
    """How one linear, or one weight of experts, casts the operands of its matmuls, and which units multiply them.

    `runs_in` is "float8" if the device multiplies float8, and "float32" if only float32 multiplies float8 values
    exactly. Otherwise it is the high-precision dtype, of a matmul in high precision or an exact one.
    """

    name: str
    in_features: int
    out_features: int
    operands: dict[str, str]
    runs_in: dict[str, str]
    matrices_per_token: int = 1
    """The number of experts that a token takes; 1 for a linear."""

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of one matmul; a multiply-add counts as two."""
        return 2 * self.in_features * self.out_features * self.matrices_per_token


def list_linear_precisions(model: nn.Module, hp_dtype: str, device: torch.device) -> list[LinearPrecision]:
    """Return the precisions of every linear and weight of experts of `model`, with the sizes of unsharded weights.

    Args:
        hp_dtype: the dtype of linears that are not float8, such as "bfloat16".
        device: the device that the model will run on.
    """
    precisions = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            config = module.float8_config if isinstance(module, Float8Linear) else None
            matmuls = _list_matmuls(config, hp_dtype, device, predict_backend)
            precisions.append(LinearPrecision(name, module.in_features, module.out_features, *matmuls))
        elif isinstance(module, Experts):
            config = module.float8_config if isinstance(module, Float8Experts) else None
            matmuls = _list_matmuls(config, hp_dtype, device, predict_grouped_backend)
            for leaf, weight in get_expert_weights(module).items():
                sizes = weight.shape[2], weight.shape[1]
                precisions.append(LinearPrecision(f"{name}.{leaf}", *sizes, *matmuls, module.top_k))
    return precisions


def _list_matmuls(
    config: Float8LinearConfig | None, hp_dtype: str, device: torch.device, choose_backend: Callable[..., GemmBackend]
) -> tuple[dict[str, str], dict[str, str]]:
    operands, runs_in = dict.fromkeys(MATMULS, hp_dtype), dict.fromkeys(MATMULS, hp_dtype)
    if config is None:
        return operands, runs_in
    for matmul, operands_read in MATMULS.items():
        left, right = (config.casts.get(*operand) for operand in operands_read)
        if left.is_disabled:
            continue
        operands[matmul] = f"{left} x {right}"
        if choose_backend(left, right, device, emulate=config.emulate) is GemmBackend.NATIVE:
            runs_in[matmul] = "float8"
        elif not has_bfloat16_units(device):
            runs_in[matmul] = "float32"
    return operands, runs_in


def group_linears(linears: Iterable[LinearPrecision]) -> list[tuple[LinearPrecision, int]]:
    """Group linears that differ only in their layer's number; return one of each group (number -> *) and its size."""
    groups: dict[str, list[LinearPrecision]] = defaultdict(list)
    for linear in linears:
        group = replace(linear, name=re.sub(r"\.\d+\.", ".*.", linear.name))
        groups[str(group)] += [group] if str(group) in groups else [linear]
    return [(members[-1], len(members)) for members in groups.values()]


def count_flops_per_token_by_precision(
    model: Llama, config: Model, seq_len: int, hp_dtype: str, device: torch.device
) -> dict[str, int]:
    """Return the FLOPs of forward and backward per token, by the precision that computes them.

    Attention counts as `hp_dtype`, and half of it as `MASKED_FLOPS`. The sum is `count_training_flops_per_token`.
    """
    masked = count_attention_flops_per_token(config, seq_len) // 2
    flops = {MASKED_FLOPS: masked, hp_dtype: count_training_flops_per_token(config, seq_len) - masked}
    for linear in list_linear_precisions(model, hp_dtype, device):
        for precision in linear.runs_in.values():
            if precision != hp_dtype:
                flops[precision] = flops.get(precision, 0) + linear.flops_per_token
                flops[hp_dtype] -= linear.flops_per_token
    return flops


def compute_utilization(
    flops_per_token: dict[str, int], tokens_per_s: float, peak: PeakFlops
) -> dict[str, float | None]:
    """Return how well one device is used, in three measures.

    `tflops`: model TFLOP/s. `mfu`: their share of the bfloat16 peak, in all precisions, so that these compare. Both
    count all of attention, as is usual. `mfu_by_precision`: the share with each matmul at the peak of its precision,
    without `MASKED_FLOPS`; None if a peak is unknown. No run is above 1 of a data sheet's peaks; a measured rate may be
    exceeded.

    Args:
        flops_per_token: forward and backward FLOPs, by precision, and `MASKED_FLOPS`.
        tokens_per_s: tokens per second of this device.
    """
    flops_per_s = sum(flops_per_token.values()) * tokens_per_s
    seconds_per_token = peak.compute_seconds(
        {name: flops for name, flops in flops_per_token.items() if name != MASKED_FLOPS}
    )
    return {
        "tflops": flops_per_s / 1e12,
        "mfu": flops_per_s / peak.flops_per_s,
        "mfu_by_precision": None if seconds_per_token is None else seconds_per_token * tokens_per_s,
    }

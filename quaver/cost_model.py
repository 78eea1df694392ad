"""How long the matmuls of one linear take in bfloat16 and in float8, from a roofline; and the filter built on it.

Per matmul: the larger of FLOPs / peak and bytes / bandwidth. Float8 adds its casts, which are bandwidth alone:

    tensorwise           per operand: read for amax, read and write one byte in each of two layouts: 2 + 2 + 2 bytes
    rowwise              per operand: two directions, each read for amax and cast: 2 * (2 + 2 + 1) bytes
    rowwise_with_gw_hp   input and grad_output one direction (5 bytes), weight row-wise and tensorwise (2 + 3 + 3)
    rowwise_with_tensorwise_weight   input and grad_output as rowwise, weight as tensorwise
    delayed              per operand: read once, write one byte in each of two layouts: 2 + 2 bytes
    delayed_with_dynamic_weight      input and grad_output as delayed, weight as tensorwise

and a fixed launch time per kernel. Real kernels reach neither roof: `_MATMUL_EFFICIENCY`, `_MEMORY_EFFICIENCY` are the
shares that large kernels reach on an H200 (788 of 989 TFLOP/s bfloat16, 4.3 of 4.8 TB/s copied). Float8 matmuls reach
1.9 times the bfloat16 rate on large shapes, not 2 (torchao's published GEMM benchmark).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from quaver.config import Float8LinearRecipeName
from quaver.convert import FilterDecision
from quaver.devices import DEVICE_SPECS, DeviceSpec, device_spec, find_device_spec
from quaver.gemm import ALIGNMENT

_MATMUL_EFFICIENCY = 0.80
_MEMORY_EFFICIENCY = 0.85
_FLOAT8_MATMUL_GAIN = 0.95
_KERNEL_LAUNCH_S = 4e-6

# Bytes moved per element by the casts of (input, weight, grad_output), bfloat16 operands.
_CAST_BYTES = {
    Float8LinearRecipeName.TENSORWISE: (6, 6, 6),
    Float8LinearRecipeName.ROWWISE: (10, 10, 10),
    Float8LinearRecipeName.ROWWISE_WITH_GW_HP: (5, 8, 5),
    Float8LinearRecipeName.ROWWISE_WITH_TENSORWISE_WEIGHT: (10, 6, 10),
    Float8LinearRecipeName.DELAYED: (4, 4, 4),
    Float8LinearRecipeName.DELAYED_WITH_DYNAMIC_WEIGHT: (4, 6, 4),
}
_CAST_KERNELS = {
    Float8LinearRecipeName.TENSORWISE: 9,
    Float8LinearRecipeName.ROWWISE: 12,
    Float8LinearRecipeName.ROWWISE_WITH_GW_HP: 8,
    Float8LinearRecipeName.ROWWISE_WITH_TENSORWISE_WEIGHT: 11,
    Float8LinearRecipeName.DELAYED: 9,
    Float8LinearRecipeName.DELAYED_WITH_DYNAMIC_WEIGHT: 9,
}
_FLOAT8_MATMULS = {
    Float8LinearRecipeName.TENSORWISE: 3,
    Float8LinearRecipeName.ROWWISE: 3,
    Float8LinearRecipeName.ROWWISE_WITH_GW_HP: 2,
    Float8LinearRecipeName.ROWWISE_WITH_TENSORWISE_WEIGHT: 3,
    Float8LinearRecipeName.DELAYED: 3,
    Float8LinearRecipeName.DELAYED_WITH_DYNAMIC_WEIGHT: 3,
}


@dataclass(frozen=True)
class LinearCost:
    """Predicted seconds of a linear's forward and backward."""

    bfloat16_s: float
    float8_s: float

    @property
    def speedup(self) -> float:
        return self.bfloat16_s / self.float8_s


def linear_cost(
    tokens: int, in_features: int, out_features: int, recipe: Float8LinearRecipeName | str, spec: DeviceSpec
) -> LinearCost:
    """Predict a linear of M = `tokens`, K = `in_features`, N = `out_features` on `spec`.

    Raises:
        ValueError: an unknown recipe, or a device that does not multiply float8.
    """
    if spec.float8_tflops is None:
        raise ValueError(f"{spec.name} does not multiply float8, so no layer gains")
    recipe = Float8LinearRecipeName(recipe)
    m, k, n = tokens, in_features, out_features
    bandwidth = spec.memory_gb_per_s * 1e9 * _MEMORY_EFFICIENCY

    def matmul_s(bytes_per_element: int, tflops: float) -> float:
        compute = 2 * m * k * n / (tflops * 1e12 * _MATMUL_EFFICIENCY)
        return _KERNEL_LAUNCH_S + max(compute, bytes_per_element * (m * k + k * n + m * n) / bandwidth)

    bfloat16_matmul_s = matmul_s(2, spec.bfloat16_tflops)
    float8_matmul_s = matmul_s(1, spec.float8_tflops * _FLOAT8_MATMUL_GAIN)
    float8_matmuls = _FLOAT8_MATMULS[recipe]
    cast_bytes = sum(b * e for b, e in zip(_CAST_BYTES[recipe], (m * k, k * n, m * n), strict=True))
    casts_s = cast_bytes / bandwidth + _CAST_KERNELS[recipe] * _KERNEL_LAUNCH_S
    float8_s = float8_matmuls * float8_matmul_s + (3 - float8_matmuls) * bfloat16_matmul_s + casts_s
    return LinearCost(3 * bfloat16_matmul_s, float8_s)


def auto_filter_for_recipe(
    recipe: Float8LinearRecipeName | str,
    *,
    tokens: int = 8192,
    device: str | torch.device | None = None,
    skip: tuple[str, ...] = (),
    min_speedup: float = 1.05,
) -> Callable[[nn.Module, str], FilterDecision]:
    """A filter for `convert_to_float8_training` that skips linears too small to gain, and says its estimate.

    Args:
        recipe: a recipe's name.
        tokens: rows of the linears' inputs per forward, on one device.
        device: what the training will run on: a name such as "H100" or a torch.device. None for this machine's GPU if
            it is known, else H100: on a laptop the question is about the cluster.
        skip: names to leave in high precision whatever they gain; a layer matches if one is a part of its name.
        min_speedup: convert from this predicted speedup on.
    Raises:
        ValueError: an unknown recipe or device, or one that does not multiply float8.
    """
    recipe = Float8LinearRecipeName(recipe)
    spec = _spec_of(device)
    linear_cost(tokens, 16, 16, recipe, spec)  # says now what would fail at every layer

    def decide(module: nn.Module, name: str) -> FilterDecision:
        matched = next((part for part in skip if part in name), None)
        if matched is not None:
            return FilterDecision(False, f"filter: name contains {matched!r}")
        if not isinstance(module, nn.Linear):
            return FilterDecision(False, "not a linear")
        k, n = module.in_features, module.out_features
        if k % ALIGNMENT or n % ALIGNMENT:
            return FilterDecision(False, f"shape: {k} x {n} is not a multiple of {ALIGNMENT}, padding would cost more")
        speedup = linear_cost(tokens, k, n, recipe, spec).speedup
        estimate = f"estimated {speedup:.2f}x on {spec.name} at {tokens} tokens"
        return FilterDecision(speedup >= min_speedup, estimate)

    return decide


def _spec_of(device: str | torch.device | None) -> DeviceSpec:
    if isinstance(device, str):
        spec = find_device_spec(device)
    elif device is not None:
        spec = device_spec(device)
    else:
        spec = (device_spec(torch.device("cuda")) if torch.cuda.is_available() else None) or find_device_spec("H100")
    if spec is None:
        names = ", ".join(spec.name for spec in DEVICE_SPECS if spec.float8_tflops is not None)
        raise ValueError(f"no data about device {str(device)!r}: name one of {names}")
    return spec

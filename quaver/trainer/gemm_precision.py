"""What each matmul of each linear really runs in: the effective-quantization table, and FLOPs by precision."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from quaver import Float8Linear
from quaver.config import CastConfig
from quaver.gemm import GemmBackend, backend_for
from quaver.kernels.exact_mm import has_bfloat16_units
from quaver.trainer.config import Model
from quaver.trainer.model import Llama, training_flops_per_token

MATMULS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight_for_grad_input"),
    "grad_weight": ("grad_output_for_grad_weight", "input_for_grad_weight"),
}


@dataclass(frozen=True)
class LinearPrecision:
    """The three matmuls of one linear: `operands` says how both operands of each are cast, `runs_in` where it runs.

    `runs_in` is "float8" where the device multiplies float8, and the high-precision dtype where the matmul is in high
    precision or float8 is multiplied exactly in it; "float32" where that is all that multiplies it exactly.
    """

    name: str
    in_features: int
    out_features: int
    operands: dict[str, str]
    runs_in: dict[str, str]

    @property
    def flops_per_token(self) -> int:
        """Of one matmul, a multiply and an add counted apart."""
        return 2 * self.in_features * self.out_features


def linear_precisions(model: nn.Module, hp_dtype: str, device: torch.device) -> list[LinearPrecision]:
    """Return every linear of `model` that is called: (in_features, out_features) are those of the whole.

    Args:
        hp_dtype: what linears compute in where they do not in float8, as "bfloat16".
        device: where the model runs.
    """
    found = []
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            operands, runs_in = _matmuls(linear, hp_dtype, device)
            found.append(LinearPrecision(name, linear.in_features, linear.out_features, operands, runs_in))
    return found


def _matmuls(linear: nn.Linear, hp_dtype: str, device: torch.device) -> tuple[dict[str, str], dict[str, str]]:
    operands, runs_in = {}, {}
    for matmul, names in MATMULS.items():
        operands[matmul], runs_in[matmul] = hp_dtype, hp_dtype
        if isinstance(linear, Float8Linear):
            casts: list[CastConfig] = [getattr(linear.config.casts, name) for name in names]
            if not casts[0].is_disabled:
                operands[matmul] = " x ".join(map(str, casts))
                rowwise = any(cast.is_rowwise for cast in casts)
                if backend_for(device, rowwise=rowwise, emulate=linear.config.emulate) is GemmBackend.NATIVE:
                    runs_in[matmul] = "float8"
                elif not has_bfloat16_units(device.type):
                    runs_in[matmul] = "float32"
    return operands, runs_in


def grouped(linears: Iterable[LinearPrecision]) -> list[tuple[LinearPrecision, int]]:
    """Put linears together that differ in the number of their layer only, named with * for it; with their count."""
    groups: dict[tuple[str, str], list[LinearPrecision]] = defaultdict(list)
    for linear in linears:
        pattern = re.sub(r"\.\d+\.", ".*.", linear.name)
        groups[pattern, str((linear.in_features, linear.out_features, linear.operands, linear.runs_in))].append(linear)
    return [
        (
            LinearPrecision(
                pattern if len(members) > 1 else members[0].name,
                members[0].in_features,
                members[0].out_features,
                members[0].operands,
                members[0].runs_in,
            ),
            len(members),
        )
        for (pattern, _), members in groups.items()
    ]


def flops_per_token_by_precision(
    model: Llama, config: Model, seq_len: int, hp_dtype: str, device: torch.device
) -> dict[str, int]:
    """Return the FLOPs of forward and backward for one token by the precision that they run in.

    Attention counts in `hp_dtype`. They add up to `training_flops_per_token`. Call it before `model` is split.
    """
    flops = {hp_dtype: training_flops_per_token(config, seq_len)}
    for linear in linear_precisions(model, hp_dtype, device):
        for precision in linear.runs_in.values():
            if precision != hp_dtype:
                flops[precision] = flops.get(precision, 0) + linear.flops_per_token
                flops[hp_dtype] -= linear.flops_per_token
    return flops

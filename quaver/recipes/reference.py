"""Float8 training in plain PyTorch, to read from top to bottom: one process, no cache, no kernels.

A linear of M tokens, K inputs and N outputs is three matmuls. Each operand takes part in two of them: in one, the dot
products run along its rows (`row`), in the other along its columns (`column`).

    output      [M, N] = input.row            [M, K] @ weight.row.t()   [K, N]     contracts K
    grad_input  [M, K] = grad_output.row      [M, N] @ weight.column    [N, K]     contracts N
    grad_weight [N, K] = grad_output.column.t() [N, M] @ input.column   [M, K]     contracts M

A float8 number has 2 or 3 bits of mantissa and few exponents, so a tensor is scaled to the format's range first:

    amax          = max |hp|                            the largest magnitude
    quant_scale   = format.max / amax                   maps the amax to the largest float8 number
    codes         = cast(clamp(hp * quant_scale))       one byte per element
    dequant_scale = 1 / quant_scale                     (a * sa) @ (b * sb) = (a @ b) * sa * sb

The granularity says which elements share an amax. A scale that is constant along the dim that a matmul sums over can
be applied to the sums:

    tensorwise   one scale for the tensor: the same codes in both directions
    rowwise      row: one scale per row [R, 1]. column: one scale per column [1, C]. The codes differ by direction
    blockwise    one scale per block. Weights have square blocks: the same codes in both directions. Input and
                 grad_output have blocks of 128 (or 32) elements along the sum, so their codes differ by direction.
                 These scales vary along the sum, so the codes are multiplied by them before the matmul

The scaling type says when a scale is computed:

    dynamic      for each cast, from the tensor itself
    delayed      once per step, from the amaxes of earlier steps, so that the tensor is read once
    static       once, before training
    disabled     never: the matmul runs in high precision

`Float8Linear` computes the same numbers. Codes and scales are bit-identical; sums are in float32, in the order of the
device's own matmul (tests/library/recipes/test_reference.py). It adds speed and saves memory: kernels that cast for
both directions in one read, codes saved for backward, casts shared by several linears, and meshes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.recipes import scaling
from quaver.recipes.config import CastConfig, DelayedScalingConfig, Float8LinearConfig, ScalingType
from quaver.recipes.formats import FLOAT8_FORMATS

ROW, COLUMN = 1, 0
"""The direction of an operand [R, C] is the dim that its matmul contracts."""


class CastMatrix(NamedTuple):
    """One operand of one matmul."""

    data: Tensor
    """float8 codes, or the high-precision tensor itself."""
    dequant_scale: Tensor | None
    """float32: (), [R, 1], [1, C] or one per block. None in high precision."""

    def t(self) -> CastMatrix:
        return CastMatrix(self.data.t(), None if self.dequant_scale is None else self.dequant_scale.t())


def quantize(
    hp: Tensor, cast: CastConfig, direction: int, persistent: ScaleHistory | None, *, power_of_2: bool
) -> CastMatrix:
    """Quantize a matrix [R, C] for the matmul that contracts its dim `direction`."""
    if cast.is_disabled:
        return CastMatrix(hp, None)
    dtype = cast.float8_dtype
    if persistent is not None:
        # Elements above the format's maximum saturate. Before the first sync the scale is computed from hp itself.
        codes, _, dequant_scale, (amax, _) = scaling.cast_with_persistent_scale(
            hp, persistent.quant_scale, dtype, power_of_2=power_of_2
        )
        persistent.amax = torch.maximum(persistent.amax, amax)
    elif cast.is_blockwise:
        layout = cast.require_layout("the reference")
        codes, _, dequant_scale = scaling.dynamic_cast_blocks(
            hp,
            dtype,
            power_of_2=power_of_2,
            block_size=layout if direction == ROW else layout.t(),
            rule=cast.rule,
        )
    else:
        dim = direction if cast.is_rowwise else None
        codes, _, dequant_scale = scaling.dynamic_cast(hp, dtype, dim, power_of_2=power_of_2, rule=cast.rule)
    return CastMatrix(codes, dequant_scale)


def multiply(a: CastMatrix, b: CastMatrix, hp_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return a [M, K] @ b [K, N] + bias [N] as [M, N] in `hp_dtype`.

    Products of two float8 numbers are exact in float32. Sums are rounded, in the order of torch.mm.
    """
    a_scale, b_scale = a.dequant_scale, b.dequant_scale
    if a_scale is None or b_scale is None:
        return torch.mm(a.data, b.data) if bias is None else torch.addmm(bias, a.data, b.data)
    a_wide, b_wide = a.data.float(), b.data.float()
    if a_scale.dim() and tuple(a_scale.shape) != (a.data.shape[0], 1):  # one per block
        a_wide, a_scale = scaling.dequantize(a.data, a_scale), a_scale.new_ones(())
    if b_scale.dim() and tuple(b_scale.shape) != (1, b.data.shape[1]):
        b_wide, b_scale = scaling.dequantize(b.data, b_scale), b_scale.new_ones(())
    sums = torch.mm(a_wide, b_wide) * a_scale * b_scale
    return (sums if bias is None else sums + bias).to(hp_dtype)


class ReferenceFunction(torch.autograd.Function):
    """The three matmuls on matrices. `linear` quantizes the operands."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, linear: ReferenceLinear) -> Tensor:
        input_row = linear.quantize("input", ROW, input)
        weight_row = linear.quantize("weight", ROW, weight)
        # Saved for backward: the input's column operand, one byte per element, and the weight itself. The parameter is
        # in memory anyway, so backward quantizes it again.
        input_column = linear.quantize("input", COLUMN, input)
        ctx.save_for_backward(*input_column, weight)
        ctx.linear, ctx.bias_dtype = linear, None if bias is None else bias.dtype
        return multiply(input_row, weight_row.t(), input.dtype, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        linear = ctx.linear
        *input_column, weight = ctx.saved_tensors
        grad_row = linear.quantize("grad_output", ROW, grad_output)
        weight_column = linear.quantize("weight", COLUMN, weight)
        grad_input = multiply(grad_row, weight_column, grad_output.dtype)
        grad_column = linear.quantize("grad_output", COLUMN, grad_output)
        grad_weight = multiply(grad_column.t(), CastMatrix(*input_column), grad_output.dtype)
        grad_bias = None if ctx.bias_dtype is None else grad_output.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None


class ReferenceLinear(nn.Linear):
    """An `nn.Linear` whose matmuls run in float8 under the `config` of a `Float8Linear`."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, config: Float8LinearConfig, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.config = config
        casts = config.casts
        self.casts: dict[tuple[str, int], Any] = {
            # output = input @ weight.t()
            ("input", ROW): casts.input.row,
            ("weight", ROW): casts.weight.row,
            # grad_input = grad_output @ weight
            ("grad_output", ROW): casts.grad_output.row,
            ("weight", COLUMN): casts.weight.column,
            # grad_weight = grad_output.t() @ input
            ("grad_output", COLUMN): casts.grad_output.column,
            ("input", COLUMN): casts.input.column,
        }
        device = self.weight.device
        persistent = {name: cast for (name, _), cast in self.casts.items() if cast.is_persistent}
        self.persistent = {name: ScaleHistory(cast, device) for name, cast in persistent.items()}

    def forward(self, input: Tensor) -> Tensor:
        output = ReferenceFunction.apply(input.reshape(-1, self.in_features), self.weight, self.bias, self)
        return output.view(*input.shape[:-1], self.out_features)

    def quantize(self, name: str, direction: int, hp: Tensor) -> CastMatrix:
        """Quantize the operand `name` for the matmul that contracts its dim `direction`."""
        if direction == COLUMN and getattr(self.config.casts, name).is_dequantized:
            data, scale = self.quantize(name, ROW, hp)
            return CastMatrix(data if scale is None else scaling.dequantize(data, scale, hp.dtype), None)
        power_of_2 = self.config.round_scales_to_power_of_2
        cast = self.casts[name, direction]
        return quantize(hp, cast, direction, self.persistent.get(name), power_of_2=power_of_2)

    def sync(self) -> None:
        """Compute the scales of the next step from the recorded amaxes. Call it once a step, after the backward."""
        for persistent in self.persistent.values():
            persistent.sync(self.config.delayed_scaling_config, self.config.round_scales_to_power_of_2)


class ScaleHistory:
    """The delayed or static scale of an operand, shared by both directions, and its amax history."""

    def __init__(self, cast: CastConfig, device: torch.device) -> None:
        self.cast = cast
        scale = cast.static_quant_scale or 0.0  # 0: unknown
        self.quant_scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.amax = self.quant_scale.new_tensor(-1.0)  # the largest since the last sync; -1: no cast yet
        self.history: list[Tensor] = []  # one amax per earlier step, newest last

    def sync(self, delayed: DelayedScalingConfig, power_of_2: bool) -> None:
        amax, self.amax = self.amax, self.amax.new_tensor(-1.0)
        if self.cast.scaling_type is ScalingType.STATIC or amax < 0:
            return
        if not amax.isfinite() and delayed.nonfinite_amax == "skip":
            return
        self.history = [*self.history, amax][-delayed.history_len :]
        expected = torch.stack(self.history).amax() if delayed.scale_fn_name == "max" else amax
        if expected.isfinite() and expected > 0:  # otherwise the scale is kept
            largest = FLOAT8_FORMATS[self.cast.float8_dtype].max
            scale = (largest / delayed.headroom / expected.double()).float() / 2.0**delayed.margin
            scale = scale.clamp(max=torch.finfo(torch.float32).max)
            self.quant_scale = scaling.round_down_to_power_of_2(scale) if power_of_2 else scale

"""Float8 training in plain PyTorch, to read from top to bottom: one process, no cache, no kernels.

A linear of M tokens, K inputs and N outputs is three matmuls. Each operand takes part in two of them, once in each
direction: its dot products run along its rows, or along its columns.

    output      [M, N] = input.row            [M, K] @ weight.row.t()   [K, N]     contracts K
    grad_input  [M, K] = grad_output.row      [M, N] @ weight.column    [N, K]     contracts N
    grad_weight [N, K] = grad_output.column.t() [N, M] @ input.column   [M, K]     contracts M

A float8 number has 2 or 3 bits of mantissa and few exponents, so a tensor is scaled to the format's range first:

    amax          = max |hp|                            how large it is
    quant_scale   = format.max / amax                   what brings that to the largest float8 number
    codes         = cast(clamp(hp * quant_scale))       one byte per element
    dequant_scale = 1 / quant_scale                     (a * sa) @ (b * sb) = (a @ b) * sa * sb

Which elements share an amax is the granularity. A scale must not vary along the dim that a matmul sums over, or it
could not be taken out of the sum:

    tensorwise   one scale for the tensor: the same codes in both directions
    rowwise      row: one scale per row [R, 1]. column: one per column [1, C]. Other scales, so other codes
    blockwise    one scale per block. Weights have square blocks: the same codes in both directions. Input and
                 grad_output have blocks of 128 (or 32) elements along the sum: other blocks in each direction. Scales
                 vary along the sum, so the codes are multiplied by them before the matmul

When the scale is known is the scaling type: dynamic (from the tensor itself), delayed (from the amaxes of earlier
steps, so that the tensor is read once), static (given), or disabled: this matmul runs in high precision.

`Float8Linear` computes the same: codes and scales bit for bit, sums in float32 in the order of the device's own matmul
(tests/library/recipes/test_reference.py). What it adds is speed and memory: kernels that make both directions from one
read, saved codes, casts that several linears share, meshes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.recipes import scaling
from quaver.recipes.config import CastConfig, DelayedScalingConfig, Float8LinearConfig, ScalingType
from quaver.recipes.formats import FORMATS

ROW, COLUMN = 1, 0
"""The two directions of an operand [R, C]: the dim that its matmul contracts."""


class CastMatrix(NamedTuple):
    """One operand of one matmul, as its cast leaves it."""

    data: Tensor
    """float8 codes, or the high-precision tensor itself."""
    dequant_scale: Tensor | None
    """float32: (), [R, 1], [1, C] or one per block. None in high precision."""

    def t(self) -> CastMatrix:
        return CastMatrix(self.data.t(), None if self.dequant_scale is None else self.dequant_scale.t())


def quantize(
    hp: Tensor, cast: CastConfig, direction: int, persistent: ScaleHistory | None, *, power_of_2: bool
) -> CastMatrix:
    """A matrix [R, C] as the operand of its matmul in `direction`."""
    if cast.is_disabled:
        return CastMatrix(hp, None)
    dtype = cast.float8_dtype
    if persistent is not None:
        # Elements above the format's maximum saturate; before the first sync the scale is that of hp's own amax.
        codes, _, dequant_scale, (amax, _) = scaling.cast_with_persistent_scale(
            hp, persistent.quant_scale, dtype, power_of_2=power_of_2
        )
        persistent.amax = torch.maximum(persistent.amax, amax)
    elif cast.is_blockwise:
        layout = cast.known_layout("the reference")
        codes, _, dequant_scale = scaling.dynamic_cast_blocks(
            hp,
            dtype,
            power_of_2=power_of_2,
            block_size=layout if direction == ROW else layout.t(),
            mode=cast.mode,
        )
    else:
        dim = direction if cast.is_rowwise else None
        codes, _, dequant_scale = scaling.dynamic_cast(hp, dtype, dim, power_of_2=power_of_2, mode=cast.mode)
    return CastMatrix(codes, dequant_scale)


def multiply(a: CastMatrix, b: CastMatrix, hp_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N] + bias [N] -> [M, N] in `hp_dtype`.

    A product of two float8 numbers is exact in float32. Their sum is rounded, in the order of torch.mm.
    """
    a_scale, b_scale = a.dequant_scale, b.dequant_scale
    if a_scale is None or b_scale is None:
        return torch.mm(a.data, b.data) if bias is None else torch.addmm(bias, a.data, b.data)
    a_wide, b_wide = a.data.float(), b.data.float()
    if a_scale.dim() and tuple(a_scale.shape) != (a.data.shape[0], 1):  # one per block
        a_wide, a_scale = scaling.dequantize(a.data, a_scale), torch.ones(())
    if b_scale.dim() and tuple(b_scale.shape) != (1, b.data.shape[1]):
        b_wide, b_scale = scaling.dequantize(b.data, b_scale), torch.ones(())
    sums = torch.mm(a_wide, b_wide) * a_scale * b_scale
    return (sums if bias is None else sums + bias).to(hp_dtype)


class ReferenceFunction(torch.autograd.Function):
    """The three matmuls, of matrices. `linear` says how each operand is cast."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, linear: ReferenceLinear) -> Tensor:
        input_row = linear.quantize("input", ROW, input)
        weight_row = linear.quantize("weight", ROW, weight)
        # Backward reads the input's other direction, in float8: a byte per element. Of the weight it needs the other
        # direction too, but the parameter is there anyway: it is quantized again, which takes no memory until then.
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
    """`nn.Linear` whose matmuls run in float8; `config` as of `Float8Linear`."""

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
        self.persistent = {name: ScaleHistory(cast) for (name, _), cast in self.casts.items() if cast.is_persistent}

    def forward(self, input: Tensor) -> Tensor:
        output = ReferenceFunction.apply(input.reshape(-1, self.in_features), self.weight, self.bias, self)
        return output.view(*input.shape[:-1], self.out_features)

    def quantize(self, name: str, direction: int, hp: Tensor) -> CastMatrix:
        """The operand `name` of its matmul in `direction`."""
        if direction == COLUMN and getattr(self.config.casts, name).is_dequantized:
            data, scale = self.quantize(name, ROW, hp)
            return CastMatrix(data if scale is None else scaling.dequantize(data, scale, hp.dtype), None)
        power_of_2 = self.config.round_scales_to_power_of_2
        cast = self.casts[name, direction]
        return quantize(hp, cast, direction, self.persistent.get(name), power_of_2=power_of_2)

    def sync(self) -> None:
        """Compute the next step's scales of delayed scaling: once a step, after the backward."""
        for persistent in self.persistent.values():
            persistent.sync(self.config.delayed_scaling_config, self.config.round_scales_to_power_of_2)


class ScaleHistory:
    """The delayed or static scale of an operand, one for both directions, and the amaxes that it follows."""

    def __init__(self, cast: CastConfig) -> None:
        self.cast = cast
        self.quant_scale = torch.tensor(cast.static_quant_scale or 0.0)  # 0: not known yet
        self.amax = torch.tensor(-1.0)  # the largest since the last sync; -1 for none
        self.history: list[Tensor] = []  # of the steps before, newest last

    def sync(self, delayed: DelayedScalingConfig, power_of_2: bool) -> None:
        amax, self.amax = self.amax, torch.tensor(-1.0)
        if self.cast.scaling_type is ScalingType.STATIC or amax < 0:
            return
        if not amax.isfinite() and delayed.nonfinite_amax == "skip":
            return
        self.history = [*self.history, amax][-delayed.history_len :]
        expected = torch.stack(self.history).amax() if delayed.scale_fn_name == "max" else amax
        if expected.isfinite() and expected > 0:  # else the scale stays as it is
            largest = FORMATS[self.cast.float8_dtype].max
            scale = (largest / delayed.headroom / expected.double()).float() / 2.0**delayed.margin
            scale = scale.clamp(max=torch.finfo(torch.float32).max)
            self.quant_scale = scaling.round_down_to_power_of_2(scale) if power_of_2 else scale

"""`float8_grouped_mm`: torch's grouped matmul, and its two gradients, in float8.

    output      [T, N]     group g: a_g [t, K] @ b_t[g] [K, N]
    grad_a      [T, K]              grad_output_g [t, N] @ b_t[g].t() [N, K]
    grad_b_t    [E, K, N]           a_g.t() [K, t] @ grad_output_g [t, N]

An expert is a linear with the weight [N, K] = b_t[g].t(). Operands and scales of a group are bit-identical to a float8
linear's on its tokens; sums may differ in their order. The forward saves the column operand of a, and b_t, which the
backward quantizes again. It saves the column operand of b_t instead with `keep_float8_weight_for_backward`, or if the
weight was quantized before (an all-gather, `cast_weights_once`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.experts.cast import cast_groups
from quaver.experts.gemm import grouped_mm
from quaver.experts.groups import ExpertMatmul, arrange_scale_rows
from quaver.experts.token_exchange import TokenExchange
from quaver.kernels.operands import Operand, Operands, require
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.function import (
    check_local_tensors,
    check_transforms,
    get_output_dtype,
    make_device_error,
    needs_autograd,
    run_backward,
)
from quaver.linear.protocols import NO_PROBE, Groups, MatmulProbe
from quaver.linear.saved_tensors import load_saved, save
from quaver.linear.tensor import Float8Tensor
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scale_layout import ALL, ScaleLayout
from quaver.runtime.compile_hints import add_dependency
from quaver.torch_private.autograd import find_wanted_gradients

NO_PERSISTENT_SCALES_REASON = "experts are scaled dynamically: an expert receives different tokens in each step"


def explain_config_obstacle(config: Float8LinearConfig) -> str:
    """Return why the matmuls of experts cannot run with `config`, or "" if they can."""
    if config.has_persistent_scales:
        return NO_PERSISTENT_SCALES_REASON
    try:
        for cast in (cast for operand in config.casts for cast in operand.directions if not cast.is_disabled):
            cast.require_layout("experts")
    except NotImplementedError as error:
        return str(error)
    return ""


class GroupedMMArgs(NamedTuple):
    """The arguments of a grouped matmul other than its tokens, weight and ends."""

    config: Float8LinearConfig
    hp_dtype: torch.dtype
    transposed: bool
    """Whether weights are stored [E, K, N]."""
    weight_operands: Operands | None
    """The weight's operands, if it was quantized before."""
    saves_weight_codes: bool
    """Whether codes of the weight are saved for backward, instead of the weight."""
    input_exchange: TokenExchange | None = None
    """Sends rows of `a` to the ranks of their experts; None if they are there."""
    output_exchange: TokenExchange | None = None
    """Sends rows of the output back to the ranks of their tokens; None if they stay."""
    probe: MatmulProbe = NO_PROBE
    """Observes the operands and results; `NO_PROBE` without a monitor."""

    def make_groups(self, ends: Tensor) -> Groups:
        return Groups(ends.shape[0], ends, self.transposed)


class _GroupedMMFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, ends: Tensor, args: GroupedMMArgs) -> Tensor:
        needs_grad_a, needs_grad_weight = ctx.needs_input_grad[:2]
        a_operands = _quantize_rows(a, ends, args, "input", row=True, column=needs_grad_weight)
        quantized_weight = _get_or_quantize_weight(
            weight, args, row=True, column=needs_grad_a and args.saves_weight_codes
        )
        saved_a = saved_weight = None
        if needs_grad_weight:
            saved_a = require(a_operands.column, "the column operand")._replace(quant_scale=None)
        if needs_grad_a and args.saves_weight_codes:
            saved_weight = require(quantized_weight.column, "the column operand")._replace(quant_scale=None)
        elif needs_grad_a:  # as in linear/function.py, backward quantizes the weight again
            saved_weight = Operand(weight.detach())
        ctx.args = args
        save(ctx, (saved_a, saved_weight), ends)
        return _compute_output(a_operands, quantized_weight, ends, args, a, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *run_backward(_backward, ctx, grad_output), None, None


def _compute_output(
    a: Operands, weight: Operands, ends: Tensor, args: GroupedMMArgs, a_hp: Tensor, weight_hp: Tensor
) -> Tensor:
    rows = require(a.row, "the row operand"), require(weight.row, "the row operand")
    output = grouped_mm(*rows, ends, ExpertMatmul.OUTPUT, args.config.matmuls.output, args.hp_dtype, args.transposed)
    args.probe.observe_output(output, None if args.input_exchange else a_hp, weight_hp, None, args.make_groups(ends))
    return output if args.output_exchange is None else args.output_exchange.combine(output)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
    args: GroupedMMArgs = ctx.args
    matmuls = args.config.matmuls
    needs_grad_a, needs_grad_weight = find_wanted_gradients(ctx, 2)
    (saved_a, saved_weight), (ends,) = load_saved(ctx)
    grad_output = grad_output.contiguous()
    grad_operands = _quantize_rows(grad_output, ends, args, "grad_output", row=needs_grad_a, column=needs_grad_weight)
    # With `output_exchange` the experts multiply rows of other ranks.
    local_grad = None if args.output_exchange else grad_output
    grad_a = grad_weight = None
    if needs_grad_weight:
        column, a = require(grad_operands.column, "the column operand"), require(saved_a, "the saved operand of a")
        grad_weight = grouped_mm(
            column, a, ends, ExpertMatmul.GRAD_WEIGHT, matmuls.grad_weight, args.hp_dtype, args.transposed
        )
        args.probe.observe_grad_weight(grad_weight, local_grad, a, args.make_groups(ends))
    if needs_grad_a:
        row, weight = require(grad_operands.row, "the row operand"), require(saved_weight, "the saved weight")
        weight_hp = None
        if not args.saves_weight_codes:
            weight_hp = weight.data
            if row.dequant_scale is not None:
                # As in linear/function.py: the compiler saves the weight, not its column codes.
                add_dependency(row.dequant_scale, weight_hp)
            quantized_weight = _get_or_quantize_weight(weight_hp, args, row=False, column=True)
            weight = require(quantized_weight.column, "the column operand")
        grad_a = grouped_mm(
            row, weight, ends, ExpertMatmul.GRAD_INPUT, matmuls.grad_input, args.hp_dtype, args.transposed
        )
        args.probe.observe_grad_input(grad_a, local_grad, weight_hp, weight, args.make_groups(ends))
        grad_a = grad_a if args.input_exchange is None else args.input_exchange.combine(grad_a)
    return grad_a, grad_weight


def quantize_groups(
    hp: Tensor, casts: OperandCasts, ends: Tensor | None, num_groups: int, *, row: bool, column: bool
) -> Operands:
    """Quantize groups of rows [rows, columns] for one or both of their matmuls."""
    if not (row or column):
        return Operands(None, None)
    power_of_2 = casts.power_of_2
    if casts.is_dequantized:
        operand = cast_groups(hp, casts.row, ends, num_groups, row=True, column=False, power_of_2=power_of_2).row
        return Operands(operand, operand)
    if casts.has_equal_casts or not (row and column):
        cast = casts.row if row else casts.column
        return cast_groups(hp, cast, ends, num_groups, row=row, column=column, power_of_2=power_of_2)
    row_operand = cast_groups(hp, casts.row, ends, num_groups, row=True, column=False, power_of_2=power_of_2).row
    column_cast = cast_groups(hp, casts.column, ends, num_groups, row=False, column=True, power_of_2=power_of_2)
    return Operands(row_operand, column_cast.column)


def _quantize_rows(hp: Tensor, ends: Tensor, args: GroupedMMArgs, name: str, *, row: bool, column: bool) -> Operands:
    """Quantize "input" or "grad_output" (`name`), and send the rows to their experts."""
    casts: OperandCasts = getattr(args.config.casts, name)
    exchange = args.input_exchange if name == "input" else args.output_exchange
    if exchange is not None and (row or column):
        operands = exchange.quantize(hp, casts, row=row, column=column)
    else:
        operands = quantize_groups(hp, casts, ends, ends.shape[0], row=row, column=column)
    args.probe.observe_operands(name, hp, operands, Groups(ends.shape[0], ends), exchanged=exchange is not None)
    return operands


def _get_or_quantize_weight(weight: Tensor, args: GroupedMMArgs, *, row: bool, column: bool) -> Operands:
    operands = args.weight_operands
    if operands is None:
        operands = quantize_weight(weight, args.config, args.transposed, row=row, column=column)
    args.probe.observe_operands("weight", weight, operands, Groups(weight.shape[0], None, args.transposed))
    return operands


def get_parameter_casts(config: Float8LinearConfig, transposed: bool) -> OperandCasts:
    """Return the casts along stored rows and columns of weights; exchanged for [E, K, N]."""
    casts = config.casts.weight
    return OperandCasts(casts.column, casts.row, casts.power_of_2, casts.has_equal_casts) if transposed else casts


def get_parameter_layouts(config: Float8LinearConfig, transposed: bool) -> tuple[ScaleLayout, ScaleLayout]:
    """Return the layouts of the row and column codes of stored weights."""
    casts = get_parameter_casts(config, transposed).directions
    row, column = (cast.require_layout("grouped matmuls") for cast in casts)
    column = column.get_column_layout()
    if config.casts.weight.is_dequantized:
        row = column = column if transposed else row
    return row, column


def get_quantized_operands(weight: Float8Tensor, transposed: bool) -> Operands:
    """Return the operands of an all-gathered or primary weight, with codes [E, rows, columns]."""
    sides = [require(side, "the stored operand") for side in weight.get_stored_operands()]
    row, column = (side._replace(data=side.data.view(-1, weight.shape[2])) for side in sides)
    return Operands(column, row) if transposed else Operands(row, column)


def get_frozen_operands(weight: FrozenFloat8Weight) -> Operands:
    """Return the operands of a frozen stack of weights; both matmuls read the same codes."""
    scale, (_, rows, columns) = weight.dequant_scale, weight.shape
    layout = weight.scale_layout
    if scale.dim() == 3 and layout.rows == ALL:
        scale = scale.squeeze(1)
    elif scale.dim() == 3:
        scale = scale.flatten(0, 1) if layout.rows == 1 else arrange_scale_rows(scale, rows, layout.rows)
    operand = Operand(weight.data_fp8.view(-1, columns), scale, layout)
    return Operands(operand, operand)


def quantize_weight(
    weight: Tensor, config: Float8LinearConfig, transposed: bool, *, row: bool, column: bool
) -> Operands:
    """Quantize the [N, K] of every expert, from a weight that is stored [E, N, K] or, if `transposed`, [E, K, N]."""
    casts, stored = get_parameter_casts(config, transposed), weight.view(-1, weight.shape[2])
    if not transposed:
        return quantize_groups(stored, casts, None, weight.shape[0], row=row, column=column)
    if config.casts.weight.is_dequantized:
        operand = quantize_groups(stored, casts, None, weight.shape[0], row=False, column=True).column
        return Operands(operand, operand)
    return Operands(*reversed(quantize_groups(stored, casts, None, weight.shape[0], row=column, column=row)))


def float8_grouped_mm(
    a: Tensor,
    b_t: Tensor,
    offs: Tensor,
    *,
    config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
) -> Tensor:
    """Run `torch.nn.functional.grouped_mm(a, b_t, offs=offs)` with its matmuls, forward and backward, in float8.

    Groups may be empty and of any size. Rows past the last end belong to no group: their results and gradients are 0.

    Args:
        a: [T, K], float32, bfloat16 or float16.
        b_t: [E, K, N], any high-precision dtype. For weights [E, N, K] pass `weight.transpose(1, 2)`.
        offs: int32 [E]: where each group of rows of `a` ends, ascending, at most T.
        config: a config, a recipe or its name; None for the tensorwise recipe. Dynamic scaling only.
    Returns:
        [T, N] in a's dtype; under autocast in autocast's.
    Raises:
        TypeError: a DTensor, or no tensor.
        ValueError: shapes, dtypes or ends that do not fit, or a config with delayed or static scaling. Ends on a GPU
            are not checked.
        NotImplementedError: a config with 4-bit codes, or whose casts have no `ScalingGranularity.get_layout`.
    """
    check_local_tensors("Float8Experts", a=a, b_t=b_t, offs=offs)
    config = resolve_config(config)
    if config.has_persistent_scales:
        raise ValueError(f"{NO_PERSISTENT_SCALES_REASON}; got a config with persistent scales")
    transposed = b_t.is_contiguous() or b_t.dim() != 3
    weight = b_t if transposed else b_t.transpose(1, 2).contiguous()
    return multiply_by_weight(a, weight, offs, config, transposed=transposed)


def multiply_by_weight(
    a: Tensor,
    weight: Tensor,
    ends: Tensor,
    config: Float8LinearConfig,
    *,
    transposed: bool,
    operands: Operands | None = None,
    input_exchange: TokenExchange | None = None,
    output_exchange: TokenExchange | None = None,
    probe: MatmulProbe = NO_PROBE,
) -> Tensor:
    """Run `float8_grouped_mm` with a contiguous weight that is stored [E, N, K] or, if `transposed`, [E, K, N].

    Under expert parallelism this rank's experts multiply the tokens of all ranks.

    Args:
        ends: int32 [E]: where each group of rows ends, after `input_exchange`.
        operands: the weight's operands, if it was quantized before.
        input_exchange: sends the rows of `a` to the ranks of their experts. None if they are there already.
        output_exchange: sends the rows of the output back. None if they stay.
        probe: observes the operands and results.
    """
    _check_arguments(a, weight, ends, transposed)
    saves_weight_codes = operands is not None or config.keep_float8_weight_for_backward
    exchanges = input_exchange, output_exchange
    args = GroupedMMArgs(config, get_output_dtype(a), transposed, operands, saves_weight_codes, *exchanges, probe)
    a = a.contiguous()
    check_transforms(a, weight)
    if needs_autograd():
        return _GroupedMMFunction.apply(a, weight, ends, args)
    a_operands = _quantize_rows(a, ends, args, "input", row=True, column=False)
    weight_operands = _get_or_quantize_weight(weight, args, row=True, column=False)
    return _compute_output(a_operands, weight_operands, ends, args, a, weight)


def _check_arguments(a: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> None:
    b_t = list(weight.shape) if transposed else [weight.shape[0], weight.shape[2], weight.shape[1]]
    if a.dim() != 2 or len(b_t) != 3 or a.shape[1] != b_t[1]:
        raise ValueError(f"expected a of [T, K] and b_t of [E, K, N], got {list(a.shape)} and {b_t}")
    for name, tensor in (("a", a), ("b_t", weight)):
        if tensor.dtype not in HP_DTYPES:
            raise ValueError(f"{name}: expected {', '.join(map(str, HP_DTYPES))}, got {tensor.dtype}")
    if weight.device != a.device or ends.device != a.device:
        raise make_device_error(a=a, b_t=weight, offs=ends)
    if ends.dtype is not torch.int32 or ends.dim() != 1 or ends.shape[0] != b_t[0] or not ends.shape[0]:
        raise ValueError(
            f"offs: expected int32 of shape [{b_t[0]}], one end for each of at least one expert; got "
            f"{ends.dtype} of {list(ends.shape)}"
        )

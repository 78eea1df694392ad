"""The float8 linear as a function: its equations and its one autograd function.

    output      [M, N] = input         [M, K] @ weight.t() [K, N] (+ bias)      contracts K
    grad_input  [M, K] = grad_output   [M, N] @ weight     [N, K]               contracts N
    grad_weight [N, K] = grad_output.t() [N, M] @ input    [M, K]               contracts M

Each matmul has two operands, and each matrix is the operand of two matmuls: one reads it along its rows, the other
along its columns (quantize.py has the picture).

Saved for backward:
    input     its column operand, M * K bytes in float8 and a scale; in high precision where the recipe computes
              grad_weight in high precision; its row operand, as many bytes as the column operand, with
              backward="dequantized"; nothing if the weight is frozen.
    weight    an alias of the parameter, no copy, and its tensorwise scale; backward quantizes it again. An alias keeps
              the memory that the forward read where `.data` is exchanged before the backward. Its column operand
              where the weight was quantized before the linear ran (an all-gather, `cast_weights_once`) or with
              `keep_float8_weight_for_backward`. Nothing if the input needs no gradient.

Reads for an amax: input and grad_output once each, weight once; rowwise once per direction. In rowwise_with_gw_hp the
tensorwise scale of the weight is the smallest of its row scales, so it costs no read.

Order of the backward. grad_weight comes first, and its operands go before grad_input is computed, so that the operands
of one matmul are alive at a time; in compiled code the order is a hint to Inductor (compile_hints.py). An eager
backward for some of the inputs computes and casts only what these need: a zero-bubble pipeline goes backward for its
input first and for its weights later.

Everything inside the autograd function is plain tensors. A weight or an input that arrives as a `Float8Tensor` was
quantized before it was all-gathered. Under tensor parallelism a `LinearSharding` provides the quantizers, which agree
on scales with the other ranks, and reduces the output.
"""

from __future__ import annotations

import typing
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels.cpu import check_memory
from quaver.kernels.operands import Operand, Operands, expect
from quaver.linear.gemm import backends_of, laid_out_for_columns_after, mm
from quaver.linear.last_run import note_run
from quaver.linear.nested import over_rows
from quaver.linear.quantize import LinearSharding, MatmulProbe, Quantizer, StoredQuantizer
from quaver.linear.saved_tensors import save
from quaver.linear.saved_tensors import saved as saved_tensors
from quaver.linear.shared_input import cached_quantizer, clear_cached_operands
from quaver.linear.tensor import Float8Tensor
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.scale_layout import TENSORWISE, ScaleLayout
from quaver.recipes.scaling import NO_PERSISTENT_SCALES, PersistentScales, Scales
from quaver.runtime.compile_hints import add_dependency, materialize, wait_for_codes
from quaver.runtime.devices import is_cpu
from quaver.torch_private.autograd import forward_ad_level, wanted_gradients
from quaver.torch_private.dispatch import transforms


class LinearArgs(NamedTuple):
    """The arguments of `_LinearFunction` other than input, weight and bias."""

    config: Float8LinearConfig
    hp_dtype: torch.dtype
    """The dtype of the output and, inside the autograd function, of the gradients."""
    scales: PersistentScales
    weight_operands: Operands | None
    """The weight's operands, if it was quantized before the linear runs."""
    sharding: LinearSharding | None
    reader: int
    """The id of the linear while it records gradients, else 0; see shared_input.py."""
    probe: MatmulProbe | None = None
    """Observes the operands and results, while a monitor is attached."""


# ---- the three matmuls -----------------------------------------------------------------------------------------------


class _SavedWeight(NamedTuple):
    """The weight as saved for grad_input: in high precision, or as codes. All None if the input needs no gradient."""

    hp: Tensor | None = None
    """An alias of the weight, which backward quantizes again."""
    quant_scale: Tensor | None = None
    """The tensorwise scale that the forward multiplied the weight by, for backward to quantize `hp` with."""
    dequant_scale: Tensor | None = None
    """Dequant scale of `data`, or the tensorwise one that goes with `quant_scale`."""
    data: Tensor | None = None
    """Codes of the weight's column operand, saved instead of `hp` where the codes are kept for backward."""
    outer_scale: Tensor | None = None
    """The outer_scale of these codes, in formats of two levels."""


class _LinearFunction(torch.autograd.Function):
    """`output` forward, `grad_input`, `grad_weight` and the bias's gradient backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, args: LinearArgs) -> Tensor:
        needs_grad_input, needs_grad_weight = ctx.needs_input_grad[:2]
        ctx.has_gathered_weight = needs_grad_weight and isinstance(weight, Float8Tensor)
        input_q = _quantize_input(input, args, needs_grad_weight)
        weight_row, saved_weight, weight_layout = _quantize_weight(weight, args, needs_grad_input)
        saved_input = expect(input_q.column) if needs_grad_weight else None
        ctx.args, ctx.input_shape, ctx.bias_dtype = args, input.shape, None if bias is None else bias.dtype
        ctx.layouts = TENSORWISE if saved_input is None else saved_input.layout, weight_layout
        save(ctx, [*_tensors_of(saved_input), *saved_weight])
        return _output(expect(input_q.row), weight_row, bias, args, input, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return *_backward(ctx, grad_output), None
        with torch.no_grad():
            grads = _backward(ctx, grad_output)
        return *NoSecondDerivative.apply(*(g if g is None else g.detach().requires_grad_() for g in grads)), None


def _tensors_of(operand: Operand | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Codes, dequant_scale and outer_scale, as autograd saves them."""
    return (None, None, None) if operand is None else (operand.data, operand.dequant_scale, operand.outer_scale)


def _output(
    input: Operand, weight: Operand, bias: Tensor | None, args: LinearArgs, input_hp: Tensor, weight_hp: Tensor
) -> Tensor:
    """output [M, N] = input [M, K] @ weight.t() [K, N]; under tensor parallelism perhaps [*leading, N], sharded."""
    output = mm(input, weight.t(), args.config.matmuls.output, args.hp_dtype, bias)
    if args.probe is not None:
        args.probe.output(output, input_hp, weight_hp, bias)
    return output if args.sharding is None else args.sharding.reduce_output(output, input_hp.shape[:-1])


_ZERO_BUBBLE_WITH_FSDP2 = (
    "a backward for inputs alone passes a weight that FSDP2 gathered: if it is the first half of a zero-bubble "
    "pipeline schedule, the gradient of this weight will be wrong. PyTorch runs no hooks of FSDP2 or DDP in the other "
    "half, with any linear. Use GPipe, 1F1B or Interleaved1F1B with them (docs/distributed.md)"
)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    args: LinearArgs = ctx.args
    matmuls, cast = args.config.matmuls, args.config.casts.grad_output
    needs_grad_input, needs_grad_weight, needs_grad_bias = wanted_gradients(ctx, 3)
    if ctx.has_gathered_weight and not needs_grad_weight:
        warnings.warn(_ZERO_BUBBLE_WITH_FSDP2, stacklevel=2)
    tensors = saved_tensors(ctx)
    input_layout, weight_layout = ctx.layouts
    saved_input = Operand(tensors[0], tensors[1], input_layout, None, tensors[2])
    saved_weight = _SavedWeight(*tensors[3:])
    del tensors
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()  # autograd then holds none of them, unless the graph is retained
        clear_cached_operands()
    quantizer = _grad_output_quantizer(args)
    # One read makes both row-wise casts. On a CPU it is spared only where the codes of one need not be alive meanwhile.
    apart = is_cpu(grad_output) and cast.column.depends_on_direction and args.sharding is None
    row, column = quantizer(grad_output, row=needs_grad_input and not apart, column=needs_grad_weight)
    if args.probe is not None:
        args.probe.operands("grad_output", grad_output, Operands(row, column))
    if row is not None and row.dequant_scale is not None:
        materialize(grad_output, row.dequant_scale)
        if saved_input.dequant_scale is not None:
            materialize(saved_input.data, row.dequant_scale)
    grad_input = grad_weight = grad_bias = None
    if needs_grad_bias:
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    if column is not None:  # grad_weight [N, K] = grad_output.t() [N, M] @ input [M, K]
        grad_weight = mm(column.t(), saved_input, matmuls.grad_weight, args.hp_dtype)
        if args.probe is not None:
            args.probe.grad_weight(grad_weight, grad_output, saved_input)
    del saved_input, column
    if needs_grad_input and apart:
        row = quantizer(grad_output, row=True, column=False).row
        if args.probe is not None:
            args.probe.operands("grad_output", grad_output, Operands(row, None))
    if row is not None:  # grad_input [M, K] = grad_output [M, N] @ weight [N, K]
        if grad_weight is not None and row.dequant_scale is not None:
            add_dependency(row.dequant_scale, grad_weight)
        weight = _weight_for_grad_input(args, saved_weight, weight_layout, row)
        grad_input = mm(row, weight, matmuls.grad_input, args.hp_dtype).view(ctx.input_shape)
        if args.probe is not None:
            args.probe.grad_input(grad_input, grad_output, saved_weight.hp, weight)
    return grad_input, grad_weight, grad_bias


# ---- the operands ----------------------------------------------------------------------------------------------------


def _quantize_input(input: Tensor, args: LinearArgs, needs_grad_weight: bool) -> Operands:
    """The input's row operand, for output, and its column operand, for grad_weight."""
    casts, scale = args.config.casts.input, args.scales.input
    if isinstance(input, Float8Tensor):
        if not casts.is_float8:
            raise RuntimeError("this linear reads its input in high precision too, and was given a quantized one")
        operands = input.operands()
    else:
        make_quantizer = cached_quantizer if args.sharding is None else args.sharding.input_quantizer
        quantizer = make_quantizer(input, casts, args.hp_dtype, scale, args.reader)
        operands = quantizer(input, row=True, column=needs_grad_weight)
        row = expect(operands.row)
        if row.dequant_scale is not None:
            materialize(row.data, row.dequant_scale)  # once, for q, k and v
    if args.probe is not None:
        args.probe.operands("input", input, operands)
    return operands


def _quantize_weight(
    weight: Tensor, args: LinearArgs, needs_grad_input: bool
) -> tuple[Operand, _SavedWeight, ScaleLayout]:
    """The weight's row operand, for output; what to save of it, and the layout of the scales of saved codes."""
    keeps_codes = args.weight_operands is not None or args.config.keep_float8_weight_for_backward
    quantizer, operands = _weight_quantizer(args), args.weight_operands
    if operands is None:
        operands = quantizer(weight, row=True, column=needs_grad_input and keeps_codes)
    if args.probe is not None:
        args.probe.operands("weight", weight, operands)
    saved, layout = _SavedWeight(), TENSORWISE
    if needs_grad_input and keeps_codes:
        column = expect(operands.column)
        layout = column.layout
        saved = _SavedWeight(None, None, column.dequant_scale, column.data, column.outer_scale)
    elif needs_grad_input:
        scales = quantizer.scales_for(args.config.casts.weight.column_source, operands)
        if scales is not None:
            scales = scales._replace(quant=wait_for_codes(scales.quant, expect(operands.row).data))
        saved = _SavedWeight(weight.detach(), *(scales or ()))
    return expect(operands.row), saved, layout


def _weight_for_grad_input(args: LinearArgs, saved: _SavedWeight, layout: ScaleLayout, grad_output: Operand) -> Operand:
    """The weight's column operand, for grad_input; `layout` of saved codes."""
    if saved.data is not None:
        check_memory(saved.data, saved.dequant_scale)  # FSDP2 frees what it gathered
        if saved.dequant_scale is None:
            return Operand(saved.data)
        data = saved.data
        if grad_output.dequant_scale is not None:
            data = laid_out_for_columns_after(data, grad_output.data, emulate=args.config.emulate)
        return Operand(data, saved.dequant_scale, layout, None, saved.outer_scale)
    scales = None
    if saved.quant_scale is not None and saved.dequant_scale is not None:
        scales = Scales(saved.quant_scale, saved.dequant_scale)
    weight = typing.cast(Tensor, saved.hp)
    if grad_output.dequant_scale is not None:
        # The compiler then saves the weight, and computes its column codes in the backward.
        add_dependency(grad_output.dequant_scale, weight)
    operands = _weight_quantizer(args)(weight, row=False, column=True, scales=scales)
    if args.probe is not None:
        args.probe.operands("weight", weight, operands)
    return expect(operands.column)


def _weight_quantizer(args: LinearArgs) -> Quantizer:
    make_quantizer = Quantizer if args.sharding is None else args.sharding.weight_quantizer
    return make_quantizer(args.config.casts.weight, args.hp_dtype, args.scales.weight)


def _grad_output_quantizer(args: LinearArgs) -> Quantizer:
    make_quantizer = StoredQuantizer if args.sharding is None else args.sharding.grad_output_quantizer
    return make_quantizer(args.config.casts.grad_output, args.hp_dtype, args.scales.grad_output)


class NoSecondDerivative(torch.autograd.Function):
    """Identity on the gradients of a backward that autograd records (create_graph=True); its own backward raises."""

    @staticmethod
    def forward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *grad_grads: Tensor) -> None:
        raise RuntimeError(
            "a float8 matmul has no second derivative: quantization is piecewise constant. "
            "Call convert_to_high_precision(model) before double backward"
        )


# ---- as a function ---------------------------------------------------------------------------------------------------


def float8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
) -> Tensor:
    """`torch.nn.functional.linear` with its three matmuls in float8.

    Args:
        input: [..., K], float32, bfloat16 or float16, any strides; or a nested tensor.
        weight: [N, K], any high-precision dtype. Either may be a `Float8Tensor`.
        bias: [N] or None.
        config: a config, a recipe or its name; None for the tensorwise recipe. Dynamic scaling only: a function has no
            state that could hold a scale.
    Returns:
        [..., N] in input's dtype; under autocast in autocast's.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a config with delayed or static scaling.
    """
    config = resolve_config(config)
    if config.has_persistent_scales:
        raise ValueError("float8_linear scales dynamically, got a config with persistent scales; use a Float8Linear")
    if input.is_nested:
        return over_rows(lambda rows: float8_linear(rows, weight, bias, config=config), input)
    operands = checked_operands(weight, config) if isinstance(weight, Float8Tensor) else None
    return apply_linear(input, weight, bias, config, NO_PERSISTENT_SCALES, operands, None)


def checked_operands(weight: Float8Tensor, config: Float8LinearConfig) -> Operands:
    """The operands of a weight that was quantized before; in eager code, an error if that was under another config."""
    if not torch.compiler.is_compiling():
        weight.check_casts(config.casts.weight)
    return weight.operands()


def compute_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a linear's results for an input of `dtype`: autocast's where it is on."""
    if device_type == "meta":  # torch has no autocast for the meta device
        return dtype
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype


def refuse_transforms() -> None:
    """Raise RuntimeError under a functorch transform that needs derivatives which the float8 matmuls do not have.

    Dynamo would drop the backward of their autograd functions there, and the gradients would be zeros.
    """
    names = transforms()
    if "Grad" in names or "Jvp" in names or ("Vmap" in names and torch.is_grad_enabled()):
        raise RuntimeError(
            "float8 matmuls support no torch.func.grad, vjp or jvp, and vmap under torch.no_grad() alone: use "
            "torch.autograd.grad, or call convert_to_high_precision(model) before"
        )


def apply_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: Float8LinearConfig,
    scales: PersistentScales,
    weight_operands: Operands | None,
    sharding: LinearSharding | None,
    linear: Any = None,
) -> Tensor:
    """`float8_linear` of plain tensors; `weight_operands`, if given, are used in place of a cast of the weight.

    `linear` is the module that calls it, if one does.
    """
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"expected an input of shape [..., {weight.shape[1]}] for a weight of {list(weight.shape)}, "
            f"got {list(input.shape)}"
        )
    if input.dtype not in HP_DTYPES:
        raise ValueError(f"expected an input of {', '.join(map(str, HP_DTYPES))}, got {input.dtype}")
    hp_dtype = compute_dtype("cpu" if input.is_cpu else input.device.type, input.dtype)
    reader = 0 if linear is None or torch.compiler.is_compiling() or not torch.is_grad_enabled() else id(linear)
    probe = None if linear is None or not linear.training else linear.probe
    args = LinearArgs(config, hp_dtype, scales, weight_operands, sharding, reader, probe)
    refuse_transforms()
    # A Function without jvp refuses forward-mode autodiff.
    if torch.is_grad_enabled() or forward_ad_level() >= 0:
        output: Tensor = _LinearFunction.apply(input, weight, bias, args)
    else:
        input_row, weight_row = _quantize_input(input, args, False).row, _quantize_weight(weight, args, False)[0]
        output = _output(expect(input_row), weight_row, bias, args, input, weight)
    if linear is not None:
        note_run(linear, input.device, config, backends_of)
    if output.dim() == input.dim():
        return output
    # As for F.linear, the result must not be a view: autograd forbids in-place operations on a view that a Function
    # returns, and FSDP2 would register its hooks on the view.
    return torch.ops.aten._unsafe_view.default(output, [*input.shape[:-1], weight.shape[0]])

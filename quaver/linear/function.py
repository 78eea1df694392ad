"""The float8 linear as a function: its equations and its one autograd function.

    output      [M, N] = input         [M, K] @ weight.t() [K, N] (+ bias)      contracts K
    grad_input  [M, K] = grad_output   [M, N] @ weight     [N, K]               contracts N
    grad_weight [N, K] = grad_output.t() [N, M] @ input    [M, K]               contracts M

Each matrix is an operand of two matmuls: one reads it along its rows, the other along its columns (see the picture in
quantize.py).

Saved for backward:
    input     its column operand: M * K bytes in float8 and a scale, or high precision where the recipe computes
              grad_weight in high precision. With backward="dequantized" its row operand, of the same size. Nothing if
              the weight is frozen.
    weight    an alias of the parameter, without a copy, and its tensorwise scale; backward quantizes it again. The
              alias keeps the memory that the forward read, even if `.data` is replaced before the backward. The column
              operand instead, if the weight was quantized before the linear ran (an all-gather, `cast_weights_once`)
              or with `keep_float8_weight_for_backward`. Nothing if the input needs no gradient.

Reads for an amax: input and grad_output once each, weight once; rowwise once per direction. In rowwise_with_gw_hp the
tensorwise scale of the weight is the smallest of its row scales, so it costs no read.

Order of the backward. grad_weight is computed first and its operands are freed before grad_input is computed, so the
operands of only one matmul are alive at a time. In compiled code the order is a hint to Inductor (compile_hints.py). An
eager backward for some inputs casts and computes only what they need: a zero-bubble pipeline runs the backward for its
input first and for its weights later.

The autograd function works on plain tensors. A weight or input that arrives as a `Float8Tensor` was quantized before
its all-gather. Under tensor parallelism a `LinearSharding` makes the quantizers, whose scales agree across ranks, and
reduces the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from quaver.kernels.cpu import check_memory
from quaver.kernels.operands import Operand, Operands, require
from quaver.linear.float8_module import Float8Module
from quaver.linear.gemm import lay_out_saved_columns, multiply_operands
from quaver.linear.last_run import record_run
from quaver.linear.nested import apply_to_nested
from quaver.linear.protocols import NO_PROBE, MatmulProbe
from quaver.linear.quantize import MaterializedQuantizer, Quantizer
from quaver.linear.saved_tensors import load_saved, save
from quaver.linear.shared_input import choose_quantizer, clear_cached_operands
from quaver.linear.tensor import Float8Tensor
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.scale_layout import ROWWISE
from quaver.recipes.scaling import NO_PERSISTENT_SCALES, CastScales, PersistentScales
from quaver.runtime.compile_hints import add_dependency, store_once, wait_for_codes
from quaver.runtime.devices import is_cpu
from quaver.runtime.warnings import warn_user
from quaver.torch_private.autograd import find_wanted_gradients, get_forward_ad_level
from quaver.torch_private.dispatch import is_batched, list_transforms
from quaver.torch_private.dtensor import is_dtensor

if TYPE_CHECKING:
    from quaver.linear.sharding import LinearSharding


class LinearArgs(NamedTuple):
    """The arguments of `_LinearFunction` other than input, weight and bias."""

    config: Float8LinearConfig
    hp_dtype: torch.dtype
    """The dtype of the output and, inside the autograd function, of the gradients."""
    scales: PersistentScales
    weight_operands: Operands | None
    """The weight's operands, if it was quantized before the linear ran."""
    saves_weight_codes: bool
    """Whether codes of the weight are saved for backward, instead of the weight."""
    sharding: LinearSharding | None
    linear_id: int | None
    """The id of the linear if it records gradients, else None; see shared_input.py."""
    probe: MatmulProbe
    """Observes the operands and results; `NO_PROBE` without a monitor."""


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, args: LinearArgs) -> Tensor:
        needs_grad_input, needs_grad_weight = ctx.needs_input_grad[:2]
        ctx.has_gathered_weight = needs_grad_weight and isinstance(weight, Float8Tensor)
        input_q = _quantize_input(input, args, needs_grad_weight)
        weight_row, saved_weight = _quantize_weight(weight, args, needs_grad_input)
        saved_input = (
            require(input_q.column, "the input's column operand")._replace(quant_scale=None)
            if needs_grad_weight
            else None
        )
        ctx.args, ctx.input_shape, ctx.bias_dtype = args, input.shape, None if bias is None else bias.dtype
        save(ctx, (saved_input, saved_weight))
        return compute_output(require(input_q.row, "the input's row operand"), weight_row, bias, args, input, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *run_backward(_backward, ctx, grad_output), None


def compute_output(
    input: Operand, weight: Operand, bias: Tensor | None, args: LinearArgs, input_hp: Tensor, weight_hp: Tensor
) -> Tensor:
    """Multiply, then reduce under tensor parallelism, where the output may be [*leading, N] and sharded."""
    output = multiply_operands(input, weight.t(), args.config.matmuls.output, args.hp_dtype, bias)
    args.probe.observe_output(output, input_hp, weight_hp, bias)
    return output if args.sharding is None else args.sharding.reduce_output(output, input_hp.shape[:-1])


_ZERO_BUBBLE_WITH_FSDP2 = (
    "a backward for inputs alone passes a weight that FSDP2 gathered: if it is the first half of a zero-bubble "
    "pipeline schedule, the gradient of this weight will be wrong. PyTorch runs no hooks of FSDP2 or DDP in the other "
    "half, with any linear. Use GPipe, 1F1B or Interleaved1F1B with them (docs/distributed.md)"
)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    args: LinearArgs = ctx.args
    matmuls, cast = args.config.matmuls, args.config.casts.grad_output
    needs_grad_input, needs_grad_weight, needs_grad_bias = find_wanted_gradients(ctx, 3)
    if ctx.has_gathered_weight and not needs_grad_weight:
        warn_user(_ZERO_BUBBLE_WITH_FSDP2)
    (saved_input, saved_weight), _ = load_saved(ctx)
    if not torch.compiler.is_compiling():
        clear_cached_operands()
    quantizer = make_grad_output_quantizer(args)
    # One read could make both rowwise casts. On a CPU they are made one by one, so that one set of codes is alive.
    one_by_one = is_cpu(grad_output) and cast.column.depends_on_direction and args.sharding is None
    row, column = quantizer(grad_output, row=needs_grad_input and not one_by_one, column=needs_grad_weight)
    args.probe.observe_operands("grad_output", grad_output, Operands(row, column))
    if row is not None and row.dequant_scale is not None:
        store_once(grad_output, before=row.dequant_scale)
        if saved_input is not None and saved_input.dequant_scale is not None:
            store_once(saved_input.data, before=row.dequant_scale)
    grad_input = grad_weight = grad_bias = None
    if needs_grad_bias:
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    if column is not None:  # grad_weight [N, K] = grad_output.t() [N, M] @ input [M, K]
        saved_input = require(saved_input, "the saved input")
        grad_weight = multiply_operands(column.t(), saved_input, matmuls.grad_weight, args.hp_dtype)
        args.probe.observe_grad_weight(grad_weight, grad_output, saved_input)
    del saved_input, column
    if needs_grad_input and one_by_one:
        row = quantizer(grad_output, row=True, column=False).row
        args.probe.observe_operands("grad_output", grad_output, Operands(row, None))
    if row is not None:  # grad_input [M, K] = grad_output [M, N] @ weight [N, K]
        if grad_weight is not None and row.dequant_scale is not None:
            add_dependency(row.dequant_scale, grad_weight)
        saved_weight = require(saved_weight, "the saved weight")
        weight = _get_weight_column(args, saved_weight, row)
        grad_input = multiply_operands(row, weight, matmuls.grad_input, args.hp_dtype).view(ctx.input_shape)
        weight_hp = None if args.saves_weight_codes else saved_weight.data
        args.probe.observe_grad_input(grad_input, grad_output, weight_hp, weight)
    return grad_input, grad_weight, grad_bias


def _quantize_input(input: Tensor, args: LinearArgs, needs_grad_weight: bool) -> Operands:
    """Return the input's row operand for output, and its column operand if grad_weight is needed."""
    casts, scale = args.config.casts.input, args.scales.input
    if isinstance(input, Float8Tensor):
        if not casts.is_float8:
            raise RuntimeError(
                "expected a high-precision input, which a matmul of this linear reads; got a Float8Tensor"
            )
        if not torch.compiler.is_compiling():
            input.check_casts(casts)
        operands = input.get_operands()
    else:
        make_quantizer = choose_quantizer if args.sharding is None else args.sharding.make_input_quantizer
        quantizer = make_quantizer(input, casts, args.hp_dtype, scale, args.linear_id)
        operands = quantizer(input, row=True, column=needs_grad_weight)
        row = require(operands.row, "the input's row operand")
        if row.dequant_scale is not None:
            store_once(row.data, before=row.dequant_scale)  # stored once for q, k and v
    args.probe.observe_operands("input", input, operands)
    return operands


def _quantize_weight(weight: Tensor, args: LinearArgs, needs_grad_input: bool) -> tuple[Operand, Operand | None]:
    """Return the weight's row operand for output, and what to save for grad_input.

    What is saved is the column operand, or an alias of the weight with the tensorwise scales of its next cast.
    """
    quantizer, operands = _make_weight_quantizer(args), args.weight_operands
    if operands is None:
        operands = quantizer(weight, row=True, column=needs_grad_input and args.saves_weight_codes)
    args.probe.observe_operands("weight", weight, operands)
    row = require(operands.row, "the weight's row operand")
    if not needs_grad_input:
        return row, None
    if args.saves_weight_codes:
        return row, require(operands.column, "the weight's column operand")._replace(quant_scale=None)
    scales = quantizer.derive_scales(args.config.casts.weight.column_source, operands)
    if scales is None:
        return row, Operand(weight.detach())
    return row, Operand(weight.detach(), scales.dequant, quant_scale=wait_for_codes(scales.quant, row.data))


def _get_weight_column(args: LinearArgs, saved: Operand, grad_output: Operand) -> Operand:
    """Return the weight's column operand, from what `_quantize_weight` saved."""
    weight = saved.data
    if args.saves_weight_codes:
        check_memory(weight, saved.dequant_scale)  # FSDP2 frees all-gathered memory
        if saved.dequant_scale is None or grad_output.dequant_scale is None:
            return saved
        codes = lay_out_saved_columns(weight, grad_output.data, emulate=args.config.emulate)
        return saved._replace(data=codes)
    scales = None
    if saved.quant_scale is not None and saved.dequant_scale is not None:
        scales = CastScales(saved.quant_scale, saved.dequant_scale)
    if grad_output.dequant_scale is not None:
        # Otherwise the compiler would compute the column codes in the forward and save them.
        add_dependency(grad_output.dequant_scale, weight)
    operands = _make_weight_quantizer(args)(weight, row=False, column=True, scales=scales)
    args.probe.observe_operands("weight", weight, operands)
    return require(operands.column, "the weight's column operand")


def _make_weight_quantizer(args: LinearArgs) -> Quantizer:
    make_quantizer = Quantizer if args.sharding is None else args.sharding.make_weight_quantizer
    return make_quantizer(args.config.casts.weight, args.hp_dtype, args.scales.weight)


def make_grad_output_quantizer(args: LinearArgs) -> Quantizer:
    """Return the quantizer for grad_output, or for this rank's part of it under tensor parallelism."""
    make_quantizer = MaterializedQuantizer if args.sharding is None else args.sharding.make_grad_output_quantizer
    return make_quantizer(args.config.casts.grad_output, args.hp_dtype, args.scales.grad_output)


def run_backward(
    backward: Callable[[Any, Tensor], tuple[Tensor | None, ...]], ctx: Any, grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `backward`. Under `create_graph=True` a derivative of them raises.

    `torch.autograd.grad` runs only the nodes between its outputs and its inputs. So the node that raises has
    `grad_output` and the leaves among the forward's inputs as its inputs. It cannot have the forward's other inputs, so
    a derivative of grad_weight alone with respect to what computed the linear's input does not raise: it is None or
    partial.
    """
    if torch.compiler.is_compiling():
        return backward(ctx, grad_output)
    if is_batched(grad_output):
        raise RuntimeError(
            "float8 matmuls support no batched gradients (is_grads_batched=True, vectorize=True), which vmap computes: "
            "call torch.autograd.grad once for each, or convert_to_high_precision(model) before"
        )
    if not torch.is_grad_enabled():
        return backward(ctx, grad_output)
    with torch.no_grad():
        grads = backward(ctx, grad_output)
    recorded = [grad if grad is None else grad.detach().requires_grad_() for grad in grads]
    leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
    return tuple(_NoSecondDerivative.apply(len(recorded), *recorded, grad_output, *leaves))


class _NoSecondDerivative(torch.autograd.Function):
    """Returns the first `count` tensors, the gradients that autograd records (create_graph=True). Backward raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grad_grads: Tensor) -> None:
        raise RuntimeError(
            "a float8 matmul has no second derivative: quantization is piecewise constant. "
            "Call convert_to_high_precision(model) before double backward"
        )


def float8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
) -> Tensor:
    """Apply `torch.nn.functional.linear` with its three matmuls in float8.

    Args:
        input: [..., K], float32, bfloat16 or float16, any strides; or a nested tensor.
        weight: [N, K], any high-precision dtype. Input and weight may each be a `Float8Tensor`.
        bias: [N], float32, bfloat16 or float16; or None.
        config: a config, a recipe or its name; None for the tensorwise recipe. Dynamic scaling only: a function has no
            state that could hold a scale.
    Returns:
        [..., N] in input's dtype; under autocast in autocast's.
    Raises:
        TypeError: a DTensor, or no tensor.
        ValueError: shapes or dtypes that do not fit, or a config with delayed or static scaling.
    """
    tensors = {"input": input, "weight": weight} | ({} if bias is None else {"bias": bias})
    check_local_tensors("a Float8Linear", **tensors)
    config = resolve_config(config)
    if config.has_persistent_scales:
        raise ValueError("config: expected dynamic scaling, got persistent scales; use a Float8Linear for them")
    if input.is_nested:
        return apply_to_nested(lambda rows: float8_linear(rows, weight, bias, config=config), input)
    operands = get_checked_operands(weight, config) if isinstance(weight, Float8Tensor) else None
    return apply_linear(input, weight, bias, config, NO_PERSISTENT_SCALES, weight_operands=operands)


def check_local_tensors(supported_by: str, **tensors: object) -> None:
    """Raise TypeError unless all `tensors` are tensors and no DTensors, which the module `supported_by` supports."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if is_dtensor(tensor):
            raise TypeError(f"{name}: expected no DTensor; use {supported_by}, or pass {name}.to_local()")


def get_checked_operands(weight: Float8Tensor, config: Float8LinearConfig) -> Operands:
    """Return the operands of a quantized weight; eager code raises if `config` has other casts."""
    if not torch.compiler.is_compiling():
        weight.check_casts(config.casts.weight)
    return weight.get_operands()


def get_output_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype of a linear's output: autocast's if it is enabled, else the input's."""
    device_type = "cpu" if input.is_cpu else input.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # torch has no autocast for "meta"
        return input.dtype
    return torch.get_autocast_dtype(device_type)


def needs_autograd() -> bool:
    """Return whether a call must go through its autograd function. Without a jvp it refuses forward-mode autodiff."""
    return torch.is_grad_enabled() or get_forward_ad_level() >= 0


def check_transforms(*tensors: Tensor) -> None:
    """Raise RuntimeError under a functorch transform that differentiates, or if eager `tensors` have a tangent.

    Dynamo would drop the backward of the autograd function under such a transform, and gradients would be zero.
    """
    names = list_transforms()
    is_forward_mode = get_forward_ad_level() >= 0 and not torch.compiler.is_compiling()
    if (
        "Grad" in names
        or "Jvp" in names
        or ("Vmap" in names and torch.is_grad_enabled())
        or (is_forward_mode and any(unpack_dual(tensor).tangent is not None for tensor in tensors))
    ):
        raise RuntimeError(
            "float8 matmuls do not support torch.func.grad, vjp, jvp, forward-mode autodiff, or vmap outside of "
            "torch.no_grad(); use torch.autograd.grad, or call convert_to_high_precision(model) first"
        )


def make_device_error(**tensors: Tensor | None) -> ValueError:
    """Return the error for tensors on several devices. Casts run on each one's own, so PyTorch would not raise."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    hint = "; give parameters on the meta device memory: to_empty, load_state_dict(assign=True)"
    return ValueError(
        f"expected {', '.join(devices)} on one device, got {', '.join(map(str, devices.values()))}"
        f"{hint if torch.device('meta') in devices.values() else ''}"
    )


def _check_arguments(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2:
        raise ValueError(f"expected a weight of shape [N, K], got {list(weight.shape)}")
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"expected an input of shape [..., {weight.shape[1]}] for a weight of {list(weight.shape)}, "
            f"got {list(input.shape)}"
        )
    if type(input) is not Tensor and is_dtensor(input):
        raise TypeError(
            "input is a DTensor, and the linear's weight is not: give both to parallelize_module, or pass "
            "input.to_local()"
        )
    if input.dtype not in HP_DTYPES:
        raise ValueError(f"expected an input of {', '.join(map(str, HP_DTYPES))}, got {input.dtype}")
    if weight.dtype not in HP_DTYPES:
        raise ValueError(f"expected a weight of {', '.join(map(str, HP_DTYPES))}, got {weight.dtype}")
    if input.layout is not torch.strided:
        raise ValueError(f"expected a strided input, got {input.layout}")
    if bias is not None and bias.dtype not in HP_DTYPES:
        raise ValueError(f"expected a bias of {', '.join(map(str, HP_DTYPES))}, got {bias.dtype}")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"expected a bias of [{weight.shape[0]}], got {list(bias.shape)}")
    if weight.device != input.device or (bias is not None and bias.device != input.device):
        raise make_device_error(input=input, weight=weight, bias=bias)


def apply_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: Float8LinearConfig,
    scales: PersistentScales,
    *,
    weight_operands: Operands | None = None,
    sharding: LinearSharding | None = None,
    linear: Float8Module | None = None,
) -> Tensor:
    """Run `float8_linear` on plain tensors: this rank's part of each, if the linear has a `sharding`.

    Args:
        input: [..., K], in high precision or a `Float8Tensor`.
        weight: [N, K], in high precision or a `Float8Tensor` with its `weight_operands`.
        bias: [N] or None.
        config: the casts of the operands and the options of the matmuls.
        scales: the persistent scales of the operands; None for each that is scaled dynamically.
        weight_operands: multiplied by instead of a cast of the weight.
        sharding: makes the quantizers and reduces the output, under tensor parallelism.
        linear: the calling module, whose probe observes the matmuls and which records the backends. None for a call of
            `float8_linear`.
    Returns:
        [..., N] in `get_output_dtype(input)`.
    """
    _check_arguments(input, weight, bias)
    hp_dtype = get_output_dtype(input)
    records_gradients = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    linear_id = id(linear) if linear is not None and records_gradients else None
    probe = NO_PROBE if linear is None else linear.get_probe("weight")
    saves_weight_codes = weight_operands is not None or config.keep_float8_weight_for_backward
    args = LinearArgs(config, hp_dtype, scales, weight_operands, saves_weight_codes, sharding, linear_id, probe)
    check_transforms(input, weight, *([] if bias is None else [bias]))
    if needs_autograd():
        output: Tensor = _LinearFunction.apply(input, weight, bias, args)
    else:
        input_row = _quantize_input(input, args, needs_grad_weight=False).row
        weight_row, _ = _quantize_weight(weight, args, needs_grad_input=False)
        output = compute_output(require(input_row, "the input's row operand"), weight_row, bias, args, input, weight)
    if linear is not None:
        column = None if weight_operands is None else weight_operands.column
        has_row_codes_only = column is not None and column.layout == ROWWISE
        record_run(linear, input.device, has_row_codes_only=has_row_codes_only)
    if output.dim() == input.dim():
        return output
    # Not a view: autograd forbids in-place operations on a view that a Function returns, and FSDP2 would register its
    # hooks on the view. F.linear returns none either.
    return torch.ops.aten._unsafe_view.default(output, [*input.shape[:-1], weight.shape[0]])

"""Breaks one linear of a float8 model, for faults.py: its operands, results, gradients or weight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import quaver.linear.module
from quaver import Float8Linear
from quaver.kernels.operands import Operand, Operands
from quaver.recipes.scaling import cast_to_float8

Change = Callable[[Tensor], Tensor]
OnOperand = Callable[[Operand, Tensor], Operand]
"""Takes an operand and the tensor that it was cast from; returns the operand for the matmuls."""


def patch(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until `stack` closes."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def change_input(stack: ExitStack, linear: nn.Module, change: Change) -> None:
    stack.callback(linear.register_forward_pre_hook(lambda module, inputs: (change(inputs[0]),)).remove)


def change_output(stack: ExitStack, linear: nn.Module, change: Change) -> None:
    stack.callback(linear.register_forward_hook(lambda module, inputs, output: change(output)).remove)


def change_grad_output(stack: ExitStack, linear: nn.Module, change: Change) -> None:
    def change_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(change)

    stack.callback(linear.register_forward_hook(change_gradient).remove)


@torch.no_grad()
def change_weight(linear: nn.Module, change: Change) -> None:
    weight = linear.get_parameter("weight")
    weight.copy_(change(weight.clone()))


def change_input_operand(stack: ExitStack, linear: Float8Linear, change: OnOperand) -> None:
    """Change both operands of the input, after their cast."""
    original = quaver.linear.function.choose_quantizer

    def choose_changed_quantizer(
        activation: Tensor, casts: Any, hp_dtype: Any, scale: Any, linear_id: int | None
    ) -> Any:
        quantizer = original(activation, casts, hp_dtype, scale, linear_id)
        return make_changed_quantizer(quantizer, change) if linear_id == id(linear) else quantizer

    patch(stack, quaver.linear.function, "choose_quantizer", choose_changed_quantizer)


def change_grad_operand(stack: ExitStack, linear: Float8Linear, change: OnOperand) -> None:
    """Change both operands of grad_output, after their cast."""
    original = quaver.linear.function.make_grad_output_quantizer

    def make_grad_quantizer(args: Any) -> Any:
        quantizer = original(args)
        is_linear = args.probe is not None and args.probe is linear.get_probe("weight")
        return make_changed_quantizer(quantizer, change) if is_linear else quantizer

    patch(stack, quaver.linear.function, "make_grad_output_quantizer", make_grad_quantizer)


def make_changed_quantizer(quantizer: Any, change: OnOperand) -> Callable[..., Operands]:
    """Return a quantizer that changes the operands of `quantizer`."""

    def quantize(hp: Tensor, **directions: Any) -> Operands:
        operands, matrix = quantizer(hp, **directions), hp.reshape(-1, hp.shape[-1])
        return Operands(*(None if operand is None else change(operand, matrix) for operand in operands))

    return quantize


def change_weight_operands(stack: ExitStack, linear: Float8Linear, change: OnOperand) -> None:
    """Change the operands of the weight that `cast_weights_once` made."""
    original = quaver.linear.module.apply_linear

    def apply_with_changed_weight(
        input: Tensor, weight: Tensor, *rest: Any, weight_operands: Any, **options: Any
    ) -> Tensor:
        if options["linear"] is linear and weight_operands is not None:
            changed_operands = (operand if operand is None else change(operand, weight) for operand in weight_operands)
            weight_operands = Operands(*changed_operands)
        return original(input, weight, *rest, weight_operands=weight_operands, **options)

    patch(stack, quaver.linear.module, "apply_linear", apply_with_changed_weight)


def change_matmul(stack: ExitStack, linear: Float8Linear, change: Callable[[Operand], Operand]) -> None:
    """Change the input of the first matmul after its cast, like a wrong kernel."""
    original = quaver.linear.function.compute_output

    def compute_changed_output(input: Operand, weight: Operand, bias: Any, args: Any, *rest: Any) -> Tensor:
        is_linear = args.probe is not None and args.probe is linear.get_probe("weight")
        return original(change(input) if is_linear else input, weight, bias, args, *rest)

    patch(stack, quaver.linear.function, "compute_output", compute_changed_output)


def scale_dequant_scale(factor: float) -> OnOperand:
    """Return a change that multiplies the dequant scale, so that it does not fit the codes."""
    return lambda operand, hp: operand._replace(dequant_scale=operand.dequant_scale * factor)


def scale_quant_scale(factor: float) -> OnOperand:
    """Return a change to a quant scale `factor` times the right one, with codes that fit it."""

    def change(operand: Operand, hp: Tensor) -> Operand:
        dequant = operand.dequant_scale / factor
        wide = hp.float() * (1 / dequant)
        return Operand(cast_to_float8(wide, torch.ones(()), operand.data.dtype), dequant, operand.layout, 1 / dequant)

    return change


def reverse_rows(operand: Operand, hp: Tensor) -> Operand:
    """Reverse the rows of the codes, but not of the scales."""
    return operand._replace(data=operand.data.view(torch.uint8).flip(0).view(operand.data.dtype))


class Stale:
    """A change that reuses the codes or the scale of its first call in all later ones."""

    def __init__(self, reused: str) -> None:
        self.reused = reused
        self.first: Operand | None = None

    def __call__(self, operand: Operand, hp: Tensor) -> Operand:
        if self.first is None:
            self.first = Operand(operand.data.clone(), operand.dequant_scale.clone(), operand.layout)
        if self.reused == "codes":
            return self.first
        quant = 1 / self.first.dequant_scale
        codes = cast_to_float8(hp.float() * quant, torch.ones(()), operand.data.dtype)
        return Operand(codes, self.first.dequant_scale, operand.layout, quant)

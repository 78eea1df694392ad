"""Finds where a training step first went non-finite, by running it again with hooks."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """A loss or a gradient norm was not finite, so training stopped; the message names the first culprit."""


@dataclass(frozen=True)
class NonFiniteOperand:
    """`operand` is input, weight, bias or output of `module`, or a gradient of one, as grad_weight."""

    module: str
    operand: str

    def __str__(self) -> str:
        return f"{self.operand} of {self.module}"


def find_nonfinite(model: nn.Module, forward_backward: Callable[[], None]) -> NonFiniteOperand | None:
    """Return the first non-finite operand that `forward_backward` meets, None if all are finite.

    First is in the order of computation: forward, then backward, micro-batch by micro-batch. Compiled blocks
    run eagerly here, so that their modules can be seen. Gradients of `model` are left empty.
    """
    found: list[NonFiniteOperand] = []
    model.zero_grad(set_to_none=True)
    with torch.compiler.set_stance("force_eager"), _watched(model, found), warnings.catch_warnings():
        # torch remarks that the first module of a model has no grad_input; that is no news.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        forward_backward()
    model.zero_grad(set_to_none=True)
    return found[0] if found else None


@contextmanager
def _watched(model: nn.Module, found: list[NonFiniteOperand]) -> Iterator[None]:
    handles: list[Any] = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own or not list(module.children()):
            watch = _Watch(name or type(module).__name__, found)
            handles += [
                module.register_forward_pre_hook(watch.before_forward),
                module.register_forward_hook(watch.after_forward),
                module.register_full_backward_pre_hook(watch.before_backward),
                module.register_full_backward_hook(watch.after_backward),
            ]
            handles += [
                parameter.register_hook(partial(watch.look, f"grad_{operand}"))
                for operand, parameter in own.items()
                if parameter.requires_grad
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Watch:
    """The hooks of one module."""

    module: str
    found: list[NonFiniteOperand] = field(repr=False)

    def look(self, operand: str, values: Any) -> None:
        tensors = values if isinstance(values, tuple) else (values,)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                self.found.append(NonFiniteOperand(self.module, operand))

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        self.look("input", inputs)
        for operand, parameter in module.named_parameters(recurse=False):
            self.look(operand, parameter.detach())

    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.look("output", output)

    def before_backward(self, module: nn.Module, grad_output: Any) -> None:
        self.look("grad_output", grad_output)

    def after_backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        self.look("grad_input", grad_input)

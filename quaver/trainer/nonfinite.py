"""Finds where a training step first went non-finite, by running it again with hooks."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quaver.trainer.tensors import plain_tensors


@dataclass(frozen=True)
class NonFiniteOperand:
    """`operand` is input, weight, bias or output of `module`, or a gradient of one, as grad_weight.

    `position` counts what was looked at before it, which is the same on every rank: the least of all ranks is first.
    """

    module: str
    operand: str
    position: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.operand} of {self.module}"


def find_nonfinite(model: nn.Module, forward_backward: Callable[[], None]) -> NonFiniteOperand | None:
    """Return the first non-finite operand that `forward_backward` meets on this rank, None if all are finite.

    First is in the order of computation: forward, then backward, micro-batch by micro-batch, then the sums of the
    gradients. Compiled blocks run eagerly here, so that their modules can be seen. Every rank must call it together.
    Gradients of `model` are left empty.
    """
    search = _Search()
    model.zero_grad(set_to_none=True)
    with torch.compiler.set_stance("force_eager"), _watched(model, search), warnings.catch_warnings():
        # torch remarks that the first module of a model has no grad_input; that is no news.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        forward_backward()
    for name, parameter in model.named_parameters():
        module, _, operand = name.rpartition(".")
        search.look(module, f"grad_{operand}", parameter.grad)
    model.zero_grad(set_to_none=True)
    return search.found


@dataclass
class _Search:
    found: NonFiniteOperand | None = None
    looks: int = 0

    def look(self, module: str, operand: str, values: Any) -> None:
        self.looks += 1
        if self.found is None and not all(_is_finite(value) for value in _tuple(values)):
            self.found = NonFiniteOperand(module, operand, self.looks)


def _tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _is_finite(value: Any) -> bool:
    """Whether `value` is no tensor, or one whose part on this rank is finite: looking further would need the others."""
    # Detached: what a look saves for a backward would be missing where a checkpointed block runs again without it.
    tensors = plain_tensors(value.detach()) if isinstance(value, Tensor) else []
    return all(bool(tensor.float().isfinite().all()) for tensor in tensors if tensor.is_floating_point())


@contextmanager
def _watched(model: nn.Module, search: _Search) -> Iterator[None]:
    handles: list[Any] = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own or not list(module.children()):
            watch = _Watch(name or type(module).__name__, search)
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
    search: _Search = field(repr=False)

    def look(self, operand: str, values: Any) -> None:
        self.search.look(self.module, operand, values)

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

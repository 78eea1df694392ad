"""Non-finite training steps: whether a run may skip one, and a repetition with hooks that finds where it began."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from quaver.experts.module import Float8Experts
from quaver.lab.model.plain_tensors import list_plain_tensors
from quaver.lab.settings import Training
from quaver.linear.module import Float8Linear


class NonFiniteError(RuntimeError):
    """A loss or a gradient norm was not finite. The message names the first non-finite operand."""

    can_continue: bool = True
    """Whether no model has taken the failed step, so that a checkpoint of the last step can be written."""


def check_may_skip(training: Training, skipped_in_a_row: int, message: str) -> None:
    """Raise NonFiniteError with `message` and a remedy unless `training` allows so many skipped steps in a row."""
    if training.nonfinite != "skip":
        remedies = "lower optimizer.lr, raise lr_scheduler.warmup_steps, or leave such steps out with"
        raise NonFiniteError(f"{message}; {remedies} training.nonfinite = skip")
    if skipped_in_a_row > training.max_nonfinite_steps:
        limit = f"training.max_nonfinite_steps = {training.max_nonfinite_steps}"
        raise NonFiniteError(f"{message}; the previous steps were non-finite too, and {limit} of them were skipped")


@dataclass(frozen=True)
class NonFiniteOperand:
    """The first operand of a module that a check of a failed step found non-finite."""

    module: str
    """The name of the module."""
    operand: str
    """input, weight, bias or output, or the gradient of one, such as grad_weight."""
    check_number: int = field(default=0, compare=False, repr=False)
    """The number of the check in the step, the same on every rank: the operand with the lowest one came first."""
    in_float8: "NonFiniteOperand | None" = field(default=None, compare=False, repr=False)
    """The first non-finite operand of a float8 module, which a monitor's alarm names."""

    def __str__(self) -> str:
        return f"{self.operand} of {self.module}"


def locate_nonfinite(
    model: nn.Module,
    forward_backward: Callable[[], object],
    all_gather_objects: Callable[[NonFiniteOperand | None], list[NonFiniteOperand | None]],
) -> str:
    """Repeat `forward_backward` on every rank, and return in words where it first became non-finite on any of them.

    Args:
        all_gather_objects: returns the values of all ranks.
    """
    operands = [operand for operand in all_gather_objects(find_nonfinite(model, forward_backward)) if operand]
    float8_operands = [operand.in_float8 for operand in operands if operand.in_float8]
    first, in_float8 = (
        min(group, key=attrgetter("check_number"), default=None) for group in (operands, float8_operands)
    )
    if first is None:
        return "not reproduced: no module was non-finite when the step was repeated eagerly"
    return f"first in {first}" + (f"; of float8 modules first in {in_float8}" if in_float8 not in (None, first) else "")


def find_nonfinite(model: nn.Module, forward_backward: Callable[[], object]) -> NonFiniteOperand | None:
    """Return the first non-finite operand in `forward_backward` on this rank, None if all are finite.

    The order is the order of computation: forward, then backward, microbatch by microbatch, then the accumulated
    gradients. Compiled blocks run eagerly here, because hooks cannot see inside compiled code. Every rank must call
    this together. Clears the gradients of `model`.
    """
    search = _NonFiniteSearch(
        {name for name, module in model.named_modules() if isinstance(module, Float8Linear | Float8Experts)}
    )
    model.zero_grad(set_to_none=True)
    with torch.compiler.set_stance("force_eager"), _hook_modules(model, search), warnings.catch_warnings():
        # The first module of a model has no grad_input.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        forward_backward()
    for name, parameter in model.named_parameters():
        module, _, operand = name.rpartition(".")
        search.check(module, f"grad_{operand}", parameter.grad)
    model.zero_grad(set_to_none=True)
    return None if search.first_operand is None else replace(search.first_operand, in_float8=search.first_in_float8)


@dataclass
class _NonFiniteSearch:
    float8_modules: set[str]
    """The names of modules that compute in float8."""
    first_operand: NonFiniteOperand | None = None
    first_in_float8: NonFiniteOperand | None = None
    check_count: int = 0

    def check(self, module: str, operand: str, values: Any) -> None:
        self.check_count += 1
        values = values if isinstance(values, tuple) else (values,)
        if self.first_operand is not None and (self.first_in_float8 is not None or module not in self.float8_modules):
            return
        if not all(is_finite(value) for value in values):
            nonfinite = NonFiniteOperand(module, operand, self.check_count)
            self.first_operand = self.first_operand or nonfinite
            if module in self.float8_modules:
                self.first_in_float8 = self.first_in_float8 or nonfinite


def is_finite(value: Any) -> bool:
    """Return whether the part of `value` on this rank is finite, or `value` is not a tensor."""
    # Detached, because a checkpointed block would otherwise save more in the forward than in the recomputation.
    tensors = list_plain_tensors(value.detach()) if isinstance(value, Tensor) else []
    return all(bool(tensor.float().isfinite().all()) for tensor in tensors if tensor.is_floating_point())


@contextmanager
def _hook_modules(model: nn.Module, search: _NonFiniteSearch) -> Iterator[None]:
    """Check the operands of every module that has parameters or no children."""
    handles: list[Any] = []
    for path, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if parameters or not list(module.children()):
            check = partial(search.check, path or type(module).__name__)
            handles += [
                module.register_forward_pre_hook(partial(_check_operands, check)),
                module.register_forward_hook(lambda module, inputs, output, check=check: check("output", output)),
                module.register_full_backward_pre_hook(lambda module, grad, check=check: check("grad_output", grad)),
                module.register_full_backward_hook(lambda module, grad, _, check=check: check("grad_input", grad)),
            ]
            handles += [
                parameter.register_hook(partial(check, f"grad_{operand}"))
                for operand, parameter in parameters.items()
                if parameter.requires_grad
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_operands(check: Callable[[str, Any], None], module: nn.Module, inputs: Any) -> None:
    check("input", inputs)
    for operand, parameter in module.named_parameters(recurse=False):
        check(operand, parameter.detach())

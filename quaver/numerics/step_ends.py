"""`StepEndDetector` decides which `optimizer.step()` ends a training step of a model, on all ranks alike.

A training step ends when all optimizers that step in every training step have stepped. All ranks must decide alike,
because gathering a sampled step is a collective, although a rank without a batch ran nothing. The step of an optimizer

    of other parameters              ends nothing once an optimizer of the model has stepped
    of the model, in the first step  ends it, unless other trained parameters have no gradients yet on any rank: then a
                                     backward and another optimizer follow
    of the model, in later steps     ends the step once all optimizers of the first step have stepped; a wrapper of
                                     these optimizers ends nothing
    that steps twice                 ends two steps; later steps end without the optimizers that did not step
    with copies of the parameters    ends the step if any rank ran a backward; no optimizer of the model ever steps

Where the ranks must exchange what they know, they reduce 4 bytes: in the first step, after `Monitor.step()`, and for
optimizers with copies.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from quaver.numerics.sampling import Sampling


class StepEndDetector:
    """Counts the training steps of `model` that end with an optimizer's step.

    Args:
        any_over_ranks: returns whether a condition holds on any rank; a collective.
    """

    def __init__(self, model: nn.Module, any_over_ranks: Callable[[bool], bool]) -> None:
        self._model, self._any_over_ranks = model, any_over_ranks
        self._has_model_optimizer = False
        """Whether an optimizer of the model's own parameters has stepped."""
        self._step_optimizers: WeakSet[Optimizer] = WeakSet()
        """The optimizers that step in every training step; empty until they are known."""
        self._stepped: WeakSet[Optimizer] = WeakSet()
        """The optimizers that stepped since the last end."""
        self._has_ended = False

    def record_step_end(self) -> None:
        """Record that a step ended without an optimizer. Optimizers that step before the next forward belong to it."""
        self._stepped.clear()
        self._has_ended = True

    def count_ended_steps(self, optimizer: Optimizer, sampling: Sampling) -> int:
        """Return how many training steps end with this step of an optimizer: 0, 1, or 2 if an end was missed."""
        if not self._is_model_optimizer(optimizer):
            if self._has_model_optimizer or not self._any_over_ranks(sampling.has_run_backward):
                return 0
            self.record_step_end()
            return 1
        self._has_model_optimizer = True
        if self._has_ended and not self._any_over_ranks(sampling.has_run):
            return 0
        self._has_ended = False
        ended_steps = self._count_model_steps(optimizer)
        if ended_steps:
            self._stepped.clear()
        return ended_steps

    def _count_model_steps(self, optimizer: Optimizer) -> int:
        is_second = optimizer in self._stepped
        self._stepped.add(optimizer)
        if is_second:
            self._step_optimizers = WeakSet(self._stepped)
            return 2
        if not self._step_optimizers:
            if self._misses_gradients():
                return 0
            self._step_optimizers = WeakSet(self._stepped)
        return int(self._step_optimizers <= self._stepped)

    def _is_model_optimizer(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer has parameters of the model, which FSDP may have replaced."""
        parameter_ids = _list_parameter_ids(optimizer)
        return any(id(parameter) in parameter_ids for parameter in self._model.parameters())

    def _misses_gradients(self) -> bool:
        """Return whether trained parameters outside the optimizers that stepped have no gradients on any rank."""
        parameter_ids = set().union(*(_list_parameter_ids(optimizer) for optimizer in self._stepped))
        other_parameters = [p for p in self._model.parameters() if p.requires_grad and id(p) not in parameter_ids]
        return bool(other_parameters) and not self._any_over_ranks(any(p.grad is not None for p in other_parameters))


def _list_parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

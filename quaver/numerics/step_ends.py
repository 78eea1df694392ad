"""Which `optimizer.step()` ends a training step of a model: `StepEnds`, on all ranks alike.

A training step ends when the optimizers that step in every one have stepped. What ran on this rank decides nothing
alone: a rank may have had no batch, and the statistics of a sampled step are a collective. So

    optimizers of other parameters       end nothing, as those of a discriminator beside the model
    the model's, in the first step       the first of them, unless trained parameters that it does not hold are still
                                         without gradients on every rank: then a backward follows, and another optimizer
    the model's, later                   the last of those that stepped in the first step; wrappers and others do not
    an optimizer that steps twice        those that it waited for do not step any more: it ends both steps
    parameters that the model has not    as of an optimizer with copies of its own: ends what went backward on any rank

Where only an exchange can tell, the ranks make one, of 4 bytes: in the first step, after `Monitor.step()`, and for
optimizers with copies.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from quaver.numerics.observe import Sampling


class StepEnds:
    """Counts the training steps of `model` that end with an optimizer's step.

    Args:
        on_any_rank: whether a condition holds on any rank; a collective.
    """

    def __init__(self, model: nn.Module, on_any_rank: Callable[[bool], bool]) -> None:
        self._model, self._on_any_rank = model, on_any_rank
        self._parameters: set[int] = set()
        self._has_own = False
        """Whether an optimizer of the model's own parameters has stepped."""
        self._awaited: WeakSet[Optimizer] = WeakSet()
        """The optimizers that step in every training step; empty until they are known."""
        self._stepped: WeakSet[Optimizer] = WeakSet()
        """The optimizers that stepped since the last end."""
        self._was_called = False

    def called(self) -> None:
        """A step ended otherwise: optimizers of the model that step before the next forward belong to it."""
        self._stepped.clear()
        self._was_called = True

    def ended_by(self, optimizer: Optimizer, sampling: Sampling) -> int:
        """How many training steps end with this step of an optimizer: 0, 1, or 2 where an end went unseen."""
        if not self._holds(optimizer):
            if self._has_own or not self._on_any_rank(sampling.went_back):
                return 0
            self.called()
            return 1
        self._has_own = True
        if self._was_called and not self._on_any_rank(sampling.ran):
            return 0
        self._was_called = False
        ended = self._count(optimizer)
        if ended:
            self._stepped.clear()
        return ended

    def _count(self, optimizer: Optimizer) -> int:
        is_second = optimizer in self._stepped
        self._stepped.add(optimizer)
        if is_second:
            self._awaited = WeakSet(self._stepped)
            return 2
        if not self._awaited:
            if self._awaits_a_backward():
                return 0
            self._awaited = WeakSet(self._stepped)
        return int(self._awaited <= self._stepped)

    def _holds(self, optimizer: Optimizer) -> bool:
        """Whether it has parameters of the model; FSDP replaces those of a model."""
        held = _parameters_of(optimizer)
        if held.isdisjoint(self._parameters):
            self._parameters = {id(each) for each in self._model.parameters()}
        return not held.isdisjoint(self._parameters)

    def _awaits_a_backward(self) -> bool:
        """Whether trained parameters of no optimizer that stepped are without gradients."""
        held = set().union(*(_parameters_of(each) for each in self._stepped))
        rest = [each for each in self._model.parameters() if each.requires_grad and id(each) not in held]
        return bool(rest) and not self._on_any_rank(any(each.grad is not None for each in rest))


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}

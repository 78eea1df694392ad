"""`StatesView`: the `state` of an optimizer that wraps other optimizers, keyed by its own parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class StatesView(MutableMapping[Tensor, Any]):
    """A view of the states of several optimizers by parameter. Writes go to the optimizer that holds the parameter.

    As in `Optimizer.state`, only `[]` creates the state of a parameter that has none.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], masters: Mapping[Tensor, Tensor] = MappingProxyType({})
    ) -> None:
        """View the states of `optimizers`. For each parameter p in `masters` they hold `masters[p]` instead of p."""
        self._optimizers, self._masters = optimizers, masters
        self._parameters = {master: parameter for parameter, master in masters.items()}

    def _find_state(self, parameter: Tensor) -> tuple[Any, Tensor]:
        """Return the state mapping that a parameter belongs to, and the parameter's key in it."""
        key = self._masters.get(parameter, parameter)
        for optimizer in self._optimizers:
            if key in optimizer.state:
                return optimizer.state, key
        for optimizer in self._optimizers:
            if any(key is candidate for group in optimizer.param_groups for candidate in group["params"]):
                return optimizer.state, key
        raise KeyError(parameter)

    def __getitem__(self, parameter: Tensor) -> Any:
        states, key = self._find_state(parameter)
        return states[key]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        states, key = self._find_state(parameter)
        states[key] = state

    def __delitem__(self, parameter: Tensor) -> None:
        states, key = self._find_state(parameter)
        del states[key]

    def __contains__(self, parameter: object) -> bool:
        key = self._masters.get(parameter, parameter) if isinstance(parameter, Tensor) else parameter
        return any(key in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[Tensor]:
        keys = chain.from_iterable(optimizer.state for optimizer in self._optimizers)
        return (self._parameters.get(key, key) for key in keys)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    # MutableMapping's versions of the following methods use [], which creates a state.

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """Return the state, or `default` for a parameter that has none."""
        if parameter not in self:
            return default
        return self[parameter]

    def pop(self, parameter: Tensor, *default: Any) -> Any:
        """Remove and return the state, or return `default` for a parameter that has none."""
        if default and parameter not in self:
            return default[0]
        state = self[parameter]
        del self[parameter]
        return state

    def setdefault(self, parameter: Tensor, default: Any = None) -> Any:
        """Return the state, after setting it to `default` for a parameter that has none."""
        if parameter not in self:
            self[parameter] = default
        return self[parameter]


def replace_states(current: MutableMapping[Tensor, Any], states: Mapping[Tensor, Any]) -> None:
    """Replace all of `current` by `states`, as `optimizer.state = states` does."""
    replacement = dict(states)  # `states` may be `current`
    current.clear()
    current.update(replacement)

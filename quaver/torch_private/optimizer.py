"""The hooks of an optimizer's state dicts, for optimizers that save and load in their own way.

- `loading(optimizer, state_dict)`: Optimizer._optimizer_load_state_dict_pre_hooks and
  _optimizer_load_state_dict_post_hooks, which Optimizer.load_state_dict runs. No replacement.
- `saved(optimizer, save)`: Optimizer._optimizer_state_dict_pre_hooks and _optimizer_state_dict_post_hooks, which
  Optimizer.state_dict runs. No replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

__all__ = ["loading", "saved"]


@contextmanager
def loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what to load of `state_dict`, after the hooks before a load; those after it run at the end of the block."""
    state_dict = state_dict.copy()
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = before(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    yield state_dict
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def saved(optimizer: Optimizer, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The state dict that `save` makes, between the hooks before it and those after it."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state_dict = save()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = after(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict

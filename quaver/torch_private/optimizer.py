"""The state dict hooks of an optimizer, for optimizers that override `state_dict` and `load_state_dict`.

- `load_with_hooks(optimizer, state_dict)`: Optimizer._optimizer_load_state_dict_pre_hooks and
  _optimizer_load_state_dict_post_hooks, which Optimizer.load_state_dict runs. No replacement.
- `save_with_hooks(optimizer, save)`: Optimizer._optimizer_state_dict_pre_hooks and _optimizer_state_dict_post_hooks,
  which Optimizer.state_dict runs. No replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

__all__ = ["load_with_hooks", "save_with_hooks"]


@contextmanager
def load_with_hooks(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the pre-hooks, yield the state dict to load, and run the post-hooks at the end of the block.

    Raises:
        ValueError: `state_dict` is no dict, or what the pre-hooks return lacks "state" or "param_groups".
    """
    state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        name, got = type(optimizer).__name__, list(state_dict) if isinstance(state_dict, dict) else state_dict
        raise ValueError(f"expected a state dict of {name} with 'state' and 'param_groups', got {got!r:.200}")
    yield state_dict
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def save_with_hooks(optimizer: Optimizer, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run the pre-hooks, call `save`, and return its state dict after the post-hooks."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)
    state_dict = save()
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = post_hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict

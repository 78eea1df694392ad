"""The state dict hooks of an optimizer, for optimizers that override `state_dict` and `load_state_dict`.

- `load_with_hooks(optimizer, state_dict)`: Optimizer._optimizer_load_state_dict_pre_hooks and
  _optimizer_load_state_dict_post_hooks, which Optimizer.load_state_dict runs. No replacement.
- `check_state_dict`: the form of what Optimizer.state_dict returns, which Optimizer.load_state_dict does not check.
- `save_with_hooks(optimizer, save)`: Optimizer._optimizer_state_dict_pre_hooks and _optimizer_state_dict_post_hooks,
  which Optimizer.state_dict runs. No replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


@contextmanager
def load_with_hooks(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the pre-hooks, yield the state dict to load, and run the post-hooks at the end of the block.

    Raises:
        ValueError: the errors of `check_state_dict`, for what the pre-hooks return.
    """
    state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    check_state_dict(state_dict, optimizer=optimizer)
    yield state_dict
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def check_state_dict(state_dict: object, *, optimizer: Optimizer) -> None:
    """Raise ValueError unless `state_dict` has the form of an optimizer's: dicts of states and of param groups."""
    name = type(optimizer).__name__
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        got = list(state_dict) if isinstance(state_dict, dict) else state_dict
        raise ValueError(f"expected a state dict of {name} with 'state' and 'param_groups', got {got!r:.200}")
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, Sequence) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups
    ):
        raise ValueError(f"expected param_groups of {name}, each a dict with a list of 'params', got {groups!r:.200}")
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise ValueError(f"expected a 'state' of {name} with a dict for each parameter, got {states!r:.200}")


def save_with_hooks(optimizer: Optimizer, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run the pre-hooks, call `save`, and return its state dict after the post-hooks."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)
    state_dict = save()
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = post_hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict

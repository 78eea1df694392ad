"""Queries of autograd: whether a backward runs and what it needs.

- `backward_keeps_graph()`: torch._C._autograd._get_current_graph_task_keep_graph, the `retain_graph` of the running
  backward. No replacement.
- `runs_in_backward()`: torch._C._current_graph_task_id, -1 if this thread runs no backward. No replacement.
- `top_saved_tensors_hooks(ignore_is_tracing)`: torch._C._autograd._top_saved_tensors_default_hooks, the innermost
  (pack, unpack) or None. Remove when PyTorch packs the tensors of `save_for_backward` at the call.
- `current_node()`: torch._C._current_autograd_node, the node whose backward runs, else None. No replacement.
- `next_sequence_number()`: torch._C._autograd._get_sequence_nr, the number of the next node on this thread.
  `get_sequence_number(node)`: Node._sequence_nr. torch.autograd.graph.node_creation_hook (torch 2.14) replaces both.
- `find_wanted_gradients(ctx, inputs)`: torch._C._will_engine_execute_node. Remove when Functions in Python have the
  `task_should_compute_output` of nodes in C++.
- `is_checkpoint_hook(hooks)`: the module of the hooks of torch.utils.checkpoint. No replacement.
- `find_checkpoint_frame(hooks)`: closure variables of the hooks of torch.utils.checkpoint, `frame` in a forward and
  `target_frame_ref` in its recomputation. No replacement.
- `get_forward_ad_level()`: torch.autograd.forward_ad._current_level, -1 outside of `dual_level`. No replacement.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.autograd import forward_ad

backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
current_node = torch._C._current_autograd_node
next_sequence_number = torch._C._autograd._get_sequence_nr


def runs_in_backward() -> bool:
    """Return whether this thread runs a backward; a forward inside it is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def get_sequence_number(node: Any) -> int:
    """Return the number of an autograd node; numbers increase with each node that a thread creates."""
    return int(node._sequence_nr())


def find_wanted_gradients(ctx: Any, inputs: int) -> tuple[bool, ...]:
    """Return whether backward must compute the gradient of each of a Function's first `inputs` inputs, tensors or None.

    `ctx.needs_input_grad` says which inputs require gradients. A backward for some tensors only, such as each half of a
    zero-bubble pipeline's backward, needs fewer. A compiled backward always computes all required gradients.
    """
    required: tuple[bool, ...] = ctx.needs_input_grad[:inputs]
    if torch.compiler.is_compiling() or sum(required) < 2:
        return required
    wanted = [False] * inputs
    for index, (node, _) in enumerate(ctx.next_functions[:inputs]):
        try:
            wanted[index] = node is not None and torch._C._will_engine_execute_node(node)
        except RuntimeError:
            if not (runs_in_backward() and hasattr(node, "variable")):
                raise
            wanted[index] = True  # a leaf whose gradient `torch.autograd.grad` returns, for which the query raises
    return tuple(wanted)


def get_forward_ad_level() -> int:
    """Return the current level of forward-mode autodiff; -1 outside of it."""
    return int(forward_ad._current_level)


def is_checkpoint_hook(hooks: Any) -> bool:
    """Return whether `hooks`, a (pack, unpack) pair or None, belong to a non-reentrant activation checkpoint."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def find_checkpoint_frame(hooks: Any) -> tuple[Any, bool] | None:
    """Return the frame of the non-reentrant checkpoint with these (pack, unpack) hooks, and whether it recomputes.

    Each forward has one frame, which lives as long as its graph. None if the hooks have other closure variables.
    """
    pack = inspect.unwrap(hooks[0])
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents(), True
    return (cells["frame"].cell_contents, False) if "frame" in cells else None

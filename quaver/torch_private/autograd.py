"""Queries of autograd: whether a backward runs and what it needs.

- `backward_keeps_graph()`: torch._C._autograd._get_current_graph_task_keep_graph, the `retain_graph` of the backward
  that runs. No replacement.
- `runs_in_backward()`: torch._C._current_graph_task_id, -1 where this thread runs no backward. No replacement.
- `top_saved_tensors_hooks(ignore_is_tracing)`: torch._C._autograd._top_saved_tensors_default_hooks, the innermost
  (pack, unpack) or None. Goes when PyTorch packs the tensors of `save_for_backward` at the call.
- `current_node()`: torch._C._current_autograd_node, the node whose backward runs, else None. No replacement.
- `next_sequence_number()`: torch._C._autograd._get_sequence_nr, of the node that is created next on this thread.
  `sequence_number(node)`: Node._sequence_nr. Both can go with torch.autograd.graph.node_creation_hook, torch 2.14.
- `wanted_gradients(ctx, inputs)`: torch._C._will_engine_execute_node. Goes when PyTorch gives Functions in Python the
  `task_should_compute_output` that nodes in C++ have.
- `frame_of(hooks)`: what the hooks of torch.utils.checkpoint close over, `frame` in a forward and `target_frame_ref` in
  its recomputation. No replacement.
- `forward_ad_level()`: torch.autograd.forward_ad._current_level, -1 outside of `dual_level`. No replacement.
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
    """Whether a backward runs on this thread; a forward in one is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def sequence_number(node: Any) -> int:
    """The number of an autograd node: those of one thread grow in the order of their creation."""
    return int(node._sequence_nr())


def wanted_gradients(ctx: Any, inputs: int) -> tuple[bool, ...]:
    """Which gradients of the first `inputs` inputs of a Function, tensors or None at the end, its backward computes.

    `ctx.needs_input_grad` tells which inputs require one. A backward for some tensors only, as each half of a
    zero-bubble pipeline's is, wants fewer of them. A compiled backward always computes all that are required.
    """
    required: tuple[bool, ...] = ctx.needs_input_grad[:inputs]
    if torch.compiler.is_compiling() or sum(required) < 2:
        return required
    wanted = [False] * inputs
    for index, (node, _) in enumerate(ctx.next_functions[:inputs]):
        try:
            wanted[index] = node is not None and torch._C._will_engine_execute_node(node)
        except RuntimeError as error:
            if "A leaf node was passed" not in str(error):
                raise
            wanted[index] = True  # `torch.autograd.grad` is to return the gradient of this leaf
    return tuple(wanted)


def forward_ad_level() -> int:
    """The level of forward-mode autodiff; -1 outside of it."""
    return int(forward_ad._current_level)


def frame_of(hooks: Any) -> tuple[Any, bool] | None:
    """The frame of a non-reentrant checkpoint whose (pack, unpack) hooks are these, and whether it is recomputed now.

    One forward has one frame, which lives until its graph is gone. None where torch closes over something else.
    """
    pack = inspect.unwrap(hooks[0])
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents(), True
    return (cells["frame"].cell_contents, False) if "frame" in cells else None

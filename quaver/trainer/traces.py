"""Traces of single steps: torch.profiler, with a range for each module's forward and each of its backward nodes.

In the forward a range spans the module and contains those of its children: `model.layers.0.mlp`. In the backward a
module has a range for each of its autograd nodes: `model.layers.0.mlp.up_proj (backward)`. Autograd opens and closes a
range of its own around each node, so no range can span several nodes and still nest.

The hooks exist only while a step is traced. A compiled module is one range ([Note: compiled modules] in
quaver/recorder/modules.py): its compiled call is wrapped, because hooks would be a reason to recompile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from quaver.phases import named_range
from quaver.recorder.modules import OUTSIDE, ModuleTracker, is_compiled, visible_modules


@contextmanager
def traced(model: nn.Module, device: torch.device) -> Iterator[profile]:
    """Trace the block, which runs one training step of `model`; export the yielded profiler after the block."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as profiler, ModuleRanges(model):
        yield profiler


class ModuleRanges(ModuleTracker):
    """Opens a range in the trace around the code of each module, while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._open: list[Any] = []
        self._compiled: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> "ModuleRanges":
        super().__enter__()
        for name, module in visible_modules(self.model):
            if is_compiled(module):
                self._surround(name, module)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for module, call in self._compiled:
            module._compiled_call_impl = call
        self._compiled.clear()
        super().__exit__(kind, error, traceback)

    def entered(self, name: str) -> None:
        self._begin(name)

    def left(self, name: str, output: Any) -> None:
        self._end()
        is_recomputation = torch._C._current_autograd_node() is not None
        if len(self.stack) == 1 and not is_recomputation:  # the graph is complete, except for the loss
            for node in self._nodes(output):
                module = self.module_of(node)
                if module != OUTSIDE:
                    self._range_around(node, f"{module} (backward)")

    def _begin(self, name: str) -> None:
        opened = named_range(name)
        opened.__enter__()
        self._open.append(opened)

    def _end(self) -> None:
        self._open.pop().__exit__(None, None, None)

    def _range_around(self, node: Any, name: str) -> None:
        node.register_prehook(lambda grads: self._begin(name))
        node.register_hook(lambda grad_inputs, grad_outputs: self._end())

    def _nodes(self, output: Any) -> Iterator[Any]:
        """Yield the autograd nodes behind `output`, except AccumulateGrad."""
        pending: list[Any] = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        seen: set[Any] = {None}
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            pending += [before for before, _ in node.next_functions]
            if node.next_functions:
                yield node

    def _surround(self, name: str, module: nn.Module) -> None:
        call: Callable[..., Any] | None = getattr(module, "_compiled_call_impl", None)
        if call is None:  # an OptimizedModule, whose own hooks run outside of the compiled code
            self._watch(name, module)
            return

        def call_in_range(*args: Any, **kwargs: Any) -> Any:
            self.stack.append(name)
            self._mark()
            self._begin(name)
            try:
                return call(*args, **kwargs)
            finally:
                self._end()
                self.stack.pop()
                self._mark()

        self._compiled.append((module, call))
        module._compiled_call_impl = call_in_range

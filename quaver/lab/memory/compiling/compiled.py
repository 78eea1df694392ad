"""Compiles a model without its kernels, so that fake tensors can run it with the buffers of real compiled code.

Dynamo traces, AOTAutograd partitions forward and backward, and Inductor lowers, fuses, schedules and plans buffers as
in a run. Only the Python wrapper code that Inductor writes is replaced: its kernels do nothing, and no cache stores it
(quaver/lab/memory/compiling/inductor.py). docs/design/0001-decisions.md has the alternatives.

[Note: reset] Code compiled here guards on fake tensors and cannot run on real ones, so Dynamo is reset at the end. It
can only reset everything: code compiled earlier in the process is compiled again, from Inductor's caches, at its next
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from quaver.lab.recorder.modules import is_compiled
from quaver.torch_private.compiler import BackendCompilerFailed, count_graphs

Result = TypeVar("Result")

_STANCE = "fail_on_recompile"
_MAX_STEPS = 4


@contextmanager
def leave_out_kernels() -> Iterator[None]:
    """Let torch.compile generate code without kernels inside the block ([Note: reset]).

    Raises:
        NotImplementedError: the compiled code cannot be followed: Inductor's C++ wrapper, max-autotune, or a device
            other than a CPU.
    """
    from quaver.lab.memory.compiling.inductor import write_no_kernels  # slow to import

    torch.compiler.reset()
    with write_no_kernels():
        try:
            yield
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, NotImplementedError):
                raise
            raise NotImplementedError(str(error.inner_exception)) from error
        finally:
            torch.compiler.reset()


def repeat_until_nothing_compiles(step: Callable[[], Result]) -> Result:
    """Run steps until one compiles nothing, and return its result.

    Raises:
        NotImplementedError: each of _MAX_STEPS steps compiles something.
    """
    for _ in range(_MAX_STEPS):
        before = count_graphs()
        result = step()
        if count_graphs() == before:
            return result
    raise NotImplementedError(
        f"expected a step that compiles nothing after {_MAX_STEPS} others, got one that compiles each time; "
        "torch's TORCH_LOGS=recompiles says why"
    )


@contextmanager
def refuse_to_compile() -> Iterator[None]:
    """Raise an error at each compilation inside the block, because the compiler's tensors would be recorded.

    Raises:
        NotImplementedError: something has to be compiled.
    """
    with torch.compiler.set_stance(_STANCE):
        try:
            yield
        except RuntimeError as error:
            if _STANCE not in str(error):
                raise
            reason = " ".join(str(error).split())
            raise NotImplementedError(
                f"expected a step that compiles nothing after another such step: {reason}"
            ) from error


def has_compiled_code(model: nn.Module) -> bool:
    """Return whether `model` or a module in it is compiled."""
    return any(is_compiled(module) for module in model.modules())

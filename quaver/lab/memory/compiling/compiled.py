"""Compiles a model without its kernels, so that fake tensors can run it with the buffers of real compiled code.

Dynamo traces, AOTAutograd partitions forward and backward, and Inductor lowers, fuses, schedules and plans buffers as
in a run. Only the Python wrapper code that Inductor writes is replaced: its kernels do nothing, and no cache stores it
(quaver/lab/memory/compiling/inductor.py). docs/design/0001-decisions.md has the alternatives.

[Note: reset] Code compiled here guards on fake tensors and cannot run on real ones, so Dynamo is reset at the end. It
can only reset everything: code compiled earlier in the process is compiled again, from Inductor's caches, at its next
call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.external_utils import wrap_inline

from quaver.lab.memory.devices.gloo_buffers import GlooBuffers
from quaver.lab.recorder.modules import is_compiled
from quaver.lab.recorder.storages import StorageWatch
from quaver.torch_private.compiler import OptimizedModule, count_graphs

Result = TypeVar("Result")

_STANCE = "fail_on_recompile"
_MAX_STEPS = 4

_kernels_left_out = False


@contextmanager
def leave_out_kernels() -> Iterator[None]:
    """Let torch.compile generate code without kernels inside the block ([Note: reset]).

    Raises:
        NotImplementedError: the compiled code cannot be followed: Inductor's C++ wrapper, max-autotune, or a device
            other than a CPU.
    """
    from quaver.lab.memory.compiling.inductor import write_no_kernels  # slow to import

    global _kernels_left_out
    torch.compiler.reset()
    with ExitStack() as stack:
        stack.enter_context(write_no_kernels())
        for mode in (StorageWatch, GlooBuffers):  # otherwise Dynamo runs eager code under these modes
            stack.enter_context(patch.object(mode, "ignore_compile_internals", classmethod(lambda cls: True)))
        before, _kernels_left_out = _kernels_left_out, True
        try:
            yield
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, NotImplementedError):
                raise
            raise NotImplementedError(str(error.inner_exception)) from error
        finally:
            _kernels_left_out = before
            torch.compiler.reset()


def are_kernels_left_out() -> bool:
    """Return whether torch.compile currently generates code without kernels, which reports its buffers."""
    return _kernels_left_out


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
    """Refuse to compile inside the block if kernels are left out: the compiler's tensors would be recorded.

    Raises:
        NotImplementedError: something has to be compiled.
    """
    if not are_kernels_left_out():
        yield
        return
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


def recompile(copy: nn.Module, model: nn.Module) -> None:
    """Compile `copy` and its modules in the same way as `model`, since a copy is not compiled.

    Args:
        model: the original, possibly in a wrapper of torch.compile, which `copy` does not have.
    Raises:
        NotImplementedError: a module was not compiled by `nn.Module.compile`.
    """
    if isinstance(model, OptimizedModule):
        call = copy._call_impl
        is_torchs = trace_rules.check(copy.forward)  # Dynamo skips frames of torch's modules unless inlined
        copy._compiled_call_impl = model.dynamo_ctx(wrap_inline(call) if is_torchs else call)
        model = model._orig_mod
    copies = dict(copy.named_modules())
    for name, module in model.named_modules():
        compiled = module._compiled_call_impl
        if compiled is not None:
            copies[name]._compiled_call_impl = _find_wrapper(compiled)(copies[name]._call_impl)


def _find_wrapper(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with which torch.compile wrapped the module's call, with its backend and options."""
    wrap = inspect.getclosurevars(compiled).nonlocals.get("self")
    if not callable(wrap):
        raise NotImplementedError(
            f"expected a module that nn.Module.compile compiled, got one that calls {compiled!r}; compile it so"
        )
    return wrap

"""Compiles a model without its kernels, so that fake tensors can run the result: the same buffers, no C++, no numbers.

torch.compile does all that it does in a run: Dynamo traces, AOTAutograd makes forward and backward and chooses what is
kept between them, Inductor lowers, fuses, orders and plans buffers, and writes the Python code that allocates them.
Only then things differ: that code is rewritten, kernels are functions that do nothing, and no cache sees it
(quaver/memory/compiling/inductor.py). docs/design/0007-predicting-compiled-code.md says what else was considered.

[Note: nothing is left behind] Code that was compiled here guards on fake tensors, and is useless to real ones. It and
all that Dynamo has learnt meanwhile, such as which sizes change, is forgotten at the end. So is what was compiled
before in the process: Dynamo forgets all or nothing. It is compiled again, from Inductor's caches, when it is called
next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.external_utils import wrap_inline
from torch.torch_version import TorchVersion

from quaver.memory.faking.gloo_buffers import GlooBuffers
from quaver.memory.faking.target import is_for_a_gpu
from quaver.recorder.modules import is_compiled
from quaver.recorder.storages import StorageWatch

COMPILES_FOR_A_GPU = TorchVersion(torch.__version__) >= "2.13"
"""Whether compiled code keeps gradients of fake tensors that say they are a GPU's: not in 2.11; 2.12 was not tried."""
_STANCE = "fail_on_recompile"
_MOST_STEPS = 4

_compiled_graphs: list[int] | None = None
"""While kernels are left out: the number of graphs that were compiled, alone in a list."""


@contextmanager
def kernels_left_out() -> Iterator[None]:
    """Let torch.compile make code without kernels inside the block; see the top of this file, and the note there.

    Raises:
        NotImplementedError: where code is compiled that cannot be followed: with C++ or max-autotune of Inductor, or on
            another device than a CPU. Where predictions are for a GPU and torch is too old.
    """
    if is_for_a_gpu() and not COMPILES_FOR_A_GPU:
        raise NotImplementedError(
            f"compiled code of a GPU is predicted with torch 2.13 or newer, this is {torch.__version__}: here its "
            "gradients come out as zeros, and are left out; predict for a CPU, or update torch"
        )
    from quaver.memory.compiling.inductor import write_no_kernels  # takes a second or two

    global _compiled_graphs
    torch.compiler.reset()
    with ExitStack() as stack:
        stack.enter_context(write_no_kernels(_count))
        for mode in (StorageWatch, GlooBuffers):  # else compiled code would not be run where they watch
            stack.enter_context(patch.object(mode, "ignore_compile_internals", classmethod(lambda cls: True)))
        _compiled_graphs = [0]
        try:
            yield
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, NotImplementedError):
                raise
            raise NotImplementedError(str(error.inner_exception)) from error
        finally:
            _compiled_graphs = None
            torch.compiler.reset()


def _count() -> None:
    if _compiled_graphs is not None:
        _compiled_graphs[0] += 1


def are_kernels_left_out() -> bool:
    """Whether code that is compiled now has no kernels, and tells of its buffers."""
    return _compiled_graphs is not None


def compiled_graphs() -> int:
    """How many graphs were compiled since kernels are left out; 0 if they are not."""
    return 0 if _compiled_graphs is None else _compiled_graphs[0]


def warm_up(step: Callable[[], None]) -> None:
    """Do a step, and, where kernels are left out, others until one compiles nothing.

    Raises:
        NotImplementedError: each of several steps compiles something.
    """
    for _ in range(_MOST_STEPS):
        before = compiled_graphs()
        step()
        if compiled_graphs() == before:
            return
    raise NotImplementedError(
        f"expected a step that compiles nothing after {_MOST_STEPS} others, got one that compiles each time; "
        "torch's TORCH_LOGS=recompiles says why"
    )


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Where kernels are left out, let nothing be compiled inside the block: what compiles would be followed, too.

    Raises:
        NotImplementedError: something would have to be compiled.
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
    """Whether calls of `model`, or of a module in it, run compiled code."""
    return isinstance(model, OptimizedModule) or any(is_compiled(module) for module in model.modules())


def recompile(copy: nn.Module, model: nn.Module) -> None:
    """Compile `copy`, and the modules in it, as `model` is and those in it are: a copy does not inherit that.

    Args:
        model: may be wrapped by torch.compile; its copy is that of the module inside.
    Raises:
        NotImplementedError: this torch does not tell how a module was compiled.
    """
    if isinstance(model, OptimizedModule):
        call = copy._call_impl
        is_torchs = trace_rules.check(copy.forward)  # whose frames Dynamo takes only if they are inlined
        copy._compiled_call_impl = model.dynamo_ctx(wrap_inline(call) if is_torchs else call)
        model = model._orig_mod
    copies = dict(copy.named_modules())
    for name, module in model.named_modules():
        compiled = module._compiled_call_impl
        if compiled is not None:
            wrap = _wrapper_of(compiled)
            copies[name]._compiled_call_impl = wrap(copies[name]._call_impl)


def _wrapper_of(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile, with the same backend and options, would call to wrap a function."""
    wrap = inspect.getclosurevars(compiled).nonlocals.get("self")
    if not callable(wrap):
        raise NotImplementedError(
            f"expected a module that nn.Module.compile compiled, got one that calls {compiled!r}; compile it so"
        )
    return wrap

"""Dispatch of operators to kernels: modes, transforms, keys and overloads. No replacements.

- `count_dispatch_modes()`: torch._C._len_torch_dispatch_stack, the number of active TorchDispatchModes.
  `dispatch_mode_at(index)`: torch._C._get_dispatch_stack_at, the innermost one last.
  `dispatch_modes()`: torch.utils._python_dispatch._get_current_dispatch_mode_stack, the list of modes.
- `count_function_modes()`: torch._C._len_torch_function_stack, the number of active TorchFunctionModes.
- `innermost_transform()`: torch._C._functorch.peek_interpreter_stack: vmap, grad, jvp or functionalize, else None.
- `is_batched(tensor)`: whether vmap passes the tensor for a batch of tensors. The vmap of torch.autograd.grad with
  is_grads_batched=True has another key, `Batched`, which only torch._C._parse_dispatch_key returns.
- `list_transforms()`: torch._C._functorch.get_interpreter_stack, the names of all transforms: "Grad", "Jvp", "Vmap",
  "Functionalize". Dynamo enters transforms while it traces, so the names are constants to it, and it guards on them.
- `without_dispatch_modes()`: torch.utils._python_dispatch._disable_current_modes, a context without active modes.
- `is_fake_mode_on()`: torch._C._get_dispatch_mode of torch._C._TorchDispatchModeKey.FAKE.
- `has_kernel(overload, key)`: torch._C._dispatch_has_kernel and _dispatch_has_kernel_for_dispatch_key. TorchScript has
  overloads without a kernel.
- `decompose(overload, args, kwargs)`: OpOverload.decompose, which runs the ops of a composite op.
- `implement_operators(namespace)`: torch.library._scoped_library, a Library whose kernels are removed at the exit.
- `exclude_keys(keys)`: torch._C._ExcludeDispatchKeyGuard, a context in which operators skip the kernels of these keys.
- `dispatch_keys(tensor)`: torch._C._dispatch_keys, with `DispatchKey` and `DispatchKeySet`.
- `skip_torch_function`: torch._C._disabled_torch_function_impl, for `__torch_function__` of a tensor subclass.
- `OpOverload`, `OpOverloadPacket`, `HigherOrderOperator` of torch._ops: the types of torch.ops.aten.mm.default, of
  torch.ops.aten.mm, and of operators that take functions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from quaver.torch_private.tracing import assume_constant_result

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
HigherOrderOperator = torch._ops.HigherOrderOperator
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
count_dispatch_modes = torch._C._len_torch_dispatch_stack
count_function_modes = torch._C._len_torch_function_stack
dispatch_mode_at = torch._C._get_dispatch_stack_at
innermost_transform = torch._C._functorch.peek_interpreter_stack
dispatch_keys = torch._C._dispatch_keys
_BATCHED: Any = torch._C._parse_dispatch_key("Batched")
skip_torch_function = torch._C._disabled_torch_function_impl
dispatch_modes = _get_current_dispatch_mode_stack
exclude_keys = torch._C._ExcludeDispatchKeyGuard
without_dispatch_modes = _disable_current_modes


def is_fake_mode_on() -> bool:
    """Return whether a FakeTensorMode is among the dispatch modes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def implement_operators(namespace: str) -> AbstractContextManager[torch.library.Library]:
    """Yield a library whose kernels for operators of `namespace` are used inside the block."""
    return torch.library._scoped_library(namespace, "IMPL")


def has_kernel(overload: OpOverload, key: str = "") -> bool:
    """Return whether an operator has a kernel; with `key`, whether it has one for this dispatch key."""
    name = overload.name()
    if not torch._C._dispatch_has_kernel(name):
        return False
    return not key or torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def decompose(overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite op as the ops it is composed of."""
    return overload.decompose(*args, **kwargs)


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether vmap passes `tensor` for a batch of tensors."""
    keys = dispatch_keys(tensor)
    return keys.has(_BATCHED) or keys.has(DispatchKey.FuncTorchBatched)


@assume_constant_result
def list_transforms() -> tuple[str, ...]:
    """Return the names of the active functorch transforms, innermost last."""
    stack = torch._C._functorch.get_interpreter_stack()
    return () if stack is None else tuple(interpreter.key().name for interpreter in stack)

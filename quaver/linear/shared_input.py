"""Quantizes an activation once for all linears that read it, such as q, k and v.

Each thread caches the operands of the activation that it quantized last. The next linear uses them if these hold:

    gradients are recorded. Evaluation caches nothing.
    the forward of their parent runs. The parent holds several Float8Linears, and the conversion registered two hooks
        on it (`share_input_casts`). The end of the outermost parent's forward clears the cache. Without a parent
        linears share nothing.
    this linear has not used them yet. A linear that is called twice quantizes twice.
    the activation is the same tensor object at the same version, and casts and scale are the same.

Version counters are not enough: they miss writes through numpy, `.data`, shared memory or a captured graph. Such a
write is still missed if the parent's forward makes it between two linears that read one activation.

Under a selective checkpoint the recomputation may not call the parent, but must issue the same operations as the
forward. So the checkpoint's dispatch mode replaces the parent: operands are used only under the mode object under which
they were quantized. Dynamo traces no cache; a compiler removes equal operations itself.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.kernels.operands import Operand, Operands
from quaver.linear.quantize import Quantizer
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scaling import CastScales, PersistentScale
from quaver.runtime.module_names import iter_enclosing_modules
from quaver.torch_private.dispatch import count_dispatch_modes, dispatch_mode_at
from quaver.torch_private.policies import POLICY_MODES
from quaver.torch_private.versions import get_version

SHARED_INPUT_HOOK_KEY: Any = "quaver.shared_input"
"""The key of the hooks, which a recomputation calls too. Pickled models contain it."""


class SharedOperands(NamedTuple):
    """The operands of one activation, and the conditions under which they may be reused."""

    activation: weakref.ref[Tensor]
    version: int
    dispatch_mode: weakref.ref[Any] | None
    """A weak reference, because a checkpoint's mode holds every tensor that its policy saved."""
    casts: OperandCasts
    hp_dtype: torch.dtype
    scale: PersistentScale | None
    scale_version: int
    operands: Operands
    linear_ids: frozenset[int]
    """The ids of the linears that used these operands."""

    def matches(self, activation: Tensor, quantizer: CachedQuantizer, dispatch_mode: Any) -> bool:
        return (
            self.activation() is activation
            and quantizer.linear_id not in self.linear_ids
            and self.version == get_version(activation)
            and (None if self.dispatch_mode is None else self.dispatch_mode()) is dispatch_mode
            and self.scale is quantizer.scale
            and self.scale_version == _get_scale_version(quantizer.scale)
            and self.casts == quantizer.casts
            and self.hp_dtype is quantizer.hp_dtype
        )


def _get_scale_version(scale: PersistentScale | None) -> int:
    # See [Note: stale scales] in scale_state.py.
    return -1 if scale is None else get_version(scale.quant_scale)


class _Forwards:
    """The running forwards of one thread and the operands that they share."""

    def __init__(self) -> None:
        self.parents: list[weakref.ref[nn.Module]] = []
        """The modules whose forwards run, the outermost first."""
        self.cached_operands: SharedOperands | None = None

    def clear_dead_operands(self, activation: weakref.ref[Tensor]) -> None:
        """Clear the cache when the activation dies, on any thread."""
        entry = self.cached_operands
        if entry is not None and entry.activation is activation:
            self.cached_operands = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.forwards = _Forwards()


_thread = _Thread()


def begin_parent_forward(parent: nn.Module, args: object) -> None:
    """Record that a parent's forward runs, which allows a cache. A forward pre-hook."""
    if not torch.compiler.is_compiling():
        parents = _thread.forwards.parents
        interrupted = [other for other in parents if other() in (parent, None)]
        if interrupted:  # Ctrl-C ended their last forwards, without `end_parent_forward`
            del parents[parents.index(interrupted[0]) :]
            clear_cached_operands()
        parents.append(weakref.ref(parent))


def end_parent_forward(parent: nn.Module, args: object, output: object) -> None:
    """Clear the cache when the outermost parent's forward ends, also if it raised. A forward hook."""
    if not torch.compiler.is_compiling():
        parents = _thread.forwards.parents
        if weakref.ref(parent) in parents:  # remove also the modules that it called
            del parents[parents.index(weakref.ref(parent)) :]
        if not parents:
            clear_cached_operands()


def share_input_casts(model: nn.Module, linear_class: type[nn.Module]) -> None:
    """Let linears of `model` (modules of `linear_class`) that have the same parent share the cast of their input.

    The parent is the nearest enclosing module that runs a forward and holds another Float8Linear. With an adapter
    around each linear it is still the attention or the feed-forward.
    """
    modules = dict(model.named_modules())
    linears = (name for name, module in modules.items() if isinstance(module, linear_class))
    enclosing_names = [list(iter_enclosing_modules(name, modules)) for name in linears]
    linear_counts = Counter(name for names in enclosing_names for name in names)
    for names in enclosing_names:
        parent = next((modules[name] for name in names if linear_counts[name] > 1), None)
        if parent is not None and begin_parent_forward not in parent._forward_pre_hooks.values():
            _set_hook_key(parent.register_forward_pre_hook(begin_parent_forward).id, parent._forward_pre_hooks)
            hook_id = parent.register_forward_hook(end_parent_forward, always_call=True).id
            _set_hook_key(hook_id, parent._forward_hooks, parent._forward_hooks_always_called)


def _set_hook_key(hook_id: int, *hooks: dict[Any, Any]) -> None:
    """Give a hook the same key in all modules.

    torch.compile guards on the keys of always-called hooks. The default keys are numbers that differ from module to
    module, so each block of a model would be compiled anew.
    """
    for hooks_by_key in hooks:
        hooks_by_key[SHARED_INPUT_HOOK_KEY] = hooks_by_key.pop(hook_id)


def stop_sharing_input_casts(model: nn.Module) -> None:
    """Undo `share_input_casts`."""
    for module in model.modules():
        for hooks, shared_hook in (
            (module._forward_pre_hooks, begin_parent_forward),
            (module._forward_hooks, end_parent_forward),
        ):
            for key in [key for key, hook in hooks.items() if hook is shared_hook]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def clear_cached_operands() -> None:
    """Clear the cache of this thread; the backward of a linear calls this when it begins."""
    _thread.forwards.cached_operands = None


class CachedQuantizer(Quantizer):
    """Quantizes an activation, unless the cache has its operands."""

    __slots__ = ("linear_id",)

    def __init__(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, linear_id: int
    ) -> None:
        super().__init__(casts, hp_dtype, scale)
        self.linear_id = linear_id

    def __call__(self, hp: Tensor, *, row: bool, column: bool, scales: CastScales | None = None) -> Operands:
        forwards = _thread.forwards
        mode, cached, linear_ids = _get_dispatch_mode(), Operands(None, None), frozenset((self.linear_id,))
        entry = forwards.cached_operands  # read once: another thread clears it when the activation dies
        if entry is not None and entry.matches(hp, self, mode):
            cached, linear_ids = entry.operands, entry.linear_ids | linear_ids
            if (not row or cached.row is not None) and (not column or cached.column is not None):
                forwards.cached_operands = entry._replace(linear_ids=linear_ids)
                return cached
        forwards.cached_operands = entry = None  # frees its memory before the next cast allocates
        missing = self.casts.row if cached.row is None else self.casts.column
        operands = super().__call__(
            hp,
            row=row and cached.row is None,
            column=column and cached.column is None,
            scales=scales or self.derive_scales(missing, cached),
        )
        operands = Operands(cached.row or operands.row, cached.column or operands.column)
        operands_to_cache = operands if hp.dtype is not self.hp_dtype else Operands(*map(_drop_hp, operands))
        weak_mode = None if mode is None else weakref.ref(mode)
        forwards.cached_operands = SharedOperands(
            weakref.ref(hp, forwards.clear_dead_operands),
            get_version(hp),
            weak_mode,
            self.casts,
            self.hp_dtype,
            self.scale,
            _get_scale_version(self.scale),
            operands_to_cache,
            linear_ids,
        )
        return operands


def _drop_hp(operand: Operand | None) -> Operand | None:
    # An operand in high precision is the activation itself, which the cache would keep alive.
    return None if operand is None or operand.dequant_scale is None else operand


def choose_quantizer(
    activation: Tensor, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, linear_id: int | None
) -> Quantizer:
    """Return the quantizer of an activation: a `CachedQuantizer` if its operands may be shared.

    `linear_id` is the id of the linear if it records gradients, else None.
    """
    if (
        torch.compiler.is_dynamo_compiling()
        or linear_id is None
        or activation.is_inference()
        or not (_thread.forwards.parents or isinstance(_get_dispatch_mode(), POLICY_MODES))
        or (casts.row.is_disabled and casts.column.is_disabled)
    ):
        return Quantizer(casts, hp_dtype, scale)
    return CachedQuantizer(casts, hp_dtype, scale, linear_id)


def _get_dispatch_mode() -> Any:
    depth = count_dispatch_modes()
    return dispatch_mode_at(depth - 1) if depth else None

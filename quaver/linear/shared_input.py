"""q, k and v read one activation, which is quantized once for all of them.

The operands of the last activation that a linear quantized are remembered, and serve the next linear, while all of
these hold:

    gradients are recorded. In evaluation nothing is remembered.
    the forward of their parent runs: of a module that holds several Float8Linears, to which the conversion gave two
        hooks (`share_inputs`). The end of that forward forgets. Linears that are called by themselves share nothing.
    the linear is another one than those that were served. One that is called twice quantizes twice.
    it is the same tensor object at the same version, with the same casts and scale.

Version counters miss writes through numpy, `.data`, shared memory or a captured graph, so they alone would not do. Such
a write by the parent's own forward, between two linears that read one activation, is the one that is still missed.

Under a selective checkpoint the recomputation may not call the parent, and must issue the same operations as the
forward. So the checkpoint's dispatch mode takes the place of the parent: operands serve under the mode object under
which they were quantized, in the forward as in the recomputation. Dynamo traces no cache; a compiler removes equal
operations itself.
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
from quaver.recipes.scaling import PersistentScale, Scales
from quaver.runtime.names import enclosing_modules
from quaver.torch_private.dispatch import count_dispatch_modes, dispatch_mode_at
from quaver.torch_private.policies import POLICIES
from quaver.torch_private.versions import version_of

RECOMPUTED_HOOKS: Any = "quaver.shared_input"
"""The key of the hooks that a recomputation calls, too. It is in pickles of models."""


class _SharedOperands(NamedTuple):
    """The operands of one activation, and what they are valid for."""

    activation: weakref.ref[Tensor]
    version: int
    dispatch_mode: weakref.ref[Any] | None
    """Held weakly, because the mode of a checkpoint holds all that its policy saved."""
    casts: OperandCasts
    hp_dtype: torch.dtype
    scale: PersistentScale | None
    scale_version: int
    operands: Operands
    readers: frozenset[int]
    """The linears that were given these operands, by id."""

    def serves(self, activation: Tensor, quantizer: CachedQuantizer, dispatch_mode: Any) -> bool:
        return (
            self.activation() is activation
            and quantizer.reader not in self.readers
            and self.version == version_of(activation)
            and (None if self.dispatch_mode is None else self.dispatch_mode()) is dispatch_mode
            and self.scale is quantizer.scale
            and self.scale_version == _version_of(quantizer.scale)
            and self.casts == quantizer.casts
            and self.hp_dtype is quantizer.hp_dtype
        )


def _version_of(scale: PersistentScale | None) -> int:
    """See [Note: stale scales] in scale_state.py."""
    return -1 if scale is None else version_of(scale.quant_scale)


_entry: _SharedOperands | None = None
_open = threading.local()
"""`forwards`: how many forwards of parents run on this thread."""


def open_shared_input(parent: nn.Module, args: object) -> None:
    """The pre-hook of a parent's forward."""
    if not torch.compiler.is_compiling():
        _open.forwards = getattr(_open, "forwards", 0) + 1


def close_shared_input(parent: nn.Module, args: object, output: object) -> None:
    """The hook after a parent's forward, also after one that raised."""
    if not torch.compiler.is_compiling():
        _open.forwards = max(getattr(_open, "forwards", 0) - 1, 0)
        if _open.forwards == 0:
            clear_cached_operands()


def share_inputs(model: nn.Module, linear_class: type[nn.Module]) -> None:
    """Let the linears of `model`, modules of `linear_class`, share the cast of their input where they have one parent.

    The parent of a linear is the nearest module around it that runs a forward and holds another Float8Linear: with an
    adapter's module around each linear it is still the attention or the feed-forward.
    """
    modules = dict(model.named_modules())
    linears = (name for name, each in modules.items() if isinstance(each, linear_class))
    around = [list(enclosing_modules(name, modules)) for name in linears]
    held = Counter(name for names in around for name in names)
    for names in around:
        parent = next((modules[name] for name in names if held[name] > 1), None)
        if parent is not None and open_shared_input not in parent._forward_pre_hooks.values():
            _rename(parent.register_forward_pre_hook(open_shared_input).id, parent._forward_pre_hooks)
            ended = parent.register_forward_hook(close_shared_input, always_call=True).id
            _rename(ended, parent._forward_hooks, parent._forward_hooks_always_called)


def _rename(key: int, *hooks: dict[Any, Any]) -> None:
    """Give a hook one key in all modules.

    torch.compile guards on the keys of hooks that are always called. As numbers they differ from module to module, so
    that each block of a model would be compiled anew.
    """
    for each in hooks:
        each[RECOMPUTED_HOOKS] = each.pop(key)


def stop_sharing_inputs(model: nn.Module) -> None:
    """Undo `share_inputs`."""
    for module in model.modules():
        for hooks, own in ((module._forward_pre_hooks, open_shared_input), (module._forward_hooks, close_shared_input)):
            for key in [key for key, hook in hooks.items() if hook is own]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def _clear_if(activation: weakref.ref[Tensor]) -> None:
    entry = _entry
    if entry is not None and entry.activation is activation:
        clear_cached_operands()


def clear_cached_operands() -> None:
    """Drop the entry; called when the backward of a linear begins."""
    global _entry
    _entry = None


class CachedQuantizer(Quantizer):
    """Quantizes an activation once for the linears that read it one after another.

    Args:
        reader: the id of the linear.
    """

    __slots__ = ("reader",)

    def __init__(self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, reader: int) -> None:
        super().__init__(casts, hp_dtype, scale)
        self.reader = reader

    def __call__(self, hp: Tensor, *, row: bool, column: bool, scales: Scales | None = None) -> Operands:
        """See `Quantizer`; `hp` is the activation itself."""
        global _entry
        mode, known, readers = _innermost_dispatch_mode(), Operands(None, None), frozenset((self.reader,))
        entry = _entry  # read once: another thread may replace it
        if entry is not None and entry.serves(hp, self, mode):
            known, readers = entry.operands, entry.readers | readers
            if (not row or known.row is not None) and (not column or known.column is not None):
                _entry = entry._replace(readers=readers)
                return known
        _entry = entry = None  # its memory goes before more is taken
        missing = self.casts.row if known.row is None else self.casts.column
        made = super().__call__(
            hp,
            row=row and known.row is None,
            column=column and known.column is None,
            scales=self.scales_for(missing, known),
        )
        made = Operands(known.row or made.row, known.column or made.column)
        kept = made if hp.dtype is not self.hp_dtype else Operands(*map(_unless_hp, made))
        weak_mode = None if mode is None else weakref.ref(mode)
        _entry = _SharedOperands(
            weakref.ref(hp, _clear_if),
            version_of(hp),
            weak_mode,
            self.casts,
            self.hp_dtype,
            self.scale,
            _version_of(self.scale),
            kept,
            readers,
        )
        return made


def _unless_hp(operand: Operand | None) -> Operand | None:
    """None for an operand that is the activation itself: an entry that held it would live as long as autograd does."""
    return None if operand is None or operand.dequant_scale is None else operand


def cached_quantizer(
    activation: Tensor, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, reader: int
) -> Quantizer:
    """The quantizer of an activation; a `CachedQuantizer` where the top of the file allows it.

    Args:
        reader: the id of the linear if it records gradients, else 0.
    """
    if torch.compiler.is_dynamo_compiling() or not reader or activation.is_inference():
        return Quantizer(casts, hp_dtype, scale)
    if not getattr(_open, "forwards", 0) and not _under_selective_checkpoint():
        return Quantizer(casts, hp_dtype, scale)
    if casts.row.is_disabled and casts.column.is_disabled:
        return Quantizer(casts, hp_dtype, scale)
    return CachedQuantizer(casts, hp_dtype, scale, reader)


def _innermost_dispatch_mode() -> Any:
    depth = count_dispatch_modes()
    return dispatch_mode_at(depth - 1) if depth else None


def _under_selective_checkpoint() -> bool:
    return isinstance(_innermost_dispatch_mode(), POLICIES)

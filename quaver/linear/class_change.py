"""Changes the class of a module in place: to a float8 class, and to subclasses that run code around its forward.

These functions assign `module.__class__` and keep the object. So every reference to the module stays valid: a second
parent's, a hook's, an optimizer's name map. The way back is exact for the same reason.

A class consists of these parts, from the inside out. Each can be added or removed whatever the others are:

    original    the class that the module had
    float8      Float8Linear or another float8 class, which provides the forward
    wrappers    code around the forward, in the order of the calls of `wrap_forward`
    FSDP2       FSDPModule, from `fully_shard`

pickle finds a class by its name, which these classes do not have. So a pickled module names the parts, and unpickling
makes its class again.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

from torch import nn

from quaver.torch_private.fsdp import find_fsdp_module_class


class SubstituteModule(nn.Module):
    """A class that a module was given so that it can be converted; its `original` part while it is in float8."""

    def to_original(self) -> None:
        """Give the module back the class that it had before. Called by `convert_to_high_precision`."""
        raise NotImplementedError


class ForwardWrapper:
    """Code around a module's forward. Instances are hashable and can be pickled; equal ones make the same class."""

    def make_forward(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """Return a forward that calls the one of `cls`, the class below."""
        raise NotImplementedError


class ClassParts(NamedTuple):
    """The parts of a class; see the top of the file. FSDP2's is not listed."""

    original: type[nn.Module]
    float8: type[nn.Module] | None = None
    wrappers: tuple[ForwardWrapper, ...] = ()


def get_class_parts(module: nn.Module) -> ClassParts:
    """Return the parts of the module's class. A class that this file did not make is an `original`."""
    cls = type(module)
    cls = cls.__bases__[1] if _is_fsdp_class(cls) else cls
    if "original_class" in vars(cls):  # a float8 class itself
        return ClassParts(vars(cls)["original_class"], cls)
    return vars(cls).get("_class_parts", ClassParts(cls))


def change_class(module: nn.Module, **parts: Any) -> None:
    """Replace parts of the module's class, by the names of `ClassParts`."""
    cls: Any = _get_class(get_class_parts(module)._replace(**parts))
    current = type(module)
    if _is_fsdp_class(current):
        namespace = {"__deepcopy__": vars(current)["__deepcopy__"]}
        cls = type(f"FSDP{cls.__name__}", (current.__bases__[0], cls), namespace)
    module.__class__ = cls


def wrap_forward(module: nn.Module, wrapper: ForwardWrapper) -> None:
    """Run `wrapper` around the forward that `module` has."""
    change_class(module, wrappers=(*get_class_parts(module).wrappers, wrapper))


def unwrap_forward(module: nn.Module, kind: type[ForwardWrapper]) -> None:
    """Remove the wrappers of this class, wherever they are."""
    if has_wrapper(module, kind):
        wrappers = get_class_parts(module).wrappers
        change_class(module, wrappers=tuple(wrapper for wrapper in wrappers if not isinstance(wrapper, kind)))


def has_wrapper(module: nn.Module, kind: type[ForwardWrapper]) -> bool:
    """Return whether a wrapper of this class runs around the module's forward."""
    return any(isinstance(wrapper, kind) for wrapper in get_class_parts(module).wrappers)


def _is_fsdp_class(cls: type) -> bool:
    fsdp, bases = find_fsdp_module_class(), cls.__bases__
    return fsdp is not None and len(bases) == 2 and issubclass(bases[0], fsdp)


_made_classes: weakref.WeakValueDictionary[ClassParts, type[nn.Module]] = weakref.WeakValueDictionary()
"""The classes of `_make_class` that some module has. It keeps no class alive, so a user's class can be collected."""


def _get_class(parts: ClassParts) -> type[nn.Module]:
    """Return the class with these parts, the same one for all modules."""
    original, float8, wrappers = parts
    if not wrappers and (float8 is None or vars(float8).get("original_class") is original):
        return float8 or original
    cls = _made_classes.get(parts)
    if cls is None:
        cls = _made_classes[parts] = _make_class(original, float8, wrappers)
    return cls


def _make_class(original: Any, float8: Any, wrappers: tuple[ForwardWrapper, ...]) -> type[nn.Module]:
    """Make a class with the name and signature by which libraries find modules and their arguments."""
    namespace: dict[str, Any] = {"_class_parts": ClassParts(original, float8, wrappers), "__reduce_ex__": _reduce_ex}
    if wrappers:
        cls = _get_class(ClassParts(original, float8, wrappers[:-1]))
        forward = functools.wraps(cls.forward)(wrappers[-1].make_forward(cls))
        namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": forward}
        return types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(namespace))
    name = f"{float8.__name__.removesuffix('Linear').removesuffix('Experts')}{original.__name__}"
    namespace |= {"__module__": original.__module__}
    # `float8` provides the forward, and everything else that `original` defines stays.
    return types.new_class(name, (float8, original), exec_body=lambda body: body.update(namespace))


def _reduce_ex(self: nn.Module, protocol: SupportsIndex) -> Any:
    parts = vars(type(self)).get("_class_parts")
    return (_make_module, parts, self.__getstate__()) if parts else object.__reduce_ex__(self, protocol)


def _make_module(*parts: Any) -> nn.Module:
    return object.__new__(_get_class(ClassParts(*parts)))

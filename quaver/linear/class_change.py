"""The class of a converted module: a float8 class in front of the class that the module had.

[Note: a change of class] A conversion assigns `module.__class__` and keeps the object. So every reference to the module
stays valid: a second parent's, a hook's, an optimizer's name map. Converting back is exact for the same reason.
"""

from __future__ import annotations

import functools
import types
from typing import Any, SupportsIndex, TypeVar

from torch import nn

Float8Module = TypeVar("Float8Module", bound=nn.Module)


def float8_class(cls: type[nn.Module], float8: type[Float8Module]) -> type[Float8Module]:
    """Return the class for a converted module of class `cls`: `float8` for nn.Linear, else a subclass of both.

    `float8` comes first in the MRO: it provides `forward`, and everything else that `cls` defines stays.
    """
    return float8 if cls is nn.Linear else _class_of_both(cls, float8)  # type: ignore[arg-type,return-value]


@functools.cache
def _class_of_both(cls: type[nn.Module], float8: type[nn.Module]) -> type[nn.Module]:
    name = f"{float8.__name__.removesuffix('Linear').removesuffix('Experts')}{cls.__name__}"
    namespace = {"__module__": cls.__module__, "__reduce_ex__": _reduce_of_both}
    return types.new_class(name, (float8, cls), exec_body=lambda body: body.update(namespace))


def _reduce_of_both(self: Any, protocol: SupportsIndex) -> Any:
    # pickle finds a class by its name. A class that `float8_class` made cannot be found, so unpickling makes it again.
    float8 = type(self).__mro__[1]
    if not hasattr(self, "_converted_from") or type(self) is not float8_class(self._converted_from, float8):
        return object.__reduce_ex__(self, protocol)
    return _new_of_both, (self._converted_from, float8), self.__getstate__()


def _new_of_both(cls: type[nn.Module], float8: type[nn.Module]) -> nn.Module:
    return object.__new__(float8_class(cls, float8))

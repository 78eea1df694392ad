"""`hide_derived_fields`: makes `dataclasses.replace` derive a field again that the constructor of a config filled in.

    config = Float8LinearConfig()                             # fills in cast_config_input_for_grad_weight
    replace(config, cast_config_input=rowwise)                # fills it in again, by the new cast_config_input
    cast = CastConfig(STATIC, static_quant_scale=2.0)         # fills in static_scale
    replace(cast, static_quant_scale=3.0)                     # fills it in again

torchao's code reads the filled-in value under the name of the argument, so the attribute cannot stay None, and a
property cannot give `replace` another value: it reads the same attribute and passes it on as an explicit argument.
`replace`, `asdict` and `fields` find the fields of an instance in `__dataclass_fields__`, which has no other hook. An
instance therefore lists the fields without those in its `_derived`; the class lists all.
"""

from __future__ import annotations

from typing import Any, TypeVar

Config = TypeVar("Config")


class _ListedFields:
    """The attribute `__dataclass_fields__` of a class, and of its instances without the derived fields."""

    def __init__(self, all_fields: dict[str, Any]) -> None:
        self.all_fields = all_fields

    def __get__(self, config: Any, owner: type) -> dict[str, Any]:
        if config is None:
            return self.all_fields
        derived = getattr(config, "_derived", ())
        return {name: option for name, option in self.all_fields.items() if option.init and name not in derived}


def hide_derived_fields(cls: type[Config]) -> type[Config]:
    """Decorate a dataclass whose constructor puts the names of the fields that it fills in into `_derived`."""
    dataclass: Any = cls
    dataclass.__dataclass_fields__ = _ListedFields(dataclass.__dataclass_fields__)
    return cls

"""Settings: fields of frozen dataclasses with a help text, and a type and bounds that pydantic checks.

The command line, its help, the TOML files and docs/configuration.md all read these fields.
"""

import difflib
import typing
from collections.abc import Collection, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.types import AllowInfNan
from pydantic_core import CoreSchema, core_schema

MOST = 2**63 - 1
"""TOML and torch have no larger integers."""
AtLeast1 = Annotated[int, Ge(1), Le(MOST)]
NotNegative = Annotated[int, Ge(0), Le(MOST)]
AtMost = Annotated[int, Le(MOST)]
MostRanks = Annotated[int, Ge(1), Le(100_000)]
"""Processes of a run that is not started."""
FiniteNotNegative = Annotated[float, AllowInfNan(False), Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]

TYPE_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_BOUND_WORDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "finite_number": "finite",
}
"""The bounds behind pydantic's types of errors, in words."""


@dataclass(frozen=True)
class OneOf:
    """The strings that a setting may be: `Annotated[str, OneOf(("a", "b"))]`."""

    choices: tuple[str, ...]
    has_aliases: bool = False
    """Other spellings are accepted too; the code that reads the setting refuses wrong ones."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return the schema by which pydantic checks them."""
        return core_schema.str_schema() if self.has_aliases else core_schema.literal_schema(list(self.choices))


def setting(default: object, text: str) -> Any:
    """A field of `Settings` with its help text: `steps: AtLeast1 = setting(200, "Optimizer steps.")`."""
    return field(default=default, metadata={"help": text})


def argument(text: str) -> Any:
    """A field that a command takes without a flag, and always, with its help text."""
    return field(metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """Base of the dataclasses of settings: checks the type and the bounds of each field, then calls `check`.

    Raises (when made):
        ValueError: with the setting's name, what was expected, and what was given.
    """

    section: ClassVar[str] = ""
    """The section of the TOML file; empty for the options of a command."""

    def __init_subclass__(cls, *, section: str = "") -> None:
        cls.section = section or cls.section

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for each in fields(self):
            value, hint = getattr(self, each.name), hints_of(kind)[each.name]
            if is_section(hint):
                continue
            if isinstance(value, list):
                value = tuple(value)
            try:
                checked = _adapters(kind)[each.name].validate_python(value)
            except ValidationError as error:
                first = error.errors()[0]
                is_type = first["type"].endswith("_type")
                bound = _BOUND_WORDS.get(first["type"], f"one of {', '.join(choices_of(hint))}")
                expected = type_words(hint) if is_type else bound.format(**first.get("ctx", {}))
                got = getattr(self, each.name) if is_type else first["input"]
                raise ValueError(f"{self.name_of(each.name)} must be {expected}, got {got!r}") from None
            object.__setattr__(self, each.name, checked)
        self.check()

    def check(self) -> None:
        """Raise ValueError for values that exclude each other."""

    @classmethod
    def name_of(cls, field: str) -> str:
        """Return the name by which errors call a field: `section.field`, or `--field` for an option."""
        if cls.section:
            return f"{cls.section}.{field}"
        return field.upper() if is_positional(cls.__dataclass_fields__[field]) else "--" + field.replace("_", "-")

    def require(self, holds: bool, field: str, expected: str, fix: str = "") -> None:
        """Raise ValueError that says what `field` must be, what it is, and what to do, unless `holds`."""
        require(holds, self.name_of(field), expected, attrgetter(field)(self), fix)

    def require_default(self, *names: str, unless: str, fix: str = "") -> None:
        """Refuse values of these fields that no code would read."""
        for name in names:
            default = type(self).__dataclass_fields__[name].default
            self.require(getattr(self, name) == default, name, f"its default, {default!r}, unless {unless}", fix)


def require(holds: bool, name: str, expected: str, got: object, fix: str = "") -> None:
    """Raise ValueError saying what setting `name` must be, what it is, and what to do, unless `holds`."""
    if not holds:
        raise ValueError(f"{name} must be {expected}, got {got!r}" + (f"; {fix}" if fix else ""))


def expanded(path: str) -> Path:
    """Return `path` with ~ expanded. Raises ValueError for the home of a user that does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path!r} begins with the home of a user that does not exist; give another path") from error


def is_folder_name(name: str) -> bool:
    """Whether `name` is empty or names one folder, on any system, and not a path."""
    return name not in (".", "..") and not any(sep in name for sep in "/\\")


def hints_of(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, with their bounds."""
    return _hints(kind)


@cache  # mypy takes a dataclass for unhashable where it is not Any
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in fields(kind)}


def is_section(hint: Any) -> bool:
    """Whether the type of a field is a dataclass of settings itself."""
    return isinstance(hint, type) and issubclass(hint, Settings)


def is_positional(each: "Field[Any]") -> bool:
    """Whether an option is given without a flag."""
    return each.default is MISSING and each.default_factory is MISSING


def base_type(hint: Any) -> Any:
    """The type of a setting without bounds and without None: bool, int, float, str, or tuple[item, ...]."""
    if typing.get_origin(hint) is Annotated:
        return base_type(typing.get_args(hint)[0])
    members = [each for each in typing.get_args(hint) if each is not NoneType]
    is_optional = len(members) < len(typing.get_args(hint))
    return base_type(members[0]) if is_optional else hint


def item_type(hint: Any) -> Any:
    """The type of the items of a tuple[item, ...]; None for any other type."""
    base = base_type(hint)
    return base_type(typing.get_args(base)[0]) if typing.get_origin(base) is tuple else None


def choices_of(hint: Any) -> tuple[str, ...]:
    """The strings that a setting, or each of its items, may be; () where any string is one."""
    return next((each.choices for each in _metadata(hint) if isinstance(each, OneOf)), ())


def type_words(hint: Any) -> str:
    """The type of a setting, as an error says it."""
    item = item_type(hint)
    return TYPE_WORDS[base_type(hint)] if item is None else f"a list of {TYPE_WORDS[item].split()[-1]}s"


def help_of(kind: type) -> dict[str, str]:
    """By field, its help text, which a field without one inherits."""
    return {each.name: each.metadata["help"] for each in _own_fields(kind) if each.metadata}


def _own_fields(kind: type) -> "Iterator[Field[Any]]":
    for owner in reversed(kind.__mro__):
        yield from owner.__dict__.get("__dataclass_fields__", {}).values()


def nearest(name: str, choices: Collection[str], *, otherwise: str) -> str:
    """The hint for an unknown `name`: the nearest of `choices`, or `otherwise`."""
    # A right key in the wrong section is nearer than a name of similar spelling.
    found = [choice for choice in choices if choice.rpartition(".")[2] == name.rpartition(".")[2]]
    found = found or difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {found[0]!r}?" if found else otherwise


def default_of(setting: "Field[Any]") -> str:
    """The default of a setting, as TOML writes it."""
    value = setting.default
    if isinstance(value, tuple):
        return str(list(value)).replace("'", '"')
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


@cache
def _adapters(kind: Any) -> dict[str, TypeAdapter[Any]]:
    strict = ConfigDict(strict=True)
    return {name: TypeAdapter(hint, config=strict) for name, hint in hints_of(kind).items() if not is_section(hint)}


def _metadata(hint: Any) -> Iterator[Any]:
    """The metadata of all Annotated types inside `hint`."""
    yield from getattr(hint, "__metadata__", ())
    for inner in typing.get_args(hint):
        yield from _metadata(inner)

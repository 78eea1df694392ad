"""Settings: fields of frozen dataclasses with a help text, and a type and bounds that pydantic checks.

The command line, its help, the TOML files and docs/configuration.md all read these fields.
"""

import difflib
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.types import AllowInfNan
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from quaver.runtime.errors import InputError

MAX_INTEGER = 2**63 - 1
"""The largest integer of TOML and of torch."""
AtLeast1 = Annotated[int, Ge(1), Le(MAX_INTEGER)]
NotNegative = Annotated[int, Ge(0), Le(MAX_INTEGER)]
Integer = Annotated[int, Le(MAX_INTEGER)]
RankCount = Annotated[int, Ge(1), Le(100_000)]
"""The number of ranks of a run that is planned or predicted, not started."""
FiniteNotNegative = Annotated[float, AllowInfNan(False), Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]

TYPE_DESCRIPTIONS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_BOUND_DESCRIPTIONS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "finite_number": "finite",
    "unknown_home": "a path that does not begin with the home of an unknown user",
}
"""Descriptions of valid values, by the type of pydantic's error."""


def _expand_home(path: str) -> str:
    try:
        return str(expand_user(path)) if path.startswith("~") else path
    except InputError as error:
        raise PydanticCustomError("unknown_home", "unknown home") from error


UserPath = Annotated[str, AfterValidator(_expand_home)]
"""A path of a command's option, in which ~ is expanded when the option is checked: the shell does not expand
`--html=~/page.html`. The paths of a run's config are expanded where they are read, so that config.toml keeps the ~."""


@dataclass(frozen=True)
class OneOf:
    """The strings that a setting may be: `Annotated[str, OneOf(("a", "b"))]`."""

    choices: tuple[str, ...]
    has_aliases: bool = False
    """Accept other spellings too. The code that reads the setting refuses wrong ones."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Make the schema with which pydantic validates."""
        return core_schema.str_schema() if self.has_aliases else core_schema.literal_schema(list(self.choices))


def setting(default: object, text: str) -> Any:
    """Define a field of `Settings` with its help text: `steps: AtLeast1 = setting(200, "Optimizer steps.")`."""
    return field(default=default, metadata={"help": text})


def argument(text: str) -> Any:
    """Define a required positional argument of a command, with its help text."""
    return field(metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """Base of the dataclasses of settings: checks the type and the bounds of each field, then calls `check`.

    An InputError has the setting's name, what was expected, and what was given.
    """

    section: ClassVar[str] = ""
    """The section of the TOML file; empty for the options of a command."""

    def __init_subclass__(cls, *, section: str = "") -> None:
        cls.section = section or cls.section

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name in get_field_types(cls):
            value, annotation = getattr(self, name), get_field_types(cls)[name]
            if is_section(annotation):
                continue
            value = convert_list_to_tuple(value)
            try:
                checked = _make_adapters(cls)[name].validate_python(value)
            except ValidationError as error:
                first = error.errors()[0]
                if first["type"] == "value_error":  # of an AfterValidator
                    raise InputError(f"{self.name_field(name)}: {first['ctx']['error']}") from None
                is_type = first["type"].endswith("_type")
                bound = _BOUND_DESCRIPTIONS.get(first["type"], f"one of {', '.join(get_choices(annotation))}")
                expected = describe_type(annotation) if is_type else bound.format(**first.get("ctx", {}))
                value = getattr(self, name) if is_type else first["input"]
                raise InputError(f"{self.name_field(name)} must be {expected}, got {value!r}") from None
            object.__setattr__(self, name, checked)
        self.check()

    def check(self) -> None:
        """Raise InputError for values that exclude each other."""

    @classmethod
    def name_field(cls, field: str) -> str:
        """Return the name by which errors call a field: `section.field`, or `--field` for an option."""
        if cls.section:
            return f"{cls.section}.{field}"
        return field.upper() if is_positional(cls.__dataclass_fields__[field]) else "--" + field.replace("_", "-")

    def require(self, holds: bool, field: str, expected: str, hint: str = "") -> None:
        """Raise InputError that says what `field` must be, what it is, and what to do, unless `holds`."""
        require(holds, self.name_field(field), expected, attrgetter(field)(self), hint)

    def require_default(self, *names: str, unless: str = "", beside: str = "", hint: str = "") -> None:
        """Raise InputError if a field of `names` is set that nothing reads: `unless` or `beside` something."""
        condition = f"with {beside}" if beside else f"unless {unless}"
        for name in names:
            default, value = type(self).__dataclass_fields__[name].default, getattr(self, name)
            if default is None and value is not None:
                end = f"; {hint}" if hint else ""
                raise InputError(f"{self.name_field(name)} must not be given {condition}, got {value!r}{end}")
            self.require(value == default, name, f"its default, {default!r}, {condition}", hint)


def require(holds: bool, name: str, expected: str, value: object, hint: str = "") -> None:
    """Raise InputError saying what setting `name` must be, its value, and what to do, unless `holds`."""
    if not holds:
        raise InputError(f"{name} must be {expected}, got {value!r}" + (f"; {hint}" if hint else ""))


def convert_list_to_tuple(value: Any) -> Any:
    """Return a list as a tuple, as settings have it, and other values unchanged."""
    return tuple(value) if isinstance(value, list) else value


def expand_user(path: str) -> Path:
    """Return `path` with ~ expanded. Raises InputError for the home of a user that does not exist, and for NUL."""
    if "\0" in path:  # a TOML file may hold one, and every system call refuses it
        raise InputError(f"{path!r} has a NUL character; give another path")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path!r} begins with the home of a user that does not exist; give another path") from error


def is_folder_name(name: str) -> bool:
    """Return whether `name` is empty or names one folder, on any system, in printable characters."""
    return name not in (".", "..") and name.isprintable() and not set(name) & set("/\\")


def get_field_types(cls: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, with their bounds."""
    return _resolve_types(cls)


@cache  # mypy takes a dataclass for unhashable unless it is typed as Any
def _resolve_types(cls: Any) -> dict[str, Any]:
    annotations = typing.get_type_hints(cls, include_extras=True)
    return {field.name: annotations[field.name] for field in fields(cls)}


def is_section(annotation: Any) -> bool:
    """Return whether the type of a field is a `Settings` class."""
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def is_positional(field: "Field[Any]") -> bool:
    """Return whether an option is given without a flag."""
    return field.default is MISSING and field.default_factory is MISSING


def get_base_type(annotation: Any) -> Any:
    """Return the type of a setting without bounds and None: bool, int, float, str, or tuple[item, ...]."""
    if typing.get_origin(annotation) is Annotated:
        return get_base_type(typing.get_args(annotation)[0])
    members = [member for member in typing.get_args(annotation) if member is not NoneType]
    is_optional = len(members) < len(typing.get_args(annotation))
    return get_base_type(members[0]) if is_optional else annotation


def get_item_type(annotation: Any) -> Any:
    """Return the type of the items of a tuple[item, ...], or None for any other type."""
    base = get_base_type(annotation)
    return get_base_type(typing.get_args(base)[0]) if typing.get_origin(base) is tuple else None


def get_choices(annotation: Any) -> tuple[str, ...]:
    """Return the strings that a setting, or an item of it, may be; () if any string is accepted."""
    return next((metadata.choices for metadata in _iter_metadata(annotation) if isinstance(metadata, OneOf)), ())


def describe_type(annotation: Any) -> str:
    """Return the type of a setting as an error message names it."""
    item = get_item_type(annotation)
    if item is None:
        return TYPE_DESCRIPTIONS[get_base_type(annotation)]
    return f"a list of {TYPE_DESCRIPTIONS[item].split()[-1]}s"


def get_help(cls: type) -> dict[str, str]:
    """Return the help text of each field. A field without one inherits the text of the base class."""
    return {field.name: field.metadata["help"] for field in _iter_fields_of_bases(cls) if field.metadata}


def _iter_fields_of_bases(cls: type) -> "Iterator[Field[Any]]":
    for owner in reversed(cls.__mro__):
        yield from owner.__dict__.get("__dataclass_fields__", {}).values()


def suggest_nearest(
    name: str, choices: Collection[str], *, fallback: str, format_name: Callable[[str], str] = str
) -> str:
    """Return the hint for an unknown `name`: the nearest of `choices` as `format_name` writes it, or `fallback`."""
    # A right key in the wrong section is near, a right section alone is not.
    keys = [choice.rpartition(".")[2] for choice in choices]
    nearest_keys = difflib.get_close_matches(name.rpartition(".")[2], keys, n=1, cutoff=0.7)
    candidates = [choice for choice, key in zip(choices, keys, strict=True) if key in nearest_keys]
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0)
    return f"did you mean {format_name(matches[0])!r}?" if matches else fallback


def format_default(setting: "Field[Any]") -> str:
    """Return the default of a setting as TOML."""
    value = setting.default
    if isinstance(value, tuple):
        return str(list(value)).replace("'", '"')
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


@cache
def _make_adapters(cls: Any) -> dict[str, TypeAdapter[Any]]:
    strict = ConfigDict(strict=True)
    return {
        name: TypeAdapter(annotation, config=strict)
        for name, annotation in get_field_types(cls).items()
        if not is_section(annotation)
    }


def _iter_metadata(annotation: Any) -> Iterator[Any]:
    """Yield the metadata of all Annotated types inside `annotation`."""
    yield from getattr(annotation, "__metadata__", ())
    for inner in typing.get_args(annotation):
        yield from _iter_metadata(inner)

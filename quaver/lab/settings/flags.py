"""The flags of a command: an argparse parser whose options are the fields of a `Settings` class.

A value that cannot be converted stays text, so that the type check refuses it with the same error as in TOML.
"""

import itertools
import textwrap
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, Field, fields
from functools import partial
from typing import Any, NoReturn, TypeVar

from quaver.lab.settings.fields import (
    Settings,
    format_default,
    get_base_type,
    get_choices,
    get_field_types,
    get_help,
    get_item_type,
    is_positional,
    is_section,
    suggest_nearest,
)
from quaver.runtime.errors import InputError

Values = dict[str, Any]
"""The values that flags give, by the name of the setting, `section.field` in a section."""

SHORTHANDS = {"compare": "job.compare", "data": "data.path", "deterministic": "training.deterministic"}
"""Flags of `quaver train` without their section."""

_Options = TypeVar("_Options", bound=Settings)


def parse_options(cls: type[_Options], argv: list[str], *, prog: str) -> _Options:
    """Parse the options of a command from `argv`; for --help print its help and exit. Raises InputError."""
    exit_if_help(cls, argv, prog=prog)
    try:
        values, rest = split_flags(cls, argv)
    except InputError as error:
        raise InputError(f"{error}; {_format_help_hint(prog)}") from error
    if rest and rest[0].startswith("--"):
        names = [field.name for field in fields(cls) if not is_positional(field)]
        raise make_unknown_flag_error(rest[0], names, prog=prog)
    if rest:
        raise InputError(f"unexpected argument {rest[0]!r}; {_format_help_hint(prog)}")
    return cls(**values)


def split_options(cls: type[_Options], argv: list[str], *, prog: str) -> tuple[_Options, list[str]]:
    """Parse the options of a command that also takes the flags of a run. Return them and the remaining arguments.

    For --help print the help of the command and exit. Raises InputError.
    """
    exit_if_help(cls, argv, prog=prog)
    values, rest = split_flags(cls, argv)
    return cls(**values), rest


def make_unknown_flag_error(word: str, names: Collection[str], *, prog: str) -> InputError:
    """Return the error for the flag `word` of the command `prog`, which has the settings `names`."""
    flag = word.partition("=")[0]
    name, fallback = flag[2:].replace("-", "_"), _format_help_hint(prog)
    hint = suggest_nearest(name, names, fallback=fallback, format_name=_format_flag)
    return InputError(f"unknown flag: {flag!r}; {hint}")


def _format_help_hint(prog: str) -> str:
    return f"see {' '.join(word for word in prog.split() if word.islower() and '{' not in word)} --help"


def _format_flag(name: str) -> str:
    return f"--{name if '.' in name else name.replace('_', '-')}"


def exit_if_help(cls: type, argv: list[str], *, prog: str) -> None:
    """Print the help of `cls` and exit with 0 if `argv` asks for it."""
    if "--help" in argv or "-h" in argv:
        print(_Parser(cls, prog).format_help(), end="", flush=True)
        raise SystemExit(0)


def split_flags(cls: type, argv: Iterable[str]) -> tuple[Values, list[str]]:
    """Return the values of the flags of `cls` in `argv`, and the other arguments in their order.

    Hyphens and underscores are the same in names. A boolean is `--flag`, `--no-flag` or `--flag false`. Any other word
    after it is a wrong value, unless the command takes arguments or the word has a dot or a slash. A list is every
    word up to the next flag, split at commas, or is written as in TOML. A string may hold flags and spaces. Of a
    repeated flag the last value counts; lists are joined. Raises InputError if a flag has no value, or an argument is
    missing.
    """
    parser = _Parser(cls)
    values, rest = parser.parse_known_intermixed_args(list(parser.normalize(argv)))
    return vars(values), rest


class _HelpFormatter(HelpFormatter):
    """Breaks lines at spaces and between choices only, so that a word with hyphens stays whole."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width))

    def _format_action_invocation(self, action: Action) -> str:
        text, indent = super()._format_action_invocation(action), " " * 8
        lines = self._split_lines(text.replace("|", "| "), self._width - len(indent))
        return f"\n{indent}".join(lines).replace("| ", "|")


class _Parser(ArgumentParser):
    """The parser of the settings of `cls`; `prog` is what its help says before the options."""

    def __init__(self, cls: type, prog: str = "") -> None:
        super().__init__(
            usage=f"{prog} [options]",
            description=_join_lines(cls.__doc__),
            add_help=bool(prog),
            allow_abbrev=False,
            argument_default=SUPPRESS,
            formatter_class=_HelpFormatter,
        )
        self._spellings: dict[str, str] = {}
        self._switches: set[str] = set()
        self._has_arguments = any(map(is_positional, fields(cls)))
        self._add_flags(self.add_argument, cls, "")

    def error(self, message: str) -> NoReturn:
        """Raise InputError, where argparse would end the process."""
        raise InputError(message.removeprefix("argument ").replace(": expected one argument", " must have a value"))

    def normalize(self, argv: Iterable[str]) -> Iterator[str]:
        """Yield the arguments, each flag as argparse spells it, and with the value of each boolean."""
        args = list(argv)
        for index in reversed(range(1, len(args))):
            flag, value = args[index - 1 : index + 1]
            if flag.startswith("--") and "=" not in flag and value[:1] == "-" != value[1:2]:
                args[index - 1 : index + 1] = [f"{flag}={value}"]  # argparse takes no value that begins with a hyphen
        for word, after in itertools.pairwise([*args, ""]):
            flag, equals, text = word.partition("=")
            flag = self._spellings.get(flag.replace("-", "_"), flag)
            if flag in self._switches and not equals and not self._is_value(after):
                flag += "=true"
            yield flag + equals + text

    def _is_value(self, word: str) -> bool:
        """Return whether `word` after a boolean flag is its value, right or wrong, and neither a flag nor a path."""
        if self._has_arguments or not word:
            return word.lower() in ("true", "false")
        return not word.startswith("-") and not set(word) & set("./\\")

    def _add_flags(self, add: Callable[..., object], cls: type, section: str) -> None:
        texts = get_help(cls)
        for field in fields(cls):
            annotation, name = get_field_types(cls)[field.name], section + field.name
            if is_section(annotation):
                group = self.add_argument_group(field.name, _join_lines(annotation.__doc__))
                self._add_flags(group.add_argument, annotation, f"{name}.")
                continue
            base, item = get_base_type(annotation), get_item_type(annotation)
            text = f"{texts[field.name]} {_describe_default(field)}".replace("%", "%%")
            if is_positional(field):
                add(name, nargs="+" if item else None, metavar=name.upper(), help=text)
                continue
            choices = ("true", "false") if base is bool else get_choices(annotation)
            metavar = "|".join(choices) or (item or base).__name__.upper()
            flag = _format_flag(name)
            options: dict[str, Any] = {"type": partial(_convert, base)}
            if base is bool:
                options["nargs"] = "?"
                self._switches.add(flag)
                for negated in (f"{section}no_{field.name}", f"no_{name}"):
                    self._spellings[f"__{negated}"] = f"{flag}=false"
            if item is not None:
                options = {"action": _ListAction, "nargs": "*"}
            add(flag, dest=name, metavar=metavar, help=text, **options)
            self._spellings[f"__{name}"] = flag
            self._spellings |= {f"__{short}": flag for short, long in SHORTHANDS.items() if long == name}


class _ListAction(Action):
    """Stores words split at commas, or a list written as in TOML. A repeated flag appends."""

    def __call__(self, parser: object, namespace: object, values: Any, option_string: object = None) -> None:
        """Handle the flag for argparse."""
        text = " ".join(values)
        if text.startswith("[") and text.endswith("]"):  # the shell may have removed its quotes and split it
            values = [part.strip().strip("\"'") for part in text[1:-1].split(",")]
        given = [part for word in values for part in word.split(",") if part]
        setattr(namespace, self.dest, getattr(namespace, self.dest, []) + given)


def _join_lines(text: str | None) -> str:
    return " ".join((text or "").split())


def _describe_default(setting: "Field[Any]") -> str:
    value = setting.default
    return "" if value in (None, "", (), MISSING) or value is False else f"(default: {format_default(setting)})"


def _convert(cls: type, text: str) -> Any:
    if cls is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return cls(text)
    except ValueError:
        return text

"""The flags of a command: the settings of its dataclass, read from words, and the help that tyro prints for them.

Values stay text where they are none of their type, so that a wrong one has the same error as in TOML.
"""

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import Field, field, fields, make_dataclass
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import UseAppendAction, arg

from quaver.trainer.config.settings import (
    TYPE_WORDS,
    Settings,
    base_type,
    choices_of,
    default_of,
    help_of,
    hints_of,
    is_positional,
    is_section,
    item_type,
)

Values = dict[str, Any]
"""The values that flags give, by the name of the setting, `section.field` in a section."""

SHORTHANDS = {"compare": "job.compare", "data": "data.path", "deterministic": "training.deterministic"}
"""Flags of `quaver train` without their section."""

_Words = Annotated[list[tuple[str, ...]], UseAppendAction]
"""The type of every flag in the help: it may be repeated, and has words."""

_Options = TypeVar("_Options", bound=Settings)


def parse_options(kind: type[_Options], words: list[str], *, prog: str) -> _Options:
    """Return the options of a command as `words` give them; for --help print its help and exit.

    Raises:
        ValueError: for an unknown flag, a flag without its value, or a wrong value.
    """
    exit_after_help(kind, words, prog=prog)
    values, rest = split_flags(kind, words)
    command = " ".join(word for word in prog.split() if word.islower() and "{" not in word)
    flags = []
    for each in fields(kind):
        hint = hints_of(kind)[each.name]
        if not is_positional(hint):
            flags.append(f"--{each.name.replace('_', '-')}")
            continue
        if not rest or rest[0].startswith("-"):
            choices = ", ".join(choices_of(hint))
            expected = f"one of {choices}" if choices else each.name.upper()
            raise ValueError(f"expected {expected}: {help_of(kind)[each.name]}; see {command} --help")
        if item_type(hint) is None:
            values[each.name] = rest.pop(0)
        else:
            values[each.name] = tuple(itertools.takewhile(_is_value, rest))
            rest = rest[len(values[each.name]) :]
    if rest and rest[0].startswith("--"):
        nearest = difflib.get_close_matches(rest[0].partition("=")[0].replace("_", "-"), flags, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"see {command} --help"
        raise ValueError(f"unknown flag: {rest[0]!r}; {hint}")
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; see {command} --help")
    return kind(**values)


def split_options(kind: type[_Options], words: list[str], *, prog: str) -> tuple[_Options, list[str]]:
    """Return the options of a command that also takes the flags of a run, and the words of the run.

    For --help print the help of the command and exit.

    Raises:
        ValueError: an option has no value, or a wrong one.
    """
    exit_after_help(kind, words, prog=prog)
    values, rest = split_flags(kind, words)
    return kind(**values), rest


def exit_after_help(kind: type, words: list[str], *, prog: str) -> None:
    """Print the help of `kind` and exit with 0 if `words` ask for it."""
    if "--help" in words or "-h" in words:
        tyro.cli(
            _flags(kind, kind.__name__),
            prog=prog,
            description=" ".join((kind.__doc__ or "").split()),
            args=["--help"],
            use_underscores=any(map(is_section, hints_of(kind).values())),
        )


def split_flags(kind: type, words: Sequence[str]) -> tuple[Values, list[str]]:
    """Return the values of the flags of `kind` among `words`, and the other words, those before any flag first.

    Hyphens and underscores are the same in names. A boolean is `--flag`, `--no-flag` or `--flag false`; a list takes
    every word up to the next flag, or `--flag=a,b`; the value of a string may be one word that holds flags and spaces.
    Text that is no value of its type stays text, for the type check to refuse by name.

    Raises:
        ValueError: a flag has no value.
    """
    hints = _hints_by_name(kind)
    values: Values = {}
    others: list[str] = []
    unknown: list[str] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if _is_value(word):
            others.append(word)
            continue
        flag, equals, text = word.partition("=")
        name, negated = (_name(each, hints) for each in (flag, flag.replace("no-", "", 1).replace("no_", "", 1)))
        count = int(bool(pending) and " " in pending[0] and base_type(hints.get(name)) is str)
        while count < len(pending) and _is_value(pending[count]):
            count += 1
        given, pending = pending[:count], pending[count:]
        if name in hints and word.startswith("--"):
            values[name], more = _value(name, hints[name], [text] if equals else given, is_attached=bool(equals))
            others += given if equals else more
        elif not equals and word.startswith("--") and base_type(hints.get(negated)) is bool:
            values[negated] = False
            others += given
        else:
            unknown += [word, *given]
    return values, others + unknown


def _hints_by_name(kind: type, section: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, hint in hints_of(kind).items():
        if is_section(hint):
            found |= _hints_by_name(hint, f"{name}.")
        elif not is_positional(hint):
            found[section + name] = hint
    return found


def _is_value(word: str) -> bool:
    """Whether `word` is no flag; a negative number is none."""
    return not word.startswith("-") or word == "-" or isinstance(_convert(word, float), float)


def _name(flag: str, hints: dict[str, Any]) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    return name if name in hints else SHORTHANDS.get(name, name)


def _flags(kind: type, title: str, section: str = "") -> type:
    """A dataclass for tyro with the flags of `kind`, each a list of the words that follow it."""
    made: list[tuple[str, Any, Any]] = []
    shorthands = {name: flag for flag, name in SHORTHANDS.items()}
    helps = help_of(kind)
    for each in fields(kind):
        hint = hints_of(kind)[each.name]
        if is_section(hint):
            inner = _flags(hint, hint.__name__, f"{each.name}.")
            made.append((each.name, inner, field(default_factory=inner)))
        elif not is_positional(hint):
            short = shorthands.get(section + each.name)
            about = arg(
                name=each.name if section else each.name.replace("_", "-"),
                metavar=_metavar(hint),
                help=helps[each.name],
                help_behavior_hint=_default_words(each),
                aliases=None if short is None else [f"--{short}"],
            )
            made.append((each.name, Annotated[_Words, about], field(default_factory=list)))
    result = make_dataclass(title, made)
    result.__doc__ = kind.__doc__
    return result


def _metavar(hint: Any) -> str:
    choices = choices_of(hint)
    one = f"{{{','.join(choices)}}}" if choices else (item_type(hint) or base_type(hint)).__name__.upper()
    if base_type(hint) is bool:
        return "[true|false]"
    return f"[{one} ...]" if item_type(hint) else one


def _default_words(setting: "Field[Any]") -> str:
    value = setting.default
    return "" if value in (None, "", ()) or value is False else f"(default: {default_of(setting)})"


def _value(name: str, hint: Any, given: list[str], *, is_attached: bool) -> tuple[Any, list[str]]:
    """The value of a flag from the words after it, and the words that are not part of it."""
    base, item = base_type(hint), item_type(hint)
    if base is bool:
        if given and (is_attached or given[0].lower() in ("true", "false")):
            return {"true": True, "false": False}.get(given[0].lower(), given[0]), given[1:]
        return True, given
    if item is not None:
        items = given[0].split(",") if is_attached else given
        return [_convert(each, item) for each in items if each], []
    if not given:
        shown = name if "." in name else name.replace("_", "-")
        raise ValueError(f"--{shown} needs a value: {TYPE_WORDS[base]}")
    return _convert(given[0], base), given[1:]


def _convert(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text

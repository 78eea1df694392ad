"""Reads a TrainConfig from TOML and the command line, and writes the resolved one back.

Both sources become one nested dict of plain values, the command line winning; then the dataclasses are made
once, so a bad value has one message wherever it came from.
"""

import contextlib
import difflib
import tomllib
import typing
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import tomli_w
import tyro

from quaver.trainer.config import TrainConfig

Sections = dict[str, dict[str, Any]]

SHORTHANDS = {"compare": "job.compare", "data": "data.path", "deterministic": "training.deterministic"}
"""`--compare`, `--data PATH` and `--deterministic`, spelled out."""


def load_config(path: Path | None, flags: Sections | None = None) -> TrainConfig:
    """Return the defaults, overridden by the TOML file at `path`, overridden by `flags`.

    Raises:
        ValueError: for a file that is not TOML, an unknown section or key, or a value that is wrong.
        OSError: if the file cannot be read.
    """
    sections = {} if path is None else read_toml(path)
    for section, values in (flags or {}).items():
        sections[section] = {**sections.get(section, {}), **values}
    return build_config(sections)


def read_toml(path: Path) -> Sections:
    """Return the sections of a TOML file, their names and keys checked, their values not yet."""
    if not path.is_file():
        raise FileNotFoundError(f"config file {str(path)!r} does not exist; give the path of a TOML file")
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config file {str(path)!r} is not valid TOML: {error}") from error
    for section, values in sections.items():
        _check_known(section, _section_types(), f"section in {path}")
        if not isinstance(values, dict):
            raise ValueError(f"{section} in {path} must be a section, got {values!r}; write [{section}]")
        for key in values:
            _check_known(f"{section}.{key}", _field_types(), f"key in {path}")
    return sections


def build_config(sections: Sections) -> TrainConfig:
    """Return the TrainConfig of nested plain values, checking each one's type; missing ones are defaults."""
    known = _field_types()
    made = {}
    for section, section_type in _section_types().items():
        values = {
            key: _typed(f"{section}.{key}", value, known[f"{section}.{key}"])
            for key, value in sections.get(section, {}).items()
        }
        made[section] = section_type(**values)
    return TrainConfig(**made)


def write_config(config: TrainConfig, path: Path) -> None:
    """Write every field of `config` as TOML that `quaver train` reads back to an equal config.

    In one move: a run that is killed meanwhile must find a whole file when it goes on.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(tomli_w.dumps(asdict(config)), encoding="utf-8")
    partial.replace(path)


def parse_arguments(argv: list[str]) -> tuple[Path | None, Sections]:
    """Split `[CONFIG.toml] [--section.field value ...]` into the file and the flags as nested values.

    `--resume RUN_FOLDER` stands for the config of that folder, and for going on in it. Hyphens and underscores are the
    same in names. A boolean is `--training.compile`, `--training.no-compile`
    or `--training.compile false`; a list takes every word up to the next flag.

    Raises:
        ValueError: for an unknown flag, a flag without its value, or a second file.
    """
    types = _field_types()
    config_path: Path | None = None
    flags: Sections = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if config_path is not None or word.startswith("-"):
                raise ValueError(f"unexpected argument {word!r}; expected [CONFIG.toml] [--section.field value ...]")
            config_path = Path(word)
            continue
        flag, equals, inline = word[2:].partition("=")
        if flag == "resume":
            folder = Path(_flag_value("resume", str, [inline] if equals else None, words)).expanduser().resolve()
            if config_path is not None:
                raise ValueError(f"--resume takes the config of the run folder, got {str(config_path)!r} beside it")
            config_path = _config_of_run(folder)
            flags.setdefault("job", {}).update(dump_folder=str(folder.parent), name=folder.name)
            flags.setdefault("checkpoint", {})["resume"] = "must"
            continue
        name, negated = _flag_name(flag, types)
        value = False if negated else _flag_value(name, types[name], [inline] if equals else None, words)
        section, key = name.split(".")
        flags.setdefault(section, {})[key] = value
    return config_path, flags


def print_help() -> None:
    """Print every flag with its help and default."""
    usage = (
        "quaver train [CONFIG.toml | --resume RUN_FOLDER] [--section.field value ...] [--compare] [--data PATH] "
        "[--deterministic] [--dry-run [--ranks N]]"
    )
    description = f"Train a Llama in float8. Usage: {usage}. Flags win over CONFIG.toml."
    with contextlib.suppress(SystemExit):  # tyro exits with 0 after its help
        tyro.cli(TrainConfig, prog="quaver train", description=description, args=["--help"])


def _config_of_run(folder: Path) -> Path:
    path = folder / "config.toml"
    if not path.is_file():
        raise FileNotFoundError(f"--resume needs the folder of a run, got {str(folder)!r}, which has no config.toml")
    return path


def _section_types() -> dict[str, type]:
    hints = typing.get_type_hints(TrainConfig)
    return {field.name: hints[field.name] for field in fields(TrainConfig)}


def _field_types() -> dict[str, Any]:
    return {
        f"{section}.{name}": hint
        for section, section_type in _section_types().items()
        for name, hint in typing.get_type_hints(section_type).items()
    }


def _check_known(name: str, known: Iterable[str], kind: str) -> None:
    if name in known:
        return
    choices = list(known)
    # A right key in the wrong section is nearer than a name that is spelled alike.
    last = name.rpartition(".")[2]
    nearest = [choice for choice in choices if choice.rpartition(".")[2] == last]
    nearest = nearest or difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "see quaver train --help"
    raise ValueError(f"unknown {kind}: {name!r}; {hint}")


def _typed(name: str, value: Any, hint: Any) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if hint is bool or hint is int or hint is float or hint is str:
        if type(value) is hint:
            return value
        raise ValueError(f"{name} must be {_TYPE_WORDS[hint]}, got {value!r}")
    item_type = typing.get_args(hint)[0]  # of tuple[item_type, ...]
    if isinstance(value, list | tuple):
        items = tuple(float(item) if item_type is float and type(item) is int else item for item in value)
        if all(type(item) is item_type for item in items):
            return items
    raise ValueError(f"{name} must be a list of {_TYPE_WORDS[item_type].split()[-1]}s, got {value!r}")


_TYPE_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def _flag_name(flag: str, types: dict[str, Any]) -> tuple[str, bool]:
    name = flag.replace("-", "_")
    name = SHORTHANDS.get(name, name)
    section, _, key = name.partition(".")
    positive = f"{section}.{key.removeprefix('no_')}"
    if key.startswith("no_") and types.get(positive) is bool:
        return positive, True
    if name not in types:
        _check_known(name, types, "flag")
    return name, False


def _flag_value(name: str, hint: Any, inline: list[str] | None, words: list[str]) -> Any:
    """Take the value of flag `name` off the front of `words`, or from `inline` (what followed an =)."""
    if hint is bool:
        if inline is None and (not words or words[0].lower() not in ("true", "false")):
            return True
        text = (inline or [words.pop(0)])[0].lower()
        return {"true": True, "false": False}.get(text, text)
    if hint in (int, float, str):
        if inline is None and (not words or words[0].startswith("--")):
            raise ValueError(f"--{name} needs a value: {_TYPE_WORDS[hint]}")
        text = (inline or [words.pop(0)])[0]
        return _number(text, hint)
    item_type = typing.get_args(hint)[0]  # of tuple[item_type, ...]
    items = [item for item in inline[0].split(",") if item] if inline is not None else []
    while inline is None and words and not words[0].startswith("--"):
        items.append(words.pop(0))
    return [_number(item, item_type) for item in items]


def _number(text: str, hint: type) -> Any:
    """Return `text` as `hint`, or unchanged where it is not one, for the type check to refuse by name."""
    try:
        return hint(text)
    except ValueError:
        return text

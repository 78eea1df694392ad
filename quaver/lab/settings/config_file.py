"""Reads a TrainConfig from TOML and the command line, and writes the resolved one back.

Both sources become one nested dict of plain values, in which the command line wins. Then the dataclasses are made once,
so a bad value has the same message wherever it came from.
"""

import tomllib
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from quaver.lab.settings import Float8, Numerics, TrainConfig
from quaver.lab.settings.fields import (
    Settings,
    convert_list_to_tuple,
    expand_user,
    get_field_types,
    is_section,
    setting,
    suggest_nearest,
)
from quaver.lab.settings.flags import make_unknown_flag_error, split_flags
from quaver.runtime.errors import InputError
from quaver.runtime.files import replace_file

Sections = dict[str, dict[str, Any]]

CONFIG_FILE = "config.toml"
"""The name of the resolved config in the folder of a run."""

_WITHOUT_FLOAT8 = ("enable_float8_linear", "recipe_name", "filter_fqns")
"""The settings of [float8] that a run without float8 may have."""


def load_config(path: Path | None, flags: Sections | None = None) -> TrainConfig:
    """Return the defaults, overridden by the TOML file at `path`, overridden by `flags`.

    A flag that turns float8 off also turns off what `list_settings_turned_off` returns. Raises InputError and OSError.
    """
    sections = {} if path is None else read_toml(path)
    for name in _list_settings_turned_off(sections, flags or {}):
        section, key = name.split(".")
        del sections[section][key]
    for section, values in (flags or {}).items():
        sections[section] = {**sections.get(section, {}), **values}
    return build_config(sections)


def list_settings_turned_off(path: Path | None, flags: Sections) -> list[str]:
    """Return the settings of the file that only float8 reads, if a flag turns float8 off, else nothing.

    Settings that `flags` give, or that have their defaults in the file, are left out.
    """
    return [] if path is None else _list_settings_turned_off(read_toml(path), flags)


def _list_settings_turned_off(sections: Sections, flags: Sections) -> list[str]:
    if flags.get("float8", {}).get("enable_float8_linear") is not False:
        return []
    in_float8 = (f"float8.{name}" for name in get_field_types(Float8) if name not in _WITHOUT_FLOAT8)
    in_numerics = (f"numerics.{name}" for name in get_field_types(Numerics))
    turned_off = []
    for name in (*in_float8, *in_numerics, "validation.high_precision_too", "metrics.float8_scales_freq"):
        section, key = name.split(".")
        values = sections.get(section, {})
        default = get_field_types(TrainConfig)[section].__dataclass_fields__[key].default
        if key in values and key not in flags.get(section, {}) and convert_list_to_tuple(values[key]) != default:
            turned_off.append(name)
    return turned_off


def read_toml(path: Path) -> Sections:
    """Return the sections of a TOML file. Their names and keys are checked; `build_config` also checks values."""
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "does not exist"
        hint = "is a folder; give its config.toml" if path.is_dir() else f"{problem}; give the path of a TOML file"
        raise FileNotFoundError(f"config file {str(path)!r} {hint}")
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows write a BOM
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"config file {str(path)!r} is not valid TOML: {error}") from error
    _check_names(sections, str(path))
    return sections


def _check_names(sections: Sections, source: str) -> None:
    for section, values in sections.items():
        _check_name(section, get_field_types(TrainConfig), f"section in {source}")
        if not isinstance(values, dict):
            raise InputError(f"{section} in {source} must be a section, got {values!r}; write [{section}]")
        for key in values:
            _check_name(f"{section}.{key}", _list_setting_names(), f"key in {source}")


def build_config(sections: Sections) -> TrainConfig:
    """Make a TrainConfig from nested plain values. Missing values take their defaults. Raises InputError."""
    _check_names(sections, "the settings")
    return TrainConfig(**{name: cls(**sections.get(name, {})) for name, cls in get_field_types(TrainConfig).items()})


def list_changed_settings(config: TrainConfig) -> Sections:
    """Return the settings that differ from their defaults, by section; `build_config` makes an equal config of them."""
    sections = {name: getattr(config, name) for name in get_field_types(TrainConfig)}
    changed = {
        name: {
            field.name: value for field in fields(section) if (value := getattr(section, field.name)) != field.default
        }
        for name, section in sections.items()
    }
    return {name: values for name, values in changed.items() if values}


def write_config(config: TrainConfig, path: Path) -> None:
    """Write every field of `config` as TOML that `quaver train` reads back to an equal config."""
    with replace_file(path) as partial:
        partial.write_text(tomli_w.dumps(asdict(config)), encoding="utf-8")


@dataclass(frozen=True)
class TrainFlags(TrainConfig):
    """The flags of a run: its settings, and the run that it resumes."""

    resume: str = setting("", "Resume the run in this folder, with its own config.")


def parse_arguments(
    argv: list[str], options: type[Settings] = TrainFlags, *, prog: str = "quaver train"
) -> tuple[Path | None, Sections]:
    """Split `[CONFIG.toml] [--section.field value ...]` into the file and the flags as nested values.

    `--resume RUN_FOLDER` takes the config and the name of that folder, and sets checkpoint.resume = must.
    `split_flags` says how values are written. Raises InputError.

    Args:
        options: the command's own options, which are parsed already. The hint for an unknown flag may name one.
        prog: the command whose help that hint names otherwise.
    """
    values, rest = split_flags(TrainFlags, argv)
    names = [*_list_setting_names(), *(name for name, cls in get_field_types(options).items() if not is_section(cls))]
    for word in rest:
        if word.startswith("--") and word[2:].partition("=")[0].replace("-", "_") not in names:
            raise make_unknown_flag_error(word, names, prog=prog)
    for word in rest[1:] if rest and not rest[0].startswith("-") else rest:
        raise InputError(f"unexpected argument {word!r}; expected [CONFIG.toml] [--section.field value ...]")
    config_path = expand_user(rest[0]) if rest else None
    flags: Sections = {}
    if "resume" in values:
        if sum(word.partition("=")[0] == "--resume" for word in argv) > 1:
            raise InputError("--resume must be given once: a run resumes one folder")
        if not values["resume"]:
            raise InputError("--resume must be the folder of a run, got ''")
        folder = expand_user(values.pop("resume")).resolve()
        if config_path is not None:
            raise InputError(f"--resume takes the config of the run folder, got {str(config_path)!r} as well")
        config_path = _find_config_of_run(folder)
        flags = {"job": {"dump_folder": str(folder.parent), "name": folder.name}, "checkpoint": {"resume": "must"}}
    for name, value in values.items():
        section, key = name.split(".")
        if section == "job" and key in flags.get(section, {}):
            raise InputError(f"--resume sets {name}, got --{name} {value} as well; remove one of them")
        flags.setdefault(section, {})[key] = value
    return config_path, flags


def _find_config_of_run(folder: Path) -> Path:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"--resume needs the folder of a run, got {str(folder)!r}, which has no {CONFIG_FILE}")
    return path


def _list_setting_names() -> list[str]:
    sections = get_field_types(TrainConfig)
    return [f"{section}.{name}" for section, cls in sections.items() for name in get_field_types(cls)]


def _check_name(name: str, names: Collection[str], kind: str) -> None:
    if name in names:
        return
    hint = suggest_nearest(name, names, fallback="see quaver train --help")
    raise InputError(f"unknown {kind}: {name!r}; {hint}")

"""Writes docs/configuration.md from the settings: `python -m quaver.lab.settings.docs docs/configuration.md`."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from quaver.lab.settings import TrainConfig
from quaver.lab.settings.fields import Settings, format_default, get_choices, get_field_types, get_help

PAGE_HEAD = """# Configuration

Every setting of `quaver train`: a key of the TOML file (`[section]`, `name = value`) or a flag
(`--section.name value`; flags win). A setting that is true or false: `--float8.emulate`, `--float8.emulate false` or
`--float8.no-emulate`.
"""


def format_configuration_page() -> str:
    """Return the page as Markdown."""
    return "\n".join([PAGE_HEAD, *(_format_section(cls) for cls in get_field_types(TrainConfig).values())])


def _format_section(cls: type[Settings]) -> str:
    texts, types = get_help(cls), get_field_types(cls)
    meanings = {name: text + _format_choices(types[name], text) for name, text in texts.items()}
    rows = [f"`{field.name}` | `{format_default(field)}` | {meanings[field.name]}" for field in fields(cls)]
    table = "\n".join(["setting | default | meaning", "---|---|---", *rows])
    return f"## [{cls.section}]\n\n{' '.join((cls.__doc__ or '').split())}\n\n{table}\n"


def _format_choices(annotation: Any, text: str) -> str:
    """Return the strings that a setting may be, unless its help text names them."""
    choices = get_choices(annotation)
    return "" if all(choice in text for choice in choices) else f" One of {', '.join(choices)}."


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(format_configuration_page(), encoding="utf-8")

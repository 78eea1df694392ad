"""Writes docs/configuration.md from the settings: `python -m quaver.trainer.config_docs docs/configuration.md`."""

import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from quaver.trainer.config import TrainConfig
from quaver.trainer.config.settings import Settings, choices_of, default_of, help_of, hints_of

HEAD = """# Configuration

Every setting of `quaver train`: a key of the TOML file (`[section]`, `name = value`) or a flag
(`--section.name value`; flags win).
"""


def configuration_page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(_section(each) for each in hints_of(TrainConfig).values())])


def _section(kind: type[Settings]) -> str:
    texts = help_of(kind)
    rows = [f"`{each.name}` | `{default_of(each)}` | {texts[each.name]}{_choices(kind, each)}" for each in fields(kind)]
    table = "\n".join(["setting | default | meaning", "---|---|---", *rows])
    return f"## [{kind.section}]\n\n{' '.join((kind.__doc__ or '').split())}\n\n{table}\n"


def _choices(kind: type[Settings], each: "Field[Any]") -> str:
    """The strings that a setting may be, unless its text names them."""
    choices = choices_of(hints_of(kind)[each.name])
    is_named = all(choice in help_of(kind)[each.name] for choice in choices)
    return "" if is_named else f" One of {', '.join(choices)}."


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(configuration_page(), encoding="utf-8")

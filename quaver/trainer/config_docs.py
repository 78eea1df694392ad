"""Writes docs/configuration.md from the settings: `python -m quaver.trainer.config_docs docs/configuration.md`."""

import sys
from dataclasses import fields
from pathlib import Path

from quaver.trainer.config import TrainConfig
from quaver.trainer.config.settings import Settings, default_of, help_of, hints_of

HEAD = """# Configuration

Every setting of `quaver train`: a key of the TOML file (`[section]`, `name = value`) or a flag
(`--section.name value`; flags win).
"""


def configuration_page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(_section(each) for each in hints_of(TrainConfig).values())])


def _section(kind: type[Settings]) -> str:
    texts = help_of(kind)
    rows = [f"`{each.name}` | `{default_of(each)}` | {texts[each.name]}" for each in fields(kind)]
    table = "\n".join(["setting | default | meaning", "---|---|---", *rows])
    return f"## [{kind.section}]\n\n{' '.join((kind.__doc__ or '').split())}\n\n{table}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(configuration_page(), encoding="utf-8")

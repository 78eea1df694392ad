"""Writes docs/configuration.md from the dataclasses: `python -m quaver.trainer.config_docs docs/configuration.md`."""

import ast
import inspect
import sys
import textwrap
import typing
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from quaver.trainer.config import TrainConfig

HEAD = """# Configuration

Every setting of `quaver train`, as a key of the TOML file (`[section]`, `name = value`) or as a flag
(`--section.name value`; flags win). This page is written by `python -m quaver.trainer.config_docs`.
"""


def configuration_page() -> str:
    """Return the page."""
    hints = typing.get_type_hints(TrainConfig)
    return "\n".join([HEAD, *(_section(each.name, hints[each.name]) for each in fields(TrainConfig))])


def _section(name: str, section: Any) -> str:
    hints = typing.get_type_hints(section, include_extras=True)
    texts = _texts_under_fields(section)
    rows = [
        f"| `{each.name}` | `{_default(each)}` | {_help(hints[each.name]) or texts[each.name]} |"
        for each in fields(section)
    ]
    table = "\n".join(["| setting | default | |", "|---|---|---|", *rows])
    return f"## [{name}]\n\n{' '.join((section.__doc__ or '').split())}\n\n{table}\n"


def _default(setting: "Field[Any]") -> str:
    if setting.default is MISSING:
        raise TypeError(f"setting {setting.name} has no default")
    value = setting.default
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value)).replace("'", '"')
    return f'"{value}"' if isinstance(value, str) else str(value)


def _help(hint: Any) -> str:
    """The help of a setting whose type is annotated with one for the command line."""
    helps = [getattr(extra, "help", None) for extra in getattr(hint, "__metadata__", ())]
    return next(filter(None, helps), "")


def _texts_under_fields(section: Any) -> dict[str, str]:
    """By field, the string that stands under it in the source, which Python itself does not keep."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    if not isinstance(body, ast.ClassDef):
        raise TypeError(f"{section} is not a class")
    texts = {}
    for setting, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            texts[setting.target.id] = " ".join(str(below.value.value).split()) if is_text else ""  # type: ignore[attr-defined]
    return texts


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(configuration_page(), encoding="utf-8")

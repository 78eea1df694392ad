"""griffe extension: fits quaver's docstrings to griffe, and leaves private fields out of the reference."""

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises)(?: \((.+)\))?:$", re.MULTILINE)


def _separated(match: "re.Match[str]") -> str:
    section, when = match.groups()
    return f"\n{section}: {section} {when}:" if when else f"\n{section}:"


class Sections(griffe.Extension):
    """Puts an empty line before each section, which griffe asks for; `Raises (when called):` becomes its title."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = SECTION.sub(_separated, obj.docstring.value)
        if isinstance(obj, griffe.Class) and isinstance(made := obj.members.get("__init__"), griffe.Function):
            made.parameters = griffe.Parameters(*(each for each in made.parameters if not each.name.startswith("_")))

"""griffe extension: quaver's docstrings lack the empty lines that griffe asks for between their sections."""

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises)(?: \((.+)\))?:$", re.MULTILINE)


def _separated(match: "re.Match[str]") -> str:
    section, when = match.groups()
    return f"\n{section}: {section} {when}:" if when else f"\n{section}:"


class Sections(griffe.Extension):
    """Puts an empty line before each section, and makes the words of `Raises (when called):` its title."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = SECTION.sub(_separated, obj.docstring.value)

"""Reads a JSON file of a run or a checkpoint, which may be damaged or edited, and validates its type."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from quaver.runtime.errors import InputError

T = TypeVar("T")

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
"""`__pydantic_config__` of the types: no conversions, and no NaN, which JSON lacks and Python's reader accepts."""


def read_json(path: Path, adapter: TypeAdapter[T], hint: str) -> T:
    """Read the regular file `path` and validate it with `adapter`.

    Raises:
        OSError: the file cannot be read.
        InputError: the file is damaged, or a Literal such as its format has another value. One line names the file and
            the first wrong field, and ends with `hint`.
    """
    if not path.is_file():  # reading a FIFO would block
        raise FileNotFoundError(f"{str(path)!r} is not a file; {hint}")
    try:
        return adapter.validate_json(path.read_bytes())
    except ValidationError as error:
        first: dict[str, Any] = error.errors(include_url=False)[0]  # type: ignore[assignment]
        problem = "has another format" if first["type"] == "literal_error" else "is damaged"
        raise InputError(f"{str(path)!r} {problem}: {_describe(first)}; {hint}") from None


def _describe(first: dict[str, Any]) -> str:
    field = ".".join(map(str, first["loc"]))
    if first["type"] in ("missing", "json_invalid"):
        return f"{field} is missing" if field else first["msg"]
    return f"{field or 'the value'}: {first['msg'][0].lower()}{first['msg'][1:]}, got {repr(first['input'])[:80]}"

"""`quaver import SOURCE TARGET`: a float8 checkpoint becomes one in high precision, to train from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from quaver.export import import_float8
from quaver.lab.cli.errors import report_bad_input
from quaver.lab.settings.fields import OneOf, Settings, UserPath, argument, setting
from quaver.lab.settings.flags import parse_options
from quaver.lab.terminal.byte_sizes import parse_bytes
from quaver.lab.terminal.progress import show_progress


@dataclass(frozen=True)
class ImportOptions(Settings):
    """Dequantize a float8 checkpoint, in a layout that docs/export.md lists, into a folder or a file to train from."""

    source: UserPath = argument("a folder with config.json and *.safetensors, or a .safetensors file such as ComfyUI's")
    target: UserPath = argument("the new folder, or the new file if SOURCE is a file")
    dtype: Annotated[str, OneOf(("float32", "bfloat16", "float16"))] = setting(
        "bfloat16",
        "Dtype of the weights; codes times power-of-two scales are exact in bfloat16, others only in float32.",
    )
    max_shard_size: str = setting("5GB", "Largest size of a file in a folder.")

    def check(self) -> None:
        """Raise InputError for --max-shard-size if the result is one file."""
        super().check()
        if Path(self.source).is_file():
            self.require_default("max_shard_size", unless="SOURCE is a folder")


def main(argv: list[str]) -> int:
    """Run the verb; returns 0 when done, 2 for bad input, 4 if the result cannot be written."""
    with report_bad_input():
        options = parse_options(ImportOptions, argv, prog="quaver import SOURCE TARGET")
        target, limit = Path(options.target), parse_bytes(options.max_shard_size, "--max-shard-size")
        dtype = getattr(torch, options.dtype)
        with show_progress(f"writing {target}"):
            count = import_float8(Path(options.source), target, dtype=dtype, max_shard_bytes=limit)
    print(f"{target}: {count} float8 weights dequantized to {options.dtype}")
    return 0

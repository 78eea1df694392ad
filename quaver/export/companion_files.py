"""The files beside the weights of an export: the record, the model card, and the files that an export copies.

quaver_export.json    version, recipe, format, step and source; SQNR of requantized weights; sha256 of all other files
README.md             a model card: format, recipe, SQNR, logits, conversion report
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quaver.conversion.report import ConversionReport
from quaver.export.files import CONFIG_JSON, INDEX_SUFFIX, SAFETENSORS, check_names, read_json_object, write_json
from quaver.runtime.errors import InputError
from quaver.runtime.files import make_file_threads
from quaver.runtime.module_names import join_names

RECORD_FILE = "quaver_export.json"
HEADER_KEY = "quaver_export"
"""The key of the record in the header of a single file."""

MODEL_CARD_FILE = "README.md"
GENERATION_CONFIG_FILE = "generation_config.json"

_WRITTEN_FILES = CONFIG_JSON, RECORD_FILE, MODEL_CARD_FILE
"""The files that an export writes besides the weights and the generation config."""

_TOKENIZER_PATTERNS = ("tokenizer*", "*_tokens*.json", "vocab.json", "merges.txt", "chat_template.jinja")


def list_tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer in `folder`.

    Raises:
        FileNotFoundError: it has none.
        ValueError: a .json file among them is damaged.
    """
    files = _list_files(folder, *_TOKENIZER_PATTERNS)
    if not files:
        raise FileNotFoundError(f"{str(folder)!r}: expected files of a tokenizer, such as tokenizer.json, got none")
    return files


def list_copied_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer and the generation config, which do not depend on the weights.

    Raises ValueError if a .json file among them is damaged.
    """
    return _list_files(folder, *_TOKENIZER_PATTERNS, GENERATION_CONFIG_FILE)


def _list_files(folder: Path, *patterns: str) -> list[Path]:
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    for file in files:
        if file.suffix == ".json":
            read_json_object(file)
    return files


def check_copied_files(files: Iterable[Path]) -> None:
    """Check that `files` can be copied next to exported weights.

    Raises:
        FileNotFoundError: one of them is not a file.
        InputError: the export writes a file of that name, or two of them have one name.
    """
    copied: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"files: {str(file)!r} is not a file")
        if file.name in _WRITTEN_FILES or file.name.endswith((SAFETENSORS, INDEX_SUFFIX)):
            raise InputError(f"files: expected none that the export writes, such as {CONFIG_JSON}, got {str(file)!r}")
        if file.name in copied:
            raise InputError(f"files: expected one {file.name}, got {str(copied[file.name])!r} and {str(file)!r}")
        copied[file.name] = file


def write_card_and_record(folder: Path, record: dict[str, Any], report: ConversionReport) -> None:
    """Write the card and the record, the last files of an export."""
    (folder / MODEL_CARD_FILE).write_text("\n".join(_format_card(record, report)) + "\n", encoding="utf-8")
    about = {"quaver": version("quaver"), **record, "conversion_report": report.to_dict()}
    digests = _compute_digests(folder, sorted(file.name for file in folder.iterdir()))
    write_json(folder / RECORD_FILE, {**about, "sha256": digests})


def check_digests(folder: Path) -> None:
    """Compare the files of a folder with the digests in its record; a folder without one is not checked.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file differs, or the record is damaged.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        return
    digests = read_json_object(path).get("sha256")
    if not isinstance(digests, dict) or not all(Path(name).name == name for name in digests):
        raise InputError(f"{str(path)!r} has no sha256 of the files; download it again")
    check_names(digests, path)
    missing = sorted(name for name in digests if not (folder / name).is_file())
    if missing:
        raise FileNotFoundError(f"{str(folder)!r} lacks files that {RECORD_FILE} names: {join_names(missing)}")
    actual = _compute_digests(folder, list(digests))
    differing = sorted(name for name in digests if actual[name] != digests[name])
    if differing:
        raise InputError(
            f"{str(folder)!r} has files that differ from their sha256 in {RECORD_FILE}: {join_names(differing)}; "
            f"download them again, or remove {RECORD_FILE} if you changed them"
        )


def _compute_digests(folder: Path, names: list[str]) -> dict[str, str]:
    with make_file_threads() as threads:
        return dict(zip(names, threads.map(_compute_sha256, [folder / name for name in names]), strict=True))


def _compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _format_card(record: dict[str, Any], report: ConversionReport) -> Iterator[str]:
    yield from ("# Float8 weights", "")
    yield from (f"Exported by quaver {version('quaver')} in the format `{record['format']}`.", "")
    for name in ("source", "recipe", "step"):
        if record.get(name) is not None:
            yield f"- {name}: {record[name]}"
    requantized, written = record["requantized"], record["written"]
    if written:
        yield (
            "- A write, such as the merge of an adapter, quantized these weights again: the logits of the merged model "
            "differ from those of the base with a separate adapter. SQNR of the written weight in dB:"
        )
        rows = {name: [sqnr_db] for name, sqnr_db in written.items()}
        yield from _format_table("weight (of experts, the stack)", ["after the write"], rows)
        yield ""
    if requantized:
        yield "- The codes of these weights differ from the training forward; SQNR of the weight in dB:"
        rows = {name: [sqnr["training_db"], sqnr["stored_db"]] for name, sqnr in requantized.items()}
        yield from _format_table("weight (of experts, the worst one)", ["training", "stored"], rows)
    else:
        forward = "the forward of the merged model" if written else "the training forward"
        yield f"- Codes and scales are bit-identical to {forward}."
    if record["ragged"]:
        yield (
            "- These weights have incomplete last blocks, because a dimension is not a multiple of 128: "
            f"{join_names(record['ragged'])}. In compressed-tensors, inputs of such a width stay in high precision, "
            "and transformers dequantizes the weights. fp8 servers refuse them."
        )
    if record["whole_stacks"]:
        yield f"- Experts that were float8 in training stay in high precision: {join_names(record['whole_stacks'])}."
    yield from ("", "## Logits", "")
    logits = record.get("logits")
    if logits is None:
        yield "Not measured; `save_float8(make_hp_model=...)` does."
    else:
        yield (
            f"On {logits['tokens']} random tokens, the dequantized weights against the high-precision weights, both "
            f"multiplied in high precision: SQNR {_format_decibels(logits['sqnr_db'])} dB, largest difference "
            f"{logits['max_difference']:.4g}, the same most likely token at {logits['same_argmax']:.1%} of positions."
        )
    layers = [replace(layer, backend="") for layer in report.layers]  # how the exporter ran them, if it did
    yield from ("", "## Conversion", "", "```", str(replace(report, layers=layers)), "```")


def _format_table(name: str, columns: list[str], rows: Mapping[str, list[float | None]]) -> Iterator[str]:
    yield from ("", f"| {' | '.join([name, *columns])} |", f"| --- |{' ---: |' * len(columns)}")
    for weight, decibels in rows.items():
        yield f"| {' | '.join([weight, *map(_format_decibels, decibels)])} |"


def _format_decibels(value: float | None) -> str:
    return "exact" if value is None else f"{value:.2f}"

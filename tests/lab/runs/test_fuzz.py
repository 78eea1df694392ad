"""Tests that random and damaged bytes in every file that quaver reads are read, or refused in one line."""

import json
import pickletools
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tomli_w
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quaver.export.files import StoredTensors
from quaver.lab.data.documents import SkippedItems, SourceFile
from quaver.lab.data.records import read_records
from quaver.lab.data.token_files import DamagedEntryError, open_entry
from quaver.lab.data.tokenizer import load_tokenizer
from quaver.lab.runs.checkpoint_folder import RECORD_FILE, read_record
from quaver.lab.runs.dcp import read_metadata
from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.json_lines import rewind_json_lines
from quaver.lab.runs.manifest import MANIFEST_FILE, check_manifest
from quaver.lab.runs.safe_dcp import METADATA_FILE, CheckpointReader
from quaver.lab.settings import Data
from quaver.lab.settings.config_file import load_config
from quaver.runtime.errors import InputError
from tests.lab.data.texts import train_tokenizer

EXAMPLES = pytest.mark.parametrize(
    "examples", [30, pytest.param(50_000, marks=[pytest.mark.nightly, pytest.mark.timeout(0)])]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def draw_dict(*keys: str) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.sampled_from(keys), VALUES)


def draw_nested(text: str, most: int = 100_000) -> st.SearchStrategy[bytes]:
    return st.integers(1, most).map(lambda depth: text.encode() * depth)


def fuzz(
    examples: int,
    path: Path,
    contents: st.SearchStrategy[bytes],
    read: Callable[[Path], object],
    *expected: type,
    corpus: Iterable[bytes] = (),
) -> None:
    """`read` of `path` with these contents may raise what is `expected`, with one line.

    `corpus`: contents that once failed, tried each time.
    """

    @settings(max_examples=examples, deadline=None, derandomize=examples < 1000)
    @given(contents)
    def check(content: bytes) -> None:
        message = ""
        path.write_bytes(content)
        try:
            read(path)
        except expected as error:
            message = str(error)
        assert len(message.splitlines()) <= 1

    for content in corpus:
        check = example(content)(check)
    check()


@EXAMPLES
def test_any_toml_is_read_or_refused_in_one_line(examples, tmp_path):
    plain = st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.lists(st.integers())
    settings = st.dictionaries(st.sampled_from(["dim", "steps", "path"]), plain, max_size=2)
    sections = st.dictionaries(st.sampled_from(["model", "training", "data"]), settings)
    texts = sections.map(tomli_w.dumps).map(lambda text: text.encode("utf-8", "replace"))
    deep = (
        draw_nested("[", 2000)
        | draw_nested("a.", 2000)
        | st.integers(1, 2000).map(lambda depth: b"a = " + b"[" * depth)
    )
    fuzz(examples, tmp_path / "config.toml", texts | st.binary(max_size=40) | deep, load_config, ValueError)


@EXAMPLES
def test_any_metrics_are_rewound_or_refused_in_one_line(examples, tmp_path):
    lines = (
        draw_dict("kind", "step", "model", "loss").map(json.dumps).map(str.encode)
        | st.binary(max_size=20)
        | draw_nested("[")
    )

    def read(path: Path) -> None:
        with rewind_json_lines([path], 3):
            pass

    fuzz(examples, tmp_path / "metrics.jsonl", st.lists(lines, max_size=3).map(b"\n".join), read, InputError)


@EXAMPLES
def test_any_entry_of_the_token_cache_is_read_or_damaged(examples, tmp_path, text_folder, load):
    load(text_folder, cache_folder=str(tmp_path / "kept"))
    (folder,) = (path for path in (tmp_path / "kept").iterdir() if path.is_dir())
    about = json.loads((folder / "entry.json").read_text())
    edited = draw_dict(*about).map(lambda changes: json.dumps({**about, **changes}).encode())
    splits = st.dictionaries(st.sampled_from(["train", "validation", "x"]), draw_dict("tokens", "ends"))
    split = splits.map(lambda splits: json.dumps({**about, "splits": splits}).encode())

    corpus = [json.dumps({**about, "splits": {}}).encode()]
    contents = edited | split | st.binary(max_size=40) | draw_nested('{"splits":')
    fuzz(examples, folder / "entry.json", contents, lambda _: open_entry(folder), DamagedEntryError, corpus=corpus)


@EXAMPLES
def test_any_hugging_face_index_is_read_or_refused_in_one_line(examples, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    names = st.sampled_from(["a.safetensors", "../a.safetensors", "/etc/passwd", "", ".", "a\0b"]) | VALUES
    maps = st.dictionaries(st.text(max_size=5), names, max_size=3)
    indices = (maps | VALUES).map(lambda weight_map: json.dumps({"weight_map": weight_map}).encode())
    contents = indices | st.binary(max_size=40) | draw_nested('{"weight_map":')
    corpus = [b'{"weight_map": {"\\r0": "a.safetensors"}}']
    index, expected = tmp_path / "model.safetensors.index.json", (ValueError, OSError, CheckpointError)
    fuzz(examples, index, contents, lambda path: StoredTensors(tmp_path), *expected, corpus=corpus)


def read_texts(path: Path) -> None:
    for text in read_records(SourceFile.from_path(path.name, path), "text", SkippedItems(), lambda _: None):
        assert isinstance(text, str)
        text.encode()


@EXAMPLES
def test_any_jsonl_is_text_or_counted_as_corrupt(examples, tmp_path):
    lines = (
        draw_dict("text", "other").map(json.dumps).map(str.encode) | st.binary(max_size=20) | draw_nested('{"text":')
    )
    fuzz(examples, tmp_path / "a.jsonl", st.lists(lines, max_size=3).map(b"\n".join), read_texts)


def draw_damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Some bytes of it replaced, in up to three places."""
    place = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 8), st.binary(max_size=8))

    def replace(places: list[tuple[int, int, bytes]]) -> bytes:
        changed = content
        for start, length, new in places:
            changed = changed[:start] + new + changed[start + length :]
        return changed

    return st.lists(place, min_size=1, max_size=3).map(replace)


VOCABULARY = {"<s>": 0, "</s>": 1, "a": 2}
HOSTILE_MODELS = [
    *(None, [], "x", 3, {}, {"type": "BPE", "merges": []}, {"type": "BPE", "vocab": [1], "merges": {}}),
    {"type": "BPE", "vocab": {}, "merges": []},
    {"type": "BPE", "vocab": VOCABULARY, "merges": ["a b"]},
    {"type": "BPE", "vocab": VOCABULARY, "merges": [], "unk_token": "<unk>"},
    {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "<unk>"},
    {"type": "WordLevel", "vocab": {**VOCABULARY, "a": -1}, "unk_token": "a"},
    {"type": "Unigram", "vocab": [["<s>", 0.0], ["</s>", 0.0]], "unk_id": None},
    {"type": "Unigram", "vocab": [["<s>", 0.0], ["</s>", 0.0]], "unk_id": 99},
]
"""Without the token for unknown text, with ids that are none, of other types."""


@EXAMPLES
def test_any_tokenizer_is_read_or_refused_in_one_line(examples, tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(path, ["<s>", "</s>"], vocab_size=280)

    def read(path: Path) -> None:
        tokenizer = load_tokenizer(Data(tokenizer=str(path)))
        (tokens,) = tokenizer.encode(["to be or not \n\n to be"])
        assert all(token < tokenizer.vocab_size for token in tokens)

    plain = json.loads(path.read_bytes())
    corpus = [json.dumps({**plain, "model": model}).encode() for model in HOSTILE_MODELS]
    corpus.append(json.dumps({name: value for name, value in plain.items() if name != "model"}).encode())
    fuzz(examples, path, draw_damaged(path.read_bytes()), read, ValueError, corpus=corpus)


@EXAMPLES
def test_any_parquet_is_text_or_counted_as_corrupt(examples, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["to be", "or not", None, "to be"] * 20}), path)
    content = path.read_bytes()
    corpus = [content[:122] + b"\x00\x80" + content[124:]]  # the name of the column
    fuzz(examples, path, draw_damaged(content), read_texts, corpus=corpus)


OPCODES = st.lists(st.sampled_from([op.code.encode("latin1") for op in pickletools.opcodes]) | st.binary(max_size=5))


@EXAMPLES
def test_any_metadata_of_a_checkpoint_is_read_or_refused(examples, tmp_path):
    path = tmp_path / METADATA_FILE
    state = {"a": torch.ones(4, 5), "b": {"c": 3, "d": [torch.ones(2), 1.5]}}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path)
    invented = OPCODES.map(lambda opcodes: b"\x80\x04" + b"".join(opcodes) + b".")
    for contents in (draw_damaged(path.read_bytes()), invented):
        fuzz(2 * examples, path, contents, lambda _: read_metadata(CheckpointReader(tmp_path)), CheckpointError)


@EXAMPLES
@pytest.mark.parametrize(("name", "read"), [(RECORD_FILE, read_record), (MANIFEST_FILE, check_manifest)])
def test_any_json_of_a_checkpoint_is_read_or_refused_in_one_line(examples, name, read, tmp_path):
    known = draw_dict("format", "models", "world_size", "progress", "config", "data", "files", "bytes", "step")
    texts = (VALUES | known).map(json.dumps).map(str.encode)
    (tmp_path / "stray").touch()  # which no manifest names

    def refuse(path: Path) -> None:
        with pytest.raises(ValueError, match=name) as error:
            read(tmp_path)
        raise error.value

    fuzz(examples, tmp_path / name, texts | st.binary(max_size=40) | draw_nested('{"format":'), refuse, ValueError)

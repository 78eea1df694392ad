"""JSONL, Parquet and text folders: what is read, what is left out, and where it says so."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from quaver.trainer.data import TokenData, records, text_files
from quaver.trainer.data.documents import VALIDATION, Account, SourceFile, find_files
from quaver.trainer.data.source import split_of

TEXTS = [f"document {number}: " + "word " * (number % 7) + "\N{SNOWMAN}" for number in range(200)]


def documents(data: TokenData) -> list[str]:
    """The texts of both splits, those for training first."""
    found = []
    for split in (data.train, data.validation):
        bounds = [0, *split.ends.tolist()]
        assert all(split.tokens[end - 1] == 0 for end in bounds[1:])
        found += [split.tokens[a : b - 1].tobytes().decode() for a, b in zip(bounds, bounds[1:], strict=False)]
    return found


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> None:
    lines = "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def write_parquet(path: Path, texts: list[str | None], field: str = "text", **options: object) -> None:
    parquet.write_table(pa.table({"id": list(range(len(texts))), field: pa.array(texts, pa.string())}), path, **options)


WRITERS = {"a.jsonl": write_jsonl, "a.jsonl.gz": write_jsonl, "a.parquet": write_parquet}


@pytest.mark.parametrize("name", WRITERS)
def test_every_document_once_in_the_split_that_its_text_decides(name, tmp_path, load):
    WRITERS[name](tmp_path / name, TEXTS)
    data = load(tmp_path / name)
    expected = [text for text in TEXTS if split_of(text) != VALIDATION], [t for t in TEXTS if split_of(t) == VALIDATION]
    assert documents(data) == [*expected[0], *expected[1]]
    assert 10 <= data.origin["validation_documents"] <= 32  # 20 expected, within 3 deviations
    assert data.origin["train_documents"] + data.origin["validation_documents"] == 200


def test_a_folder_is_read_file_by_file_and_other_files_are_counted(tmp_path, load):
    write_jsonl(tmp_path / "b.jsonl", TEXTS[:50], "content")
    (tmp_path / "inner").mkdir()
    write_jsonl(tmp_path / "inner" / "c.jsonl.gz", TEXTS[50:100], "content")
    write_parquet(tmp_path / "a.parquet", TEXTS[100:], "content")
    (tmp_path / "README.md").write_text("about the data")
    data = load(tmp_path, field="content")
    assert sorted(documents(data)) == sorted(TEXTS)
    assert documents(data)[0] == next(text for text in TEXTS[100:] if split_of(text) != VALIDATION)
    assert (data.origin["files"], data.origin["other_files"]) == (3, 1)


def test_corrupt_lines_are_counted_with_their_places(tmp_path, load):
    good = [json.dumps({"text": text}).encode() for text in TEXTS[:60]]
    bad = [
        b'{"text": "cut off',
        b'{"content": "no field"}',
        b'{"text": 7}',
        b'["text"]',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": "a\\u0000b"}',
        b"[" * 100_000,
        b'{"text": null}',
    ]
    neither = [b"", b"   ", b'{"text": ""}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join([*good, *bad, *neither, good[0]]))
    data = load(tmp_path / "a.jsonl")
    assert sorted(documents(data)) == sorted([*TEXTS[:60], TEXTS[0]])
    origin = data.origin
    assert (origin["corrupt"], origin["empty"]) == (len(bad), 1)
    reasons = ["not JSON", "field 'text'", "expected a string, got int", "got a list", "not JSON"]
    assert len(origin["corrupt_places"]) == len(reasons)
    for number, (place, reason) in enumerate(zip(origin["corrupt_places"], reasons, strict=True), start=61):
        assert place.startswith(f"a.jsonl:{number}: ")
        assert reason in place


def test_corrupt_data_is_refused_before_and_after_it_was_cached(tmp_path, load):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "{\n")
    message = r"a.jsonl:201: not JSON .*; repair or remove it, or set data.on_corrupt to skip"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "a.jsonl", on_corrupt="refuse")
    assert load(tmp_path / "a.jsonl").origin["corrupt"] == 1
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "a.jsonl", on_corrupt="refuse")


def test_a_broken_archive_gives_what_stands_before_the_break(tmp_path, load):
    cut = 0.9
    rng = np.random.default_rng(0)
    texts = [bytes(rng.integers(97, 123, 300, dtype=np.uint8)).decode() for _ in range(600)]
    write_jsonl(tmp_path / "a.jsonl.gz", texts)
    content = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(content[: int(len(content) * cut)])
    write_jsonl(tmp_path / "b.jsonl.gz", TEXTS[:50])
    (tmp_path / "c.jsonl.gz").write_text("no archive")
    data = load(tmp_path)
    found = documents(data)
    assert set(TEXTS[:50]) <= set(found) <= {*texts, *TEXTS[:50]}
    assert len(found) > 600 * cut * 0.9
    assert data.origin["corrupt"] == 2
    first, second = data.origin["corrupt_places"]
    assert first.startswith(f"a.jsonl.gz:{len(found) - 50 + 1}: the archive is broken here")
    assert second.startswith("c.jsonl.gz:1: the archive is broken here (Not a gzipped file")


def test_parquet_rows_without_text_and_broken_files_are_counted(tmp_path, load):
    write_parquet(tmp_path / "a.parquet", [*TEXTS[:100], None, ""], row_group_size=30)
    write_parquet(tmp_path / "b.parquet", TEXTS[100:], "content")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 but not really PAR1")
    parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "d.parquet")
    data = load(tmp_path)
    assert sorted(documents(data)) == sorted(TEXTS[:100])
    assert (data.origin["corrupt"], data.origin["empty"]) == (4, 1)
    null, column, broken, numbers = data.origin["corrupt_places"]
    assert null == "a.parquet:101: expected a string, got NoneType"
    assert column == "b.parquet: no column of strings 'text'; its columns are id, content"
    assert broken.startswith("c.parquet:1: not readable as Parquet")
    assert numbers.startswith("d.parquet: no column of strings 'text'")
    with pytest.raises(ValueError, match=r"a.parquet:101: expected a string"):
        load(tmp_path, on_corrupt="refuse")


def test_a_parquet_file_that_breaks_in_the_middle_gives_what_stands_before(tmp_path, load):
    rng = np.random.default_rng(0)
    texts = [bytes(rng.integers(97, 123, 300, dtype=np.uint8)).decode() for _ in range(6000)]
    write_parquet(tmp_path / "a.parquet", texts, row_group_size=2000, compression="gzip", use_dictionary=False)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    (tmp_path / "a.parquet").write_bytes(content)
    data = load(tmp_path / "a.parquet")
    assert data.origin["corrupt"] == 1
    found = documents(data)
    assert 2000 <= len(found) < 4000  # the first group of rows and nothing of the last
    assert set(found) < set(texts)
    assert "not readable as Parquet" in data.origin["corrupt_places"][0]


def test_one_parquet_row_that_is_not_utf_8_loses_no_other(tmp_path, load):
    rows = pa.array([text.encode() for text in TEXTS[:50]] + [b"a\xff"] + [text.encode() for text in TEXTS[50:]])
    parquet.write_table(pa.table({"text": rows.view(pa.string())}), tmp_path / "a [1].parquet")
    data = load(tmp_path / "a [1].parquet")
    assert sorted(documents(data)) == sorted(TEXTS)
    assert data.origin["corrupt_places"] == ["a [1].parquet:51: not UTF-8 (invalid start byte)"]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_strings_of_other_kinds(kind, tmp_path, load):
    parquet.write_table(pa.table({"text": pa.array(TEXTS, pa.string()).cast(kind)}), tmp_path / "a.parquet")
    assert sorted(documents(load(tmp_path / "a.parquet"))) == sorted(TEXTS)


def test_parquet_without_pyarrow_names_what_to_install(tmp_path, load, monkeypatch):
    write_parquet(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setattr(records.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pyarrow, which is not installed; pip install 'quaver\[data\]'"):
        load(tmp_path)


def test_a_field_is_refused_where_there_are_none(text_folder, load):
    with pytest.raises(ValueError, match=r"data.field must be its default, 'text', unless data.path has JSONL"):
        load(text_folder, field="content")


def test_binary_files_are_left_out_and_counted(text_folder, load):
    (text_folder / "latin.txt").write_bytes(b"caf\xe9" * 100)
    (text_folder / "nul.bin").write_bytes(b"a\0b" * 100)
    (text_folder / "empty.txt").write_bytes(b"")
    (text_folder / ".git").mkdir()
    (text_folder / ".git" / "config").write_text("secret\n" * 100)
    origin = load(text_folder).origin
    assert (origin["corrupt"], origin["empty"], origin["train_documents"], origin["validation_documents"]) == (
        2,
        1,
        11,
        1,
    )
    assert origin["corrupt_places"] == [
        "latin.txt: not UTF-8 (invalid continuation byte)",
        "nul.bin: a 0 byte, so not text",
    ]
    with pytest.raises(
        ValueError, match=r"latin.txt: not UTF-8 .*; repair or remove it, or set data.on_corrupt to skip"
    ):
        load(text_folder, on_corrupt="refuse")


def test_long_texts_are_read_in_pieces_that_end_between_lines(tmp_path, monkeypatch, load):
    monkeypatch.setattr(text_files, "READ_BYTES", 100)
    text = "".join(f"  line {number} \N{SNOWMAN}\n\n" + "word " * (number % 5) + "\n" for number in range(300))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("x" * 1000)
    pieces = {"a.txt": [], "b.txt": []}
    names = iter(pieces)
    name = next(names)
    for _, piece, ends_document in text_files.read_texts(find_files(str(tmp_path)), Account(), lambda count: None):
        pieces[name].append(piece)
        name = next(names, None) if ends_document else name
    assert name is None
    assert "".join(pieces["a.txt"]) == text
    assert max(map(len, pieces["a.txt"])) < 300
    assert len(pieces["a.txt"]) > 50
    for piece, after in zip(pieces["a.txt"], pieces["a.txt"][1:], strict=False):
        assert not after or (piece.endswith("\n") and not after[0].isspace())
    assert "".join(pieces["b.txt"]) == "x" * 1000  # no line to end at


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, load, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    from quaver.trainer.data import source

    def read_and_touch(file: SourceFile, *others: object):
        yield from our_read(file, *others)
        write_jsonl(tmp_path / "a.jsonl", TEXTS[:100])

    our_read = source.records.read_records
    monkeypatch.setattr(source.records, "read_records", read_and_touch)
    with pytest.raises(ValueError, match="changed while they were read; try again"):
        load(tmp_path / "a.jsonl")

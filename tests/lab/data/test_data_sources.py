"""Tests sources and tokenizers: which text becomes a document, of which split, and what is left out where."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from pyarrow import parquet
from tokenizers import Tokenizer

from quaver.lab.data import TokenData, records, text_files
from quaver.lab.data import tokenizer as tokenizer_module
from quaver.lab.data.documents import VALIDATION, SkippedItems, SourceFile, find_files
from quaver.lab.data.source import choose_split
from quaver.lab.data.tokenizer import check_vocabulary, load_tokenizer
from quaver.lab.settings import Data, Model
from tests.lab.data.texts import ENGLISH, TEXTS, train_tokenizer, write_jsonl, write_parquet

TRICKY = "a </s> <|end_of_text|> don't  \r\n\r\n\tx \N{SNOWMAN}\N{GRINNING FACE} 12345 \u00e9\u0301 "


def decode_documents(data: TokenData) -> list[str]:
    """Return the texts of both splits, those for training first."""
    texts = []
    for split in (data.train, data.validation):
        bounds = [0, *split.ends.tolist()]
        assert all(split.tokens[end - 1] == 0 for end in bounds[1:])
        texts += [split.tokens[start : end - 1].tobytes().decode() for start, end in pairwise(bounds)]
    return texts


@pytest.fixture
def hf_file(tmp_path: Path) -> Path:
    train_tokenizer(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    return tmp_path / "tokenizer.json"


def test_stdlib_is_a_large_source_and_the_same_each_time(load):
    first, second = (load("stdlib") for _ in range(2))
    assert first.origin == second.origin
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert len(first.train.tokens) > 2_000_000
    assert len(first.validation.tokens) > 100_000
    text = first.train.tokens.tobytes()
    assert b"def " in text
    # _sysconfigdata has paths of the machine that built Python
    assert b"# system configuration generated and used by the sysconfig module" not in text


def test_a_folder_is_split_by_file(text_folder, load):
    data = load(text_folder)
    contents = [file.read_bytes() + b"\0" for file in sorted(text_folder.iterdir())]
    train, validation = data.train.tokens.tobytes(), data.validation.tokens.tobytes()
    assert all((content in train) != (content in validation) for content in contents)
    assert len(train) + len(validation) == sum(map(len, contents))
    assert data.train.tokens.dtype == np.uint8
    assert [data.origin[name] for name in ("files", "train_documents", "validation_documents")] == [12, 11, 1]
    for split in (data.train, data.validation):
        assert np.array_equal(split.ends, np.flatnonzero(split.tokens == 0) + 1)
    (text_folder / "zz.txt").write_text("something else\n" * 40)  # its hash is late in the order
    assert load(text_folder).validation.tokens.tobytes() == validation


@pytest.mark.parametrize(
    "text",
    ["abcdefghij" * 100, "one\r\ntwo\rthree\n" * 40, *("\N{GRINNING FACE}" * 100 + "x" * after for after in range(4))],
    ids=["ascii", "line ends", *map(str, range(4))],
)
def test_a_single_file_keeps_its_last_tenth_of_whole_characters_for_validation(text, tmp_path, load):
    content = text.encode()
    (tmp_path / "a.txt").write_bytes(content)
    data = load(tmp_path / "a.txt")
    assert data.train.tokens[-1] == data.validation.tokens[-1] == 0
    train, validation = (split.tokens[:-1].tobytes() for split in (data.train, data.validation))
    assert train.decode() + validation.decode() == text
    assert 0 <= len(validation) - len(content) // 10 < (1 if text.isascii() else 4)


def test_the_digest_depends_on_content_and_order(text_folder, load):
    digests = {load(text_folder).origin["sha256"]}
    (text_folder / "00.txt").rename(text_folder / "99.txt")
    digests.add(load(text_folder).origin["sha256"])
    (text_folder / "99.txt").write_text("changed\n" * 100)
    digests.add(load(text_folder).origin["sha256"])
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("none", None, FileNotFoundError, "does not exist; give stdlib, a text file or a folder"),
        (".", None, ValueError, "holds no text"),
        ("data.txt", b"", ValueError, "holds no text"),
        ("data.txt", b"\0\0", ValueError, "holds no text.*1 corrupt item skipped, the first at data.txt: a 0 byte"),
        ("data.txt", b"short", ValueError, r"train split .* has 6 tokens, .* needs training.seq_len \+ 1 = 17"),
        ("data.txt", b"x" * 100, ValueError, "validation split .* has 11 tokens"),
    ],
)
def test_unreadable_or_too_little_text_is_refused(name, content, error, message, tmp_path, load):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        load(tmp_path / name, cache_folder=str(tmp_path / "cache"))
    assert any(tmp_path.glob("cache/*/entry.json")) == ("tokens" in message), "no text makes no entry"


STRINGS = (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()))
WRITERS: dict[str, tuple[str, Callable, dict]] = {
    "jsonl": ("a.jsonl", write_jsonl, {}),
    "gzip": ("a.jsonl.gz", write_jsonl, {}),
    "parquet": ("a.parquet", write_parquet, {}),
    **{str(kind): ("a.parquet", write_parquet, {"kind": kind}) for kind in STRINGS},
}


@pytest.mark.parametrize("form", WRITERS)
def test_every_document_is_once_in_the_split_that_its_text_decides(form, tmp_path, load):
    name, write, options = WRITERS[form]
    write(tmp_path / name, TEXTS, **options)
    data = load(tmp_path / name)
    assert decode_documents(data) == sorted(TEXTS, key=lambda text: choose_split(text) == VALIDATION)
    assert 10 <= data.origin["validation_documents"] <= 32  # 20 expected, within 3 deviations
    assert data.origin["train_documents"] + data.origin["validation_documents"] == 200


def test_a_folder_is_read_file_by_file_and_other_files_are_counted(tmp_path, load):
    write_jsonl(tmp_path / "b.jsonl", TEXTS[:50], "content")
    (tmp_path / "inner").mkdir()
    write_jsonl(tmp_path / "inner" / "c.jsonl.gz", TEXTS[50:100], "content")
    write_parquet(tmp_path / "a.parquet", TEXTS[100:], "content")
    (tmp_path / "README.md").write_text("about the data")
    data = load(tmp_path, field="content")
    assert sorted(decode_documents(data)) == sorted(TEXTS)
    assert decode_documents(data)[0] == next(text for text in TEXTS[100:] if choose_split(text) != VALIDATION)
    assert (data.origin["files"], data.origin["other_files"]) == (3, 1)


def write_corrupt_lines(folder: Path) -> Path:
    good = [json.dumps({"text": text}).encode() for text in TEXTS]
    bad = [b'{"text": "cut off', b'{"content": "no field"}', b'{"text": 7}', b'{"text": null}', b'["text"]']
    bad += [b'{"text": "\xff"}', b'{"text": "\\ud800"}', b'{"text": "a\\u0000b"}', b"[" * 100_000]
    neither = [b"", b"   ", b'{"text": ""}']
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join([*good[:60], *bad, *neither, *good[60:]]))
    return folder / "a.jsonl"


def write_corrupt_tables(folder: Path) -> Path:
    write_parquet(folder / "a.parquet", [*TEXTS, None, ""], row_group_size=30)
    write_parquet(folder / "b.parquet", TEXTS[100:], "content")
    (folder / "c.parquet").write_bytes(b"PAR1 but not really PAR1")
    parquet.write_table(pa.table({"text": [1, 2]}), folder / "d.parquet")
    return folder


def write_one_row_that_is_not_utf_8(folder: Path) -> Path:
    rows = pa.array([text.encode() for text in TEXTS[:50]] + [b"a\xff"] + [text.encode() for text in TEXTS[50:]])
    parquet.write_table(pa.table({"text": rows.view(pa.string())}), folder / "a [1].parquet")
    return folder / "a [1].parquet"


def write_binary_files(folder: Path) -> Path:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"caf\xe9" * 100)
    (folder / "nul.bin").write_bytes(b"a\0b" * 100)
    (folder / "short.txt").write_bytes(b"caf\xc3")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".env").write_text("hidden\n" * 100)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret\n" * 100)
    return folder


LINES = ["a.jsonl:61: not JSON .*", "a.jsonl:62: .* without the field 'text'", "a.jsonl:63: expected a string, got int"]
LINES += ["a.jsonl:64: .* field 'text', got null in it", "a.jsonl:65: .* got a list"]
TABLES = ["a.parquet:201: expected a string, got NoneType"]
TABLES += ["b.parquet: no column of strings 'text'; its columns are id, content"]
TABLES += ["c.parquet:1: not readable as Parquet .*", "d.parquet: no column of strings 'text'; .*"]
BINARY = [r"latin.txt: not UTF-8 \(invalid continuation byte\)", "nul.bin: a 0 byte, so not text"]
BINARY += [r"short.txt: not UTF-8 \(unexpected end of data\)"]
CORRUPT: dict[Callable[[Path], Path], tuple[int, int, list[str]]] = {
    write_corrupt_lines: (1, 9, LINES),
    write_corrupt_tables: (1, 4, TABLES),
    write_one_row_that_is_not_utf_8: (0, 1, [r"a \[1\].parquet:51: not UTF-8 \(invalid start byte\)"]),
    write_binary_files: (1, 3, BINARY),
}
"""By what writes 200 documents and others: empty items, corrupt ones, and the places of the first five."""


@pytest.mark.parametrize("write", CORRUPT)
def test_corrupt_items_are_left_out_with_their_places_or_refused_cached_or_not(write, tmp_path, load):
    (tmp_path / "data").mkdir()
    path = write(tmp_path / "data")
    empty, corrupt, places = CORRUPT[write]
    refused = pytest.raises(ValueError, match=f"{places[0]}; repair or remove it, or set data.on_corrupt to skip")
    for _ in range(2):
        with refused:
            load(path, on_corrupt="refuse")
    data = load(path)
    assert sorted(decode_documents(data)) == sorted(TEXTS)
    assert (data.origin["empty"], data.origin["corrupt"]) == (empty, corrupt)
    for pattern, place in zip(places, data.origin["corrupt_places"], strict=True):
        assert re.fullmatch(pattern, place)
    with refused:
        load(path, on_corrupt="refuse")


def draw_texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [bytes(rng.integers(97, 123, 300, dtype=np.uint8)).decode() for _ in range(count)]


def test_a_broken_archive_gives_what_stands_before_the_break(tmp_path, load):
    cut, texts = 0.9, draw_texts(600)
    write_jsonl(tmp_path / "a.jsonl.gz", texts)
    content = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(content[: int(len(content) * cut)])
    write_jsonl(tmp_path / "b.jsonl.gz", TEXTS[:50])
    (tmp_path / "c.jsonl.gz").write_text("no archive")
    data = load(tmp_path)
    documents = decode_documents(data)
    assert set(TEXTS[:50]) <= set(documents) <= {*texts, *TEXTS[:50]}
    assert len(documents) > 600 * cut * 0.9
    assert data.origin["corrupt"] == 2
    first, second = data.origin["corrupt_places"]
    assert first.startswith(f"a.jsonl.gz:{len(documents) - 50 + 1}: the archive is broken here")
    assert second.startswith("c.jsonl.gz:1: the archive is broken here (Not a gzipped file")


def test_a_parquet_file_that_breaks_in_the_middle_gives_what_stands_before(tmp_path, load):
    texts = draw_texts(6000)
    write_parquet(tmp_path / "a.parquet", texts, row_group_size=2000, compression="gzip", use_dictionary=False)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    (tmp_path / "a.parquet").write_bytes(content)
    data = load(tmp_path / "a.parquet")
    assert data.origin["corrupt"] == 1
    documents = decode_documents(data)
    assert 2000 <= len(documents) < 4000  # the first group of rows and nothing of the last
    assert set(documents) < set(texts)
    assert "not readable as Parquet" in data.origin["corrupt_places"][0]


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [(records, {}, "Parquet files need pyarrow"), (tokenizer_module, {"tokenizer": "tokenizer.json"}, "tokenizers")],
    ids=["pyarrow", "tokenizers"],
)
def test_a_missing_package_is_named(module, settings, message, hf_file, load, monkeypatch):
    write_parquet(hf_file.with_name("a.parquet"), TEXTS)
    monkeypatch.chdir(hf_file.parent)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"{message}, which is not installed; pip install 'quaver\[data\]'"):
        load("a.parquet", **settings)


def test_a_field_is_refused_where_there_are_none(text_folder, load):
    with pytest.raises(ValueError, match=r"data.field must be its default, 'text', unless data.path has JSONL"):
        load(text_folder, field="content")


def test_long_texts_are_read_in_pieces_that_end_between_lines(tmp_path, monkeypatch, load):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 100)
    text = "".join(f"  line {number} \N{SNOWMAN}\n\n" + "word " * (number % 5) + "\n" for number in range(300))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("x" * 1000)
    documents = [[]]
    for _, piece, ends_document in text_files.read_texts(find_files(str(tmp_path)), SkippedItems(), lambda count: None):
        documents[-1].append(piece)
        documents += [[]] * ends_document
    pieces, without_lines, rest = documents
    assert rest == []
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 300
    assert len(pieces) > 50
    for piece, after in pairwise(pieces):
        assert not after or (piece.endswith("\n") and not after[0].isspace())
    assert "".join(without_lines) == "x" * 1000


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, load, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)

    read_records = records.read_records

    def read_and_rewrite(file: SourceFile, *others: object):
        yield from read_records(file, *others)
        write_jsonl(tmp_path / "a.jsonl", TEXTS[:100])

    monkeypatch.setattr(records, "read_records", read_and_rewrite)
    with pytest.raises(ValueError, match="changed while they were read; try again"):
        load(tmp_path / "a.jsonl")


def test_hugging_face_tokens_are_the_whole_text_and_nothing_else(hf_file):
    tokenizer = load_tokenizer(Data(tokenizer=str(hf_file)))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (Tokenizer.from_file(str(hf_file)).get_vocab_size(), 1)
    encoded = tokenizer.encode([*ENGLISH, TRICKY])
    decode = Tokenizer.from_file(str(hf_file)).decode
    for text, tokens in zip([*ENGLISH, TRICKY], encoded, strict=True):
        assert decode(tokens.tolist(), skip_special_tokens=False) == text
        assert not {0, 1} & set(tokens.tolist())  # a text that spells a special token gets none
    assert len(encoded[0]) < len(ENGLISH[0])
    assert len(tokenizer.encode([ENGLISH[0] * 10])[0]) > 8  # not truncated


def test_a_folder_names_its_own_end_token(tmp_path):
    special = ["<s>", "<|endoftext|>", "</s>", "<stop>"]
    train_tokenizer(tmp_path / "tokenizer.json", special)
    with pytest.raises(ValueError, match=r"\(several: <\|endoftext\|>, </s>\); set data.eos_token"):
        load_tokenizer(Data(tokenizer=str(tmp_path)))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert load_tokenizer(Data(tokenizer=str(tmp_path))).eos_id == 2
    (tmp_path / "tokenizer_config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"tokenizer_config.json' is not a JSON object: maximum recursion depth"):
        load_tokenizer(Data(tokenizer=str(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    by_config = load_tokenizer(Data(tokenizer=str(tmp_path)))
    assert by_config.eos_id == load_tokenizer(Data(tokenizer=str(tmp_path / "tokenizer.json"))).eos_id == 1
    by_setting = load_tokenizer(Data(tokenizer=str(tmp_path), eos_token="<stop>"))
    assert by_setting.eos_id == 3
    assert by_setting.digest != by_config.digest
    with pytest.raises(ValueError, match=r"'<none>' is not a token of .*; set data.eos_token to one"):
        load_tokenizer(Data(tokenizer=str(tmp_path), eos_token="<none>"))


def test_cutting_a_long_text_into_pieces_changes_no_token(hf_file, tmp_path, load, monkeypatch):
    text = "".join(f"{ENGLISH[number % 3]}\n{'  ' * (number % 3)}{number}\n\n" for number in range(400))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(text)
    whole = load(tmp_path / "text", tokenizer=str(hf_file), cache_folder=str(tmp_path / "whole"))
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 200)
    cut = load(tmp_path / "text", tokenizer=str(hf_file), cache_folder=str(tmp_path / "cut"))
    assert whole.origin["sha256"] == cut.origin["sha256"]
    assert whole.train.tokens.dtype == np.uint16
    assert whole.train.tokens[-1] == whole.origin["eos_id"]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("none.json", None, FileNotFoundError, "does not exist; give bytes, a tokenizer.json or its folder"),
        (".", None, FileNotFoundError, "a folder without a tokenizer.json"),
        ("a.json", b"{}", ValueError, "is not a tokenizer of Hugging Face"),
        ("a.json", b"\xff", ValueError, "is not a tokenizer of Hugging Face"),
        ("tokenizer.model", b"aGk= 0\n", ValueError, "got '.*model'; the tokenizer.json of the same model"),
    ],
)
def test_files_that_are_no_tokenizers_are_refused(name, content, error, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        load_tokenizer(Data(tokenizer=str(tmp_path / name)))


def test_the_model_must_have_every_token(hf_file, load, text_folder):
    data = Data(tokenizer=str(hf_file))
    tokenizer = load_tokenizer(data)
    size = tokenizer.vocab_size
    assert size > 256
    check_vocabulary(tokenizer, data, Model(vocab_size=size))
    message = rf"model.vocab_size must be at least {size}, .*, got {size - 1}; set it to {size}"
    with pytest.raises(ValueError, match=message):
        load(text_folder, tokenizer=str(hf_file), vocab_size=size - 1)
    with pytest.raises(ValueError, match="at least 256, because text is read as bytes, got 255; set it to 256"):
        load(text_folder, vocab_size=255)


def test_tokens_beyond_two_bytes_are_kept_in_four(tmp_path, text_folder, load):
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    tokenizer.add_tokens([tokenizers.AddedToken(f"<extra {number}>") for number in range(2**16)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = load(text_folder, tokenizer=str(tmp_path))
    assert data.train.tokens.dtype == np.uint32
    assert data.origin["vocab_size"] > 2**16

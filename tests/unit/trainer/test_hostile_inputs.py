"""Impossible settings, odd files and random bytes: one line that names the setting or the file, and never a hang."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_tokenizers import train_tokenizer

from quaver.cli import main
from quaver.trainer import run_lock
from quaver.trainer.config import Data
from quaver.trainer.config_io import load_config
from quaver.trainer.data.documents import Account, SourceFile
from quaver.trainer.data.records import read_records
from quaver.trainer.data.token_files import DamagedEntryError, check_content, open_entry
from quaver.trainer.data.tokenizer import load_tokenizer
from quaver.trainer.errors import CheckpointError
from quaver.trainer.huggingface.weights import open_safetensors
from quaver.trainer.metrics import rewound_metrics
from quaver.trainer.run_lock import HOLDER, RunLock
from tests.command_line import TEXT, TINY

pytestmark = pytest.mark.timeout(60)
"""A reader that waits for a FIFO fails."""

SETTINGS = {
    "--model.n_layers=100000000": "model.n_layers must be at most 10000, got 100000000",
    "--model.n_layers=1e8": "model.n_layers must be an integer, got '1e8'",
    "--validation.steps=1000000000": "validation.steps must be at least 1 and at most 100000, got 1000000000",
    "--comm.watchdog_seconds=100000000000000": "comm.watchdog_seconds must be at least 0 and at most",
    "--comm.train_timeout_seconds=100000000000000": "comm.train_timeout_seconds must be at least 1 and at most",
    "--job.dump_folder=~nosuchuser/runs": "'~nosuchuser/runs' begins with the home of a user that does not exist",
    "--data=~nosuchuser/text": "'~nosuchuser/text' begins with the home of",
    "--data.tokenizer=~nosuchuser/tokenizer.json": "'~nosuchuser/tokenizer.json' begins with the home of",
    "--data.cache_folder=~nosuchuser/cache": "'~nosuchuser/cache' begins with the home of",
    "--checkpoint.initial_load_path=~nosuchuser/step": "'~nosuchuser/step' begins with the home of",
    "--resume=~nosuchuser/run": "'~nosuchuser/run' begins with the home of",
    "--data={fifo}": "fifo",
    "--data.tokenizer={fifo}": "fifo",
    "--checkpoint.initial_load_path={fifo}": "fifo",
    "--resume={fifo}": "fifo",
    "{fifo}": "fifo",
    "{nested}": "nested.toml",
    "{latin}": "latin.toml",
}


@pytest.fixture
def where(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text(TEXT)
    words = [*TINY, "--training.steps=1", "--float8.no-enable_float8_linear"]
    return [*words, f"--data={tmp_path / 'text.txt'}", f"--job.dump_folder={tmp_path / 'runs'}"]


@pytest.mark.parametrize("word", SETTINGS)
def test_an_impossible_input_is_one_line(word, where, tmp_path, refused):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "nested.toml").write_text("a = " + "[" * 100_000)
    (tmp_path / "latin.toml").write_bytes(b'[data]\npath = "\xe9"\n')
    given_word = word.format(**{path.stem: path for path in tmp_path.iterdir()})
    words = [given_word, *where] if word.startswith("{") or "resume" in word else [*where, given_word]
    assert SETTINGS[word] in refused("train", *words)


def test_a_file_name_that_is_not_utf8_is_data_like_any_other(where, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (tmp_path / "text.txt").rename(Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xe9.txt")))
    assert main(["train", *where, f"--data={folder}", "--job.name=odd"]) == 0
    assert json.loads((tmp_path / "runs" / "odd" / "data.json").read_text())["files"] == 1


def test_a_setting_that_is_not_utf8_is_refused(where, tmp_path, refused):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    (tmp_path / "text.txt").rename(Path(folder) / "text.txt")
    assert "data.path must be in UTF-8, got '" in refused("train", *where, f"--data={folder}")


def test_garbage_inside_metrics_is_one_line_and_leaves_the_run(where, tmp_path, refused):
    run = tmp_path / "runs" / "run"
    assert main(["train", *where, "--job.name=run"]) == 0
    metrics = run / "metrics.jsonl"
    content = metrics.read_bytes()
    garbage = b'{"step": 1, "ru\n' + content
    metrics.write_bytes(garbage)
    said = refused("train", "--resume", run, "--training.steps=2")
    assert f"line 1 of '{metrics}' is not a record" in said
    assert metrics.read_bytes() == garbage
    metrics.unlink()
    os.mkfifo(metrics)
    assert f"'{metrics}' is not a file" in refused("train", "--resume", str(run), "--training.steps=2")
    metrics.unlink()
    metrics.write_bytes(content)
    (run / HOLDER).unlink(missing_ok=True)
    os.mkfifo(run / HOLDER)
    assert main(["train", "--resume", str(run), "--training.steps=2"]) == 0


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "PATIENCE_S", 1.0)


def test_a_live_holder_on_another_host_is_not_taken_over(tmp_path, quick):
    """Its file lock does not reach this host; its heartbeat does."""
    path = tmp_path / HOLDER
    path.write_text('{"host": "elsewhere", "pid": 1, "since": "today"}')
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(BlockingIOError, match="process 1 on host elsewhere, since today; wait until it ends"):
            RunLock(tmp_path).acquire()
    finally:
        ended.set()
        thread.join()
    RunLock(tmp_path).acquire()  # the refusal has released the lock


def test_a_dead_holder_on_another_host_is_taken_over(tmp_path, quick, capsys):
    (tmp_path / HOLDER).write_text('{"host": "elsewhere", "pid": 1}')
    RunLock(tmp_path).acquire()
    waits, takes_over = capsys.readouterr().err.splitlines()
    assert "waiting 1 s to see whether another run writes" in waits
    assert "took over the lock" in takes_over


def test_a_holder_touches_its_file_until_it_releases(tmp_path, quick):
    lock = RunLock(tmp_path)
    lock.acquire()
    first = (tmp_path / HOLDER).stat().st_mtime_ns
    deadline = time.monotonic() + 10
    while (tmp_path / HOLDER).stat().st_mtime_ns == first:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock.release()
    assert not (tmp_path / HOLDER).exists()


EXAMPLES = pytest.mark.parametrize(
    "examples", [150, pytest.param(50_000, marks=[pytest.mark.nightly, pytest.mark.timeout(0)])]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def with_keys(*keys: str) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.sampled_from(keys), VALUES)


def nested(text: str, most: int = 100_000) -> st.SearchStrategy[bytes]:
    return st.integers(1, most).map(lambda depth: text.encode() * depth)


def fuzz(examples: int, contents: st.SearchStrategy[bytes], read: Callable[[bytes], object], *expected: type) -> None:
    """`read` may raise what is `expected`, with one line."""

    @settings(max_examples=examples, deadline=None, derandomize=examples < 1000)
    @given(contents)
    def one(content: bytes) -> None:
        message = ""
        try:
            read(content)
        except expected as error:
            message = str(error)
        assert len(message.splitlines()) <= 1

    one()


@EXAMPLES
def test_toml(examples, tmp_path):
    path = tmp_path / "config.toml"
    known = [(f"{section}", name) for section, name in (("model", "dim"), ("training", "steps"), ("data", "path"))]
    plain = st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.lists(st.integers())
    sections = st.dictionaries(
        st.sampled_from([section for section, _ in known]),
        st.dictionaries(st.sampled_from([name for _, name in known]), plain, max_size=2),
    )
    texts = sections.map(tomli_w.dumps).map(lambda text: text.encode("utf-8", "replace"))

    deep = nested("[", 2000) | nested("a.", 2000) | st.integers(1, 2000).map(lambda depth: b"a = " + b"[" * depth)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        load_config(path)

    fuzz(examples, texts | st.binary(max_size=40) | deep, read, ValueError)


@EXAMPLES
def test_metrics(examples, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = with_keys("step", "run", "loss").map(json.dumps).map(str.encode) | st.binary(max_size=20) | nested("[")

    def read(content: bytes) -> None:
        path.write_bytes(content)
        with rewound_metrics([path], 3):
            pass

    fuzz(examples, st.lists(lines, max_size=3).map(b"\n".join), read, CheckpointError)


@EXAMPLES
def test_token_cache(examples, tmp_path, text_folder, load):
    load(text_folder, cache_folder=str(tmp_path / "kept"))
    (folder,) = (path for path in (tmp_path / "kept").iterdir() if path.is_dir())
    about = json.loads((folder / "entry.json").read_text())
    edited = with_keys(*about).map(lambda changes: json.dumps({**about, **changes}).encode())
    splits = st.dictionaries(st.sampled_from(["train", "validation", "x"]), with_keys("tokens", "ends"))
    split = splits.map(lambda found: json.dumps({**about, "splits": found}).encode())

    def read(content: bytes) -> None:
        (folder / "entry.json").write_bytes(content)
        entry = open_entry(folder)
        check_content(folder, entry, entry.about["vocab_size"])

    fuzz(examples, edited | split | st.binary(max_size=40) | nested('{"splits":'), read, DamagedEntryError)


@EXAMPLES
def test_hugging_face_index(examples, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    names = st.sampled_from(["a.safetensors", "../a.safetensors", "/etc/passwd", "", ".", "a\0b"]) | VALUES
    maps = st.dictionaries(st.text(max_size=5), names, max_size=3)
    indices = (maps | VALUES).map(lambda found: json.dumps({"weight_map": found}).encode())

    def read(content: bytes) -> None:
        (tmp_path / "model.safetensors.index.json").write_bytes(content)
        open_safetensors(tmp_path)

    contents = indices | st.binary(max_size=40) | nested('{"weight_map":')
    fuzz(examples, contents, read, ValueError, OSError, CheckpointError)


@EXAMPLES
def test_json_lines(examples, tmp_path):
    path = tmp_path / "a.jsonl"
    lines = with_keys("text", "other").map(json.dumps).map(str.encode) | st.binary(max_size=20) | nested('{"text":')

    def read(content: bytes) -> None:
        path.write_bytes(content)
        account = Account(refuse=False)
        for text in read_records(SourceFile.of("a.jsonl", path), "text", account, lambda _: None):
            assert isinstance(text, str)
            text.encode()

    fuzz(examples, st.lists(lines, max_size=3).map(b"\n".join), read)


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Some bytes of it replaced, in up to three places."""
    place = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 8), st.binary(max_size=8))

    def replace(places: list[tuple[int, int, bytes]]) -> bytes:
        changed = content
        for start, length, new in places:
            changed = changed[:start] + new + changed[start + length :]
        return changed

    return st.lists(place, min_size=1, max_size=3).map(replace)


@EXAMPLES
def test_tokenizers(examples, tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(path, ["<s>", "</s>"], vocab_size=280)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        tokenizer = load_tokenizer(Data(tokenizer=str(path)))
        (tokens,) = tokenizer.encode(["to be or not \n\n to be"])
        assert all(token < tokenizer.vocab_size for token in tokens)

    fuzz(examples, damaged(path.read_bytes()), read, ValueError)


@EXAMPLES
def test_parquet(examples, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["to be", "or not", None, "to be"] * 20}), path)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        account = Account(refuse=False)
        for text in read_records(SourceFile.of("a.parquet", path), "text", account, lambda _: None):
            assert isinstance(text, str)

    fuzz(examples, damaged(path.read_bytes()), read)

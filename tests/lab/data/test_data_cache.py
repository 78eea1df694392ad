"""Tests that the token cache is made once, whole or not at all, and again if it is damaged; `quaver prepare-data`."""

import errno
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from xxhash import xxh3_128

from quaver.lab.cli import main
from quaver.lab.data import cache as cache_module
from quaver.lab.data import load as load_module
from quaver.lab.data import load_data, tokenizer
from quaver.lab.data.cache import resolve_cache_folder
from quaver.lab.data.progress import CacheProgress
from quaver.lab.data.source import TextSource
from quaver.lab.data.token_files import SplitWriter
from quaver.lab.runs.ranks import INPUT_TIMEOUT_S
from quaver.lab.settings import Data, TrainConfig, Training
from tests.isolated import Forked
from tests.lab.data.texts import TEXTS, train_tokenizer, write_jsonl, write_parquet


def load_and_print(text: Path, cache: str) -> None:
    """Print the digest, or the error."""
    config = TrainConfig(training=Training(seq_len=16), data=Data(path=str(text), cache_folder=cache))
    try:
        print(load_data(config).origin["sha256"])
    except OSError as error:
        print("error:", error)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the entries that this process makes, which grows as it makes them."""
    names = []
    build = load_module.build_entry

    def build_and_count(folder: Path, *rest: object) -> None:
        names.append(folder.name)
        build(folder, *rest)

    monkeypatch.setattr(load_module, "build_entry", build_and_count)
    return names


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def find_entry(cache: str) -> Path:
    (folder,) = (path for path in Path(cache).iterdir() if path.is_dir())
    return folder


def test_tokens_are_made_once_and_then_mapped(text_folder, load, cache, builds):
    first, second = (load(text_folder, cache_folder=cache) for _ in range(2))
    assert len(builds) == 1
    assert isinstance(second.train.tokens, np.memmap)
    assert not second.train.tokens.flags.writeable
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert first.origin == second.origin
    assert second.origin["cache"] == str(find_entry(cache))
    about = json.loads((find_entry(cache) / "entry.json").read_text())
    assert about["splits"]["train"]["tokens"]["items"] == len(first.train.tokens)
    name = builds[0].removesuffix(".partial")
    assert sorted(path.name for path in Path(cache).iterdir()) == [name, f"{name}.lock"]


CHANGES: dict[str, tuple[int, Callable[[Path], object]]] = {
    "content": (2, lambda folder: (folder / "00.txt").write_text("changed\n" * 100)),
    "time": (2, lambda folder: touch_later(folder / "00.txt")),
    "name": (2, lambda folder: (folder / "00.txt").rename(folder / "0.txt")),
    "more": (2, lambda folder: (folder / "more.txt").write_text("more\n" * 100)),
    "tokenizer": (2, lambda folder: {"tokenizer": str(folder.with_name("tokenizer.json"))}),
    "place of the folder": (1, lambda folder: folder.rename(folder.with_name("moved"))),
}
"""How many entries there are after a change, which may return settings or the new path of the data."""


def touch_later(path: Path) -> None:
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_tokens_changes_the_entry(change, tmp_path, text_folder, load, cache, builds):
    train_tokenizer(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    load(text_folder, cache_folder=cache)
    count, apply = CHANGES[change]
    result = apply(text_folder)
    settings = result if isinstance(result, dict) else {}
    load(text_folder if text_folder.exists() else result, cache_folder=cache, **settings)
    assert len(set(builds)) == len(builds) == count


def test_corpora_with_equal_names_sizes_and_times_are_two_entries(tmp_path, load, cache):
    for name, text in (("a", "hello\n"), ("b", "HELLO\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text(text * 100)
        os.utime(tmp_path / name / "t.txt", (1.6e9, 1.6e9))
    first, second = (load(tmp_path / name, cache_folder=cache).train.tokens for name in ("a", "b"))
    assert not np.array_equal(first, second)


def test_another_field_is_another_entry(tmp_path, load, cache, builds):
    lines = [json.dumps({"text": f"{n:04d}" * 9, "b": f"{n:03d}" * 9}) + "\n" for n in range(99)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    for field in ("text", "b"):
        load(tmp_path / "a.jsonl", field=field, cache_folder=cache)
    assert len(set(builds)) == 2


def test_another_release_of_tokenizers_is_another_entry(tmp_path, text_folder, load, cache, builds, monkeypatch):
    train_tokenizer(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    for release in ("0.22.0", "0.22.1"):
        monkeypatch.setattr(tokenizer, "version", {"tokenizers": release}.get)
        for _ in range(2):
            load(text_folder, cache_folder=cache, tokenizer=str(tmp_path))
    assert len(set(builds)) == len(builds) == 2


DAMAGE = {
    "shorter": lambda folder: os.truncate(folder / "train.tokens", 10),
    "missing": lambda folder: (folder / "validation.tokens").unlink(),
    "another token": lambda folder: (folder / "train.tokens").open("r+b").write(b"?"),
    "documents in no order": lambda folder: rewrite(folder, "train.ends", lambda content: content[::-1]),
    "documents that are too long": lambda folder: rewrite(folder, "train.ends", lambda content: content[:-1] + b"\1"),
    "another vocabulary": lambda folder: edit(folder, vocab_size=10),
    "corrupt items without a place": lambda folder: edit(folder, corrupt=3),
    "no entry.json": lambda folder: (folder / "entry.json").unlink(),
    "another format": lambda folder: edit(folder, format=0),
    "dtype": lambda folder: edit(folder, dtype="<u2"),
    "addresses as tokens": lambda folder: poison(folder),
    "empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


def edit(folder: Path, **changes: object) -> None:
    about = json.loads((folder / "entry.json").read_text())
    (folder / "entry.json").write_text(json.dumps({**about, **changes}))


def rewrite(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file and the digest that entry.json has of it, as a hostile author would."""
    content = change((folder / name).read_bytes())
    (folder / name).write_bytes(content)
    splits = json.loads((folder / "entry.json").read_text())["splits"]
    split, part = name.split(".")
    splits[split][part]["xxh3_128"] = xxh3_128(content).hexdigest()
    edit(folder, splits=splits)


def poison(folder: Path) -> None:
    """An object array of the right size, whose bytes numpy would follow."""
    splits = json.loads((folder / "entry.json").read_text())["splits"]
    for split, parts in splits.items():
        (folder / f"{split}.tokens").write_bytes(b"A" * 800)
        parts["tokens"]["items"] = 100
    edit(folder, dtype="O", splits=splits)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_made_again(damage, text_folder, load, cache, builds):
    before = load(text_folder, cache_folder=cache)
    tokens = before.train.tokens.tobytes()
    DAMAGE[damage](find_entry(cache))
    after = load(text_folder, cache_folder=cache)
    assert len(builds) == 2
    assert after.train.tokens.tobytes() == tokens
    assert after.origin == before.origin
    load(text_folder, cache_folder=cache)
    assert len(builds) == 2


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused_unless_it_is_read_only(text_folder, load, cache, builds, monkeypatch):
    load(text_folder, cache_folder=cache)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    os.chown(cache, 12346, -1)
    with pytest.raises(ValueError, match="data.cache_folder must be a folder that belongs to you, or that you cannot"):
        load(text_folder, cache_folder=cache)
    monkeypatch.setattr(os, "access", lambda *_: False)
    load(text_folder, cache_folder=cache)
    assert len(builds) == 1


def load_and_die(text: Path, cache: str) -> None:
    load_module.write_description = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    load_and_print(text, cache)


def test_a_killed_process_leaves_nothing_that_is_taken_for_tokens(text_folder, cache, load, builds):
    assert Forked(load_and_die, text_folder, cache).finished().returncode == -signal.SIGKILL
    (partial,) = Path(cache).glob("*.partial")
    assert (partial / "train.tokens").stat().st_size > 1000
    load(text_folder, cache_folder=cache)
    assert len(builds) == 1
    assert not list(Path(cache).glob("*.partial"))


def load_when_the_other_waits(text: Path, cache: str) -> None:
    """Build once the other process has found the lock taken; print which of the two this one is."""
    build = load_module.build_entry
    other_waits = Path(cache) / "other waits"

    def build_late(*arguments):
        print("builds")
        deadline = time.monotonic() + 60
        while not other_waits.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        build(*arguments)

    def announce(progress, line):
        print("waits")
        other_waits.touch()

    load_module.build_entry, CacheProgress.print_line = build_late, announce
    load_and_print(text, cache)


def test_two_processes_build_one_entry(text_folder, cache):
    processes = [Forked(load_when_the_other_waits, text_folder, cache) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    roles, digests = zip(*(out.split() for out, _ in outputs), strict=True)
    assert sorted(roles) == ["builds", "waits"]
    assert len(set(digests)) == 1


def test_a_lock_that_stays_held_is_named_and_ends_the_wait(text_folder, load, cache, monkeypatch):
    load(text_folder, cache_folder=cache)
    entry, lines = find_entry(cache), []
    monkeypatch.setattr(CacheProgress, "print_line", lambda progress, line: lines.append(line))
    monkeypatch.setattr(cache_module, "LARGE_ENTRY_BYTES", 1_000)
    load(text_folder, cache_folder=cache)
    assert lines == ["checking the hash of 14.87 KiB of tokens"]
    shutil.rmtree(entry)
    assert cache_module.LOCK_TIMEOUT_S == INPUT_TIMEOUT_S
    monkeypatch.setattr(cache_module, "LOCK_TIMEOUT_S", 0.05)
    with FileLock(f"{entry}.lock"), pytest.raises(TimeoutError, match=f"waited 0.05 s for .* holds '{entry}.lock'; "):
        load(text_folder, cache_folder=cache)
    assert lines[1:] == [f"waiting for another process, which makes the tokens and holds {entry}.lock"]


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path, text_folder, load):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "cache", tmp_path / "file"):
        with pytest.raises(OSError, match=f"tokens to '{folder}': Not a directory; give another data.cache_folder"):
            load(text_folder, cache_folder=str(folder))


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path, cache):
    """A limit on the file size stands in for a full disk: writes fail in the same way."""
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / "text" / f"{name}.txt").write_text("x" * 3_000_000)
    process = Forked(load_and_print, tmp_path / "text", cache, largest_file_bytes=1_000_000).finished()
    error = f"error: cannot write tokens to {cache!r}: File too large; give another data.cache_folder"
    assert process.stdout.splitlines()[-1] == error
    assert not [path for path in Path(cache).iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("verb", ["prepare-data", "train"])
def test_a_full_disk_is_exit_code_4(verb, config, monkeypatch, capsys):
    def fill_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SplitWriter, "append", fill_disk)
    with pytest.raises(SystemExit, match="^4$"):
        main([verb, str(config)])
    assert "cannot write tokens to" in capsys.readouterr().err.splitlines()[-1]


def test_the_cache_is_by_default_in_xdg_cache_home_or_dot_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_cache_folder("") == tmp_path / "quaver" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_cache_folder("") == tmp_path / "home" / ".cache" / "quaver" / "tokens"
    assert resolve_cache_folder("~/x") == tmp_path / "home" / "x"


def test_progress_counts_every_byte_once(tmp_path, text_folder, load, monkeypatch):
    folder = tmp_path / "records"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS)
    write_parquet(folder / "b.parquet", TEXTS * 20, row_group_size=500)
    write_jsonl(folder / "c.jsonl.gz", ["x" * 99])
    advanced: Counter[str] = Counter()
    pieces = TextSource.read_pieces

    def count_pieces(self, skipped, advance):
        def count(amount: int) -> None:
            assert amount >= 0
            advanced[self.path] += amount
            advance(amount)

        yield from pieces(self, skipped, count)

    monkeypatch.setattr(TextSource, "read_pieces", count_pieces)
    for path in (folder, text_folder):
        load(path)
        assert advanced[str(path)] == sum(file.stat().st_size for file in path.iterdir())


@pytest.fixture
def config(tmp_path: Path, text_folder: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(
        f'[data]\npath = "{text_folder}"\ncache_folder = "{tmp_path / "cache"}"\n'
        '[training]\nseq_len = 32\nsteps = 1\nlocal_batch_size = 2\ndevice = "cpu"\n'
        "[validation]\nsteps = 1\n[float8]\nenable_float8_linear = false\n"
        "[model]\ndim = 32\nn_layers = 1\nn_heads = 4\nn_kv_heads = 2\nhidden_dim = 48\n"
        f'[job]\nname = "r"\ndump_folder = "{tmp_path / "runs"}"\n'
    )
    return path


def test_a_run_finds_what_was_prepared(config, tmp_path, run_quaver, monkeypatch):
    printed = run_quaver("prepare-data", config)
    monkeypatch.setattr(load_module, "build_entry", None)  # a second build fails
    run_quaver("train", config)
    origin = json.loads((tmp_path / "runs" / "r" / "data.json").read_text())
    assert f"train        {origin['train_documents']} documents, {origin['train_tokens']:,} tokens" in printed
    assert f"validation   1 document, {origin['validation_tokens']:,} tokens" in printed
    assert "tokenizer    bytes: 256 tokens, 0 ends a document" in printed
    assert f"sha256       {origin['sha256']}" in printed
    assert f"cached in    {origin['cache']}" in printed


@pytest.mark.parametrize("verb", ["prepare-data", "train"])
def test_content_that_was_changed_on_the_disk_is_noticed_and_made_again(verb, config, tmp_path, run_quaver, capsys):
    run_quaver("prepare-data", config)
    (tokens,) = (tmp_path / "cache").glob("*/train.tokens")
    content = tokens.read_bytes()
    tokens.write_bytes(content[:500] + b"?" + content[501:])
    for is_damaged in (True, False):
        assert main([verb, str(config), f"--job.name=damaged-{is_damaged}"]) == 0
        line = "are damaged (train.tokens is not what was written); making them again"
        assert (line in capsys.readouterr().err) == is_damaged
        assert tokens.read_bytes() == content


def test_places_of_corrupt_items_are_listed(config, text_folder, run_quaver):
    (text_folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    assert "left out     0 empty, 1 corrupt\n  latin.txt: not UTF-8" in run_quaver("prepare-data", config)


def test_bad_input_is_one_line_and_exit_code_2(config, run_refused):
    assert "data.tokenizer 'none' does not exist" in run_refused("prepare-data", config, "--data.tokenizer=none")

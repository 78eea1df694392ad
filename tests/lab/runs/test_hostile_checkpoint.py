"""Tests that damaged, edited or foreign checkpoints end in one line and that no code in them runs."""

import errno
import io
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
)

from quaver.lab.runs import checkpoint_folder
from quaver.lab.runs.checkpoint_folder import CheckpointFolder, read_record
from quaver.lab.runs.dcp import describe_innermost_cause, load_state
from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.manifest import check_manifest
from quaver.lab.runs.safe_dcp import METADATA_FILE, CheckpointReader
from quaver.lab.settings import Checkpoint, TrainConfig
from quaver.lab.trainer.train import train
from quaver.lab.trainer.training_run import prepare_run


class Calls:
    """Pickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


BY_NAME = lambda member, _: (getattr, (type(member), member.name))  # noqa: E731
BY_VALUE = lambda member, _: (type(member), (member.value,))  # noqa: E731


@pytest.mark.parametrize("reduced", [BY_NAME, BY_VALUE], ids=["before Python 3.11.4", "later"])
def test_quaver_reads_the_metadata_that_torch_reads(tmp_path, monkeypatch, reduced):
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    state = {"model": {"a": torch.ones(4, 5)}, "progress": {"step": 3, "losses": [torch.ones(2), 1.5]}}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path)
    expected, metadata = FileSystemReader(tmp_path).read_metadata(), CheckpointReader(tmp_path).read_metadata()
    for tensor in expected.state_dict_metadata.values():
        if hasattr(tensor, "properties"):  # PyTorch 2.15 records strides, too, which no load reads
            tensor.properties = TensorProperties(tensor.properties.dtype)
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.storage_data == expected.storage_data


def encode_name(module: str, name: str) -> bytes:
    words = [word.encode() for word in (module, name)]
    return b"".join(b"\x8c" + bytes([len(word)]) + word for word in words) + b"\x93"


RECORD = encode_name("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81"

HOSTILE: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "a call": ("'posix.system', which no checkpoint", lambda marker: pickle.dumps(Calls(f"touch {marker}"))),
    "a call in protocol 0": ("opcode", lambda marker: pickle.dumps(Calls(f"touch {marker}"), protocol=0)),
    "a call in protocol 2": ("opcode", lambda marker: pickle.dumps(Calls(f"touch {marker}"), protocol=2)),
    "an import": ("'this.s', which", lambda marker: b"\x80\x04" + encode_name("this", "s") + b"."),
    "a dotted name": (
        "'torch.os.system', which",
        lambda marker: b"\x80\x04" + encode_name("torch", "os.system") + b".",
    ),
    "a dotted known name": ("which", lambda marker: b"\x80\x04" + encode_name("torch", "Size.__class__") + b"."),
    "a name of two lines": (r"'torch.a\\nb', which", lambda marker: b"\x80\x04" + encode_name("torch", "a\nb") + b"."),
    "a name that is no name": ("", lambda marker: b"\x80\x04K\x01K\x02\x93."),
    "a call of a record": ("calls a value", lambda marker: b"\x80\x04" + RECORD + b")R."),
    "a call of a dtype": ("calls a value", lambda marker: b"\x80\x04" + encode_name("torch", "float32") + b")R."),
    "an object of text": ("calls a value", lambda marker: b"\x80\x04\x8c\x01x)\x81."),
    "a state for a name": ("state", lambda marker: b"\x80\x04" + encode_name("torch", "Size") + b"N}\x86b."),
    "a state for a list": ("state", lambda marker: b"\x80\x04]}b."),
    "a class in a state": ("", lambda marker: b"\x80\x04" + RECORD + b"}\x8c\x09__class__Nsb."),
    "a registered extension": ("opcode", lambda marker: b"\x80\x04\x82\x01."),
    "a persistent id": ("opcode", lambda marker: b"\x80\x04NQ."),
    "an object by an old opcode": ("opcode", lambda marker: b"\x80\x04(ios\nsystem\n."),
    "a memo of 2**31 entries": ("opcode", lambda marker: b"\x80\x04Nr\xff\xff\xff\x7f."),
    "bytes of 2**60": ("opcode", lambda marker: b"\x80\x05\x96" + (2**60).to_bytes(8, "little") + b"x."),
    "a frame of 2**60": ("", lambda marker: b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b"N."),
    "text of 2**31": ("", lambda marker: b"\x80\x04X\xff\xff\xff\x7fx."),
    "a nested tuple as a key": ("a key", lambda marker: b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns."),
    "a nested tuple among keys": ("a key", lambda marker: b"\x80\x04}()" + b"\x85" * 1_000_000 + b"Nu."),
    "nested lists": ("", lambda marker: b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."),
    "nested tuples as a size": ("", lambda marker: b"\x80\x04" + RECORD + b")" + b"\x85" * 1_000_000 + b"b."),
    "nothing": ("", lambda marker: b""),
    "no value": ("", lambda marker: b"\x80\x04."),
    "a mark without a begin": ("", lambda marker: b"\x80\x04t."),
}


@pytest.fixture
def few_gigabytes() -> Iterator[None]:
    """A limit on the address space, so that an allocation that a file asks for fails at once."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_metadata_is_one_line_and_is_not_run(hostile, tmp_path, few_gigabytes):
    message, make = HOSTILE[hostile]
    (tmp_path / METADATA_FILE).write_bytes(make(tmp_path / "ran"))
    sizes = torch.Size.__dict__.keys()
    with pytest.raises(CheckpointError, match=rf"cannot read .*\.metadata is damaged: .*{message}.*; choose") as error:
        load_state({"a": torch.empty(1)}, CheckpointReader(tmp_path))
    assert "\n" not in str(error.value)
    assert isinstance(error.value.__cause__, ValueError)  # no MemoryError
    assert not (tmp_path / "ran").exists()
    assert torch.Size.__dict__.keys() == sizes


def test_a_hostile_value_is_one_line_and_is_not_run(tmp_path):
    torch.distributed.checkpoint.save({"value": 0, "tensor": torch.ones(2)}, checkpoint_id=tmp_path)
    content = io.BytesIO()
    torch.save(Calls(f"touch {tmp_path / 'ran'}"), content)
    place = CheckpointReader(tmp_path).read_metadata().storage_data
    (value,) = (place for index, place in place.items() if index.fqn == "value")
    (tmp_path / value.relative_path).write_bytes(b"\0" * value.offset + content.getvalue())
    edit_metadata(tmp_path, lambda m: setattr(find_place(m, "value"), "length", len(content.getvalue())), only="value")
    with pytest.raises(CheckpointError, match="cannot load .*: value is not a tensor; choose") as error:
        load_state({"value": torch.ones(1)}, CheckpointReader(tmp_path))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def find_place(metadata: Any, name: str) -> Any:
    return next(place for index, place in metadata.storage_data.items() if index.fqn == name)


def edit_metadata(folder: Path, change: Callable[[Any], object], only: str = "") -> None:
    """Change the metadata, of `only` one name, as its author could."""
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    if only:
        metadata.state_dict_metadata = {only: metadata.state_dict_metadata[only]}
        metadata.storage_data = {index: place for index, place in metadata.storage_data.items() if index.fqn == only}
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def first_chunk(metadata: Any) -> Any:
    return metadata.state_dict_metadata["a"].chunks[0]


def replace_chunks(metadata: Any, *rows: tuple[int, int]) -> None:
    """Replace the one part by rows (first, count)."""
    metadata.state_dict_metadata["a"].chunks[:] = [
        ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([count, 5])) for first, count in rows
    ]


EDITS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "an absolute path": ("outside of", lambda m: setattr(find_place(m, "a"), "relative_path", "/etc/passwd")),
    "a path above": ("outside of", lambda m: setattr(find_place(m, "a"), "relative_path", "../x.distcp")),
    "no path": ("is missing", lambda m: setattr(find_place(m, "a"), "relative_path", "..")),
    "a link": ("outside of", lambda m: setattr(find_place(m, "a"), "relative_path", "link")),
    "a missing file": ("is missing", lambda m: setattr(find_place(m, "a"), "relative_path", "__7_0.distcp")),
    "a FIFO": ("is missing", lambda m: setattr(find_place(m, "a"), "relative_path", "fifo")),
    "beyond the end": ("or more", lambda m: setattr(find_place(m, "a"), "offset", 2**40)),
    "a negative offset": ("negative", lambda m: setattr(find_place(m, "a"), "offset", -1)),
    "a negative length": ("negative", lambda m: setattr(find_place(m, "a"), "length", -1)),
    "a path of another type": ("string", lambda m: setattr(find_place(m, "a"), "relative_path", 3)),
    "a compressed tensor": ("compressed", lambda m: setattr(find_place(m, "a"), "transform_descriptors", ["zstd"])),
    "a hole": ("the parts of a", lambda m: setattr(first_chunk(m), "sizes", torch.Size([1, 5]))),
    "a part twice": ("the parts of a", lambda m: replace_chunks(m, (0, 2), (0, 1), (1, 1))),
    "two holes and two overlaps": ("the parts of a", lambda m: replace_chunks(m, (0, 2), (1, 2))),
    "a part outside": ("the parts of a", lambda m: setattr(first_chunk(m), "offsets", torch.Size([1, 0]))),
    "no parts": ("the parts of a", lambda m: m.state_dict_metadata["a"].chunks.clear()),
    "a part many times": ("share", lambda m: m.state_dict_metadata["a"].chunks.extend([first_chunk(m)] * 1000)),
    "a size of many dims": ("at most 16", lambda m: setattr(m.state_dict_metadata["a"], "size", (1,) * 1000)),
    "another rank": ("", lambda m: setattr(first_chunk(m), "sizes", torch.Size([20]))),
    "a size of 2**70": ("negative", lambda m: setattr(m.state_dict_metadata["a"], "size", (2**70, 5))),
    "no dtype": ("dtype", lambda m: setattr(m.state_dict_metadata["a"].properties, "dtype", 3)),
    "no tensors": ("", lambda m: setattr(m, "state_dict_metadata", None)),
    "no places": ("", lambda m: setattr(m, "storage_data", None)),
    "a place for nothing": ("a part of a has no place", lambda m: m.storage_data.clear()),
    "text for a tensor": ("a part of a has", lambda m: m.state_dict_metadata.update(a=BytesStorageMetadata())),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_metadata_is_one_line(edit, tmp_path):
    message, change = EDITS[edit]
    torch.distributed.checkpoint.save({"a": torch.ones(4, 5)}, checkpoint_id=tmp_path)
    (tmp_path.parent / "x.distcp").write_bytes(b"x" * 10_000)
    (tmp_path / "link").symlink_to(tmp_path.parent / "x.distcp")
    os.mkfifo(tmp_path / "fifo")
    edit_metadata(tmp_path, change)
    with pytest.raises(CheckpointError, match=f"cannot (read|load) .*{message}.*; choose another checkpoint") as error:
        load_state({"a": torch.empty(4, 5)}, CheckpointReader(tmp_path))
    assert "\n" not in str(error.value)


def test_errors_that_cause_each_other_are_one_line():
    error, cause = RuntimeError("cannot save"), OSError(errno.ENOSPC, "No space left on device")
    error.__cause__, cause.__cause__ = cause, error
    assert describe_innermost_cause(error) == "No space left on device"


def test_parts_that_several_ranks_wrote_count_once(tmp_path):
    torch.distributed.checkpoint.save({"a": torch.ones(4, 5), "empty": torch.ones(0, 5)}, checkpoint_id=tmp_path)
    edit_metadata(tmp_path, lambda m: m.state_dict_metadata["a"].chunks.append(first_chunk(m)))
    state = {"a": torch.empty(4, 5), "empty": torch.empty(0, 5)}
    load_state(state, CheckpointReader(tmp_path))
    assert state["a"].eq(1).all()


@pytest.fixture
def config(tiny_config: TrainConfig) -> TrainConfig:
    return replace(tiny_config, checkpoint=Checkpoint(interval=1, keep_latest_k=0, async_mode="disabled"))


CALLS = 20
"""More than a save with retention and with steps to leave behind makes."""
FATAL = (checkpoint_folder, "write_manifest"), (checkpoint_folder, "flush_folder"), (Path, "rename"), (shutil, "rmtree")


def test_a_save_that_dies_after_its_tensors_leaves_no_fewer_checkpoints(config, monkeypatch):
    """Steps 3 and 4 give way to a new history from step 2 on. All checkpoints are complete, and of one history."""
    run = prepare_run(config)
    train(run)
    folder = run.checkpoints.folder
    original = folder.path.with_name("original")
    shutil.copytree(folder.path, original)
    died = 0
    for fatal in range(CALLS):
        shutil.rmtree(folder.path)
        shutil.copytree(original, folder.path)
        left = iter(range(fatal))

        def make_fatal(call: Callable[..., Any], left=left) -> Callable[..., Any]:
            def call_or_die(*arguments: Any) -> Any:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return call(*arguments)

            return call_or_die

        again = CheckpointFolder(folder.path)
        record = {**json.loads((folder.get_path(3) / "checkpoint.json").read_text()), "saved_at": "again"}
        with monkeypatch.context() as patch:
            for owner, name in FATAL:
                patch.setattr(owner, name, make_fatal(getattr(owner, name)))
            try:
                again.set_aside_after(2)
                again.make_partial(3)
                shutil.copytree(original / "step-00000003" / "bfloat16", again.get_partial_path(3) / "bfloat16")
                again.publish(3, record)
                again.prune(2)
            except KeyboardInterrupt:
                died += 1
        assert again.list_steps() in ([1, 2, 3, 4], [1, 2, 3], [1, 2], [2, 3]), fatal
        for step in again.list_steps():
            check_manifest(again.get_path(step))
        aside = {path.name for path in again.path.glob("*.aside")}
        is_new = 3 in again.list_steps() and read_record(again.get_path(3))["saved_at"] == "again"
        assert is_new or len(again.list_steps()) + len(aside) == 4
        again.remove_partials()
        names = {path.name for path in again.path.iterdir()}
        assert names == {f"step-{step:08d}" for step in again.list_steps()} | aside
    assert 6 <= died < CALLS


def test_a_checkpoint_that_cannot_be_read_back_removes_none(config, monkeypatch):
    train(prepare_run(config))
    checkpoint = replace(config.checkpoint, keep_latest_k=1, resume="must")
    again = prepare_run(replace(config, training=replace(config.training, steps=6), checkpoint=checkpoint))
    monkeypatch.setattr(pickle, "dump", lambda _, file: file.write(b"\x80"))
    with pytest.raises(CheckpointError, match="step 5 could not be written .*metadata is damaged.* step 4 is intact"):
        train(again)
    assert again.checkpoints.folder.list_steps() == [1, 2, 3, 4]

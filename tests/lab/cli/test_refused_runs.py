"""Tests that a run has one writer, and that a refused resume or export is one line; a resume leaves every byte."""

import json
import os
import pickle
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch.distributed.checkpoint.filesystem import FileSystemReader

from quaver.lab.cli import main
from quaver.lab.runs.checkpoint_folder import read_record
from quaver.lab.runs.file_names import PROVENANCE_FILE
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.runs.lock import HOLDER_FILE, LOCK_FILE, RunLock
from quaver.lab.runs.manifest import MANIFEST_FILE, write_manifest
from quaver.lab.trainer.train import train
from quaver.lab.trainer.training_run import prepare_run
from tests.command_line import TEXT, TINY
from tests.isolated import Forked
from tests.lab.trainer.runs import hash_files, run_to_end, with_settings

pytestmark = pytest.mark.timeout(300)
"""A reader that waits for a FIFO fails; the server of forks takes a minute to start on a busy machine."""


def train_run(parent: Path, name: str, steps: int) -> Path:
    """Train with delayed scaling and a checkpoint of each step, and return the run's folder."""
    argv = [*TINY, f"--training.steps={steps}", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"]
    argv += ["--lr_scheduler.schedule=constant", "--validation.freq=1", "--float8.recipe_name=delayed"]
    argv += ["--float8.delayed_history_len=3", f"--data={parent / 'text.txt'}"]
    assert main(["train", *argv, f"--job.dump_folder={parent}", f"--job.name={name}"]) == 0
    return parent / name


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "text.txt").write_text(TEXT)
    return train_run(folder, "run", 2)


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


STEP, FIRST = "checkpoint/step-00000002", "checkpoint/step-00000001"
SHARD, OTHER, RECORD = f"{STEP}/delayed/__0_0.distcp", f"{STEP}/delayed/.metadata", f"{STEP}/checkpoint.json"
SCALE = "model.layers.0.self_attn.q_proj.input.quant_scale"
RECIPE = "--float8.recipe_name=rowwise --float8.delayed_history_len=16"


def make_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def make_lock_folder(run: Path) -> None:
    (run / LOCK_FILE).unlink()
    (run / LOCK_FILE).mkdir()


def make_link(path: Path) -> None:
    path.rename(path.parents[2] / "x")
    path.symlink_to("../../x")


def edit_record(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a function that changes the record of a checkpoint, as its author could."""

    def edit(run: Path) -> None:
        record = json.loads((run / RECORD).read_text())
        change(record)
        (run / RECORD).write_text(json.dumps(record))
        write_manifest(run / STEP, {})

    return edit


def set_entry(name: str, value: object) -> Callable[[Path], None]:
    """Return a function that replaces an entry of a checkpoint's model, or removes it for None, as its author could."""

    def edit(run: Path) -> None:
        folder = run / STEP / "delayed"
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
        state: dict[str, Any] = {key: torch.empty(entry.size) for key, entry in metadata.items()}
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
        shutil.rmtree(folder)
        state = {key: entry for key, entry in (state | {name: value}).items() if entry is not None}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        write_manifest(run / STEP, {})

    return edit


class Calls:
    """Pickles as a call that makes a file in the run."""

    def __init__(self, run: Path) -> None:
        self.command = f"touch {run}/ran"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def write_code(run: Path) -> None:
    (run / OTHER).write_bytes(pickle.dumps(Calls(run)))
    write_manifest(run / STEP, {})


def edit_config(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().replace("\ndim = 32", "\ndim = 64"))


def write_garbage(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(b'{"step": 1, "ru\n' + metrics.read_bytes())


NOWHERE, UNREAD, MORE = lambda run: None, "choose another checkpoint", "--training.steps=3"
REFUSED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # what happens to the run, the flags, and the error
    "short": (lambda run: os.truncate(run / SHARD, 100), MORE, f"/{SHARD}' has 100 bytes, expected"),
    "missing": (
        lambda run: (run / SHARD).unlink(),
        MORE,
        f"/{SHARD}' is missing; {UNREAD} with --checkpoint.load_step 1",
    ),
    "extra": (lambda run: (run / STEP / "delayed/__1_0.distcp").touch(), MORE, "/delayed/__1_0.distcp' is not in"),
    "of another step": (lambda run: shutil.copy(run / SHARD.replace(STEP, FIRST), run / SHARD), MORE, f"/{SHARD}' "),
    "a link": (lambda run: make_link(run / SHARD), MORE, f"/{SHARD}' must be a file"),
    "edited config": (edit_config, MORE, "has model.dim = 32, and the config of the run 64; restore the config"),
    "edited record": (lambda run: (run / RECORD).open("a").write(" "), MORE, f"/{RECORD}' has"),
    "no manifest": (lambda run: (run / STEP / MANIFEST_FILE).unlink(), MORE, f"/{STEP}/{MANIFEST_FILE}"),
    "no progress": (edit_record(lambda r: r.pop("progress")), MORE, "progress is missing"),
    "another step": (edit_record(lambda r: r["progress"].update(step=1)), MORE, "progress.step 1, expected 2"),
    "code in metadata": (write_code, MORE, f"/{STEP}/delayed': .metadata is damaged"),
    "text for a weight": (set_entry("model.model.norm.weight", "x"), MORE, "model.model.norm.weight is not a tensor"),
    "text for a scale": (set_entry(f"float8.{SCALE}", "x"), MORE, f"float8.{SCALE} is not a tensor"),
    "text for a generator": (set_entry("rng.cpu_0", "x"), MORE, "rng.cpu_0 is not a tensor"),
    "no generator": (set_entry("rng.cpu_0", None), MORE, f"rng.cpu_0.; {UNREAD} with --checkpoint.load_step 1"),
    "inf as a scale": (set_entry(f"float8.{SCALE}", torch.tensor(torch.inf)), MORE, f"{SCALE}: expected a finite"),
    "metrics": (write_garbage, MORE, "line 1 of '{run}/metrics.jsonl' is not a record"),
    "a start": (
        lambda run: (run / PROVENANCE_FILE).write_text("{}\n"),
        MORE,
        f"line 1 of '{{run}}/{PROVENANCE_FILE}' is not a start",
    ),
    "a FIFO of starts": (
        lambda run: make_fifo(run / PROVENANCE_FILE),
        MORE,
        f"'{{run}}/{PROVENANCE_FILE}' is not a file",
    ),
    "a FIFO": (lambda run: make_fifo(run / "metrics.jsonl"), MORE, "'{run}/metrics.jsonl' is not a file"),
    "metrics as folder": (NOWHERE, "--checkpoint.folder=metrics.jsonl", "checkpoint.folder must be a folder"),
    "recipe": (NOWHERE, f"{RECIPE} --checkpoint.load_step=2", "rowwise"),
    "no float8": (NOWHERE, "--float8.enable_float8_linear=false --float8.recipe_name=tensorwise", "delayed"),
    "another model": (NOWHERE, "--job.compare=true --training.steps=8", "bfloat16"),
    "dim": (NOWHERE, "--model.dim=64", "model.dim must be 32"),
    "vocabulary": (NOWHERE, "--model.vocab_size=300", "model.vocab_size"),
    "no data there": (NOWHERE, "--data=missing.txt", "missing.txt"),
    "little data": (lambda run: (run / "a.txt").write_text("a"), "--data={run}/a.txt", "{run}/a.txt"),
    "a lock as folder": (make_lock_folder, MORE, ".writer.lock': Is a directory; remove it"),
    "no such step": (NOWHERE, "--checkpoint.load_step=3", "its steps are 1, 2"),
    "a config": (NOWHERE, "{run}/config.toml", "takes the config of the run folder"),
    "two resumes": (NOWHERE, "--resume={run}", "--resume must be given once"),
    "another run": (NOWHERE, "--job.dump_folder={run} --job.name=checkpoint", "--resume sets job.dump_folder"),
    "ranks": (NOWHERE, "--parallelism.data_parallel_shard_degree=2", "parallelism"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_resume_that_is_refused_is_one_line_and_leaves_every_byte(case, run, run_refused):
    spoil, flags, message = REFUSED[case]
    spoil(run)
    before = hash_files(run)
    line = run_refused("train", "--resume", run, *flags.format(run=run).split())
    assert message.format(run=run) in line
    assert hash_files(run) == before


RECORDS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an empty list of models": (lambda r: r.update(models=[]), "models: "),
    "a model that is a path": (lambda r: r.update(models=["../x"]), "models.0: "),
    "a negative step": (lambda r: r["progress"].update(step=-1), "progress.step: "),
    "inf": (lambda r: r["progress"].update(recent_losses={"a": [1e999]}), "progress.recent_losses.a.0: "),
    "negative skips": (lambda r: r["progress"].update(skipped_steps={"a": -1}), "skipped_steps.a"),
    "an unknown key of progress": (lambda r: r["progress"].update(extra=1), "progress.extra: "),
    "no ranks": (lambda r: r.update(world_size=0), "world_size: "),
    "another format": (lambda r: r.update(format=2), "has another format: format: "),
    "states of another version": (lambda r: r.update(optimizer_state_version=2), "optimizer_state_version: "),
    "no config": (lambda r: r.pop("config"), "config is missing"),
    "a list as config": (lambda r: r.update(config=[]), "config: "),
    "no section of a run": (lambda r: r["config"].pop("parallelism"), "config.parallelism is missing"),
    "no optimizer": (lambda r: r["config"].pop("optimizer"), "config.optimizer is missing"),
    "no layers": (lambda r: r.update(conversion_report={"layers": []}), "conversion_report.layers: "),
    "half a layer": (lambda r: r["conversion_report"]["layers"][0].pop("converted"), "layers.0.converted is missing"),
    "text for yes": (lambda r: r["conversion_report"]["layers"][0].update(converted="yes"), "layers.0.converted: "),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_cannot_be_is_refused_in_one_line(case, saved_run, tmp_path):
    change, message = RECORDS[case]
    record = json.loads((saved_run / RECORD).read_text())
    change(record)
    (tmp_path / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message) as error:
        read_record(tmp_path)
    assert "\n" not in str(error.value)


EXPORTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a setting of another type": (
        edit_record(lambda r: r["config"]["float8"].update(emulate=1)),
        "float8.emulate must",
    ),
    "a setting of no run": (edit_record(lambda r: r["config"]["float8"].update(x=1)), "does not know: x"),
    "another history": (edit_record(lambda r: r["config"]["float8"].update(delayed_history_len=5)), "Size mismatch"),
    "no report": (edit_record(lambda r: r.pop("conversion_report")), "conversion_report is missing"),
    "one layer": (
        edit_record(lambda r: r["conversion_report"].update(layers=r["conversion_report"]["layers"][:1])),
        "lis",
    ),
    "no recipe of a layer": (
        edit_record(lambda r: r["config"]["float8"].update(layer_recipes=["x=rowwise"])),
        "'x' is",
    ),
    "no such parallelism": (
        edit_record(lambda r: r["config"]["parallelism"].update(tensor_parallel_degree=0)),
        "must be",
    ),
    "inf as a scale": (set_entry(f"float8.{SCALE}", torch.tensor(torch.inf)), f"{SCALE}: expected a finite"),
    "no scale": (
        set_entry(f"float8.{SCALE}", torch.tensor(-1.0)),
        "scale of the input of model.layers.0.self_attn.q_p",
    ),
    "text for a scale": (set_entry(f"float8.{SCALE}", "x"), f"float8.{SCALE} is not a tensor"),
    "scales for a scale": (set_entry(f"float8.{SCALE}", torch.ones(2)), f"for float8.{SCALE}"),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_an_export_of_a_damaged_checkpoint_is_refused_in_one_line(case, run, run_refused):
    spoil, message = EXPORTS[case]
    spoil(run)
    assert message in run_refused("export", run, run.parent / "exported")
    assert not (run.parent / "exported").exists()


def test_refused_resumes_leave_a_run_that_resumes_to_the_bit(saved_run, run, run_refused):
    whole = train_run(saved_run.parent, "whole", 3)
    for flags in (f"{RECIPE} --checkpoint.load_step=1", "--model.dim=64", "--checkpoint.load_step=3"):
        run_refused("train", "--resume", run, *flags.split())
    spaced = shutil.copytree(run, run.with_name("my run"))
    line = run_refused("train", run / "config.toml", f"--job.dump_folder={run.parent}", "--job.name=my run")
    assert line.endswith(f"resume it with --resume '{spaced}'")
    assert main(["train", "--resume", str(run), MORE]) == 0
    keys = ("step", "loss", "grad_norm", "validation_loss")
    records, expected = (read_json_lines(path / "metrics.jsonl") for path in (run, whole))
    assert len(records) == len(expected)
    for key in keys:
        assert [record.get(key) for record in records] == [record.get(key) for record in expected]


def test_verify_off_loads_what_the_manifest_refuses_and_a_lock_that_is_a_fifo_holds_nothing(run, run_refused):
    (run / STEP / "delayed" / "notes.txt").write_text("x")
    assert "notes.txt' is not in manifest.json" in run_refused("train", "--resume", run, MORE)
    make_fifo(run / HOLDER_FILE)
    assert main(["train", "--resume", str(run), MORE, "--no-checkpoint.verify"]) == 0


def test_a_folder_in_a_run_is_no_run(run, run_refused):
    argv = [f"--job.dump_folder={run}", "--job.name=checkpoint", "--checkpoint.resume=must"]
    before = hash_files(run)
    assert "is not a run folder" in run_refused("train", run / "config.toml", *argv)
    assert hash_files(run) == before


def acquire_and_sleep(folder: Path) -> None:
    lock = RunLock(folder)
    lock.acquire()
    (folder.parent / "held").touch()
    time.sleep(600)


def test_a_run_holds_its_lock_until_it_has_ended_and_a_second_resume_changes_nothing(resumable_config, run_refused):
    first = prepare_run(resumable_config)
    before = hash_files(first.folder.path)
    resume = ("--resume", first.folder.path, "--checkpoint.resume=auto", "--training.steps=6")
    for argv in (resume, [first.folder.path / "config.toml"]):
        assert f"process {os.getpid()} on host {platform.node()}" in run_refused("train", *argv)
    assert hash_files(first.folder.path) == before
    train(first)
    assert first.checkpoints.folder.list_steps() == [2, 4]
    assert not (first.folder.path / HOLDER_FILE).exists()
    again = with_settings(resumable_config, training={"steps": 6}, checkpoint={"resume": "must"})
    assert run_to_end(again).began_at_step == 4


def test_a_run_takes_a_lock_that_another_start_only_checks(tmp_path):
    (lock := FileLock(tmp_path / LOCK_FILE, thread_local=False)).acquire()
    threading.Timer(0.1, lock.release).start()  # as the end of check_is_free in another process
    RunLock(tmp_path).acquire()


def test_the_lock_of_a_killed_run_is_taken_over_with_one_line(run, capsys):
    holder = Forked(acquire_and_sleep, run)
    while not (run.parent / "held").exists():
        assert holder.poll() is None, holder.communicate()
        time.sleep(0.01)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert json.loads((run / HOLDER_FILE).read_text())["pid"] == holder.pid
    capsys.readouterr()
    assert main(["train", "--resume", str(run), MORE]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"was killed: process {holder.pid} on host {platform.node()}" in line


@pytest.mark.parametrize("holder", ["", "[]", "{", '{"pid": 1}', '{"host": "elsewhere", "pid": 1}'])
def test_a_damaged_or_foreign_holder_file_does_not_keep_a_run_from_its_folder(tmp_path, capsys, holder):
    (tmp_path / HOLDER_FILE).write_text(holder)
    RunLock(tmp_path).acquire()
    assert "took over the lock" in capsys.readouterr().err

"""Saves and loads a run bit-exactly, on any number of ranks, with torch.distributed.checkpoint (DCP).

A checkpoint has the parameters, the optimizer's states, the float8 scales and the amax histories of each model; the
step and the position in the data, which determine the learning rate and the samples; and each rank's states of torch's
random number generators, which the trainer itself does not use while it trains.

[Note: background writes] `save` copies the state to host memory and returns. A thread of each rank then writes the
copy, and the first rank renames the folder once all ranks have written. The threads communicate through their own gloo
group, whose collectives do not interleave with the collectives of training. Each phase ends with an exchange of
errors: a save fails on every rank or on none. `has_error` polls it, `wait` raises it. The caller of `save` runs in a
block of `ignore_single_process_warning`.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from quaver.lab.runs.checkpoint_folder import RECORD_FORMAT, CheckpointFolder, RunProgress, read_record
from quaver.lab.runs.dcp import call_converting_errors, describe_innermost_cause, load_state
from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.manifest import CHECKPOINT_HINT, FileDigest, check_manifest, hash_files_of_rank
from quaver.lab.runs.model_state import (
    SaveableModel,
    collect_rng_states,
    collect_state,
    load_model,
    load_rng_states,
)
from quaver.lab.runs.ranks import Ranks
from quaver.lab.runs.safe_dcp import CheckpointReader, check_readable
from quaver.lab.settings import Checkpoint
from quaver.lab.settings.float8 import make_file_name
from quaver.optim.base import STATE_VERSION
from quaver.runtime.agreement import run_on_every_rank, run_on_first_rank
from quaver.runtime.errors import InputError, describe_error


class Checkpointer:
    """The checkpoints of one run, on one rank. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        folder: CheckpointFolder,
        config: Checkpoint,
        ranks: Ranks,
        device: torch.device,
        description: dict[str, Any],
    ) -> None:
        """Make the group of the writing threads: a collective.

        Args:
            description: JSON-serializable; goes into each checkpoint's record: config, versions, conversion report.
        """
        self.folder, self.config, self.ranks, self.description = folder, config, ranks, description
        self._device = device
        self._group = None if ranks.is_alone else dist.new_group(backend="gloo")
        self._pending: Future[None] | None = None
        self._saved_step: int | None = None

    def update_description(self, changes: dict[str, Any]) -> None:
        """Replace parts of the description in the records of later checkpoints."""
        self.description = self.description | changes

    @property
    def has_error(self) -> bool:
        """Whether a save in the background has failed, as far as this rank's thread knows; never blocks."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def is_due(self, step: int) -> bool:
        """Return whether checkpoint.interval asks for a checkpoint after step `step`."""
        return self.config.enable and step % self.config.interval == 0

    def save(self, progress: RunProgress, models: Sequence[SaveableModel]) -> None:
        """Save the run, unless this step is saved already or checkpoints are disabled; with async_mode in a thread.

        Raises CheckpointError on every rank if this save, or the one before it in the background, failed.
        """
        if progress.step == self._saved_step or not self.config.enable:
            return
        self.wait()
        state = {make_file_name(trained.name): collect_state(trained) for trained in models}
        state[make_file_name(models[0].name)]["rng"] = collect_rng_states(self.ranks.rank, self._device)
        record = {
            "format": RECORD_FORMAT,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "models": list(state),
            "world_size": self.ranks.world_size,
            "progress": asdict(progress),
            "optimizer_state_version": STATE_VERSION,
            **self.description,
        }
        is_async = self.config.async_mode != "disabled"
        if is_async:
            state = self._stage(progress.step, state)
        self._saved_step = progress.step
        self._pending = _run_in_thread(self._write, progress.step, state, record)
        if not is_async:
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on the disk. Raises CheckpointError on every rank if it failed."""
        error = self._pending.exception() if self._pending else None
        self._pending = None
        if error:
            self._saved_step = None
            raise error

    def close(self, *, waits: bool = True) -> str:
        """Finish a save in progress at the end of the run, or leave it partial at a second Ctrl-C (`waits=False`).

        Returns the error of a failed save, else "". Does not raise, so that the error that ended the run is reported.
        """
        error = self._pending.exception() if self._pending is not None and waits else None
        return str(error) if error else ""

    def load(
        self, step: int, models: Sequence[SaveableModel], restore_recipes: Callable[[RunProgress], None]
    ) -> tuple[RunProgress, list[str]]:
        """Load the checkpoint of `step` into `models`.

        Args:
            restore_recipes: gives the models the recipes that they had at this position, before they are loaded.
        Returns:
            The run's position, and notes for the user: what does not continue as it was saved.
        Raises:
            CheckpointError: on every rank, if it cannot be read or does not fit.
        """
        with self._list_other_steps_in_errors(step):
            path = self.folder.get_path(step)
            record = _read_record_on_every_rank(path, self.ranks, verifies=self.config.verify)
            progress = RunProgress(**record["progress"])
            if progress.step != step:
                problem = f"checkpoint.json has progress.step {progress.step}, expected {step}"
                raise CheckpointError(f"{str(path)!r} is damaged: {problem}; {CHECKPOINT_HINT}")
            names = [make_file_name(trained.name) for trained in models]
            if not set(names) <= set(record["models"]):
                saved, wanted = ", ".join(record["models"]), ", ".join(names)
                raise CheckpointError(
                    f"{str(path)!r} has the models {saved}, and this run trains {wanted}; "
                    "resume with the precision that was saved, or begin a new run with checkpoint.initial_load_path"
                )
            _check_same_model(path, record["config"]["model"], self.description["config"]["model"])
            restore_recipes(progress)
            for name, trained in zip(names, models, strict=True):
                load_model(trained, path / name, record["config"]["optimizer"]["name"])
            rng_note = load_rng_states(path / record["models"][0], record["world_size"], self.ranks, self._device)
            self._saved_step = step
            return progress, [note for note in (_describe_new_order(record, self.description), rng_note) if note]

    @contextmanager
    def _list_other_steps_in_errors(self, step: int) -> Iterator[None]:
        """Append to a CheckpointError that says `CHECKPOINT_HINT` how to choose: the run's steps other than `step`."""
        try:
            yield
        except CheckpointError as error:
            steps = [str(other) for other in self.folder.list_steps() if other != step]
            if not str(error).endswith(CHECKPOINT_HINT):
                raise
            option = f" with --checkpoint.load_step {' or '.join(steps)}" if steps else "; the run has no other"
            raise CheckpointError(f"{error}{option}") from error

    def _stage(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `state` in host memory: the next optimizer step changes the original.

        Raises CheckpointError on every rank.
        """
        options = StagingOptions(
            use_pinned_memory=self.config.async_mode == "async_with_pinned_mem",
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        staged: dict[str, Any] = {}

        def stage() -> None:
            staged.update(DefaultStager(options).stage(state))  # type: ignore[arg-type]

        try:
            self._run_on_every_rank(stage)
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be copied to host memory: {error}; "
                f"{_describe_newest(self.folder)}",
                is_write_error=True,
            ) from error
        return staged

    def _write(self, step: int, state: dict[str, Any], record: dict[str, Any]) -> None:
        """Write and publish the checkpoint of `step`, and remove old ones. The background thread calls it.

        Raises CheckpointError on every rank.
        """
        folder = self.folder
        try:
            self._run_on_first_rank(partial(folder.make_partial, step))
            digests: dict[str, FileDigest] = {}
            for name, values in state.items():
                writer = FileSystemWriter(folder.get_partial_path(step) / name)
                self._run_on_every_rank(partial(save, values, storage_writer=writer, process_group=self._group))
                digest = partial(hash_files_of_rank, folder.get_partial_path(step), name, self.ranks.rank)
                for rank_digests in self._run_on_every_rank(digest):
                    digests |= rank_digests
            self._run_on_first_rank(partial(check_readable, folder.get_partial_path(step), list(state)))
            self._run_on_first_rank(partial(folder.publish, step, record, digests))
        except Exception as error:
            if self.ranks.is_first:
                with suppress(OSError, InputError):  # the next save removes it
                    folder.remove_partials()
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {str(folder.path)!r}: "
                f"{describe_innermost_cause(error)}; {_describe_newest(folder)}",
                is_write_error=True,
            ) from error
        try:
            self._run_on_first_rank(partial(folder.prune, self.config.keep_latest_k))
        except Exception as error:
            raise CheckpointError(
                f"old checkpoints in {str(folder.path)!r} could not be removed: {describe_innermost_cause(error)}; "
                f"the checkpoint of step {step} is intact",
                is_write_error=True,
            ) from error

    def _run_on_first_rank(self, action: Callable[[], None]) -> None:
        run_on_first_rank(partial(call_converting_errors, action), self._group)

    def _run_on_every_rank(self, action: Callable[[], Any]) -> list[Any]:
        return run_on_every_rank(partial(call_converting_errors, action), self._group)


def load_weights(path: Path, models: Sequence[SaveableModel]) -> None:
    """Load the weights of the checkpoint at `path`. A model whose name it lacks gets the weights of its first model.

    Raises CheckpointError on every rank if they cannot be read or do not fit.
    """
    ranks, verifies = models[0].ranks, models[0].config.checkpoint.verify
    saved_names = _read_record_on_every_rank(path, ranks, verifies=verifies)["models"]
    for trained in models:
        state = {"model": get_model_state_dict(trained.model)}
        name = make_file_name(trained.name)
        load_state(state, CheckpointReader(path / (name if name in saved_names else saved_names[0])))
        set_model_state_dict(trained.model, state["model"])
        trained.precompute_scales()


def _run_in_thread(write: Callable[..., None], *args: Any) -> "Future[None]":
    """Run `write` in a thread, and return its future.

    dcp.async_save does not fit: it starts a thread per model, whose collectives would interleave in the group; it does
    not publish; and the interpreter joins its threads, so that a second Ctrl-C would not end the process.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            write(*args)
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it in the main thread
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _read_record_on_every_rank(path: Path, ranks: Ranks, *, verifies: bool) -> dict[str, Any]:
    """Return the record of the checkpoint at `path`; with `verifies`, first compare its files with the manifest.

    Raises CheckpointError on every rank.
    """
    record: dict[str, Any] = {}

    def read() -> None:
        try:
            record.update(read_record(path))
            if verifies:
                check_manifest(path, ranks.rank, ranks.world_size)
        except (OSError, InputError) as error:
            raise CheckpointError(str(error)) from error

    run_on_every_rank(read)
    return record


def _describe_newest(folder: CheckpointFolder) -> str:
    """Return which checkpoint a failed save left intact. Does not raise, so that the error of the save is reported."""
    try:
        steps = folder.list_steps()
    except (OSError, InputError) as error:
        return f"the earlier ones cannot be listed: {describe_error(error)}"
    return f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no earlier one"


def _check_same_model(path: Path, saved: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise CheckpointError if a setting of the model differs, as after an edit of the run's config.toml."""
    for name, value in json.loads(json.dumps(config)).items():
        if name in saved and saved[name] != value:
            raise CheckpointError(
                f"{str(path)!r} has model.{name} = {saved[name]!r}, and the config of the run {value!r}; restore the "
                "config, or start a new run"
            )


def _describe_new_order(saved: dict[str, Any], current: dict[str, Any]) -> str:
    """Return how the order of the sequences differs from the one in which `saved` counted them, or ""."""
    changes = [
        f"{section}.{name} {saved['config'][section][name]} -> {current['config'][section][name]}"
        for section, name in (("training", "seq_len"), ("training", "seed"))
        if saved["config"][section][name] != current["config"][section][name]
    ]
    if saved["data"]["sha256"] != current["data"]["sha256"]:
        changes.append("other tokens")
    if not changes:
        return ""
    consumed = saved["progress"]["consumed_sequences"]
    return (
        f"the order of the data is new ({', '.join(changes)}): the run begins after its first {consumed:,} sequences, "
        "and may read some text again and some never"
    )

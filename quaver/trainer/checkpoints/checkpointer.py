"""Saves and loads what a run is, to the bit and for any number of ranks, with torch.distributed.checkpoint.

Of each model: parameters, AdamW's moments, kept float8 scales and histories. Of the run: the step and the position in
the data. The learning rate and the samples of a step follow from these. Of each rank: the states of torch's random
number generators, which the trainer itself does not draw from while it trains.

[Note: who writes when] `save` copies the state and returns; a thread of each rank then writes it, and the first rank
gives the folder its name once all have. The threads talk through a gloo group of their own, so that their collectives
do not mix with those of training. A failure is known to every rank's thread; `failed` tells of it, `wait` raises it.
"""

import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from quaver.trainer.checkpoints.folder import FORMAT, CheckpointFolder, read_metadata, read_record
from quaver.trainer.checkpoints.single_process import first_line
from quaver.trainer.config import Checkpoint
from quaver.trainer.errors import CheckpointError
from quaver.trainer.ranks import Ranks
from quaver.trainer.trained_model import TrainedModel


@dataclass
class Progress:
    """How far a run is: everything about it that is neither a tensor nor a setting."""

    step: int = 0
    """Optimizer steps done."""
    consumed_sequences: int = 0
    """Sequences of the data taken, over all ranks."""
    skipped_steps: dict[str, int] = field(default_factory=dict)
    """By model, how many of them were not finite and changed nothing."""
    recent_losses: dict[str, list[float]] = field(default_factory=dict)
    """By model, what a new loss is compared with to tell a spike."""


class Checkpointer:
    """The checkpoints of one run, on one rank; every rank calls the same methods in the same order."""

    def __init__(
        self, folder: CheckpointFolder, config: Checkpoint, ranks: Ranks, device: torch.device, about: dict[str, Any]
    ) -> None:
        """Make the group that the writing threads talk through: a collective.

        Args:
            about: JSON-able; goes into each checkpoint's record: config, versions, command, conversion report.
        """
        self.folder, self.config, self.ranks, self.about = folder, config, ranks, about
        self._device = device
        if ranks.is_alone:  # torch says each time that it saves one process's state; that is what is wanted
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        self._group = None if ranks.is_alone else dist.new_group(backend="gloo")
        self._stager: DefaultStager | None = None
        self._pending: Future[str] | None = None
        self._saved_step = -1
        self._resumed_step: int | None = None

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed, as far as this rank's thread knows; never blocks."""
        return self._pending is not None and self._pending.done() and bool(_outcome(self._pending))

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint follows step `step`, whatever else happens."""
        return self.config.enable and step % self.config.interval == 0

    def save(self, progress: Progress, twins: Sequence[TrainedModel]) -> None:
        """Save the run as it is now, unless that is done already or not wanted; with async_mode in the background.

        Raises:
            CheckpointError: on every rank, if this save, or the one before in the background, failed.
        """
        if progress.step == self._saved_step or not self.config.enable:
            return
        self.wait()
        state = {twin.name: _state_of(twin) for twin in twins}
        state[twins[0].name]["rng"] = _rng_states(self.ranks.rank, self._device)
        record = {
            "format": FORMAT,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "models": list(state),
            "world_size": self.ranks.world_size,
            "progress": asdict(progress),
            **self.about,
        }
        is_async = self.config.async_mode != "disabled"
        if is_async:
            state = self._stage(state)
        self._saved_step = progress.step
        self._pending = self._begin_writing(progress.step, state, record)
        if not is_async:
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on the disk. Raises CheckpointError on every rank if it failed."""
        if self._pending is None:
            return
        error = _outcome(self._pending)
        self._pending = None
        if error:
            self._saved_step = -1
            raise CheckpointError(error)

    def close(self, *, waits: bool = True) -> None:
        """End with the run; a save in progress is finished, or abandoned where the user is in a hurry."""
        if self._pending is not None and waits:
            _outcome(self._pending)
        if self._stager is not None:
            self._stager.close()

    def load(self, step: int, twins: Sequence[TrainedModel]) -> Progress:
        """Load the checkpoint of `step` into `twins`, and return how far the run was.

        Raises:
            CheckpointError: on every rank, if it cannot be read or does not fit.
        """
        path = self.folder.complete(step)
        try:
            record = read_record(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(str(error)) from error
        names = [twin.name for twin in twins]
        if not set(names) <= set(record["models"]):
            raise CheckpointError(
                f"{str(path)!r} has the models {', '.join(record['models'])}, and this run trains {', '.join(names)}; "
                "resume with the precision that was saved, or begin a new run with checkpoint.initial_load_path"
            )
        for twin in twins:
            _load_twin(twin, path / twin.name)
        if record["world_size"] == self.ranks.world_size:
            _load_rng(path / record["models"][0], self.ranks.rank, self._device)
        self._saved_step = self._resumed_step = step
        return Progress(**record["progress"])

    def _stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `state` in host memory."""
        pinned = self.config.async_mode == "async_with_pinned_mem"
        stager = self._stager or DefaultStager(StagingOptions(pinned, False, False, False))
        staged: dict[str, Any] = stager.stage(state)  # type: ignore[assignment]
        if pinned:  # its buffers are used again
            self._stager = stager
        return staged

    def _begin_writing(self, step: int, state: Mapping[str, Any], record: dict[str, Any]) -> "Future[str]":
        """Write in a thread, which does not keep the process from ending as those of an executor do."""
        written: Future[str] = Future()

        def write() -> None:
            try:
                written.set_result(self._write(step, state, record))
            except BaseException as error:  # noqa: BLE001 - it is the main thread's, which `wait` raises it in
                written.set_exception(error)

        threading.Thread(target=write, name="checkpoint", daemon=True).start()
        return written

    def _write(self, step: int, state: Mapping[str, Any], record: dict[str, Any]) -> str:
        """Write and publish; return why it failed, the same on every rank, or the empty string. Runs in the thread."""
        error = self._agree(self._begin(step))
        for name, values in state.items():
            error = error or self._agree(self._write_model(values, self.folder.partial(step) / name))
        error = error or self._agree(self._publish(step, record))
        if not error:
            return ""
        if self.ranks.is_first:
            with suppress(OSError):  # what is left over is not complete, and the next save begins by removing it
                self.folder.remove_partials()
        good = self.folder.steps()
        last = f"the checkpoint of step {good[-1]} is intact" if good else "there is no earlier one"
        return f"the checkpoint of step {step} could not be written to {str(self.folder.path)!r}: {error}; {last}"

    def _begin(self, step: int) -> str:
        if not self.ranks.is_first:
            return ""
        try:
            self.folder.begin(step)
            if self._resumed_step is not None:
                self.folder.remove_after(self._resumed_step)
                self._resumed_step = None
        except OSError as error:
            return _reason(error)
        return ""

    def _write_model(self, state: Any, path: Path) -> str:
        try:
            save(
                state,
                storage_writer=FileSystemWriter(path),
                process_group=self._group,
                no_dist=self.ranks.is_alone,
            )
        except CheckpointException as error:
            return "; ".join(_reason(failure[0]) for failure in error.failures.values())
        except (OSError, RuntimeError) as error:  # alone, as it comes; torch's own writer raises RuntimeErrors
            return _reason(error)
        return ""

    def _publish(self, step: int, record: dict[str, Any]) -> str:
        if not self.ranks.is_first:
            return ""
        try:
            self.folder.publish(step, record)
            self.folder.prune(self.config.keep_latest_k)
        except OSError as error:
            return _reason(error)
        return ""

    def _agree(self, error: str) -> str:
        """Return the first rank's error that is not empty, on every rank."""
        if self._group is None:
            return error
        errors: list[str] = [""] * self.ranks.world_size
        dist.all_gather_object(errors, error, group=self._group)
        return next(filter(None, errors), "")


def load_weights(path: Path, twins: Sequence[TrainedModel]) -> None:
    """Give every twin the weights of the checkpoint at `path`: those of its name there, or of the first model.

    Raises:
        CheckpointError: on every rank, if they cannot be read or do not fit.
    """
    try:
        models = read_record(path)["models"]
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    for twin in twins:
        name = twin.name if twin.name in models else models[0]
        state = {"model": get_model_state_dict(twin.model)}
        _load(state, path / name)
        set_model_state_dict(twin.model, state["model"])
        twin.was_loaded()


def saved_keys(path: Path) -> frozenset[str]:
    """Return the names of what the torch.distributed.checkpoint folder `path` has."""
    return frozenset(read_metadata(path).state_dict_metadata)


def _state_of(twin: TrainedModel) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": get_model_state_dict(twin.model),
        "optimizer": get_optimizer_state_dict(twin.model, twin.optimizer),
    }
    if twin.scaling:
        state["float8"] = twin.scaling.state_dict()
    return state


def _load_twin(twin: TrainedModel, path: Path) -> None:
    state = _state_of(twin)
    if twin.scaling and not any(key.startswith("float8.") for key in saved_keys(path)):
        del state["float8"]  # saved by a recipe that keeps no scales: they start as in a new model
    _load(state, path)
    set_model_state_dict(twin.model, state["model"])
    set_optimizer_state_dict(twin.model, twin.optimizer, state["optimizer"])
    if "float8" in state:
        twin.scaling.load_state_dict(state["float8"])
    twin.was_loaded()


def _load(state: dict[str, Any], path: Path) -> None:
    try:
        load(state, storage_reader=FileSystemReader(path))
    except CheckpointException as error:
        reasons = "; ".join(sorted({_reason(failure[0]) for failure in error.failures.values()}))
        raise CheckpointError(f"cannot load {str(path)!r}: {reasons}") from error
    except (OSError, ValueError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"cannot load {str(path)!r}: {_reason(error)}") from error


def _rng_states(rank: int, device: torch.device) -> dict[str, Tensor]:
    states = {f"cpu_{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"cuda_{rank}"] = torch.cuda.get_rng_state(device)
    return states


def _load_rng(path: Path, rank: int, device: torch.device) -> None:
    state = {"rng": _rng_states(rank, device)}
    if {f"rng.{key}" for key in state["rng"]} <= saved_keys(path):  # of a run that moves to CUDA, CUDA's is missing
        _load(state, path)
        torch.set_rng_state(state["rng"][f"cpu_{rank}"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(state["rng"][f"cuda_{rank}"], device)


def _outcome(pending: "Future[str]") -> str:
    """What the thread returned, once it has; what it did not expect is an error of the run too."""
    unexpected = pending.exception()
    return f"the checkpoint could not be written: {_reason(unexpected)}" if unexpected else pending.result()


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause of `error`: torch wraps what the system said."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)

"""A run that is ready to train: its parallelized models with their weights, its data, folder and checkpoints."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quaver.lab.data import TokenData
from quaver.lab.model.parallelize import make_mesh
from quaver.lab.runs.checkpoint import Checkpointer, load_weights
from quaver.lab.runs.checkpoint_folder import RunProgress
from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.file_names import CONVERSION_FILE, DATA_FILE
from quaver.lab.runs.ranks import Ranks
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.lab.trainer.process import Watchdog
from quaver.lab.trainer.recipe_change import change_recipes
from quaver.lab.trainer.run_setup import RunSetup, set_up_run
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.roofline.device_specs import get_peak_flops
from quaver.runtime.agreement import run_on_every_rank
from quaver.runtime.errors import InputError

SLOW_TASK_FACTOR = 10
"""The watchdog's factor for the first step and the first validation, which may compile, and for checkpoints."""


@dataclass
class TrainingRun:
    """The state of a run: its models, data, folder and position. Only the first rank writes the folder."""

    config: TrainConfig
    ranks: Ranks
    dims: ParallelDims
    device: torch.device
    data: TokenData
    models: list[TrainedModel]
    """The float8 model, then its bfloat16 baseline, with the weights and recipes of `progress`."""
    folder: RunFolder
    checkpoints: Checkpointer
    progress: RunProgress
    notes: list[str]
    """Notes for the user: what a resumed run does differently from the saved one, and slow validation."""

    def __post_init__(self) -> None:
        self.began_at_step = self.progress.step
        self.peak_flops = get_peak_flops(self.device)

    @property
    def has_ended(self) -> bool:
        """Whether the run is after its last step."""
        return self.progress.step >= self.config.training.steps

    def watch_for_hangs(self, task: str, *, is_slow: bool = False) -> AbstractContextManager[None]:
        """Write the stacks of this process if the block takes longer than comm.watchdog_seconds.

        Args:
            task: what the block does, for the line on stderr.
            is_slow: whether it may take `SLOW_TASK_FACTOR` times as long.
        """
        watchdog = Watchdog(self.folder.get_stacks_path(self.ranks.rank))
        seconds = self.config.comm.watchdog_seconds * (SLOW_TASK_FACTOR if is_slow else 1)
        return watchdog.watch(seconds, f"{task} on rank {self.ranks.rank}")


def prepare_run(config: TrainConfig) -> TrainingRun:
    """Set up and build the run of a single process.

    Raises InputError, OSError, NotImplementedError, MissingDeviceError, CheckpointError or NotWrittenError, for the
    reasons that `set_up_run`, `RunFolder.open` and `build_run` name.
    """
    setup = set_up_run(config, Ranks())
    folder = RunFolder.open(setup.config)
    try:
        return build_run(setup, folder)
    except BaseException:
        folder.release()
        raise


def build_run(setup: RunSetup, locked_folder: RunFolder | None) -> TrainingRun:
    """Parallelize the models of `setup`, initialize them or load a checkpoint, and begin the run folder.

    The initial weights are the same for any number of ranks. The folder of a run that has ended does not change. Every
    rank must call this, with a process group.

    Args:
        locked_folder: the run folder on the first rank, which holds its lock; None on the others.
    Raises:
        CheckpointError: on every rank, if a checkpoint cannot be read or does not fit; the run folder is unchanged.
        InputError: on every rank, if the metrics or the provenance are damaged; the run folder is unchanged.
        NotWrittenError: on every rank, if the run folder cannot be written.
    """
    config, ranks = setup.config, setup.ranks
    location = (str(locked_folder.path), locked_folder.resume_step) if locked_folder else None
    path, resume_step = ranks.all_gather_objects(location)[0]
    folder = locked_folder or RunFolder(Path(path), resume_step)
    loads_weights = resume_step is not None or bool(config.checkpoint.initial_load_path)
    torch.manual_seed(config.training.seed)  # nothing here draws from it, but a dropout layer would
    mesh = make_mesh(setup.dims, setup.device.type)
    models = [
        TrainedModel.build(name, model, config, setup.device, ranks, mesh, init_weights=not loads_weights)
        for name, model in setup.models.by_name.items()
    ]
    description = setup.to_record()
    checkpoints = Checkpointer(
        folder.get_checkpoint_folder(config.checkpoint), config.checkpoint, ranks, setup.device, description
    )
    progress = RunProgress()
    notes: list[str] = []
    if resume_step is not None:
        progress, notes = checkpoints.load(resume_step, models, partial(_restore_fallbacks, models, checkpoints))
        if progress.fallbacks and not config.float8.enable_float8_linear:
            notes.extend(
                f"the run has no float8, so {layer} has no recipe to fall back to" for layer in progress.fallbacks
            )
    elif loads_weights:
        load_weights(config.checkpoint.initial_weights, models)
    if config.validation.steps % setup.dims.data_parallel_degree:
        degree = f"a multiple of {setup.dims.data_parallel_degree} data-parallel ranks"
        notes.append(
            f"each rank validates on all batches: validation.steps = {config.validation.steps} is not {degree}"
        )
    run = TrainingRun(config, ranks, setup.dims, setup.device, setup.data, models, folder, checkpoints, progress, notes)
    if not run.has_ended:
        run.notes.extend(run_on_every_rank(partial(begin_folder, locked_folder, config, description))[0])
    return run


def begin_folder(folder: RunFolder | None, config: TrainConfig, description: dict[str, Any]) -> list[str]:
    """Write the files about this start of the run, on the rank that has the folder; see [Note: refusals write nothing].

    The conversion report of an earlier start stays, with the backends that ran, until the first step of this one.

    Returns:
        Notes for the user, from `RunFolder.begin`.
    Raises:
        InputError: the metrics or the provenance are damaged.
        NotWrittenError: a file cannot be written.
    """
    if folder is None:
        return []
    notes = folder.begin(config)
    folder.add_provenance(description["provenance"])
    folder.write_json(DATA_FILE, description["data"])
    if description["conversion_report"] and folder.resume_step is None:
        folder.write_json(CONVERSION_FILE, description["conversion_report"])
    return notes


def _restore_fallbacks(models: list[TrainedModel], checkpoints: Checkpointer, progress: RunProgress) -> None:
    """Give the float8 model the recipes that alarms had set when the checkpoint was saved."""
    if not progress.fallbacks or not models[0].config.float8.enable_float8_linear:
        return
    try:
        checkpoints.update_description(change_recipes(models[0], progress.fallbacks))
    except InputError as error:
        raise CheckpointError(f"the run fell back in {', '.join(progress.fallbacks)}: {error}") from error

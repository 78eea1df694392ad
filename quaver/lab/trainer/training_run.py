"""A run that is ready to train: its parallelized models with their weights, its data, folder and checkpoints."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from quaver.lab.data import TokenData
from quaver.lab.runs.checkpoint import Checkpointer, load_weights
from quaver.lab.runs.checkpoint_folder import Progress
from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.lab.trainer.alarms import fall_back
from quaver.lab.trainer.parallelize import make_mesh
from quaver.lab.trainer.run_setup import RunSetup, begin_folder, open_folder, set_up_run
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.roofline.device_specs import PeakFlops, peak_flops
from quaver.runtime.ranks import Ranks


@dataclass
class TrainingRun:
    """The state of a run: its models (the float8 model, then its bfloat16 baseline), data, folder and position."""

    config: TrainConfig
    ranks: Ranks
    dims: ParallelDims
    device: torch.device
    peak: PeakFlops
    flops_per_token: dict[str, dict[str, int]]
    data: TokenData
    models: list[TrainedModel]
    folder: RunFolder | None
    """The run folder on the first rank, which writes it; None on the others."""
    paths: RunFolder
    """The run folder on every rank, for the files that every rank writes."""
    checkpoints: Checkpointer
    progress: Progress = field(default_factory=Progress)
    began_at_step: int = 0


def prepare(config: TrainConfig) -> TrainingRun:
    """Set up and build the run of a single process. Raises what `set_up_run`, `open_folder` and `build` raise."""
    setup = set_up_run(config, Ranks())
    open_folder(setup)
    try:
        return build(setup)
    except BaseException:
        setup.release()
        raise


def build(setup: RunSetup) -> TrainingRun:
    """Parallelize the models of `setup`, initialize them or load a checkpoint, and begin the run folder.

    The initial weights are the same for any number of ranks. Every rank must call this, with a process group.

    Raises:
        CheckpointError: on every rank, if a checkpoint cannot be read or does not fit; the run folder is unchanged.
        OutputError: on every rank, if the run folder cannot be written.
    """
    config, ranks = setup.config, setup.ranks
    own = (str(setup.folder.path), setup.folder.resume_step) if setup.folder else None
    path, resume_step = ranks.gather(own)[0]
    loads_weights = resume_step is not None or bool(config.checkpoint.initial_load_path)
    torch.manual_seed(config.training.seed)  # nothing here draws from it, but a dropout layer would
    mesh = make_mesh(setup.dims, setup.device.type)
    models = [
        TrainedModel.build(name, model, config, setup.device, ranks, mesh, initializes=not loads_weights)
        for name, model in setup.models.by_name.items()
    ]
    paths = RunFolder(Path(path), resume_step)
    checkpoints = Checkpointer(
        paths.checkpoints(config.checkpoint), config.checkpoint, ranks, setup.device, setup.about
    )
    progress = Progress()
    if resume_step is not None:
        progress = checkpoints.load(resume_step, models, partial(_fall_back_again, models, checkpoints))
    elif loads_weights:
        load_weights(config.checkpoint.initial_weights, models)
    begin_folder(setup)
    return TrainingRun(
        config,
        ranks,
        setup.dims,
        setup.device,
        peak_flops(setup.device),
        {model.name: model.flops_per_token() for model in models},
        setup.data,
        models,
        setup.folder,
        paths,
        checkpoints,
        progress,
        progress.step,
    )


def _fall_back_again(models: list[TrainedModel], checkpoints: Checkpointer, progress: Progress) -> None:
    """Give the float8 model the recipes that alarms had set when the checkpoint was saved."""
    if not progress.fallbacks or not models[0].config.float8.enable_float8_linear:
        return
    try:
        fall_back(models[0], checkpoints, progress.fallbacks)
    except ValueError as error:
        raise CheckpointError(f"the run fell back in {', '.join(progress.fallbacks)}: {error}") from error

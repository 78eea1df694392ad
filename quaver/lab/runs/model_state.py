"""Collects and loads the states that a checkpoint saves: of a model in training, and of torch's random generators."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from quaver.conversion.persistent_scales import Float8ScalingState
from quaver.lab.runs.dcp import load_state, read_metadata
from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.manifest import CHECKPOINT_HINT
from quaver.lab.runs.ranks import Ranks
from quaver.lab.runs.safe_dcp import CheckpointReader
from quaver.lab.settings import TrainConfig
from quaver.optim import copy_states
from quaver.runtime.agreement import run_on_every_rank
from quaver.runtime.devices import is_cuda_device

_MAX_HISTORY_LEN = 1 << 16
"""The longest history of amaxes that is loaded, so that a damaged file cannot ask for any amount of memory."""


class SaveableModel(Protocol):
    """The parts of a model in training that a checkpoint saves and loads."""

    @property
    def name(self) -> str:
        """Its label; `make_file_name` converts it to the name of its folder in a checkpoint."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def scaling(self) -> Float8ScalingState: ...

    @property
    def config(self) -> TrainConfig: ...

    @property
    def ranks(self) -> Ranks: ...

    def make_optimizer_for_loading(self, name: str) -> torch.optim.Optimizer:
        """Return the optimizer `name` of `model`, for states that a run with that optimizer saved."""

    def precompute_scales(self) -> None:
        """Compute the scales of weights that were just loaded."""


def collect_state(trained: SaveableModel, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return the parameters, the states of `optimizer` or else the model's own, and the persistent scales.

    The options of the optimizer, such as its weight decay, are left out: they are settings, which a resume may change.
    """
    state: dict[str, Any] = {
        "model": get_model_state_dict(trained.model),
        "optimizer": {"state": get_optimizer_state_dict(trained.model, optimizer or trained.optimizer)["state"]},
    }
    if trained.scaling:
        state["float8"] = trained.scaling.state_dict()
    return state


def load_model(trained: SaveableModel, path: Path, saved_optimizer: str) -> None:
    """Load a model and its optimizer, and convert states that another optimizer saved."""
    optimizer = trained.optimizer
    if saved_optimizer != trained.config.optimizer.name:
        optimizer = trained.make_optimizer_for_loading(saved_optimizer)
    state, reader = collect_state(trained, optimizer), CheckpointReader(path)
    if trained.scaling and not resize_histories(state["float8"], read_metadata(reader), path):
        del state["float8"]  # a recipe with dynamic scaling saved it: the scales begin as in a new model
    load_state(state, reader)
    set_model_state_dict(trained.model, state["model"])
    own_groups = get_optimizer_state_dict(trained.model, optimizer)["param_groups"]
    set_optimizer_state_dict(trained.model, optimizer, {**state["optimizer"], "param_groups": own_groups})
    if optimizer is not trained.optimizer:
        try:
            copy_states(trained.optimizer, optimizer)
        except ValueError as error:
            raise CheckpointError(f"{str(path)!r} was saved by optimizer.name = {saved_optimizer}: {error}") from error
    if "float8" in state:
        set_scales(trained.scaling, state["float8"], path)
    trained.precompute_scales()


def resize_histories(scales: dict[str, Tensor], metadata: Metadata, path: Path) -> bool:
    """Replace histories by empty ones of the saved lengths, and return whether `metadata`, of `path`, has scales.

    `Float8ScalingState.load_state_dict` then takes the newest entries, while DCP loads only into the saved shape.

    Raises:
        CheckpointError: a saved shape is neither the tensor's nor a history's.
    """
    saved = {key: entry for key, entry in metadata.state_dict_metadata.items() if key.startswith("float8.")}
    for name, tensor in scales.items():
        entry = saved.get(f"float8.{name}")
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            if len(entry.size) != tensor.dim() or entry.size.numel() > _MAX_HISTORY_LEN:
                expected = f"at most {_MAX_HISTORY_LEN:,} amaxes" if tensor.dim() else "one number"
                raise CheckpointError(
                    f"cannot load {str(path)!r}: {name} must be {expected}, got a tensor of {list(entry.size)}; "
                    + CHECKPOINT_HINT
                )
            scales[name] = tensor.new_zeros(entry.size)
    return bool(saved)


def set_scales(scaling: Float8ScalingState, scales: dict[str, Tensor], path: Path) -> None:
    """Give the linears `scales`, which were read from `path`.

    A collective. Raises CheckpointError on every rank if a scale is inf or NaN, or an amax is NaN, on any rank.
    """

    def load() -> None:
        try:
            scaling.load_state_dict(scales)
        except ValueError as error:
            raise CheckpointError(f"cannot load {str(path)!r}: {error}") from error

    run_on_every_rank(load)


def collect_rng_states(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators for the CPU and, on a GPU, for `device`."""
    states = {f"cpu_{rank}": torch.get_rng_state()}
    if is_cuda_device(device):
        states[f"cuda_{rank}"] = torch.cuda.get_rng_state(device)
    return states


def load_rng_states(path: Path, saved_world_size: int, ranks: Ranks, device: torch.device) -> str:
    """Load the states of torch's generators on this rank, and return a note on states that were not saved, or ""."""
    if saved_world_size != ranks.world_size:
        other_states = f"the states of {saved_world_size} ranks"
        return f"random number generators begin with training.seed: the checkpoint has {other_states}"
    reader = CheckpointReader(path)
    saved = read_metadata(reader).state_dict_metadata
    states = collect_rng_states(ranks.rank, device)
    cpu = f"cpu_{ranks.rank}"
    loaded = {name: state for name, state in states.items() if name == cpu or f"rng.{name}" in saved}
    load_state({"rng": loaded}, reader)
    torch.set_rng_state(loaded[cpu])
    if not is_cuda_device(device):
        return ""
    if loaded.keys() != states.keys():
        return "the CUDA random number generator begins with training.seed: the checkpoint is from a CPU"
    torch.cuda.set_rng_state(loaded[f"cuda_{ranks.rank}"], device)
    return ""

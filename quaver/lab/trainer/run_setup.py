"""Sets up a run before it trains: the checked config, parallel dims, device, data and models.

Bad input is refused here, before a file is written or a process group is made.
"""

import json
import math
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quaver.conversion.report import ConversionReport
from quaver.lab.data import TokenData, load_data
from quaver.lab.model.float8 import convert_model
from quaver.lab.model.llama import Llama, make_meta_llama
from quaver.lab.model.parallelize import check_tensor_parallel, open_fake_mesh, parallelize
from quaver.lab.runs.checkpoint_folder import read_record
from quaver.lab.runs.provenance import collect_provenance
from quaver.lab.runs.ranks import Ranks
from quaver.lab.runs.resume import will_resume
from quaver.lab.settings import TrainConfig, require
from quaver.lab.settings.model import SHAPE_SETTINGS
from quaver.lab.settings.parallel_dims import ParallelDims, resolve_parallel_dims
from quaver.lab.trainer.display import ShownProgress
from quaver.lab.trainer.loggers import check_loggers
from quaver.runtime.devices import is_cuda_device, resolve_device


@dataclass
class Models:
    """The models of a run, on the meta device, by name: a recipe, or the high-precision dtype."""

    by_name: dict[str, Llama]
    """The float8 model first, then the bfloat16 baseline of `job.compare`."""
    conversion_report: ConversionReport | None
    """The conversion of the float8 model."""

    @property
    def first(self) -> tuple[str, Llama]:
        """The name and the model that the run is about: the float8 model, if it has one."""
        return next(iter(self.by_name.items()))


@dataclass(frozen=True)
class RunSetup:
    """A run with checked input, equal on every rank except for `dims.rank`. It has no run folder yet."""

    config: TrainConfig
    ranks: Ranks
    dims: ParallelDims
    device: torch.device
    data: TokenData
    models: Models

    @property
    def fingerprint(self) -> str:
        """The settings and the hash of the text, which must be equal on every rank."""
        return json.dumps([asdict(self.config), self.data.origin["sha256"]])

    def to_record(self) -> dict[str, Any]:
        """Return the facts about the run that each checkpoint repeats, ready for JSON; on the first rank.

        The other ranks, which write no record, do not ask git for the provenance.
        """
        conversion_report = self.models.conversion_report
        return {
            "config": asdict(self.config),
            "provenance": collect_provenance(self.device) if self.ranks.is_first else None,
            "conversion_report": conversion_report.to_dict() if conversion_report else None,
            "data": self.data.origin,
        }


def set_up_run(config: TrainConfig, ranks: Ranks) -> RunSetup:
    """Check `config`, read the data, make and convert the models. Writes nothing but the token cache.

    One rank writes a missing token cache and the others wait for it; there is no other communication.

    Raises:
        InputError: a setting does not fit.
        OSError: a path cannot be read.
        NotImplementedError: quaver does not support the settings.
        MissingDeviceError: the device does not exist here.
    """
    config, dims = resolve_parallel_dims(config, rank=ranks.rank, world_size=ranks.world_size)
    device = ranks.choose_device(resolve_device(config.training.device))
    check_inputs(config, device)
    models = make_models(config, device)
    if config.comm.float8_gradients:
        # Refuses too few gradients per rank before the run folder is locked. The process group is made later.
        with open_fake_mesh(dims) as mesh:
            parallelize(deepcopy(models.first[1]), config, mesh)
    data = load_data(config, ShownProgress() if ranks.is_first else None)
    return RunSetup(config, ranks, dims, device, data, models)


def _check_recordable(config: TrainConfig) -> None:
    """Raise InputError for inf, NaN and invalid UTF-8, which a checkpoint's JSON or config.toml cannot hold."""
    for section, values in asdict(config).items():
        for name, value in values.items():
            items = value if isinstance(value, tuple) else (value,)
            is_finite = all(not isinstance(item, float) or math.isfinite(item) for item in items)
            require(is_finite, f"{section}.{name}", "finite", value, "each checkpoint records it as JSON")
            is_text = all(not isinstance(item, str) or item == item.encode(errors="replace").decode() for item in items)
            require(is_text, f"{section}.{name}", "in UTF-8", value, "config.toml records it")


def check_inputs(config: TrainConfig, device: torch.device | None) -> None:
    """Raise InputError for settings, packages or initial weights with which the run cannot train.

    It refuses settings that no file can hold or `device` does not support, a logger whose package is missing, and
    initial weights that are missing or of another model.

    Args:
        device: the run's device; None if it is not known.
    """
    _check_recordable(config)
    require(
        device is None or is_cuda_device(device) or config.checkpoint.async_mode != "async_with_pinned_mem",
        "checkpoint.async_mode",
        "disabled or async on a device that is not CUDA",
        config.checkpoint.async_mode,
        "page-locked memory is for copies from a GPU",
    )
    check_loggers(config.metrics)
    if config.checkpoint.initial_load_path and not will_resume(config):
        _check_initial_weights(config)


def _check_initial_weights(config: TrainConfig) -> None:
    """Raise InputError for initial weights of other shapes. Other settings, such as rope_theta, may differ."""
    saved = read_record(config.checkpoint.initial_weights)["config"]["model"]
    for name in SHAPE_SETTINGS:
        value = getattr(config.model, name)
        expected = f"{saved.get(name)!r}, that of checkpoint.initial_load_path {config.checkpoint.initial_load_path!r}"
        require(saved.get(name, value) == value, f"model.{name}", expected, value)


def make_models(config: TrainConfig, device: torch.device) -> Models:
    """Make the models of a run on the meta device, and convert the float8 model.

    Raises InputError and NotImplementedError for settings that do not fit the model.
    """
    models = {config.training.mixed_precision_param: _make_meta_model(config)}
    report = None
    if config.float8.enable_float8_linear:
        model = _make_meta_model(config)
        tokens = config.training.local_batch_size * config.training.seq_len
        report = convert_model(model, config.float8, tokens=tokens, device=device)
        check_tensor_parallel(model, config.parallelism.tensor_parallel_degree)
        models = {config.float8.label: model, **(models if config.job.compare else {})}
    return Models(models, report)


def _make_meta_model(config: TrainConfig) -> Llama:
    model = make_meta_llama(config.model).to(getattr(torch, config.training.dtype))
    model.model.residual_dtype = getattr(torch, config.training.residual_stream_dtype)
    return model

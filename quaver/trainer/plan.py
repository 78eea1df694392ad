"""A run before it begins: everything that can be wrong with the input is refused here."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from quaver.convert import ConversionReport
from quaver.devices import resolve_device
from quaver.trainer.checkpoints.folder import read_record
from quaver.trainer.config import TrainConfig, require
from quaver.trainer.data import TokenData, load_data
from quaver.trainer.float8 import convert_model
from quaver.trainer.gemm_precision import flops_per_token_by_precision
from quaver.trainer.layout import Layout, resolve
from quaver.trainer.model import Llama
from quaver.trainer.ranks import Ranks
from quaver.trainer.records.loggers import check_loggers
from quaver.trainer.records.provenance import provenance
from quaver.trainer.records.run_folder import RunFolder


@dataclass
class Models:
    """What a run trains, without storage yet, by name: a recipe, or the high-precision dtype."""

    by_name: dict[str, Llama]
    """The one asked for first."""
    report: ConversionReport | None
    """What was converted of it."""
    flops_per_token: dict[str, dict[str, int]]
    """By model and by the precision that they run in."""


@dataclass
class Plan:
    """A run that was checked.

    Every rank has the same plan but for its place in the layout. `folder` is there after `open_folder`, on the first.
    """

    config: TrainConfig
    ranks: Ranks
    layout: Layout
    device: torch.device
    data: TokenData
    models: Models
    folder: RunFolder | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint says of the run that it belongs to."""

    @property
    def fingerprint(self) -> str:
        """What must be equal on every rank: the settings and the text."""
        return json.dumps([asdict(self.config), self.data.origin["sha256"]])


def plan_run(config: TrainConfig, ranks: Ranks) -> Plan:
    """Read the data, make and convert the models. Nothing is written but the cache of tokens, if it is not there yet.

    A rank waits for another at most while that one makes the cache.

    Raises:
        ValueError: for a value that does not fit, OSError for a path, NotImplementedError for a known gap,
            MissingDeviceError for a device that is not there.
    """
    config, layout = resolve(config, rank=ranks.rank, world_size=ranks.world_size)
    device = ranks.device(resolve_device(config.training.device))
    require(
        device.type == "cuda" or config.checkpoint.async_mode != "async_with_pinned_mem",
        "checkpoint.async_mode",
        "disabled or async on a device that is not CUDA",
        config.checkpoint.async_mode,
        "page-locked memory is there for copies from a GPU",
    )
    check_surroundings(config)
    models = make_models(config, device)
    data = load_data(config, quiet=not ranks.is_first)
    return Plan(config, ranks, layout, device, data, models)


def check_surroundings(config: TrainConfig) -> None:
    """Refuse what `config` names and this machine does not have: a logger's package, a checkpoint to begin with.

    Raises:
        ValueError: a package is missing, or the checkpoint is of another format.
        FileNotFoundError: there is no checkpoint.
    """
    check_loggers(config.metrics)
    if config.checkpoint.initial_load_path:
        read_record(config.checkpoint.initial_weights)


def make_models(config: TrainConfig, device: torch.device) -> Models:
    """Make the models of a run on the meta device, and convert the one that trains in float8.

    Raises:
        ValueError: for a filter that fits nothing, NotImplementedError for a known gap.
    """
    precision = config.training.mixed_precision_param
    models = {precision: _unmade(config)}
    report = None
    if config.float8.enable_float8_linear:
        model = _unmade(config)
        tokens = config.training.local_batch_size * config.training.seq_len
        report = convert_model(model, config.float8, tokens=tokens, device=device)
        models = {config.float8.recipe_name: model, **(models if config.job.compare else {})}
    flops = {
        name: flops_per_token_by_precision(model, config.model, config.training.seq_len, precision, device)
        for name, model in models.items()
    }
    return Models(models, report, flops)


def open_folder(plan: Plan) -> None:
    """Make or find the run folder on the first rank. Raises what `RunFolder.open` does, and OutputError."""
    report = plan.models.report.to_dict() if plan.models.report else None
    source = provenance(plan.device)
    plan.about = {"config": asdict(plan.config), "provenance": source, "conversion_report": report}
    plan.about["data"] = plan.data.origin
    if plan.ranks.is_first:
        plan.folder = RunFolder.open(plan.config)
        plan.folder.add_provenance(source)
        plan.folder.write_json("data.json", plan.data.origin)
        if report:
            plan.folder.write_json("conversion_report.json", report)


def _unmade(config: TrainConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config.model).to(getattr(torch, config.training.dtype))

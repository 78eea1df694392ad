"""Sets up a run without data, devices or memory: models on the meta device and a fake process group.

The model is made, converted and parallelized by the same code as in a run, as the first of `ranks` processes; torch's
fake process group replaces its collectives. `quaver memory` predicts the bytes of a step.
"""

from dataclasses import dataclass

import torch

from quaver.conversion.report import ConversionReport
from quaver.lab.data.source import TextSource, find_source
from quaver.lab.data.tokenizer import check_vocabulary, load_tokenizer
from quaver.lab.model.flops import LinearPrecision, group_linears, list_linear_precisions
from quaver.lab.model.llama import count_training_flops_per_token
from quaver.lab.model.parallelize import open_fake_mesh, parallelize
from quaver.lab.runs.run_folder import check_run_folder
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims, resolve_parallel_dims
from quaver.lab.trainer.optimizer import build_optimizer
from quaver.lab.trainer.run_setup import check_inputs, make_models


@dataclass(frozen=True)
class DryRun:
    """The run that a config describes: its ranks, data, model and precisions."""

    config: TrainConfig
    """The config with its global batch size resolved."""
    dims: ParallelDims
    source: TextSource
    """The files of the data."""
    tokenizer: str
    parameters: int
    flops_per_token: int
    """FLOPs of forward and backward."""
    linears: list[tuple[LinearPrecision, int]]
    """The rows of the effective-quantization table: a linear of each group of equal linears, and the group's size."""
    conversion_report: ConversionReport | None

    @property
    def tokens(self) -> int:
        """The tokens of the whole run."""
        return self.config.training.step_tokens * self.config.training.steps


def dry_run(config: TrainConfig, ranks: int = 1) -> DryRun:
    """Check a run on `ranks` processes as far as possible without starting it, and describe it.

    The data is found but not read; the device may be missing here. Raises the errors with which the run would begin.
    """
    config, dims = resolve_parallel_dims(config, rank=0, world_size=ranks)
    device = config.training.device
    check_inputs(config, None if device == "auto" else torch.device(device))
    tokenizer, source = load_tokenizer(config.data), find_source(config.data)
    check_vocabulary(tokenizer, config.data, config.model)
    cpu = torch.device("cpu")
    models = make_models(config, cpu)
    check_run_folder(config)
    _, model = models.first
    linears = group_linears(list_linear_precisions(model, config.training.mixed_precision_param, cpu))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with open_fake_mesh(dims) as mesh:
        parallelize(model, config, mesh)
        build_optimizer(model, config.optimizer)
    flops = count_training_flops_per_token(config.model, config.training.seq_len)
    return DryRun(config, dims, source, tokenizer.name, parameters, flops, linears, models.conversion_report)

"""What a run would be, without data, devices or memory: models on the meta device and a fake process group.

The model is made, converted and parallelized by the same code as in a run, as the first of `ranks` processes; torch's
fake process group replaces its collectives. The bytes that each rank would hold are read off the result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from quaver import Float8Linear
from quaver.convert import ConversionReport
from quaver.trainer.config import TrainConfig
from quaver.trainer.data.source import Source, find_source
from quaver.trainer.data.tokenizer import check_vocabulary, load_tokenizer
from quaver.trainer.flops import LinearPrecision, grouped, linear_precisions
from quaver.trainer.model import Llama, training_flops_per_token
from quaver.trainer.parallel_dims import ParallelDims, resolve
from quaver.trainer.parallelize import parallelize
from quaver.trainer.ranks import plain_tensors
from quaver.trainer.run_setup import check_environment, make_models


@dataclass(frozen=True)
class Held:
    """The bytes that the first rank holds, which has the largest of uneven shards."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """The most weights that FSDP2 has gathered at once; with tensor parallelism, this rank's part of them."""

    @property
    def total(self) -> int:
        """The sum, without activations and temporaries."""
        return self.parameters + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True)
class DryRun:
    """What a config would run."""

    config: TrainConfig
    """With its global batch size resolved."""
    layout: ParallelDims
    source: Source
    """The files of the data."""
    tokenizer: str
    parameters: int
    flops_per_token: int
    """FLOPs of forward and backward."""
    linears: list[tuple[LinearPrecision, int]]
    """The effective-quantization table: groups of equal linears, with their sizes."""
    report: ConversionReport | None
    held: Held

    @property
    def tokens(self) -> int:
        """The tokens of the whole run."""
        return self.config.training.step_tokens * self.config.training.steps


def dry_run(config: TrainConfig, ranks: int = 1) -> DryRun:
    """Check everything about a run on `ranks` processes that can be checked here, and return what it would be.

    The data is found but not read; the device may be missing here.

    Raises:
        ValueError, OSError, NotImplementedError: the run would raise the same error.
    """
    config, layout = resolve(config, rank=0, world_size=ranks)
    check_environment(config)
    tokenizer, source = load_tokenizer(config.data), find_source(config.data)
    check_vocabulary(tokenizer, config.data, config.model)
    cpu = torch.device("cpu")
    models = make_models(config, cpu)
    model = next(iter(models.by_name.values()))
    linears = grouped(linear_precisions(model, config.training.mixed_precision_param, cpu))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with pretended_mesh(layout) as mesh:
        parallelize(model, config, mesh)
        held = _held(model, config, layout)
    flops = training_flops_per_token(config.model, config.training.seq_len)
    return DryRun(config, layout, source, tokenizer.name, parameters, flops, linears, models.report, held)


@contextmanager
def pretended_mesh(layout: ParallelDims) -> Iterator[DeviceMesh | None]:
    """Yield a mesh of `layout` in which this process is the first rank and the others do not exist."""
    if not layout.mesh:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    try:
        yield init_device_mesh("cpu", tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh))
    finally:
        dist.destroy_process_group()


def _held(model: Llama, config: TrainConfig, layout: ParallelDims) -> Held:
    parameters = sum(_local_bytes(parameter) for parameter in model.parameters())
    # AdamW's two moments have the parameters' dtype; its step counters are 4 bytes each.
    optimizer = 2 * parameters + 4 * len(list(model.parameters()))
    gathered = _gathered(model, config) if layout.shard > 1 else 0
    return Held(parameters, parameters, optimizer, gathered)


def _local_bytes(parameter: nn.Parameter) -> int:
    return sum(plain.numel() * plain.element_size() for plain in plain_tensors(parameter))


def _gathered(model: Llama, config: TrainConfig) -> int:
    """Return the bytes that FSDP2 has gathered at most.

    The embedding and the last norm stay gathered from the forward to the end of the backward; of the other groups (see
    `parallelize`), all of them or one at a time.
    """
    groups: list[nn.Module] = list(model.blocks())
    if not config.model.tie_word_embeddings:
        groups.append(model.lm_head)
    stored = getattr(torch, config.training.dtype).itemsize
    root = [model.model.embed_tokens.weight, model.model.norm.weight]
    whole = [_gathered_bytes(group, config) for group in groups]
    never_freed = config.parallelism.fsdp_reshard_after_forward == "never"
    return sum(_unsharded_elements(each) * stored for each in root) + (sum(whole) if never_freed else max(whole))


def _gathered_bytes(group: nn.Module, config: TrainConfig) -> int:
    computed = getattr(torch, config.training.mixed_precision_param).itemsize
    total = 0
    for module in group.modules():
        element_bytes = computed
        if isinstance(module, Float8Linear) and module.config.enable_fsdp_float8_all_gather:
            casts = module.config.casts  # row-wise casts differ between the two matmuls
            element_bytes = 1 if casts.weight == casts.weight_for_grad_input and not casts.weight.is_rowwise else 2
        total += sum(_unsharded_elements(each) * element_bytes for each in module.parameters(recurse=False))
    return total


def _unsharded_elements(parameter: Tensor) -> int:
    """The elements of `parameter` on a rank after FSDP2 gathered it: the part that tensor parallelism leaves."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    names = parameter.device_mesh.mesh_dim_names or ()
    split = [
        parameter.device_mesh.size(axis)
        for axis, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
        if name == "tp" and not placement.is_replicate()
    ]
    return parameter.numel() // prod(split)

"""What a run would be, found out without data, devices or memory: models on the meta device, ranks that are pretended.

The model is made, converted and parallelized by the same code as in a run, as the first of `ranks` processes; only its
collectives go nowhere (torch's fake process group). What each rank would hold is then read off the result.
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
from quaver.trainer.gemm_precision import LinearPrecision, grouped, linear_precisions
from quaver.trainer.layout import Layout, resolve
from quaver.trainer.model import Llama, training_flops_per_token
from quaver.trainer.parallelize import parallelize
from quaver.trainer.plan import check_surroundings, make_models
from quaver.trainer.tensors import plain_tensors


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds between steps and in them; the first rank's, which holds the most of uneven shards."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Weights that FSDP2 has put together at the most, with tensor parallelism this rank's part of them."""

    @property
    def total(self) -> int:
        """Of all; activations and temporaries come on top."""
        return self.parameters + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True)
class DryRun:
    """A run that would begin."""

    config: TrainConfig
    """With its global batch size filled in."""
    layout: Layout
    source: Source
    """Of the data."""
    tokenizer: str
    parameters: int
    flops_per_token: int
    """Of forward and backward."""
    linears: list[tuple[LinearPrecision, int]]
    """The effective-quantization table: linears that are alike, with their number."""
    report: ConversionReport | None
    held: Held

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.config.training.step_tokens * self.config.training.steps


def dry_run(config: TrainConfig, ranks: int = 1) -> DryRun:
    """Check everything about a run on `ranks` processes that can be checked here, and say what it would be.

    The data is looked for, not read; the device may be missing here.

    Raises:
        ValueError, OSError, NotImplementedError: what the run itself would refuse.
    """
    config, layout = resolve(config, rank=0, world_size=ranks)
    check_surroundings(config)
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
def pretended_mesh(layout: Layout) -> Iterator[DeviceMesh | None]:
    """A mesh of `layout` in which this process is the first rank and the others do not exist."""
    if not layout.mesh:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    try:
        yield init_device_mesh("cpu", tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh))
    finally:
        dist.destroy_process_group()


def _held(model: Llama, config: TrainConfig, layout: Layout) -> Held:
    parameters = sum(_local_bytes(parameter) for parameter in model.parameters())
    # AdamW's two moments have the parameters' dtype; its step counters are 4 bytes each.
    optimizer = 2 * parameters + 4 * len(list(model.parameters()))
    gathered = _gathered(model, config) if layout.shard > 1 else 0
    return Held(parameters, parameters, optimizer, gathered)


def _local_bytes(parameter: nn.Parameter) -> int:
    return sum(plain.numel() * plain.element_size() for plain in plain_tensors(parameter))


def _gathered(model: Llama, config: TrainConfig) -> int:
    """The embedding and the last norm stay gathered from the forward's begin to the backward's end; of the other groups
    (see `parallelize`), all or the largest."""
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
            casts = module.config.casts  # rows of the two matmuls' operands are not the same ones
            element_bytes = 1 if casts.weight == casts.weight_for_grad_input and not casts.weight.is_rowwise else 2
        total += sum(_unsharded_elements(each) * element_bytes for each in module.parameters(recurse=False))
    return total


def _unsharded_elements(parameter: Tensor) -> int:
    """What a rank has of `parameter` when FSDP2 has gathered it: all that tensor parallelism leaves it."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    names = parameter.device_mesh.mesh_dim_names or ()
    split = [
        parameter.device_mesh.size(axis)
        for axis, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
        if name == "tp" and not placement.is_replicate()
    ]
    return parameter.numel() // prod(split)

"""The subjects of the memory table: modules of the trainer by precision, checkpointing and compilation, and a step.

[Note: a module inside a network] A step makes the module's input from a resident tensor, by a multiplication with a
number, and the loss from the module's output, by a sum of multiples; autograd saves nothing for either. Only the
module's own graph holds the input, so the bytes alive between forward and backward are those that the module saves. A
network behaves the same: the layer before frees its output if no graph holds it. The gradient of the output is made in
the step.

The input of a lone `linear`, `attention` or `ffn` is bfloat16, like the output of a norm in a network.

Parameters are float32, the computation bfloat16 through autocast, the optimizer is fused AdamW, and blocks are
checkpointed, compiled and sharded one by one, all as in `quaver train`. The float8 settings are those that save memory:
FSDP2 all-gathers weights in float8 (`enable_fsdp_float8_all_gather`), and norms and SwiGLU save only their own inputs
(`fused_producers`, the trainer's default).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from quaver import Float8LinearConfig, convert_to_float8_training
from quaver.activations import apply_activation_checkpointing
from quaver.lab.memory.faking.fakes import fake_tensors
from quaver.lab.memory.predict_step import Prediction, record_fake_step
from quaver.lab.model.float8 import fuse_producers
from quaver.lab.model.llama import Attention, Block, FeedForward, make_rope_tables
from quaver.lab.model.parallelize import open_fake_mesh
from quaver.lab.recorder.allocator import Usage, measure_usage
from quaver.lab.settings import Model, Optimizer
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.lab.trainer.memory import count_storage_bytes
from quaver.lab.trainer.optimizer import build_optimizer

PRECISIONS = (
    "bfloat16",
    "tensorwise",
    "rowwise",
    "rowwise_with_gw_hp",
    "blockwise",
    "blockwise_with_gw_hp",
    "mxfp8",
    "mxfp8_with_gw_hp",
)
CHECKPOINTING = ("none", "full", "op")
STEPS_ON_RANKS = 8
MODULES = ("linear", "attention", "ffn", "1 block", "2 blocks", "10 blocks")


@dataclass(frozen=True)
class Size:
    """Shapes of the modules, in the proportions of Llama 3 8B at 1/16 of its width, and the tokens of a rank's step."""

    dim: int = 256
    hidden_dim: int = 896
    n_heads: int = 4
    n_kv_heads: int = 1
    sequences: int = 4
    seq_len: int = 256

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    module: str
    precision: str
    checkpointing: str = "none"
    ranks: int = 1
    compiled: bool = False


Step = Callable[..., None]


class StackedModules(nn.Module):
    """The parts of a case, in a row: one linear, one attention, one feed-forward, or blocks."""

    def __init__(self, module: str, size: Size) -> None:
        super().__init__()
        config = Model(
            dim=size.dim, n_heads=size.n_heads, n_kv_heads=size.n_kv_heads, hidden_dim=size.hidden_dim, n_layers=1
        )
        self.parts = nn.ModuleList(_make_parts(module, config))
        cos, sin = make_rope_tables(size.seq_len, config.head_dim, config.rope_theta, torch.get_default_device())
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform `hidden` [B, T, D]: float32 for blocks, bfloat16 for modules that follow a norm."""
        for part in self.parts:
            positions = (self.cos, self.sin) if isinstance(part, (Attention, Block)) else ()
            hidden = part(hidden, *positions)
        return hidden


class OneLinear(nn.Module):
    """A linear inside a module: torch.compile skips frames of torch's own modules."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.linear = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)


def _make_parts(module: str, config: Model) -> list[nn.Module]:
    if module == "linear":
        return [OneLinear(config)]
    if module == "attention":
        return [Attention(config)]
    if module == "ffn":
        return [FeedForward(config)]
    return [Block(config) for _ in range(int(module.split()[0]))]


def build(case: Case, size: Size, device: torch.device, mesh: DeviceMesh | None) -> StackedModules:
    """Return the case's model: converted, checkpointed, compiled and sharded, in the trainer's order."""
    torch.manual_seed(0)
    with device:
        subject = StackedModules(case.module, size)
    if case.precision != "bfloat16":
        config = Float8LinearConfig.from_recipe_name(case.precision)
        convert_to_float8_training(subject, config=replace(config, enable_fsdp_float8_all_gather=mesh is not None))
        fuse_producers(subject)
    mode = {"none": "none", "full": "full", "op": "selective"}[case.checkpointing]
    checkpointed = (part.linear if isinstance(part, OneLinear) else part for part in subject.parts)
    apply_activation_checkpointing(checkpointed, mode=mode, preserve_rng_state=False)
    if case.compiled:
        for part in subject.parts:
            part.compile(fullgraph=True)
    if mesh is not None:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in subject.parts:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        fully_shard(subject, mesh=mesh, mp_policy=policy)
    return subject


def prepare(
    case: Case, size: Size, device: torch.device, mesh: DeviceMesh | None, subject: StackedModules | None = None
) -> tuple[StackedModules, Any, Step]:
    """Return the model of a case, or `subject`, its optimizer, and a step; see [Note: a module inside a network].

    The step calls its argument between forward and backward.
    """
    subject = subject or build(case, size, device, mesh)
    optimizer = build_optimizer(subject, Optimizer())
    dtype = torch.float32 if "block" in case.module else torch.bfloat16
    source = torch.randn(size.sequences, size.seq_len, size.dim, device=device, dtype=dtype, requires_grad=True)

    def step(forward_is_done: Callable[[], object] = lambda: None) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = subject(source * 1.5).mul(1 / source.numel()).sum()
        forward_is_done()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        source.grad = None

    return subject, optimizer, step


def measure(
    case: Case, size: Size, device: torch.device, mesh: DeviceMesh | None = None, subject: StackedModules | None = None
) -> tuple[int, Usage]:
    """Return the bytes of parameters, buffers and optimizer state, and those that a second training step adds.

    With `mesh`, returns the least of STEPS_ON_RANKS steps: threads of collectives release buffers at random times,
    which can only add to a peak.
    """
    subject, optimizer, step = prepare(case, size, device, mesh, subject)
    step()
    usages = []
    for _ in range(1 if mesh is None else STEPS_ON_RANKS):
        with measure_usage(device) as measured:
            step(measured.mark)
        usages.append(measured.usage)
    state = chain.from_iterable(values.values() for values in optimizer.state.values())
    resident: Any = chain(subject.parameters(), subject.buffers(), (item for item in state if isinstance(item, Tensor)))
    return count_storage_bytes(resident), _find_least(usages)


def predict(case: Case, size: Size, device: str = "cpu") -> Prediction:
    """Predict a training step of the case on the first of its ranks. Runs and compiles no kernel."""
    with (
        open_fake_mesh(ParallelDims(dp_shard=case.ranks)) as mesh,
        fake_tensors(device, compiled=case.compiled) as fake_mode,
    ):
        subject, optimizer, step = prepare(case, size, torch.device("cpu"), mesh)
        return record_fake_step(step, subject, optimizer, fake_mode)


def _find_least(usages: list[Usage]) -> Usage:
    """Return the smallest value of each figure."""
    tensor_peaks = [usage.tensor_peak_bytes for usage in usages if usage.tensor_peak_bytes is not None]
    lowest = min(usages, key=lambda usage: usage.peak_bytes)
    saved = min(usage.saved_bytes for usage in usages)
    return replace(lowest, tensor_peak_bytes=min(tensor_peaks, default=None), saved_bytes=saved)

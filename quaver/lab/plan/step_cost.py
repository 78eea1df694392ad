"""The FLOPs and the simulated time of a training step, to order settings by speed.

step       micro-batches * (linears and attention + recomputation), of one rank
seconds    quaver/lab/plan/step.py: what it computes and sends, on nodes of 8 GPUs with 400 Gb/s each, no checkpoints
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from quaver.checkpointing.policy import selected_every
from quaver.lab.memory.faking.fakes import fake_tensors
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.quick import quick_seconds
from quaver.lab.plan.run import checkpointed_blocks, run_of
from quaver.lab.recorder.modules import ModuleTracker
from quaver.lab.settings import ActivationCheckpoint, Data, Float8, TrainConfig, Training
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.lab.trainer.initialize import allocate
from quaver.lab.trainer.loss import next_token_loss
from quaver.lab.trainer.model import training_flops_per_token
from quaver.lab.trainer.parallelize import parallelize
from quaver.lab.trainer.run_setup import make_models
from quaver.lab.trainer.trained_model import autocast_of
from quaver.roofline.device_specs import DeviceSpec
from quaver.torch_private.autograd import current_node
from quaver.torch_private.dispatch import overload_packet


@dataclass(frozen=True)
class StepCost:
    """The cost of one step of one rank."""

    step_flops: int
    """Forward and backward (`training_flops_per_token`), and recomputation."""
    recomputed_flops: int | None
    """The share that checkpointing recomputes; None if the compiler decides it, and then not in `step_flops`."""
    modelled_s: float | None
    """None without a device, outside bfloat16, or if the compiler decides what is recomputed."""


def step_cost(config: TrainConfig, layout: ParallelDims, spec: DeviceSpec | None) -> StepCost:
    """The cost of a step of the run, from the `config` and `layout` that `resolve` returned.

    Raises:
        ValueError, NotImplementedError: the run itself would refuse its model.
    """
    training = config.training
    micro_batches = layout.micro_batches(training)
    tokens = training.local_batch_size * training.seq_len
    again, blocks = recomputed_flops(config), checkpointed_blocks(config)
    repeated = None if again is None else blocks * micro_batches * sum(again.values()) // layout.tensor
    flops = micro_batches * tokens * training_flops_per_token(config.model, training.seq_len) // layout.tensor
    seconds = None
    if spec is not None and again is not None and training.mixed_precision_param == "bfloat16":
        run = replace(run_of(config, layout), steps_between_saves=0)  # states in float8 would also be saved sooner
        seconds = quick_seconds(run, Cluster.of(spec))
    return StepCost(flops + (repeated or 0), repeated, seconds)


# ---- recomputation: a step of one block with fake tensors ------------------------------------------------------------


def recomputed_flops(config: TrainConfig) -> dict[str, int] | None:
    """FLOPs that one checkpointed block recomputes for one micro-batch of one data-parallel rank.

    They are counted while a module's forward runs inside the backward, so that the policy's choices and the early stop
    of a recomputation count as they happen. Tensor parallel ranks share them evenly.

    Returns:
        By the module's name in the block, such as "mlp.up_proj"; None if the compiler decides what is recomputed.
    """
    mode = config.activation_checkpoint.mode
    if mode == "memory_budget":
        return None
    return {} if mode == "none" else dict(_counted(_one_block(config)))


_COUNTED = ("seq_len", "local_batch_size", "dtype", "mixed_precision_param")


def _one_block(config: TrainConfig) -> TrainConfig:
    """A run of one checkpointed block in high precision, on one rank and eager; no precision changes FLOPs."""
    checkpoint, training = config.activation_checkpoint, config.training
    if selected_every(checkpoint.selective_ac_option) is not None:
        checkpoint = ActivationCheckpoint(mode="full")
    return TrainConfig(
        model=replace(config.model, n_layers=1),
        training=Training(**{name: getattr(training, name) for name in _COUNTED}),
        activation_checkpoint=checkpoint,
        float8=Float8(enable_float8_linear=False),
        data=Data(document_mask=config.data.document_mask),
    )


@functools.cache
def _counted(config: TrainConfig) -> dict[str, int]:
    cpu, training = torch.device("cpu"), config.training
    (model,) = make_models(config, cpu).by_name.values()
    parallelize(model, config, None)
    with fake_tensors():
        allocate(model, cpu)
        tokens = torch.empty(training.local_batch_size, training.seq_len, dtype=torch.int64)
        documents = tokens if config.data.document_mask else None
        with ModuleTracker(model) as tracker, _Recomputed(tracker) as counter:
            with autocast_of(training, cpu):
                loss = next_token_loss(model(tokens, documents), tokens)
            loss.backward()
    block = "model.layers.0."
    return {name.removeprefix(block): flops for name, flops in counter.flops.items() if name.startswith(block)}


class _Recomputed(TorchDispatchMode):
    """Counts the FLOPs of each module whose forward runs inside a backward."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._tracker.stack and current_node() is not None:
            flops = _flops(func, args, kwargs or {}, result)
            if flops:
                module = self._tracker.stack[-1]
                self.flops[module] = self.flops.get(module, 0) + flops
        return result


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of one operator, as torch.utils.flop_counter has them, and of the CPU's attention, which it leaves out."""
    if overload_packet(func) is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        sequences, heads, queries, size = args[0].shape
        return 4 * sequences * heads * queries * args[1].shape[2] * size
    count = flop_registry.get(overload_packet(func))
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))

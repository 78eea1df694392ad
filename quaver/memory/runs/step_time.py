"""The FLOPs and the modelled time of a training step, to order settings by speed.

    step       micro-batches * (linears + blocks * between + recomputation)
    linears    quaver/roofline/cost.py: three matmuls each, casts and launches, for this rank's share
    between    quaver/roofline/block.py: norms, RoPE, attention, SwiGLU and the residual, likewise
    recompute  of a checkpointed block: each recomputed linear's first matmul and its casts, and the forward between;
               attention only if it is recomputed

Not modelled: matmuls of routed experts, the loss, the optimizer, communication, the host. So settings that differ in
communication cannot be compared.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from quaver import Float8Linear
from quaver.checkpointing.policy import selected_every
from quaver.memory.faking.fakes import fake_tensors
from quaver.recorder.modules import ModuleTracker
from quaver.roofline.block import BlockShape, Both, attention_seconds, seconds_between_matmuls
from quaver.roofline.cost import LinearTime, linear_cost
from quaver.roofline.device_specs import DeviceSpec
from quaver.roofline.matmul import MATMUL_SHARES
from quaver.settings import ActivationCheckpoint, Data, Float8, Model, TrainConfig, Training
from quaver.settings.parallel_dims import ParallelDims
from quaver.torch_private.autograd import current_node
from quaver.torch_private.dispatch import overload_packet
from quaver.trainer.float8 import convert_model
from quaver.trainer.initialize import allocate
from quaver.trainer.loss import next_token_loss
from quaver.trainer.model import Llama, training_flops_per_token
from quaver.trainer.parallelize import parallelize
from quaver.trainer.run_setup import make_models
from quaver.trainer.trained_model import autocast_of

_READERS = {"q_proj": 3, "k_proj": 3, "v_proj": 3, "gate_proj": 2, "up_proj": 2}
"""The number of linears that share the input and its casts."""
_SPLIT_INPUTS = ("o_proj", "down_proj")
"""Linears whose inputs tensor parallelism splits; it splits the outputs of all others."""


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
        linears = _linears(config, layout, spec, tokens, micro_batches)
        between, attention = _between_matmuls(config, layout, spec, tokens)
        seconds = sum(time.total_s for _, time in linears) + config.model.n_layers * (sum(between) + sum(attention))
        if again:
            recomputed = _again_s(again, linears, attention.forward, layout, spec) + between.forward
            seconds += blocks * recomputed
        seconds *= micro_batches
    return StepCost(flops + (repeated or 0), repeated, seconds)


def _linears(
    config: TrainConfig, layout: ParallelDims, spec: DeviceSpec, tokens: int, micro_batches: int
) -> list[tuple[str, LinearTime]]:
    """The name of each linear in its block, empty outside blocks, and its time."""
    once = micro_batches if layout.world_size == 1 else None  # FSDP2 gathers and casts weights for each micro-batch
    found = []
    for name, inputs, outputs, is_float8 in _shapes(config.model, config.float8, config.training):
        kind = name.rpartition(".")[2]
        if kind in _SPLIT_INPUTS:
            inputs //= layout.tensor
        else:
            outputs //= layout.tensor
        recipe, readers = config.float8.recipe_name, _READERS.get(kind, 1)
        cost = linear_cost(tokens, inputs, outputs, recipe, spec, microbatches=once, input_readers=readers)
        in_block = name.partition("model.layers.")[2].partition(".")[2]
        found.append((in_block, cost.float8 if is_float8 else cost.bfloat16))
    return found


@functools.cache
def _shapes(model: Model, float8: Float8, training: Training) -> list[tuple[str, int, int, bool]]:
    """For each linear of the run's model: name, in_features, out_features, and whether it computes in float8."""
    with torch.device("meta"):
        llama = Llama(model)
    if float8.enable_float8_linear:
        tokens = training.local_batch_size * training.seq_len
        convert_model(llama, float8, tokens=tokens, device=torch.device("cpu"))
    linears = [(name, each) for name, each in llama.named_modules() if isinstance(each, nn.Linear)]
    return [(name, each.in_features, each.out_features, isinstance(each, Float8Linear)) for name, each in linears]


def _between_matmuls(config: TrainConfig, layout: ParallelDims, spec: DeviceSpec, tokens: int) -> tuple[Both, Both]:
    """The seconds of one block: of norms, RoPE, SwiGLU and the residual; and of attention.

    Tensor parallel ranks share both: norms and the residual by sequence, the others by features.
    """
    model, training = config.model, config.training
    queries, keys = (heads * model.head_dim for heads in (model.n_heads, model.n_kv_heads))
    experts = model.top_k + model.n_shared_experts if model.n_experts else 1
    shape = BlockShape(model.dim, queries, keys, experts * model.hidden_dim)
    residual_bytes = getattr(torch, training.residual_stream_dtype).itemsize
    share = tokens / layout.tensor
    between = seconds_between_matmuls(shape, share, spec, residual_bytes)
    return between, attention_seconds(queries, share, training.seq_len, spec)


def _again_s(
    again: dict[str, int],
    linears: list[tuple[str, LinearTime]],
    attention_s: float,
    layout: ParallelDims,
    spec: DeviceSpec,
) -> float:
    """The time of the matmuls and the attention that one block recomputes for one micro-batch."""
    by_name = {name: time for name, time in linears if name}  # of the last block; all are equal
    bfloat16_flops_per_s = spec.bfloat16_tflops * 1e12 * MATMUL_SHARES[spec.name].bfloat16
    seconds = 0.0
    for name, flops in again.items():
        if name in by_name:
            time = by_name[name]
            seconds += time.output_s + time.input_casts_s + time.weight_casts_s
        elif name == "self_attn":
            seconds += attention_s
        else:
            seconds += flops / layout.tensor / bfloat16_flops_per_s
    return seconds


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


def checkpointed_blocks(config: TrainConfig) -> int:
    """The number of blocks that are checkpointed."""
    checkpoint, blocks = config.activation_checkpoint, config.model.n_layers
    if checkpoint.mode == "selective":
        return blocks // (selected_every(checkpoint.selective_ac_option) or 1)
    return blocks if checkpoint.mode == "full" else 0


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

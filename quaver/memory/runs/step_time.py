"""How long a training step would take, modelled, and its FLOPs: to order settings by speed before they are run.

    step      micro-batches * (linears + attention + what is computed again)
    linears   quaver.filters: the three matmuls of each, its casts and launches, for this rank's part of it
    attention its FLOPs, forward and backward, at the rate of bfloat16 matmuls
    again     of each recomputed linear its first matmul and the casts for that; attention as above

Left out: norms, SwiGLU, the loss, the optimizer, communication, the host. So only settings of one run are to be
compared, and not those that differ in communication.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from quaver import Float8Linear
from quaver.devices import DeviceSpec
from quaver.filters import MATMUL_SHARES, LinearTime, linear_cost
from quaver.trainer.config import Float8, Model, TrainConfig, Training
from quaver.trainer.float8 import convert_model
from quaver.memory.runs.recomputed_flops import checkpointed_blocks, recomputed_flops
from quaver.trainer.layout import Layout
from quaver.trainer.model import Llama, training_flops_per_token

_READERS = {"q_proj": 3, "k_proj": 3, "v_proj": 3, "gate_proj": 2, "up_proj": 2}
"""How many linears share the input, and its casts."""
_SPLIT_INPUTS = ("o_proj", "down_proj")
"""The linears whose inputs tensor parallelism splits; of all others it splits the outputs."""


@dataclass(frozen=True)
class StepCost:
    """Of one step of one rank."""

    flops: int
    """Of forward and backward, as usual in the field (`training_flops_per_token`), and of what is computed again."""
    recomputed_flops: int | None
    """Those of it that checkpointing computes again; None where the compiler decides, and then not in `flops`."""
    modelled_s: float | None
    """None without a device, or where it is not known: not in bfloat16, or the compiler decides."""


class _Linear(NamedTuple):
    name: str
    """In its block; empty outside of blocks."""
    time: LinearTime


def step_cost(config: TrainConfig, layout: Layout, spec: DeviceSpec | None) -> StepCost:
    """The cost of a step of the run that `resolve` returned `config` and `layout` of.

    Raises:
        ValueError, NotImplementedError: what the run itself would refuse of its model.
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
        seconds = sum(linear.time.total_s for linear in linears) + _attention_s(config, layout, spec, tokens)
        seconds = micro_batches * (seconds + blocks * _again_s(again, linears, layout, spec))
    return StepCost(flops + (repeated or 0), repeated, seconds)


def _linears(config: TrainConfig, layout: Layout, spec: DeviceSpec, tokens: int, micro_batches: int) -> list[_Linear]:
    once = micro_batches if layout.world_size == 1 else None  # ranks cast each gathered weight anew
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
        found.append(_Linear(in_block, cost.float8 if is_float8 else cost.bfloat16))
    return found


@functools.cache
def _shapes(model: Model, float8: Float8, training: Training) -> list[tuple[str, int, int, bool]]:
    """Name, in_features, out_features of each linear of a run's model, and whether it computes in float8."""
    with torch.device("meta"):
        llama = Llama(model)
    if float8.enable_float8_linear:
        tokens = training.local_batch_size * training.seq_len
        convert_model(llama, float8, tokens=tokens, device=torch.device("cpu"))
    linears = [(name, each) for name, each in llama.named_modules() if isinstance(each, nn.Linear)]
    return [(name, each.in_features, each.out_features, isinstance(each, Float8Linear)) for name, each in linears]


def _bfloat16_flops_per_s(spec: DeviceSpec) -> float:
    return spec.bfloat16_tflops * 1e12 * MATMUL_SHARES[spec.name].bfloat16


def _attention_s(config: TrainConfig, layout: Layout, spec: DeviceSpec, tokens: int) -> float:
    """As in `training_flops_per_token`: no part of it is skipped."""
    model = config.model
    flops = 12 * model.n_layers * model.dim * config.training.seq_len * tokens / layout.tensor
    return flops / _bfloat16_flops_per_s(spec)


def _again_s(again: dict[str, int], linears: list[_Linear], layout: Layout, spec: DeviceSpec) -> float:
    """What one block computes again for one micro-batch."""
    by_name = {linear.name: linear.time for linear in linears if linear.name}  # the last block's, as good as any
    seconds = 0.0
    for name, flops in again.items():
        if name in by_name:
            time = by_name[name]
            seconds += time.output_s + time.input_casts_s + time.weight_casts_s
        else:
            seconds += flops / layout.tensor / _bfloat16_flops_per_s(spec)
    return seconds

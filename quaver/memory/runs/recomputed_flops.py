"""FLOPs that activation checkpointing computes again, counted: a step of the run's own blocks, with fake tensors.

    matmul [M, K] x [K, N]    2 M K N, in every precision
    attention                 2 matmuls of every query with every key, [B, H, T, E] x [B, H, E, T] and back; a causal
                              kernel may skip half of it
    all else                  nothing

They are counted where they are called while a module's forward runs again inside of a backward. So a policy's choice is
counted as it is made, and so is that a recomputation ends with the last tensor that is needed.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import quaver.kernels.exact_mm  # noqa: F401 - defines quaver::exact_float8_mm
from quaver.activation_checkpointing import selected_every
from quaver.memory.faking.fakes import fake_tensors
from quaver.recorder.modules import ModuleTracker
from quaver.trainer.autocast import autocast_of
from quaver.trainer.config import ActivationCheckpoint, Data, Float8, TrainConfig, Training
from quaver.trainer.initialize import allocate
from quaver.trainer.loss import next_token_loss
from quaver.trainer.parallelize import parallelize
from quaver.trainer.plan import make_models

_MATMULS = (torch.ops.quaver.exact_float8_mm,)
_ATTENTIONS = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,)


def recomputed_flops(config: TrainConfig) -> dict[str, int] | None:
    """FLOPs that one checkpointed block computes again for one micro-batch of one data-parallel rank.

    Tensor parallel ranks share them evenly.

    Returns:
        By the name of the module in the block that computes them, such as "mlp.up_proj"; None where the compiler
        decides what is computed again.
    """
    mode = config.activation_checkpoint.mode
    if mode == "memory_budget":
        return None
    if mode == "none":
        return {}
    return dict(_counted(_one_block(config)))


def checkpointed_blocks(config: TrainConfig) -> int:
    """How many of the model's blocks compute again what they do not keep."""
    checkpoint, blocks = config.activation_checkpoint, config.model.n_layers
    if checkpoint.mode == "selective":
        return blocks // (selected_every(checkpoint.selective_ac_option) or 1)
    return blocks if checkpoint.mode == "full" else 0


def _one_block(config: TrainConfig) -> TrainConfig:
    """What matters of a run for `_counted`: a model of one block, checkpointed, on one rank, in eager code; in high
    precision, for a matmul has as many FLOPs in each."""
    checkpoint = config.activation_checkpoint
    if selected_every(checkpoint.selective_ac_option) is not None:
        checkpoint = ActivationCheckpoint(mode="full")
    training = config.training
    return TrainConfig(
        model=replace(config.model, n_layers=1),
        training=Training(
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
            dtype=training.dtype,
            mixed_precision_param=training.mixed_precision_param,
        ),
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
    """Counts the FLOPs of each module whose forward runs inside of a backward."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._tracker.stack and torch._C._current_autograd_node() is not None:
            module = self._tracker.stack[-1]
            flops = flops_of(func, args, kwargs or {}, result)
            if flops:
                self.flops[module] = self.flops.get(module, 0) + flops
        return result


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of one call of an operator; 0 for what is not counted."""
    packet = func._overloadpacket
    if packet in _MATMULS:
        (rows, contracted), columns = args[0].shape, args[1].shape[1]
        return 2 * int(rows) * int(contracted) * int(columns)
    if packet in _ATTENTIONS:
        return _attention_flops(args[0], args[1])
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _attention_flops(query: Tensor, key: Tensor) -> int:
    sequences, heads, queries, size = query.shape
    return 4 * sequences * heads * queries * key.shape[2] * size

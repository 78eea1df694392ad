"""The runs of benchmarks/numerics/faults.py: healthy runs, and faults with the alarms that should name them.

A fault breaks a run in its middle. `rules` are the rules that name it correctly. They are empty for a fault that does
not change the numerics of matmuls: no statistic can show it, and the table lists it as missed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.numerics import inject
from quaver.lab.data import Batch
from quaver.lab.trainer.trained_model import TrainedModel

DOWN, Q, UP = "model.layers.1.mlp.down_proj", "model.layers.2.self_attn.q_proj", "model.layers.2.mlp.up_proj"
LAST = "model.layers.3.mlp.down_proj"
EXPERTS = "model.layers.1.mlp"

FaultInjector = Callable[[TrainedModel, ExitStack], Any]


@dataclass(frozen=True)
class Healthy:
    """A run without a fault; `settings` are sections of a config."""

    name: str
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 60
    every: int = 2
    kind: str = "pretrain"
    """"pretrain", "finetune" or "lora"."""


@dataclass(frozen=True)
class Fault:
    """A run that `inject` breaks before step `first_step`."""

    name: str
    rules: tuple[str, ...]
    inject: FaultInjector
    layer: str | None = None
    """The layer that an alarm must name; None if the fault is not in one layer."""
    operand: str | None = None
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    change_batch: Callable[[Batch], Batch] | None = None
    steps: int = 50
    first_step: int = 31
    every: int = 2


def set_recipe(name: str) -> dict[str, dict[str, Any]]:
    return {"float8": {"recipe_name": name}}


RECIPES = (
    *("tensorwise", "rowwise", "rowwise_with_gw_hp", "rowwise_with_tensorwise_weight", "delayed"),
    *("delayed_with_dynamic_weight", "blockwise", "blockwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp"),
)

HEALTHY = (
    *(Healthy(f"recipe {name}", {**set_recipe(name), "training": {"seed": seed}}) for seed, name in enumerate(RECIPES)),
    *(
        Healthy(f"{name}, learning rate {rate:g}", {**set_recipe(name), "optimizer": {"lr": rate}})
        for name in ("tensorwise", "rowwise")
        for rate in (1e-5, 3e-3, 1e-2)
    ),
    Healthy("no warm-up", {"lr_scheduler": {"warmup_steps": 0}}),
    Healthy("each step sampled", {"training": {"seed": 20}}, every=1),
    Healthy("every 10th step of 240", {**set_recipe("rowwise"), "training": {"seed": 21}}, steps=240, every=10),
    Healthy("delayed, every 5th step of 120", {**set_recipe("delayed"), "training": {"seed": 22}}, steps=120, every=5),
    Healthy("one sequence a batch", {"training": {"local_batch_size": 1, "seed": 23}}),
    Healthy("weights in bfloat16", {"training": {"dtype": "bfloat16", "seed": 24}}),
    Healthy("accumulation over 2 batches", {"training": {"global_batch_size": 8, "seed": 25}}, steps=40),
    Healthy("mixture of experts, rowwise", {"model": {"n_experts": 8, "hidden_dim": 64}, **set_recipe("rowwise")}),
    Healthy("mixture of experts, blockwise", {"model": {"n_experts": 8, "hidden_dim": 64}, **set_recipe("blockwise")}),
    Healthy(
        "mixture of experts, learning rate 1e-05",
        {"model": {"n_experts": 8, "hidden_dim": 64}, **set_recipe("rowwise"), "optimizer": {"lr": 1e-5}},
    ),
    Healthy("weight decay 1", {"optimizer": {"weight_decay": 1.0}, "training": {"seed": 26}}),
    Healthy("fine-tuning, tensorwise", {"training": {"seed": 27}}, kind="finetune"),
    Healthy("fine-tuning, rowwise", {**set_recipe("rowwise"), "training": {"seed": 28}}, kind="finetune"),
    Healthy("LoRA, tensorwise", {"training": {"seed": 29}}, kind="lora"),
    Healthy("LoRA, rowwise", {**set_recipe("rowwise"), "training": {"seed": 30}}, kind="lora"),
)


def inject_into(layer: str, how: Callable[..., Any], *arguments: Any) -> FaultInjector:
    """Return an injection that calls `how(stack, linear, *arguments)` with the linear `layer`."""
    return lambda trained, stack: how(stack, trained.model.get_submodule(layer), *arguments)


def inject_into_weight(layer: str, change: inject.Change) -> FaultInjector:
    return lambda trained, stack: inject.change_weight(trained.model.get_submodule(layer), change)


def change_element(index: Any, value: Callable[[torch.Tensor], Any]) -> inject.Change:
    """Return a change that replaces `tensor[index]` by `value(tensor[index])`."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[index] = value(changed[index])
        return changed

    return change


def multiply_by(factor: float) -> inject.Change:
    return lambda tensor: tensor * factor


def change_nothing(trained: TrainedModel, stack: ExitStack) -> None:
    """Change nothing: the fault is in the batches."""


def scale_loss(factor: float) -> FaultInjector:
    """Return an injection that multiplies the loss."""

    def change(trained: TrainedModel, stack: ExitStack) -> None:
        compute_loss = trained.compute_loss
        inject.patch(stack, trained, "compute_loss", lambda batch: compute_loss(batch) * factor)

    return change


def raise_learning_rate(trained: TrainedModel, stack: ExitStack) -> None:
    optimizer = replace(trained.config.optimizer, lr=trained.config.optimizer.lr * 1000)
    inject.patch(stack, trained, "config", replace(trained.config, optimizer=optimizer))


def forget_weight(layer: str) -> FaultInjector:
    """Return an injection that removes the weight of `layer` from the optimizer."""

    def change(trained: TrainedModel, stack: ExitStack) -> None:
        weight = trained.model.get_submodule(layer).get_parameter("weight")
        for group in trained.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter is not weight]

    return change


def grow_input(layer: str, factor: float) -> FaultInjector:
    """Return an injection that multiplies the input by `factor` once more in each forward."""

    def change(trained: TrainedModel, stack: ExitStack) -> None:
        calls = [0]

        def grow(input: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return input * factor ** calls[0]

        inject.change_input(stack, trained.model.get_submodule(layer), grow)

    return change


def kill_expert(trained: TrainedModel, stack: ExitStack) -> None:
    """Stop the router from choosing expert 3 of a layer."""
    get_expert_bias(trained)[3] = -1e9


def get_expert_bias(trained: TrainedModel) -> torch.Tensor:
    """Return the bias [E] that the router of EXPERTS adds to the scores of its experts."""
    buffers = trained.model.get_submodule(EXPERTS).named_buffers()
    (bias,) = (buffer for name, buffer in buffers if name.endswith("e_score_correction_bias"))
    return bias


def shuffle_targets(batch: Batch) -> Batch:
    order = torch.randperm(batch.targets.numel(), generator=torch.Generator().manual_seed(0))
    return Batch(batch.tokens, batch.targets.flatten()[order].view_as(batch.targets), batch.documents)


def repeat_sequence(batch: Batch) -> Batch:
    return Batch(batch.tokens[:1].expand_as(batch.tokens), batch.targets[:1].expand_as(batch.targets), batch.documents)


def repeat_token(batch: Batch) -> Batch:
    return Batch(torch.zeros_like(batch.tokens), torch.zeros_like(batch.targets), batch.documents)


FAULTS = (
    Fault(
        "dequant scale of an input x 2^8",
        ("codes",),
        inject_into(DOWN, inject.change_input_operand, inject.scale_dequant_scale(256)),
        DOWN,
        "input",
    ),
    Fault(
        "dequant scale of an input x 1.5",
        ("codes",),
        inject_into(DOWN, inject.change_input_operand, inject.scale_dequant_scale(1.5)),
        DOWN,
        "input",
    ),
    Fault(
        "scale of an input x 2^8, it saturates",
        ("saturation",),
        inject_into(DOWN, inject.change_input_operand, inject.scale_quant_scale(256)),
        DOWN,
        "input",
    ),
    Fault(
        "scale of an input x 2^-14, it underflows",
        ("underflow", "sqnr"),
        inject_into(DOWN, inject.change_input_operand, inject.scale_quant_scale(2.0**-14)),
        DOWN,
        "input",
    ),
    Fault(
        "flipped layout of an input's codes",
        ("codes",),
        inject_into(Q, inject.change_input_operand, inject.reverse_rows),
        Q,
        "input",
    ),
    Fault(
        "flipped layout of a weight's codes",
        ("codes",),
        inject_into(UP, inject.change_weight_operands, inject.reverse_rows),
        UP,
        "weight",
    ),
    Fault(
        "codes of a weight from an earlier step",
        ("codes",),
        inject_into(UP, inject.change_weight_operands, inject.Stale("codes")),
        UP,
        "weight",
        {"optimizer": {"lr": 3e-3}},
        steps=90,
    ),
    Fault(
        "stale scale of an input that grows x 16",
        ("saturation", "jump"),
        lambda trained, stack: (
            inject_into(DOWN, inject.change_input_operand, inject.Stale("scale"))(trained, stack),
            grow_input(DOWN, 1.2)(trained, stack),
        ),
        DOWN,
        "input",
    ),
    Fault(
        "wrong matmul: rows of another token",
        ("result",),
        inject_into(Q, inject.change_matmul, lambda operand: inject.reverse_rows(operand, operand.data)),
        Q,
        "output",
    ),
    Fault(
        "a row of NaN in an activation",
        ("nonfinite",),
        inject_into(DOWN, inject.change_input, change_element(0, lambda row: row * torch.nan)),
        DOWN,
        "input",
    ),
    Fault(
        "an infinity in a gradient",
        ("nonfinite",),
        inject_into(UP, inject.change_grad_output, change_element((0, 0, 0), lambda row: torch.inf)),
        UP,
        "grad_output",
    ),
    Fault(
        "NaN in a weight",
        ("nonfinite",),
        inject_into_weight(UP, change_element((0, 0), lambda row: torch.nan)),
        UP,
        "weight",
    ),
    Fault(
        "gradient of a layer x 1e-6",
        ("jump", "peers"),
        inject_into(UP, inject.change_grad_output, multiply_by(1e-6)),
        UP,
        "grad_output",
    ),
    Fault(
        "gradient of a layer x 1e4",
        ("jump", "peers"),
        inject_into(UP, inject.change_grad_output, multiply_by(1e4)),
        UP,
        "grad_output",
    ),
    Fault(
        "a detached layer: no gradient",
        ("zero",),
        inject_into(UP, inject.change_grad_output, multiply_by(0.0)),
        UP,
        "grad_output",
    ),
    Fault("loss x 1e-6", ("jump",), scale_loss(1e-6), LAST, "grad_output"),
    Fault("loss x 2^20", ("jump",), scale_loss(2.0**20), LAST, "grad_output"),
    Fault("loss x 1e-38", ("zero", "jump"), scale_loss(1e-38), LAST, "grad_output"),
    Fault("weights of a layer x 100", ("jump", "peers"), inject_into_weight(DOWN, multiply_by(100)), DOWN, "weight"),
    Fault("weights of a layer x 1/100", ("jump", "peers"), inject_into_weight(DOWN, multiply_by(0.01)), DOWN, "weight"),
    Fault(
        "a bit of one weight flips",
        ("jump",),
        inject_into_weight(UP, change_element((3, 5), lambda value: 2.0**12)),
        UP,
        "weight",
    ),
    Fault("weights of a layer are zero", ("zero", "jump"), inject_into_weight(DOWN, multiply_by(0.0)), DOWN, "weight"),
    Fault(
        "an outlier channel x 2^17",
        ("underflow", "sqnr", "jump"),
        inject_into(UP, inject.change_input, change_element((..., 7), lambda row: row * 2.0**17)),
        UP,
        "input",
    ),
    Fault(
        "an outlier element x 2^20",
        ("underflow", "sqnr", "jump"),
        inject_into(UP, inject.change_input, change_element((0, 0, 7), lambda row: row * 2.0**20)),
        UP,
        "input",
    ),
    Fault("an input is all zeros", ("zero",), inject_into(DOWN, inject.change_input, multiply_by(0.0)), DOWN, "input"),
    Fault("an input grows x 1.5 a step", ("growth", "jump"), grow_input(DOWN, 1.5), DOWN, "input"),
    Fault(
        "an input grows x 1.5 a step, delayed",
        ("growth", "saturation", "jump"),
        grow_input(DOWN, 1.5),
        DOWN,
        "input",
        set_recipe("delayed"),
    ),
    Fault(
        "gradients below e5m2's subnormals",
        ("underflow", "sqnr"),
        inject_into(
            UP, inject.change_grad_output, change_element((slice(None), slice(1, None)), lambda rows: rows * 2.0**-36)
        ),
        UP,
        "grad_output",
    ),
    Fault("learning rate x 1000", ("jump", "growth"), raise_learning_rate, None, None),
    Fault("no optimizer has a weight", ("unchanged",), forget_weight(UP), UP, "weight"),
    Fault(
        "a dead expert",
        ("dead",),
        kill_expert,
        EXPERTS,
        None,
        {"model": {"n_experts": 8, "hidden_dim": 64}, **set_recipe("rowwise"), "optimizer": {"lr": 1e-5}},
    ),
    Fault("shuffled labels", (), change_nothing, change_batch=shuffle_targets),
    Fault("one sequence repeated in each batch", (), change_nothing, change_batch=repeat_sequence),
    Fault("all tokens are zero", ("jump", "growth", "zero", "vanishing"), change_nothing, change_batch=repeat_token),
)

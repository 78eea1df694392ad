"""The blocks that compete: bfloat16, quaver's recipes and torchao's, with bfloat16 parameters, as torchtitan trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_parts.part_context import PartContext
from quaver.conversion.convert import convert_to_float8_training
from quaver.conversion.persistent_scales import float8_scaling_state, sync_float8_amax_and_scale_history
from quaver.lab.bench.block_step import BenchedBlock
from quaver.lab.bench.peer import convert_with_torchao
from quaver.lab.model.float8 import fuse_producers
from quaver.lab.settings.float8 import BFLOAT16
from quaver.recipes.config import Float8LinearConfig

QUAVER = tuple(f"quaver {recipe}" for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"))
ORDER = (
    BFLOAT16,
    "quaver tensorwise",
    "torchao tensorwise",
    "quaver rowwise",
    "torchao rowwise",
    "quaver rowwise_with_gw_hp",
    "torchao rowwise_with_gw_hp",
    "quaver delayed",
    "quaver blockwise",
)
"""The most important first: a part that runs out of time leaves out the last ones."""


@dataclass
class Step:
    """Runs forward and backward of a block when called. Gradients stay until the next call."""

    subject: BenchedBlock
    hidden: Tensor
    direction: Tensor

    def __call__(self) -> None:
        for parameter in self.subject.parameters():
            parameter.grad = None
        self.hidden.grad = None
        self.subject(self.hidden).backward(self.direction)

    def settle(self) -> None:
        """Run three steps with syncs of delayed scales between them, which compiles and probes the hardware."""
        for _ in range(2):
            self()
            if float8_scaling_state(self.subject):
                sync_float8_amax_and_scale_history(self.subject)
        self()

    def copy_gradients(self) -> list[Tensor]:
        """Return the gradients of the input and of all parameters in float32."""
        gradients = [self.hidden.grad, *(parameter.grad for parameter in self.subject.parameters())]
        return [gradient.float().clone() for gradient in gradients if gradient is not None]


def make_inputs(context: PartContext) -> tuple[Tensor, Tensor]:
    """A residual stream that requires a gradient, and the gradient of the output, both [B, T, D]."""
    torch.manual_seed(1)
    hidden = context.randn(context.tokens // context.seq_len, context.seq_len, context.model.dim)
    return hidden.requires_grad_(), torch.randn_like(hidden) / context.tokens


def make_step(
    context: PartContext,
    name: str,
    inputs: tuple[Tensor, Tensor],
    *,
    compiled: bool,
    mode: str | None = None,
    change: Callable[[BenchedBlock], object] = lambda subject: None,
) -> Step:
    """Return the step of a contestant. All have the same weights. `change` is applied to the block before compiling."""
    torch.manual_seed(0)
    with context.device:
        subject = BenchedBlock(context.model, context.seq_len)
    subject.to(context.device)  # its rotary tables are made on the CPU
    for parameter in subject.parameters():
        parameter.data = parameter.data.bfloat16()
    library, _, recipe = name.partition(" ")
    if library == "quaver":
        convert_to_float8_training(subject, config=Float8LinearConfig.from_recipe_name(recipe))
        fuse_producers(subject)
    elif library == "torchao":
        convert_with_torchao(subject, recipe, device=context.device)
    change(subject)
    if compiled:
        subject.compile(fullgraph=True, mode=mode, **({"backend": "aot_eager"} if context.dry else {}))
    return Step(subject, *inputs)


def select_contestants(context: PartContext, names: Sequence[str]) -> Sequence[str]:
    """Return all `names` on a GPU; in a dry run one per library, and delayed scaling."""
    kept = (BFLOAT16, "quaver tensorwise", "torchao tensorwise", "quaver delayed")
    return [name for name in names if not context.dry or name in kept]

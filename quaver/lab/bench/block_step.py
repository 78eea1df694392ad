"""A transformer block in one precision, and its training step, as in `quaver train`.

Parameters are float32, the computation bfloat16 through autocast, the optimizer fused AdamW. Each step scales a
resident tensor to make the block's input, and multiplies its output by another one to give the output a gradient;
autograd saves nothing for either. So the input is a new tensor in each step, as in a network, and everything alive
between forward and backward is what the block saves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quaver.conversion.convert import convert_to_float8_training
from quaver.conversion.persistent_scales import float8_scaling_state, sync_float8_amax_and_scale_history
from quaver.lab.bench.harness import Rotation
from quaver.lab.model.float8 import fuse_producers
from quaver.lab.model.llama import Block, make_rope_tables
from quaver.lab.settings import Model, Optimizer
from quaver.lab.trainer.optimizer import build_optimizer
from quaver.recipes.config import Float8LinearConfig

_SMALL_LR = 1e-6  # the loss has no minimum, so a larger one would let the weights grow


class BenchedBlock(nn.Module):
    """One block with its rotary tables. `forward` takes the residual stream [B, T, D]."""

    def __init__(self, model: Model, seq_len: int) -> None:
        super().__init__()
        self.block = Block(model)
        cos, sin = make_rope_tables(seq_len, model.head_dim, model.rope_theta, torch.device("cpu"))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.block(hidden, self.cos, self.sin)


class OptimizerStep:
    """Runs one training step of a block per call."""

    def __init__(self, block: BenchedBlock, sources: Rotation[Tensor], grad_output: Tensor) -> None:
        """Take inputs [B, T, D] that require gradients, and `grad_output`, the gradient of the output, in its shape."""
        self.block, self.sources, self.grad_output = block, sources, grad_output
        self.optimizer = build_optimizer(block, Optimizer(lr=_SMALL_LR))
        self._has_persistent_scales = bool(float8_scaling_state(block))

    def __call__(self, forward_is_done: Callable[[], object] = lambda: None) -> None:
        """Run forward, `forward_is_done()`, backward and the optimizer, and set the gradients to None."""
        source = self.sources.next()
        with torch.autocast(source.device.type, torch.bfloat16):
            loss = (self.block(source * 1.5) * self.grad_output).sum()
        forward_is_done()
        loss.backward()
        source.grad = None
        if self._has_persistent_scales:
            sync_float8_amax_and_scale_history(self.block)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def make_steps(
    model: Model, sequences: int, seq_len: int, precisions: list[str], device: torch.device, *, compiled: bool
) -> dict[str, OptimizerStep]:
    """Return the steps of a block in each precision, "bfloat16" or "quaver RECIPE", on the same inputs.

    The inputs [B, T, D] are float32, as the residual stream is. The gradient of the output is as small as a mean over
    tokens makes it.
    """
    tokens = sequences * seq_len

    def make_random() -> Tensor:
        return torch.randn(sequences, seq_len, model.dim, device=device)

    sources = Rotation(lambda: make_random().requires_grad_(), 4 * tokens * model.dim, device)
    grad_output = make_random() / tokens
    return {
        precision: OptimizerStep(
            build_block(model, precision, seq_len, device, compiled=compiled), sources, grad_output
        )
        for precision in precisions
    }


def build_block(model: Model, precision: str, seq_len: int, device: torch.device, *, compiled: bool) -> BenchedBlock:
    """Return a block in a precision, with the same weights in all precisions."""
    torch.manual_seed(0)
    block = BenchedBlock(model, seq_len).to(device)
    library, _, recipe = precision.partition(" ")
    if library == "quaver":
        convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name(recipe))
        fuse_producers(block)
    if compiled:
        block.compile(fullgraph=True)
    return block

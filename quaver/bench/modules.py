"""A linear, a feed-forward or a block of a Llama in a precision, and its training step, as in `quaver train`.

Parameters are float32, the computation bfloat16 through autocast, the optimizer fused AdamW. Each step makes the
module's input by scaling a resident tensor, and the gradient of its output by a product with another one; autograd
saves nothing for either. So the input is a new tensor in each step, as in a network, and everything alive between
forward and backward is what the module saves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quaver.bench.harness import Rotation
from quaver.bench.options import ModelOptions
from quaver.bench.peer import convert_with_torchao
from quaver.config import Float8LinearConfig
from quaver.convert import convert_to_float8_training
from quaver.delayed import float8_scaling_state, sync_float8_amax_and_scale_history
from quaver.trainer.config import Model, Optimizer
from quaver.trainer.float8 import fuse_producers
from quaver.trainer.model import Block, FeedForward, rope_tables
from quaver.trainer.optimizer import build_optimizer

KINDS = ("linear", "ffn", "block")

_SMALL_LR = 1e-6  # the loss has no minimum, so a larger one would let the weights grow


class Subject(nn.Module):
    """One linear (gate_proj), feed-forward or block. `forward` takes hidden states [B, T, D]."""

    def __init__(self, kind: str, model: Model, seq_len: int) -> None:
        super().__init__()
        self.part = {
            "linear": lambda: nn.Linear(model.dim, model.hidden_dim, bias=False),
            "ffn": lambda: FeedForward(model),
            "block": lambda: Block(model),
        }[kind]()
        if kind == "block":
            cos, sin = rope_tables(seq_len, model.head_dim, model.rope_theta, torch.device("cpu"))
            self.register_buffer("cos", cos)
            self.register_buffer("sin", sin)

    def forward(self, hidden: Tensor) -> Tensor:
        if isinstance(self.part, Block):
            return self.part(hidden, self.cos, self.sin)
        return self.part(hidden)


class Step:
    """The optimizer step of a subject; each call is one."""

    def __init__(self, subject: Subject, sources: Rotation[Tensor], direction: Tensor) -> None:
        """`sources`: inputs [B, T, D] that require gradients; `direction`: the gradient of the output, in its shape."""
        self.subject, self.sources, self.direction = subject, sources, direction
        self.optimizer = build_optimizer(subject, Optimizer(lr=_SMALL_LR))
        self._has_persistent_scales = bool(float8_scaling_state(subject))

    def __call__(self, forward_is_done: Callable[[], object] = lambda: None) -> None:
        """Forward, `forward_is_done()`, backward, optimizer step, and gradients set to None."""
        source = self.sources.next()
        loss = self.forward(source)
        forward_is_done()
        loss.backward()
        source.grad = None
        if self._has_persistent_scales:
            sync_float8_amax_and_scale_history(self.subject)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def forward(self, source: Tensor) -> Tensor:
        """The loss, whose gradient to the module's output is `direction`."""
        with torch.autocast(source.device.type, torch.bfloat16):
            return (self.subject(source * 1.5) * self.direction).sum()


def make_steps(
    kind: str, options: ModelOptions, precisions: list[str], device: torch.device, *, compiled: bool
) -> dict[str, Step]:
    """The steps of a module in each precision, "bfloat16", "quaver RECIPE" or "torchao RECIPE", on the same inputs.

    Inputs [B, T, D] are as in a network: a block reads the residual stream, float32; the others a norm's bfloat16. The
    gradient of the output is as small as a mean over tokens makes it.
    """
    model, (sequences, seq_len) = options.shape, options.batch
    dtype = torch.float32 if kind == "block" else torch.bfloat16

    def random(width: int) -> Tensor:
        return torch.randn(sequences, seq_len, width, device=device, dtype=dtype)

    bytes_each = options.tokens * model.dim * dtype.itemsize
    sources = Rotation(lambda: random(model.dim).requires_grad_(), bytes_each, device)
    direction = random(model.hidden_dim if kind == "linear" else model.dim) / options.tokens
    return {
        precision: Step(build_subject(kind, model, precision, seq_len, device, compiled=compiled), sources, direction)
        for precision in precisions
    }


def build_subject(
    kind: str, model: Model, precision: str, seq_len: int, device: torch.device, *, compiled: bool
) -> Subject:
    """A module in a precision; all precisions have the same weights."""
    torch.manual_seed(0)
    subject = Subject(kind, model, seq_len).to(device)
    library, _, recipe = precision.partition(" ")
    if library == "quaver":
        convert_to_float8_training(subject, config=Float8LinearConfig.from_recipe_name(recipe))
        fuse_producers(subject)
    elif library == "torchao":
        convert_with_torchao(subject, recipe, device=device)
    if compiled:
        subject.compile(fullgraph=True)
    return subject

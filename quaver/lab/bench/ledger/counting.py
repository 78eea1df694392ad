"""A block, a linear or a block of experts, compiled for a GPU in one precision."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from quaver.conversion.convert import convert_to_float8_training
from quaver.kernels.native_mm import ScaleKind
from quaver.lab.bench.block_step import BenchedBlock
from quaver.lab.bench.ledger.entries import list_entries
from quaver.lab.bench.ledger.gpu_code import GPU_PROPERTIES, record_compiled
from quaver.lab.bench.ledger.ledger import Ledger
from quaver.lab.bench.peer import convert_with_torchao, is_peer_recipe
from quaver.lab.memory.devices.gpu import simulate_float8_gpu
from quaver.lab.memory.faking.fakes import FakeMode
from quaver.lab.model.float8 import fuse_producers
from quaver.lab.settings import Model
from quaver.recipes.config import Float8LinearConfig
from quaver.roofline.cost import find_unsupported_scales
from quaver.roofline.device_specs import require_device_spec
from quaver.runtime.errors import InputError

MODULE_PARTS = ("block", "linear")
DEFAULT_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")
"""The recipes that are counted by default."""


@dataclass(frozen=True)
class ModuleConfig:
    """The module to compile: its shapes, dtypes, and part of the block."""

    model: Model
    """The block's shapes; with experts, its feed-forward is a mixture."""
    sequences: int
    seq_len: int
    autocast: bool = False
    """Keep parameters and the residual stream in float32, and multiply in bfloat16; else all is bfloat16."""
    part: str = "block"
    """One of `MODULE_PARTS`: "block", or "linear" for its first feed-forward linear only."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and of the residual stream."""
        return torch.float32 if self.autocast else torch.bfloat16


def check_recipe(recipe: str, gpu: str) -> None:
    """Raise an error for a recipe whose scales no float8 matmul of the GPU takes.

    Raises:
        InputError: an unknown recipe.
        NotImplementedError: the GPU does not multiply the recipe in float8.
    """
    if missing := _find_unmultiplied(recipe, gpu):
        names = " and ".join(sorted("such" if kind is None else kind.value for kind in missing))
        raise NotImplementedError(
            f"recipe {recipe}: no float8 matmul of {gpu} takes {names} scales; operands would be widened to bfloat16, "
            "which is slower than training in bfloat16; name another recipe or GPU"
        )


def is_multiplied(recipe: str, gpu: str) -> bool:
    """Return whether `check_recipe` accepts a recipe."""
    return not _find_unmultiplied(recipe, gpu)


def _find_unmultiplied(recipe: str, gpu: str) -> set[ScaleKind | None]:
    return find_unsupported_scales(require_device_spec(gpu, option="gpu"), recipe)


def check_triton() -> None:
    """Raise InputError if triton is not installed."""
    if find_spec("triton") is None:
        raise InputError("triton is not installed, and Inductor writes a GPU's kernels in it: pip install triton")


def make_ledger(config: ModuleConfig, name: str, gpu: str) -> Ledger:
    """Compile the forward and the backward for a GPU, and count their launches.

    Args:
        name: "bfloat16", "quaver RECIPE" or "torchao RECIPE".
        gpu: a name in GPU_PROPERTIES.
    Raises:
        InputError, NotImplementedError: the recipe is unknown, or the GPU does not multiply it.
        ImportError: torchao is not installed.
    """
    library, _, recipe = name.partition(" ")
    if recipe:
        check_recipe(recipe, gpu)
    if library == "torchao" and not is_peer_recipe(recipe):
        raise NotImplementedError(f"expected a recipe that torchao has, got {recipe}")
    with simulate_float8_gpu(), FakeMode():
        model = config.model
        module = _SingleLinear(model) if config.part == "linear" else BenchedBlock(model, config.seq_len)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(config.dtype)
        if library == "quaver":
            convert_to_float8_training(module, config=Float8LinearConfig.from_recipe_name(recipe))
            fuse_producers(module)
        elif library == "torchao":
            convert_with_torchao(module, recipe, device=torch.device("cuda"))
        hidden = torch.randn(config.sequences, config.seq_len, model.dim, dtype=config.dtype, requires_grad=True)
        module.compile(fullgraph=True)

        def call() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=config.autocast):
                module(hidden)

        graphs = record_compiled(call, GPU_PROPERTIES[gpu])
    return Ledger(name, gpu, list_entries(graphs, GPU_PROPERTIES[gpu].L2_cache_size), tuple(graphs))


class _SingleLinear(nn.Module):
    """One linear without a norm, so that the gradient of its input is a result of its backward."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.up_proj = nn.Linear(model.dim, model.hidden_dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up_proj(hidden)

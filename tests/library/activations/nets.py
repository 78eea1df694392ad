"""Builds checkpointed transformer blocks of a recipe, for tests of activation checkpointing and storage."""

import torch
from torch import nn

from quaver import Float8LinearConfig, convert_to_float8_training
from quaver.activations.policy import apply_activation_checkpointing
from tests.models import Block, rope_tables
from tests.reference import lowest_sqnr_db

SAVED = {None: 0.95, "rowwise": 0.35, "rowwise_with_gw_hp": 0.4, "blockwise": 0.35, "mxfp8": 0.35}
"""Of bfloat16's saved bytes, at most. A block that stores nothing saves 1, 0.39 to 0.49, 0.44 to 0.52, 0.39 and 0.4."""
STORED_TENSORS = 13
"""How many tensors a block stores, those that are stored again included."""
LOWEST_DB = lowest_sqnr_db(*[3] * STORED_TENSORS)
"""SQNR of the gradients of a block, each of which reads every tensor stored in e4m3 at most once."""


class Net(nn.Module):
    """Blocks of one width."""

    def __init__(self, width: int, blocks: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, width * 7 // 2) for _ in range(blocks))

    def forward(self, x):
        cos, sin = rope_tables(x.shape[1], x.shape[2] // 4, x.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def build_net(recipe: str | None, mode: str = "none", option: str | None = None, **shape) -> Net:
    torch.manual_seed(1)
    net = Net(**shape)
    if recipe:
        convert_to_float8_training(net, config=Float8LinearConfig.from_recipe_name(recipe))
    apply_activation_checkpointing(net.layers, mode=mode, selective_ac_option=option)
    return net

"""Norms and SwiGLU that write float8 for the linears behind them, as on a GPU; a reference stands in for the kernels.

tests/unit/test_triton_producers.py holds the kernels to it.
"""

import copy

import pytest
import torch

from quaver import Float8Linear, Float8LinearConfig, convert_to_float8_training, sync_float8_amax_and_scale_history
from quaver.activation_checkpointing import apply_activation_checkpointing
from quaver.casts import CastInput, MatrixCasts
from quaver.config import Float8LinearRecipeName
from quaver.kernels import fused_producers
from quaver.producers import rms_norm, swiglu
from quaver.trainer.config import Model
from quaver.trainer.float8 import fuse_producers, in_high_precision
from quaver.trainer.model import Block, rope_tables

CONFIG = Model(dim=64, n_heads=2, n_kv_heads=1, hidden_dim=224, n_layers=1)
TABLES = rope_tables(16, CONFIG.head_dim, CONFIG.rope_theta, torch.device("cpu"))
RECIPES = [name.value for name in Float8LinearRecipeName]
KEEPS_INPUT_HP = "rowwise_with_gw_hp"


def counted(name, function, calls):
    def counting(*args, **options):
        calls.append(name)
        return function(*args, **options)

    return counting


@pytest.fixture
def on_gpu(monkeypatch):
    """Cast in layouts, and count what the producers cast."""
    calls = []
    for name in [name for name in vars(fused_producers) if "_cast_" in name]:
        monkeypatch.setattr(fused_producers, name, counted(name, getattr(fused_producers, name), calls))
    monkeypatch.setattr(MatrixCasts, "lays_out", lambda self, hp: True)
    return calls


def make(recipe, fused):
    torch.manual_seed(0)
    block = convert_to_float8_training(Block(CONFIG), config=Float8LinearConfig.from_recipe_name(recipe))
    if fused:
        fuse_producers(block)
    return block


def steps(block, count=2, autocast=torch.bfloat16):
    torch.manual_seed(1)
    made = []
    for _ in range(count):
        hidden = torch.randn(2, 16, CONFIG.dim, requires_grad=True)
        block.zero_grad()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            output = block(hidden, *TABLES)
        output.backward(torch.randn_like(output))
        made.append((output.detach(), hidden.grad, *(p.grad.clone() for p in block.parameters())))
        sync_float8_amax_and_scale_history(block)
    return made


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("autocast", [torch.bfloat16, None], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_computes_the_same(on_gpu, recipe, autocast, checkpointing):
    blocks = [make(recipe, fused) for fused in (False, True)]
    for block in blocks:
        parts = torch.nn.ModuleList([block])
        apply_activation_checkpointing(parts, mode=checkpointing, selective_ac_option="op", preserve_rng_state=False)
    expected = steps(blocks[0], autocast=autocast)
    assert not on_gpu
    got = steps(blocks[1], autocast=autocast)
    assert bool(on_gpu) == (recipe != KEEPS_INPUT_HP)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours[0].equal(theirs[0])  # the forward, to the bit
        for gradient, want in zip(ours[1:], theirs[1:], strict=True):
            assert (gradient - want).norm() <= 2e-2 * want.norm()


def test_one_norm_is_cast_once_for_all_its_readers(on_gpu):
    steps(make("tensorwise", True), count=1)
    assert sorted(on_gpu) == ["rms_norm_cast_layouts"] * 2 + ["swiglu_cast_layouts"]


def test_kept_scales_are_used_and_observe(on_gpu):
    block = make("delayed", True)
    steps(block, count=3)
    assert set(on_gpu) == {"rms_norm_cast_with_persistent_scale", "swiglu_cast_with_persistent_scale"}
    unfused = make("delayed", False)
    steps(unfused, count=3)
    for ours, theirs in zip(
        block.mlp.down_proj.kept_scales(torch.device("cpu")),
        unfused.mlp.down_proj.kept_scales(torch.device("cpu")),
        strict=True,
    ):
        assert ours.quant_scale.equal(theirs.quant_scale)


def test_frozen_readers_need_no_columns(on_gpu):
    block = make("tensorwise", True)
    block.requires_grad_(False)
    hidden = torch.randn(2, 16, CONFIG.dim, requires_grad=True)
    made = block.input_layernorm(hidden)
    assert isinstance(made, CastInput)
    assert made.operands.first is None
    block(hidden, *TABLES).sum().backward()
    assert hidden.grad.isfinite().all()


def test_a_reader_in_high_precision_is_given_a_tensor(on_gpu):
    block = make("tensorwise", True)
    hidden = torch.randn(2, 16, CONFIG.dim)
    with in_high_precision(block):
        assert isinstance(block.input_layernorm(hidden), torch.Tensor)
        block(hidden, *TABLES)
    gate = torch.randn(4, 8)
    assert isinstance(swiglu(gate, gate, readers=(torch.nn.Linear(8, 8),)), torch.Tensor)
    two_configs = [Float8Linear(8, 8), Float8Linear(8, 8)]
    assert isinstance(rms_norm(gate, torch.ones(8), 1e-5, readers=two_configs), torch.Tensor)


def test_an_input_for_other_linears_is_refused(on_gpu):
    reader, other = Float8Linear(8, 8), Float8Linear(8, 8)
    made = swiglu(torch.randn(4, 8), torch.randn(4, 8), readers=(reader,))
    assert reader(made).shape == (4, 8)
    with pytest.raises(RuntimeError, match="cast for linears of another config"):
        other(made)


def test_a_copy_of_a_block_has_readers_of_its_own(on_gpu):
    block = make("tensorwise", True)
    again = copy.deepcopy(block)
    assert again.input_layernorm.readers[0] is again.self_attn.q_proj
    assert again.state_dict().keys() == block.state_dict().keys()

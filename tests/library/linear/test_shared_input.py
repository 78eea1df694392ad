"""Tests that q, k and v share the cast of their input while gradients are recorded, and when they must cast again."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quaver import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    convert_to_high_precision,
    sync_float8_amax_and_scale_history,
)
from quaver.activations.policy import apply_activation_checkpointing, make_selective_contexts
from quaver.linear import shared_input
from quaver.linear.quantize import Quantizer
from quaver.recipes.scaling import CastScales
from tests.library.linear.linears import count_reads, needs_counts
from tests.steps import assert_same, compute_results

RECIPE = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x)


def through_numpy(x: Tensor) -> None:
    x.detach().numpy()[:] = 3.0


def through_data(x: Tensor) -> None:
    x.data.fill_(3.0)


def through_shared_memory(x: Tensor) -> None:
    np.frombuffer(memoryview(x.detach().numpy()).cast("B"), dtype=np.float32)[:] = 3.0


WRITES = (through_numpy, through_data, through_shared_memory)


@pytest.mark.parametrize("records_gradients", [False, True])
@pytest.mark.parametrize("write", WRITES)
@RECIPE
def test_a_write_that_no_version_counter_sees_is_seen(recipe, write, records_gradients):
    linear = Float8Linear(64, 64, bias=False, config=recipe)
    attention = convert_to_float8_training(Attention(), config=recipe)
    for calls in ([linear, linear], [attention.q, attention.q], [attention.q, attention.k], [attention, attention]):
        x = torch.randn(32, 64)
        before = x._version
        with torch.set_grad_enabled(records_gradients):
            calls[0](x)
            write(x)
            assert x._version == before
            actual, expected = calls[1](x), calls[1](torch.full_like(x, 3.0))
        assert torch.equal(actual, expected)


class Changing(Attention):
    """Changes something between two linears that read one input."""

    def __init__(self, change, reader: str = "k") -> None:
        super().__init__()
        self.change, self.reader = change, reader

    def forward(self, x: Tensor) -> Tensor:
        self.q(x)
        self.change(x)
        return getattr(self, self.reader)(x)


@pytest.mark.parametrize(
    ("change", "reader"),
    [(lambda x: x.mul_(3), "k"), (lambda x: x.view(-1)[5].fill_(100.0), "k"), (through_data, "q")],
    ids=["mul_", "view", "through_data, one linear twice"],
)
def test_a_write_between_two_calls_in_one_forward_is_seen(change, reader):
    model, x = convert_to_float8_training(Changing(change, reader), config="tensorwise"), torch.randn(32, 64)
    assert torch.equal(model(x), getattr(model, reader)(x.clone()))


def test_a_scale_written_between_two_linears_of_one_forward_is_seen():
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("delayed"), shared_inputs=(("q", "k", "v"),))
    model = convert_to_float8_training(Changing(lambda x: sync_float8_amax_and_scale_history(model)), config=config)
    x = torch.randn(32, 64)
    model(x)
    actual = model(x * 3)
    assert torch.equal(actual, model.k(x * 3))


def test_linears_of_other_recipes_share_nothing():
    model, x = Attention(), torch.randn(32, 64) * torch.logspace(-4, 0, 32).view(-1, 1)
    for recipe, linear in zip(("tensorwise", "rowwise", "blockwise"), "qkv", strict=True):
        convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name, linear=linear: name == linear)
    assert torch.equal(model(x), model.q(x.clone()) + model.k(x.clone()) + model.v(x.clone()))


def test_linears_of_other_scales_share_nothing():
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("delayed"), shared_inputs=())
    model, x = convert_to_float8_training(Attention(), config=config), torch.randn(32, 64)
    model(x)
    model.k(x * 3)
    sync_float8_amax_and_scale_history(model)
    assert torch.equal(model(x), model.q(x.clone()) + model.k(x.clone()) + model.v(x.clone()))


def test_given_scales_are_used():
    casts, x = Float8LinearConfig().casts.input, torch.randn(32, 64)
    scales = CastScales(torch.tensor(2.0), torch.tensor(0.5))
    quantizers = Quantizer(casts, x.dtype), shared_input.CachedQuantizer(casts, x.dtype, None, 1)
    expected, actual = (quantizer(x, row=True, column=True, scales=scales) for quantizer in quantizers)
    assert_same(expected.row[:2], actual.row[:2])


def test_linears_under_other_autocasts_share_nothing():
    """The recipe keeps the input for grad_weight in the dtype of autocast."""

    class Mixed(Attention):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                self.q(x)
            with torch.autocast("cpu", torch.float16):
                return self.k(x)

    model, x = convert_to_float8_training(Mixed(), config="rowwise_with_gw_hp"), torch.randn(32, 64)
    (actual,) = torch.autograd.grad(model(x).sum(), model.k.weight)
    with torch.autocast("cpu", torch.float16):
        (expected,) = torch.autograd.grad(model.k(x.clone()).sum(), model.k.weight)
    assert torch.equal(actual, expected)


@RECIPE
def test_a_part_of_the_forward_may_be_checkpointed_selectively(recipe):
    """The recomputation calls this part and not the forward around it, and issues the operations of the forward."""

    class Part(Attention):
        def forward(self, x: Tensor) -> Tensor:
            part = super().forward
            return checkpoint(part, x, use_reentrant=False, context_fn=make_selective_contexts)

    plain = convert_to_float8_training(Attention(), config=recipe)
    model = convert_to_float8_training(Part(), config=recipe)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(32, 64)
    expected, actual = (compute_results(module, x) for module in (plain, model))
    assert_same(actual, expected)


@needs_counts
@pytest.mark.parametrize(
    ("recipe", "times", "trains"), [("tensorwise", 2, 2), ("rowwise", 1, 2), ("rowwise_with_gw_hp", 1, 1)]
)
def test_one_forward_that_trains_casts_its_input_once(recipe, times, trains):
    """An amax and a cast; rowwise in one read for the forward, and in two for both matmuls."""
    attention = convert_to_float8_training(Attention(), config=recipe)
    x = torch.randn(32, 64)
    weights, once = 3 * times * 64 * 64, trains * x.numel()
    assert count_reads(lambda: attention(x)) == weights + once
    with torch.no_grad():
        assert count_reads(lambda: attention(x)) == weights + 3 * times * x.numel()
    assert count_reads(lambda: (attention.v(x), attention.v(x))) == 2 * (weights // 3 + once)
    assert count_reads(lambda: (attention.q(x), attention.k(x), attention.v(x))) == weights + 3 * once


@needs_counts
@RECIPE
def test_a_parent_that_is_checkpointed_itself_casts_its_input_once_again(recipe):
    """A recomputation calls its forward without hooks; one of a module around it calls the parent with its hooks."""
    counts = []
    for wrap in (lambda attention: attention, nn.Sequential):
        module = wrap(convert_to_float8_training(Attention(), config=recipe))
        apply_activation_checkpointing([module], mode="full")
        x = torch.randn(32, 64, requires_grad=True)
        counts.append(count_reads(lambda module=module, x=x: module(x).sum().backward()))
    assert counts[0] == counts[1]


@needs_counts
def test_a_forward_that_raised_leaves_nothing_open():
    attention = convert_to_float8_training(Attention(), config="tensorwise")
    with pytest.raises(ValueError, match="expected an input of shape"):
        attention(torch.randn(32, 7))
    x = torch.randn(32, 64)
    assert count_reads(lambda: (attention.q(x), attention.k(x))) == 2 * (2 * 64 * 64 + 2 * x.numel())


@needs_counts
@pytest.mark.parametrize("deletes", [False, True])
def test_a_forward_after_one_that_ctrl_c_ended_closes_the_cache(deletes):
    """PyTorch calls no forward hook after a KeyboardInterrupt. The interrupted model runs again, or another."""
    model = nn.Sequential(convert_to_float8_training(Attention(), config="tensorwise"))
    handle = model[0].k.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    x = torch.randn(32, 64)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    if deletes:
        del model
        gc.collect()
        model = nn.Sequential(convert_to_float8_training(Attention(), config="tensorwise"))
    model(x)
    assert count_reads(lambda: (model[0].q(x), model[0].k(x))) == 2 * (2 * 64 * 64 + 2 * x.numel())


def test_the_hooks_are_copied_pickled_and_removed():
    model = nn.Sequential(convert_to_float8_training(Attention(), config="tensorwise"))
    convert_to_float8_training(model, config="tensorwise")
    for module in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        attention = module[0]
        assert len(attention._forward_pre_hooks) == len(attention._forward_hooks) == 1
        convert_to_high_precision(module)
        assert not attention._forward_pre_hooks
        assert not attention._forward_hooks
        assert not attention._forward_hooks_always_called


@needs_counts
def test_another_thread_shares_its_own_inputs():
    model = convert_to_float8_training(Attention(), config="tensorwise")
    other, x = copy.deepcopy(model), torch.randn(32, 64)
    reads = count_reads(lambda: model(x))

    def run_other(*_):
        thread = threading.Thread(target=other, args=(torch.randn(32, 64),))
        thread.start()
        thread.join()

    model.k.register_forward_pre_hook(run_other)
    assert count_reads(lambda: model(x)) == 2 * reads

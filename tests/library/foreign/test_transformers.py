"""Converts models of transformers as they are and trains them for some steps; test_zoo.py converts back."""

import copy
from contextlib import nullcontext

import pytest
import torch

from quaver import cast_weights_once, convert_to_float8_training, sync_float8_amax_and_scale_history
from tests.library.foreign.llama import float8_names
from tests.library.foreign.zoo import loss_of, make
from tests.thinned import at_night, first, thinned

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
PRECISIONS = ("float32", "bfloat16", "autocast")
NAMES = ("llama", "falcon", "gpt2", "qwen3_moe", "t5", "bert", "vit")


def convert(model, recipe):
    """The linears of Falcon are a subclass of nn.Linear."""
    convert_to_float8_training(model, config=recipe, include_subclasses=True)


def train(model, inputs, steps=3, *, lr=1e-3, autocast=False, scope=nullcontext):
    """Train, validate in inference mode before each step, and return the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr), []
    for _ in range(steps):
        with torch.inference_mode():
            validated = loss_of(model, inputs, autocast)
        with scope(model):
            loss = loss_of(model, inputs, autocast)
            torch.testing.assert_close(loss.detach(), validated, rtol=0.02, atol=0)  # attention has kernels for either
            loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        sync_float8_amax_and_scale_history(model)
        losses.append(loss.item())
    return losses


# SAM's loss falls after 10 steps only, and a difference may have grown by then: one case for each recipe.
SAM_CASES = [("tensorwise", "autocast"), ("rowwise", "float32"), ("rowwise_with_gw_hp", "bfloat16")]


@pytest.mark.parametrize(
    ("name", "recipe", "precision"),
    [*thinned(NAMES, RECIPES, PRECISIONS, together=1), *at_night(("sam", *case) for case in SAM_CASES)],
)
def test_trains_like_its_high_precision_baseline(name, recipe, precision):
    model, inputs = make(name)
    model.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    baseline = copy.deepcopy(model)
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    convert(model, recipe)
    assert float8_names(model) == linears
    autocast = precision == "autocast"
    options = {"autocast": autocast} | ({"steps": 14, "lr": 3e-3} if name == "sam" else {})
    losses = train(model, inputs, scope=cast_weights_once if autocast else nullcontext, **options)
    expected = train(baseline, inputs, **options)
    assert losses == pytest.approx(expected, rel=0.05)
    assert losses != expected or precision == "bfloat16"
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("recipe", "name", "use_reentrant"),
    first(2, [
        ("rowwise_with_gw_hp", "llama", False), ("delayed", "falcon", True),
        ("rowwise", "falcon", True), ("tensorwise", "llama", False),
    ]),
)  # fmt: skip
def test_its_own_gradient_checkpointing_changes_no_bit(recipe, name, use_reentrant):
    losses = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model, inputs = make(name)
        convert(model, recipe)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        losses.append(train(model, inputs, steps=2))
    assert losses[0] == losses[1]

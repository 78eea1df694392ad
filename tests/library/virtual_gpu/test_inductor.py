"""The Triton code that Inductor writes for a GPU, run in the interpreter: it has the bits of eager code.

With `emulate_precision_casts`, for without it Inductor leaves out roundings to bfloat16 inside a kernel.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from torch import nn

from quaver import (
    convert_to_float8_training,
    float8_grouped_mm,
    float8_linear,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.conversion.delayed import named_slots
from quaver.lab.bench.modules import BenchedBlock
from quaver.lab.settings import Model
from quaver.lab.trainer.float8 import fuse_producers
from tests.reference import BLOCK_RECIPES, RECIPES, sqnr_db
from tests.thinned import at_night
from tests.virtual_gpu import virtual_gpu

ALL = (*RECIPES, "delayed", *BLOCK_RECIPES)
BLOCK = Model(dim=128, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=192)


def _linear(recipe):
    weight = torch.randn(48, 64).bfloat16()
    return (
        torch.randn(32, 64).bfloat16(),
        [weight],
        lambda input: float8_linear(torch.nn.functional.silu(input), weight, config=recipe),
    )


def _delayed(recipe):
    model = nn.Sequential(nn.SiLU(), nn.Linear(64, 48, bias=False)).bfloat16()
    return torch.randn(32, 64).bfloat16(), list(model.parameters()), convert_to_float8_training(model, config=recipe)


def _experts(recipe):
    stack, ends = torch.randn(3, 64, 48).bfloat16(), torch.tensor([10, 10, 32], dtype=torch.int32)
    return (
        torch.randn(32, 64).bfloat16(),
        [stack],
        lambda input: float8_grouped_mm(torch.nn.functional.silu(input), stack, ends, config=recipe),
    )


def _block(recipe):
    subject = BenchedBlock(BLOCK, seq_len=64)
    for parameter in subject.parameters():
        parameter.data = parameter.data.bfloat16()
    if recipe is not None:
        convert_to_float8_training(subject, config=recipe)
        fuse_producers(subject)
    return torch.randn(2, 64, 128).bfloat16(), list(subject.parameters()), subject


def _both(make, recipe, card_name, knows_scales=True, options=()):
    """What a subject computes eagerly and compiled, its gradients, its launches and the vendor's matmuls.

    With persistent scales also what casts observed. `options`: Inductor's, as pairs.
    """
    from tests.virtual_gpu.inductor import inductor  # imports the interpreter

    def run(function):
        leaf = input.clone().requires_grad_()
        for parameter in parameters:
            parameter.grad = None
        output = function(leaf)
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
        return [output.detach(), leaf.grad, *(each.grad for each in parameters)]

    def run_and_observe(function):
        scaling.forget_observed()
        return [*run(function), *(state.amax_buffer.clone() for state in states)]

    torch.manual_seed(0)
    with virtual_gpu(card_name) as card, np.errstate(all="ignore"):
        input, parameters, function = make(recipe)
        for each in parameters:
            each.requires_grad_()
        model = function if isinstance(function, nn.Module) else nn.Module()
        scaling = float8_scaling_state(model)
        states = {id(state): state for _, state, _ in named_slots(model)}.values()
        run(function)  # probes
        if knows_scales:
            sync_float8_amax_and_scale_history(model)
        card.calls.clear()
        eager, calls = run_and_observe(function), dict(card.calls)
        card.calls.clear()
        options = {"emulate_precision_casts": True, **dict(options)}
        with inductor(card) as launches, torch._inductor.config.patch(options):
            compiled = run_and_observe(torch.compile(function, fullgraph=True))
    return eager, compiled, dict(launches), (calls, dict(card.calls))


def assert_same(both):
    eager, compiled, launches, (calls, calls_when_compiled) = both
    assert launches
    assert calls == calls_when_compiled
    for one, other in zip(eager, compiled, strict=True):
        assert other.isfinite().all()
        assert torch.equal(one, other)


def _refused_card():
    from tests.virtual_gpu.inductor import inductor

    with virtual_gpu("a100") as card, pytest.raises(ValueError, match="expected") as error, inductor(card):
        pass
    return str(error.value)


def test_a_card_without_inductors_code_and_a_missing_interpreter_are_refused(interpreter):
    assert interpreter(_refused_card) == "expected one of h100, h200, b200, got 'a100'"
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before the first import of triton"):
        _refused_card()


@pytest.mark.parametrize(
    ("make", "recipe", "card_name"),
    [
        (_linear, "tensorwise", "h100"),
        *at_night((_linear, each, "h100") for each in (*RECIPES[1:], *BLOCK_RECIPES)),
        *at_night((_linear, each, "b200") for each in ("mxfp8", "mxfp8_with_gw_hp", "rowwise")),
        *at_night((_experts, each, "h100") for each in ("rowwise", "rowwise_with_gw_hp")),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_compiled_code_has_eager_bits(interpreter, make, recipe, card_name):
    assert_same(interpreter(_both, make, recipe, card_name))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "knows_scales"), [("delayed", True), ("delayed", False), ("delayed_with_dynamic_weight", True)]
)
def test_a_linear_with_persistent_scales_has_eager_bits(interpreter, recipe, knows_scales):
    assert_same(interpreter(_both, _delayed, recipe, "h100", knows_scales))


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_kernels_that_inductor_joins_side_by_side_have_eager_bits(interpreter, recipe):
    """docs/block-cost.md has the launches that the option saves."""
    joined = interpreter(_both, _linear, recipe, "h100", True, [("combo_kernels", True)])
    assert_same(joined)
    apart = interpreter(_both, _linear, recipe, "h100")
    assert sum(joined[2].values()) < sum(apart[2].values())


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", [None, *ALL])
def test_a_block_for_hopper_has_eager_numbers(interpreter, recipe):
    """Inductor orders sums of norms' gradients otherwise, and rounds those of rotary embeddings elsewhere.

    `tensorwise` has eager bits but for the gradients of the input, of q and k, and of the first norm: 38 dB and more,
    as without float8.
    """
    eager, compiled, launches, (calls, calls_when_compiled) = interpreter(_both, _block, recipe, "h100")
    assert launches
    assert calls == calls_when_compiled
    for one, other in zip(eager, compiled, strict=True):
        assert other.isfinite().all()
        assert sqnr_db(one.float(), other.float()) > 35

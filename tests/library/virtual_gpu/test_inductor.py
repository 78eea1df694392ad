"""Runs the Triton code that Inductor writes for a GPU in the interpreter: it has the bits of eager code.

With `emulate_precision_casts`, for without it Inductor leaves out roundings to bfloat16 inside a kernel.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import torch.nn.functional as F
from torch import nn

from quaver import (
    convert_to_float8_training,
    float8_grouped_mm,
    float8_linear,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.conversion.persistent_scales import list_named_slots
from tests.models import Block, rope_tables
from tests.recipes import DYNAMIC_RECIPES
from tests.reference import sqnr_db
from tests.steps import assert_same
from tests.thinned import at_night
from tests.virtual_gpu import virtual_gpu


def _build_linear(recipe):
    weight = torch.randn(48, 64).bfloat16()
    return torch.randn(32, 64).bfloat16(), [weight], lambda input: float8_linear(F.silu(input), weight, config=recipe)


def _build_delayed(recipe):
    model = nn.Sequential(nn.SiLU(), nn.Linear(64, 48, bias=False)).bfloat16()
    return torch.randn(32, 64).bfloat16(), list(model.parameters()), convert_to_float8_training(model, config=recipe)


def _build_experts(recipe):
    stack, ends = torch.randn(3, 64, 48).bfloat16(), torch.tensor([10, 10, 32], dtype=torch.int32)
    multiply = lambda input: float8_grouped_mm(F.silu(input), stack, ends, config=recipe)  # noqa: E731
    return torch.randn(32, 64).bfloat16(), [stack], multiply


class BlockWithRope(Block):
    def __init__(self):
        super().__init__(dim=128, hidden_dim=192, heads=2, kv_heads=1)
        self.tables = rope_tables(64, 64, "cpu")

    def forward(self, hidden):
        return super().forward(hidden, *self.tables)


def _build_block(recipe):
    block = BlockWithRope().bfloat16()
    if recipe is not None:
        convert_to_float8_training(block, config=recipe)
    return torch.randn(2, 64, 128).bfloat16(), list(block.parameters()), block


def _run_eager_and_compiled(make, recipe, card_name, knows_scales=True, options=()):
    """Return the eager and the compiled results, the launches of compiled code, and the vendor's matmuls of both.

    The results are the output, the gradients and, with persistent scales, what casts observed. `options` are
    Inductor's, as pairs.
    """
    from tests.virtual_gpu.inductor import compile_for_card  # imports the interpreter

    def run(function):
        leaf = input.clone().requires_grad_()
        for parameter in parameters:
            parameter.grad = None
        output = function(leaf)
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
        return [output.detach(), leaf.grad, *(parameter.grad for parameter in parameters)]

    def run_and_observe(function):
        scaling.forget_recorded_amaxes()
        return [*run(function), *(slots.amax_buffer.clone() for slots in conversion_slots)]

    torch.manual_seed(0)
    with virtual_gpu(card_name) as card, np.errstate(all="ignore"):
        input, parameters, function = make(recipe)
        for parameter in parameters:
            parameter.requires_grad_()
        model = function if isinstance(function, nn.Module) else nn.Module()
        scaling = float8_scaling_state(model)
        conversion_slots = {id(slots): slots for _, slots, _ in list_named_slots(model)}.values()
        run(function)  # runs the trials
        if knows_scales:
            sync_float8_amax_and_scale_history(model)
        card.calls.clear()
        eager, calls = run_and_observe(function), dict(card.calls)
        card.calls.clear()
        options = {"emulate_precision_casts": True, **dict(options)}
        with compile_for_card(card) as launches, torch._inductor.config.patch(options):
            compiled = run_and_observe(torch.compile(function, fullgraph=True))
    return eager, compiled, dict(launches), (calls, dict(card.calls))


def assert_finite_and_same(eager, compiled, launches, calls):
    assert launches
    assert calls[0] == calls[1]
    assert all(result.isfinite().all() for result in compiled)
    assert_same(compiled, eager)


def _refuse_card():
    from tests.virtual_gpu.inductor import compile_for_card

    with virtual_gpu("a100") as card, pytest.raises(ValueError, match="expected") as error, compile_for_card(card):
        pass
    return str(error.value)


def test_a_card_without_inductors_code_and_a_missing_interpreter_are_refused(interpreter):
    assert interpreter(_refuse_card) == "expected one of h100, h200, b200, got 'a100'"
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before the first import of triton"):
        _refuse_card()


@pytest.mark.parametrize(
    ("make", "recipe", "card_name"),
    [
        (_build_linear, "tensorwise", "h100"),
        *at_night((_build_linear, recipe, "h100") for recipe in DYNAMIC_RECIPES[1:]),
        *at_night((_build_linear, recipe, "b200") for recipe in ("mxfp8", "mxfp8_with_gw_hp", "rowwise")),
        *at_night((_build_experts, recipe, "h100") for recipe in ("rowwise", "rowwise_with_gw_hp")),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_compiled_code_has_eager_bits(interpreter, make, recipe, card_name):
    assert_finite_and_same(*interpreter(_run_eager_and_compiled, make, recipe, card_name))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "knows_scales"), [("delayed", True), ("delayed", False), ("delayed_with_dynamic_weight", True)]
)
def test_a_linear_with_persistent_scales_has_eager_bits(interpreter, recipe, knows_scales):
    assert_finite_and_same(*interpreter(_run_eager_and_compiled, _build_delayed, recipe, "h100", knows_scales))


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_kernels_that_inductor_joins_side_by_side_have_eager_bits(interpreter, recipe):
    """docs/experiments/block-cost.md has the launches that the option saves."""
    joined = interpreter(_run_eager_and_compiled, _build_linear, recipe, "h100", True, [("combo_kernels", True)])
    assert_finite_and_same(*joined)
    apart = interpreter(_run_eager_and_compiled, _build_linear, recipe, "h100")
    assert sum(joined[2].values()) < sum(apart[2].values())


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", [None, *DYNAMIC_RECIPES, "delayed"])
def test_a_block_for_hopper_has_eager_numbers(interpreter, recipe):
    """Inductor orders sums of norms' gradients otherwise, and rounds those of rotary embeddings elsewhere.

    `tensorwise` has eager bits but for the gradients of the input, of q and k, and of the first norm: 38 dB and more,
    as without float8.
    """
    eager, compiled, launches, calls = interpreter(_run_eager_and_compiled, _build_block, recipe, "h100")
    assert launches
    assert calls[0] == calls[1]
    for expected, result in zip(eager, compiled, strict=True):
        assert result.isfinite().all()
        assert sqnr_db(expected.float(), result.float()) > 35

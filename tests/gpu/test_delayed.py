"""Tests on a GPU that persistent scales make the codes of a CPU, that nothing synchronizes, and what is compiled."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from quaver import (
    DelayedScalingConfig,
    Float8LinearConfig,
    convert_to_float8_training,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.kernels.persistent_cast import cast_with_persistent_scale
from quaver.recipes.scaling import PersistentScale
from quaver.recipes.scaling import cast_with_persistent_scale as oracle
from tests.gpu.device import BACKEND, DEVICE, host, host_sync_refused
from tests.recipes import E4M3, E5M2, PERSISTENT_RECIPES
from tests.reference import assert_same_bits, lowest_sqnr_db

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("scale", "is_known"), [(0.0, False), (50.0, False), (50.0, True)])
@pytest.mark.parametrize("compiled", [False, True])
def test_codes_scales_and_observed_amaxes_are_those_of_a_cpu(hp_dtype, float8_dtype, scale, is_known, compiled):
    hp = (torch.randn(300, 130) * torch.logspace(-3, 3, 130)).to(hp_dtype)

    def cast(hp, quant_scale, recorded_amax, known):
        scale = PersistentScale(quant_scale, recorded_amax, known, is_known)
        codes, dequant, _, quant, _ = cast_with_persistent_scale(hp, scale, float8_dtype, True, False, False).row
        return codes, quant, dequant

    recorded_amax = torch.tensor([-1.0, 0.0], device=DEVICE)
    cast = torch.compile(cast, fullgraph=True, backend=BACKEND) if compiled else cast
    on_gpu = cast(hp.to(DEVICE), torch.tensor(scale, device=DEVICE), recorded_amax, torch.tensor(bool(scale)))
    expected = oracle(hp, torch.tensor(scale), float8_dtype)
    for actual, reference in zip((*on_gpu, recorded_amax), expected, strict=True):
        assert_same_bits(actual.cpu(), reference)


def make(recipe, **delayed):
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, delayed_scaling_config=DelayedScalingConfig(**delayed))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))
    return convert_to_float8_training(model, config=config)


def step(model, forward, seed, device):
    torch.manual_seed(seed)
    input = torch.randn(128, 64).to(device)
    model.zero_grad()
    with torch.autocast(device, torch.bfloat16):
        loss = forward(input).float().square().mean()
    loss.backward()
    sync_float8_amax_and_scale_history(model)
    return loss.detach()


def relative_error(*mantissa_bits):
    """Return the error, relative to the rms, of a result with a rounding to each of these numbers of bits."""
    return 10 ** (-lowest_sqnr_db(*mantissa_bits) / 20)


CODES = relative_error(3, 3)
"""The second linear's input has another scale where its amax in bfloat16 differs, and then both devices round it."""
LOSS = 4 * 2 * CODES / (128 * 64) ** 0.5 + CODES**2
"""Four standard deviations of the sum of output * error, and the sum of error**2, over the sum of output**2."""
AMAX = {"2.input": 2**-6, "2.grad_output": CODES, "0.grad_output": relative_error(3, 3, 2, 2)}
"""Two ulps of bfloat16; the output's error; with that of the codes of the gradient. Other tensors have equal bits."""


@pytest.mark.parametrize("recipe", PERSISTENT_RECIPES)
@pytest.mark.parametrize("compiled", [False, True])
def test_training_follows_that_on_a_cpu_and_is_compiled_once_more_when_scales_are_known(recipe, compiled):
    on_cpu = make(recipe)
    on_gpu = copy.deepcopy(on_cpu).to(DEVICE)
    assert on_gpu[0].scale_slots.conversion_slots.device.type == DEVICE
    forward = torch.compile(on_gpu, fullgraph=True, backend=BACKEND) if compiled else on_gpu
    step(on_gpu, forward, 0, DEVICE)
    with host():
        step(on_cpu, on_cpu, 0, "cpu")
    for seed in range(1, 5):
        with torch._dynamo.config.patch(error_on_recompile=seed > 1):
            loss = step(on_gpu, forward, seed, DEVICE)
        with host():
            expected = step(on_cpu, on_cpu, seed, "cpu")
        torch.testing.assert_close(loss.cpu(), expected, rtol=LOSS, atol=0)
    actual, expected = (float8_scaling_state(model).state_dict() for model in (on_gpu, on_cpu))
    for name, value in actual.items():
        torch.testing.assert_close(value.cpu(), expected[name], rtol=AMAX.get(name.rpartition(".")[0], 0), atol=0)


def test_nothing_waits_for_the_device():
    model = make("delayed").to(DEVICE)
    step(model, model, 0, DEVICE)  # the first sync says how many scales were unknown
    input = torch.randn(128, 64, device=DEVICE)
    with host_sync_refused():
        for _ in range(3):
            model(input).sum().backward()
            sync_float8_amax_and_scale_history(model)


def test_the_state_follows_parameters_whose_data_is_moved():
    model = make("delayed")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DEVICE)
    step(model, model, 0, DEVICE)
    assert model[0].scale_slots.conversion_slots.device.type == DEVICE
    assert all(tensor.amax > 0 for tensor in float8_scaling_state(model).report())

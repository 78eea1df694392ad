"""Tests which matmuls of a model the survey finds to lose more in a GPU's sums than in their casts."""

import pytest
import torch
from torch import nn

from quaver import Float8GemmConfig, Float8LinearConfig, convert_to_float8_training, monitor
from quaver.lab.doctor.sum_survey import survey_sums
from quaver.numerics.accumulation import HOPPER
from tests.steps import compute_results


def test_a_survey_finds_the_matmul_whose_sums_cost_most():
    model = nn.Sequential(nn.Linear(2048, 48, bias=False), nn.ReLU(), nn.Linear(48, 16))
    model[0].weight.data.abs_()
    input = torch.randn(64, 2048).abs()

    def survey(config):
        configs = {"0": config, "2": None}
        return survey_sums(model, lambda: model(input).square().mean().backward(), configs.get, HOPPER)

    first, *others = survey(Float8LinearConfig())
    assert (first.name, first.matmul, first.use_fast_accum) == ("0", "output", True)
    assert first.margin_db < -10
    assert {other.matmul for other in others} == {"grad_weight"}  # the gradient of the input is not needed
    assert min(sums.margin_db for sums in survey(Float8LinearConfig(gemm_config_output=Float8GemmConfig()))) > 0
    assert not survey(Float8LinearConfig(emulate=True))


def test_a_survey_and_a_monitor_find_the_same_sums():
    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    model, input = nn.Linear(48, 64, dtype=torch.bfloat16), torch.randn(40, 48).bfloat16()
    surveyed = survey_sums(nn.Sequential(model), lambda: compute_results(model, input), lambda name: config, HOPPER)
    converted = convert_to_float8_training(nn.Sequential(model), config=config)
    with monitor(converted, every=1, extras_every=1, emulate_sums_of="h100") as watch:
        compute_results(converted, input)
        watch.step()
    (sample,) = watch.samples
    monitored = {
        tensor["operand"]: [sample["sums"][name][index] for name in ("casts", "fast", "exact")]
        for index, tensor in enumerate(watch.header["tensors"])
        if sample["sums"]["casts"][index] is not None
    }
    assert monitored.keys() == {sums.matmul for sums in surveyed} == {"output", "grad_input"}
    (output,) = (sums for sums in surveyed if sums.matmul == "output")
    assert monitored["output"] == pytest.approx(list(output.sums), abs=0.01)

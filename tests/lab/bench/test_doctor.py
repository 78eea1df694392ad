"""quaver doctor: it tries, and it says what fails."""

import json
from unittest import mock

import pytest
import torch

from quaver.lab.bench import doctor
from quaver.lab.cli import main
from quaver.recipes.config import Float8LinearRecipeName
from tests.reference import BLOCK_RECIPES, PERSISTENT_RECIPES, RECIPES


def test_every_recipe_is_tried_on_the_cpu(capsys):
    assert main(["doctor", "--json", "--no-compile"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    cpu = [finding for finding in found["recipes"] if finding["device"] == "cpu"]
    assert [finding["recipe"] for finding in cpu] == [*RECIPES, *PERSISTENT_RECIPES, *BLOCK_RECIPES]
    assert {finding["verdict"] for finding in cpu} == {"exact"}
    assert found["ok"]


def test_a_recipe_that_raises_or_is_wrong_is_impossible(capsys):
    with mock.patch.object(doctor, "Float8Linear", side_effect=RuntimeError("no such kernel\nmore")):
        finding = doctor.try_recipe(Float8LinearRecipeName.ROWWISE, torch.device("cpu"))
    assert (finding["verdict"], finding["detail"]) == ("impossible", "no such kernel")
    with mock.patch.object(doctor, "_worst_sqnr_db", return_value=3.0):
        assert main(["doctor", "--no-compile"]) == 1
    assert "wrong results (3.0 dB)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("native", "expected"),
    [
        ((), "no recipe is faster than bfloat16 here, and all save memory: take the one of the GPUs that will train"),
        (("tensorwise",), "tensorwise for speed, tensorwise for FSDP2 (all-gathers one byte per element)"),
        (
            ("tensorwise", "rowwise", "rowwise_with_tensorwise_weight"),
            "tensorwise for speed, rowwise for outliers, tensorwise for FSDP2 (all-gathers one byte per element), "
            "rowwise_with_gw_hp for accuracy",
        ),
        (
            ("tensorwise", "rowwise", "blockwise"),
            "tensorwise for speed, blockwise for outliers, blockwise for FSDP2 (all-gathers one byte per element), "
            "blockwise_with_gw_hp for accuracy",
        ),
        (
            ("tensorwise", "blockwise", "mxfp8"),
            "tensorwise for speed, mxfp8 for outliers, mxfp8 for FSDP2 (all-gathers one byte per element), "
            "mxfp8_with_gw_hp for accuracy",
        ),
    ],
)
def test_the_recipe_follows_from_what_a_device_multiplies(native, expected):
    findings = [
        {"device": "cuda:0", "recipe": each.value, "verdict": "native" if each.value in native else "exact"}
        for each in Float8LinearRecipeName
    ]
    assert doctor.recommendation("cuda:0", findings) == expected
    assert doctor.recommendation("cpu", findings).startswith("no recipe is faster")

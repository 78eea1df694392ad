"""quaver doctor: it tries, and it says what fails."""

import json
from unittest import mock

import torch

from quaver.bench import doctor
from quaver.cli import main
from quaver.config import Float8LinearRecipeName
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

"""quaver doctor: it tries, and it says what fails."""

import json
from unittest import mock

import pytest
import torch

from quaver.lab.bench import doctor
from quaver.lab.bench.ledger import verdict
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
            "tensorwise for speed, rowwise for outliers, rowwise_with_tensorwise_weight for FSDP2 (all-gathers one "
            "byte per element), rowwise_with_gw_hp for accuracy",
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


DIAGNOSED = {"versions": {}, "devices": {}, "recipes": [], "recommended": {}, "slow_paths": [], "compile": ""}
MILLISECONDS = {"bfloat16": 42.0, "quaver tensorwise": 30.0, "quaver delayed": 28.0}


@pytest.fixture
def as_gpu(monkeypatch):
    def fake(name):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)

    return fake


def test_the_ledger_says_what_a_recipe_gains_here_and_which_gains_more(as_gpu, monkeypatch, capsys):
    counted = []

    def milliseconds(name, spec):
        return {"hp": 1.0, "float8 matmul": MILLISECONDS.get(name, 35.0) - 1}

    monkeypatch.setattr(verdict, "count", lambda work, name, gpu: counted.append((name, gpu)) or name)
    monkeypatch.setattr(verdict, "milliseconds_by_category", milliseconds)
    monkeypatch.setattr("quaver.lab.cli.doctor_machine.diagnose", lambda try_compile: {**DIAGNOSED, "ok": True})
    as_gpu("NVIDIA H200")
    assert main(["doctor", "--ledger", "tensorwise"]) == 0
    assert (
        "ledger: tensorwise has 1.40 times bfloat16's speed in a compiled block of llama-8b on H200, 2 x 8192 tokens; "
        "delayed, the best other recipe, has 1.50 (modelled, not measured)\n"
    ) in capsys.readouterr().out
    assert counted == [(name, "H200") for name in ("bfloat16", *(f"quaver {each}" for each in verdict.COUNTED))]
    assert main(["doctor", "--ledger", "delayed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ledger"]
    assert (found["gpu"], found["recipe"], found["speeds"]["tensorwise"]) == ("H200", "delayed", 1.4)
    as_gpu("NVIDIA B200")
    assert main(["doctor", "--ledger", "tensorwise", "--json"]) == 0
    assert "blockwise" not in json.loads(capsys.readouterr().out)["ledger"]["speeds"]


@pytest.mark.parametrize(
    ("gpu", "words", "line"),
    [
        (None, "tensorwise", "--ledger: this machine has no GPU; `quaver bench ledger --gpu NAME` counts for any"),
        ("NVIDIA A100", "tensorwise", "--ledger: expected a GPU that is one of H100, H200, B200, got NVIDIA A100"),
        ("NVIDIA RTX", "tensorwise", "got NVIDIA RTX"),
        ("H100", "mxfp8", "recipe mxfp8: no float8 matmul of H100 takes 1 x 32 scales"),
        ("H100", "tensorwide", "tensorwide"),
        ("H100", "tensorwise --model runs/a", "--ledger"),
    ],
)
def test_a_ledger_that_cannot_be_counted_is_refused(as_gpu, refused, gpu, words, line):
    if gpu is not None:
        as_gpu(gpu)
    assert line in refused("doctor", "--ledger", *words.split())


def test_the_ledger_needs_triton(as_gpu, refused, monkeypatch):
    as_gpu("NVIDIA H200")
    monkeypatch.setattr("quaver.lab.bench.ledger.subjects.find_spec", lambda name: None)
    assert "triton is not installed" in refused("doctor", "--ledger", "rowwise")

"""Tests quaver doctor: recipes tried on this machine, and with --gpu the backends and layers on another GPU."""

import json
from importlib.metadata import PackageNotFoundError
from unittest import mock

import pytest
import torch

from quaver import error_on_slow_path
from quaver.experts.gemm import predict_grouped_backend
from quaver.kernels import cpu
from quaver.lab.cli import main
from quaver.lab.doctor import machine as doctor
from quaver.lab.doctor.gpu import describe_gpu
from quaver.linear.backends import predict_backend
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.linear_casts import MATMULS
from quaver.roofline.device_specs import require_device_spec
from tests.recipes import BLOCK_RECIPES, NON_BLOCK_RECIPES, PERSISTENT_RECIPES
from tests.virtual_gpu import virtual_gpu


def test_every_recipe_is_tried_on_the_cpu(run_quaver):
    report = json.loads(run_quaver("doctor", "--json", "--no-compile"))
    assert report["versions"]["torch"] == torch.__version__
    cpu = [finding for finding in report["recipes"] if finding["device"] == "cpu"]
    assert [finding["recipe"] for finding in cpu] == [*NON_BLOCK_RECIPES, *PERSISTENT_RECIPES, *BLOCK_RECIPES]
    assert {finding["verdict"] for finding in cpu} == {"exact"}
    assert report["ok"]


def test_the_version_of_a_module_whose_distribution_has_another_name_is_its_own(monkeypatch):
    torchao = pytest.importorskip("torchao")
    monkeypatch.setattr("importlib.metadata.version", mock.Mock(side_effect=PackageNotFoundError))
    assert doctor.diagnose(try_compile=False)["versions"]["torchao"] == torchao.__version__


def test_a_recipe_that_raises_is_impossible_and_one_with_wrong_results_fails_the_command(capsys):
    with mock.patch.object(doctor, "Float8Linear", side_effect=RuntimeError("no such kernel\nmore")):
        finding = doctor.try_recipe(Float8LinearRecipeName.ROWWISE, torch.device("cpu"))
    assert (finding["verdict"], finding["detail"]) == ("impossible", "no such kernel")
    with mock.patch.object(doctor, "compute_sqnr_db", return_value=3.0):
        assert main(["doctor", "--no-compile"]) == 1
    assert "wrong results (3.0 dB)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("native", "expected"),
    [
        ((), "no recipe is faster than bfloat16 on this device; choose the recipe for the GPU that you will train on"),
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
        {"device": "cuda:0", "recipe": recipe.value, "verdict": "native" if recipe.value in native else "exact"}
        for recipe in Float8LinearRecipeName
    ]
    assert doctor.recommend_recipe("cuda:0", findings) == expected
    assert doctor.recommend_recipe("cpu", findings).startswith("no recipe is faster")


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 100,
    "intermediate_size": 128,
    "moe_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
}


@pytest.mark.parametrize("card", ["a100", "l40s", "h100", "h200", "b200"])
def test_listed_backends_are_those_that_dispatch_finds(card):
    listed = {row.recipe: row for row in describe_gpu(require_device_spec(card, option="gpu")).recipes}
    device = torch.device("cpu")
    with virtual_gpu(card):
        for name in Float8LinearRecipeName:
            config = Float8LinearConfig.from_recipe_name(name)
            for position, operands in enumerate(MATMULS.values()):
                pair = [config.casts.get(*operand) for operand in operands]
                if pair[0].is_disabled:
                    expected = ["high precision"] * 2
                else:
                    expected = [
                        ask(*pair, device, emulate=False).value for ask in (predict_backend, predict_grouped_backend)
                    ]
                if config.has_persistent_scales:  # experts are not converted
                    expected[1] = "high precision"
                row = listed[name.value]
                assert [row.linear[position].backend, row.experts[position].backend] == expected, (name, position)


def test_a_model_needs_its_config_alone(tmp_path, run_quaver):
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIXTURE))
    report = json.loads(run_quaver("doctor", "--gpu=h100", f"--model={tmp_path}", "--recipe=blockwise", "--json"))
    layers = {layer["name"]: layer for layer in report["layers"]}
    assert layers["model.layers.*.self_attn.q_proj"]["count"] == 2
    assert "in 100 to 128" in layers["model.layers.*.self_attn.q_proj"]["note"]
    assert "out 192 to 256" in layers["model.layers.*.mlp.experts.gate_up_proj"]["note"]
    assert not layers["lm_head"]["converted"]
    assert not layers["model.layers.*.mlp.gate.weight"]["converted"]
    printed = run_quaver("doctor", "--gpu=h100", f"--model={file}", "--recipe=blockwise")
    assert "in blockwise, linears native" in printed


def test_code_that_a_model_brings_is_not_run_and_nobody_is_asked(tmp_path, run_refused):
    pytest.importorskip("transformers")
    (tmp_path / "configuration_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    brings = {"model_type": "x", "auto_map": {"AutoConfig": "configuration_x.X"}}
    (tmp_path / "config.json").write_text(json.dumps(brings))
    line = run_refused("doctor", "--gpu=h100", f"--model={tmp_path}")
    assert "auto_map in config.json), which is not run; expected a model_type of transformers, got 'x'" in line
    assert not (tmp_path / "ran").exists()


def test_a_run_has_its_recipe(run_quaver):
    report = json.loads(run_quaver("doctor", "--gpu=b200", "--model=train_configs/llama3_debug.toml", "--json"))
    assert report["capability"] == "sm_100"
    assert {layer["note"] for layer in report["layers"] if layer["converted"]} == {""}


def test_a_run_has_its_backward_and_the_recipes_of_its_layers(tmp_path, run_quaver):
    layer = "model.layers.1.mlp.up_proj"
    settings = (
        f'recipe_name = "rowwise"\nbackward = "dequantized"\nskip_first_layers = 1\nlayer_recipes = ["{layer}=mxfp8"]'
    )
    (tmp_path / "a.toml").write_text(f"[model]\nn_layers = 2\n[float8]\n{settings}\n")
    argv = ["doctor", "--gpu=h100", f"--model={tmp_path / 'a.toml'}"]
    report = json.loads(run_quaver(*argv, "--json"))
    assert report["recipe"] == "rowwise:dequantized"
    recipe = next(row for row in report["recipes"] if row["recipe"] == report["recipe"])
    assert [matmul["backend"] for matmul in recipe["linear"]] == ["native", "high precision", "high precision"]
    counts = {(layer["name"], layer["converted"], layer["note"]): layer["count"] for layer in report["layers"]}
    assert counts["model.layers.*.mlp.up_proj", True, "in mxfp8:dequantized"] == 1
    assert counts["model.layers.*.mlp.up_proj", False, "float8.skip_first_layers = 1"] == 1
    assert counts["model.layers.*.mlp.down_proj", True, ""] == 1
    printed = run_quaver(*argv, "--recipe=rowwise:high_precision")
    assert "in rowwise:high_precision, linears native output, high precision grad_input" in printed


def test_slow_paths_are_listed_and_do_not_raise(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "HAS_EXTENSION", False)
    monkeypatch.setattr(cpu, "UNAVAILABLE_REASON", "quaver._cpu was not built at install")
    monkeypatch.setattr(cpu, "PURE_PYTORCH", False)
    slow = "float8 casts on the CPU run in PyTorch, up to 10 times slower: quaver._cpu was not built at install"
    with error_on_slow_path():
        assert main(["doctor", "--no-compile"]) == 0
        assert f"slow path: {slow}" in capsys.readouterr().out
        assert main(["doctor", "--no-compile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slow_paths"] == [slow]

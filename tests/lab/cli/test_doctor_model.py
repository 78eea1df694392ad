"""Tests `quaver doctor --model`: the survey of a run or a Hugging Face folder, and recipes that a budget chooses."""

import json

import pytest
import torch
from torch import nn

from quaver import Float8Linear, LayerRecipes
from quaver.integrations.transformers import prepare_model_for_float8
from quaver.lab.doctor.linear_survey import choose_recipes, survey_linears
from quaver.lab.settings.config_file import load_config
from quaver.lab.trainer.training_run import prepare_run
from tests.lab.trainer.runs import run_to_end, with_settings


class Outlier(nn.Module):
    """Two linears; the second reads an outlier channel of 2^17."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1024, 64), nn.Linear(1024, 64)

    def forward(self, input):
        scale = torch.ones(1024)
        scale[3] = 2.0**17
        return self.first(input) + self.second(input * scale)


def test_a_budget_gives_each_layer_the_most_float8_that_keeps_it():
    model = Outlier()
    surveyed = survey_linears(model, lambda: model(torch.randn(64, 1024)).square().mean().backward())
    assert choose_recipes(24, surveyed, lambda name: False).get_recipe("first") == "tensorwise"
    assert choose_recipes(24, surveyed, lambda name: False).get_recipe("second") in ("blockwise", "mxfp8")
    assert choose_recipes(30, surveyed, lambda name: False).get_recipe("first") == "rowwise"
    highest = choose_recipes(60, surveyed, lambda name: False)
    assert highest.layers == {"first": "high_precision", "second": "high_precision"}
    assert choose_recipes(24, surveyed, lambda name: name == "second").layers == {}


def test_a_model_without_gradients_is_refused():
    with pytest.raises(ValueError, match="expected a model whose linears get gradients"):
        survey_linears(Outlier(), lambda: None)


def list_recipes(model):
    modules = model.named_modules()
    return {name: module.config.recipe_name.value for name, module in modules if isinstance(module, Float8Linear)}


def test_a_run_gets_a_config_that_the_trainer_takes(tiny_config, tmp_path, run_quaver):
    """Also a run with delayed scales, whose settings no dynamic recipe has."""
    delayed = {"enable_float8_linear": True, "recipe_name": "delayed", "delayed_margin": 1}
    run = run_to_end(with_settings(tiny_config, float8=delayed))
    out = tmp_path / "recipes.toml"
    options = ["--budget-db", 29, "--output", out, "--emulate-sums-of", "h100", "--json"]
    report = json.loads(run_quaver("doctor", "--model", run.folder.path, *options))
    recipes = {linear["name"]: linear["recipe"] for linear in report["linears"]}
    assert recipes["lm_head"] == "skipped"
    assert {matmul["matmul"] for matmul in report["sums"]} == {"output", "grad_input", "grad_weight"}
    float8 = {name: recipe for name, recipe in recipes.items() if recipe not in ("skipped", "high_precision")}
    assert {matmul["name"] for matmul in report["sums"]} == {name for name in float8 if float8[name] != "mxfp8"}
    assert recipes["model.layers.0.mlp.down_proj"] != "tensorwise"
    better = prepare_run(load_config(out, {"job": {"name": "better"}, "checkpoint": {"enable": False}}))
    assert list_recipes(better.models[0].model) == float8
    better.folder.release()


def test_linears_that_a_run_does_not_convert_are_skipped(tiny_config, run_quaver):
    float8 = {"enable_float8_linear": True, "skip_first_layers": 1, "filter_fqns": ("lm_head", "q_proj")}
    run = run_to_end(with_settings(tiny_config, float8=float8))
    linears = json.loads(run_quaver("doctor", "--model", run.folder.path, "--json"))["linears"]
    surveyed = {linear["name"] for linear in linears if linear["recipe"] != "skipped"}
    assert surveyed == list_recipes(run.models[0].model).keys()


def test_a_hugging_face_folder_gets_recipes_that_prepare_takes(tmp_path, text_folder, run_quaver):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM  # an architecture that quaver does not train

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=256, **shape)).save_pretrained(tmp_path / "hf")
    out = tmp_path / "recipes.toml"
    out.write_text("# Written by quaver doctor --model: an earlier one, which is replaced\n")
    options = ["--data", text_folder, "--seq-len", 32, "--budget-db", 29, "--output", out, "--emulate-sums-of", "h100"]
    printed = " ".join(run_quaver("doctor", "--model", tmp_path / "hf", *options).split())
    assert "at least 29 dB" in printed
    assert "float8 matmuls the sums lose less than the casts" in printed
    recipes = LayerRecipes.read(out)
    model = prepare_model_for_float8(GPTNeoXForCausalLM.from_pretrained(tmp_path / "hf"), recipes)
    chosen = {recipes.recipe, *recipes.layers.values()} - {"high_precision"}
    assert {*list_recipes(model).values()} == chosen


def test_the_vocabulary_of_a_model_of_images_and_text_is_that_of_its_embedding(tmp_path, text_folder, run_quaver):
    """Its config.json has a vocab_size in its text_config alone."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=16, **shape)
    text = LlamaConfig(vocab_size=256, **shape)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=255)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "hf")
    printed = run_quaver("doctor", "--model", tmp_path / "hf", "--data", text_folder, "--seq-len", 32)
    assert "model.language_model.layers.0" in printed


def test_layers_of_experts_get_the_recipe_of_most_linears(tiny_config, run_quaver, run_refused, tmp_path):
    float8 = {"enable_float8_linear": True, "backward": "dequantized"}
    run = run_to_end(with_settings(tiny_config, model={"n_experts": 4, "n_shared_experts": 1}, float8=float8))
    names = "model.layers.0.mlp.experts, model.layers.1.mlp.experts"
    printed = run_quaver("doctor", "--model", run.folder.path)
    assert f"not surveyed: 2 layers of experts, in tensorwise: {names}" in printed
    report = json.loads(run_quaver("doctor", "--model", run.folder.path, "--json"))
    assert report["not_surveyed"] == names.split(", ")
    assert 0 < report["float8_share"] < 1 / 3  # the forward alone
    unreached = ["doctor", "--model", str(run.folder.path), "--budget-db", "1000"]
    assert f"not surveyed: 2 layers of experts, in high precision: {names}" in run_quaver(*unreached)
    assert "--budget-db: expected decibels" in run_refused(*unreached, "--output", str(tmp_path / "recipes.toml"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "{tmp}/nothing"], "--model must be a run or a Hugging Face folder"),
        (["--model", "{tmp}"], "config.json"),
        (["--model", "{tmp}", "--output", __file__], "exists and is no TOML of recipes of quaver"),
        (["--model", "{tmp}", "--output", "/dev/null/r.toml"], "--output: cannot write /dev/null/r.toml"),
        (["--budget-db", "30"], "--budget-db must be its default, 25.0, unless --model is given"),
    ],
)
def test_bad_input_is_one_line(argv, message, tmp_path, run_refused):
    assert message in run_refused("doctor", *(word.format(tmp=tmp_path) for word in argv))

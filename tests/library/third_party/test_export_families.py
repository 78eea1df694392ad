"""Tests exports of models that are no plain decoder: multimodal ones, hybrids of Mamba, encoders, speech."""

import functools
import itertools
import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer

from quaver import convert_to_float8_training, convert_to_high_precision
from quaver.export import import_float8, load_float8, load_frozen, save_float8
from quaver.export.files import SafetensorsWriter, StoredTensors
from quaver.integrations.transformers import prepare_model_for_float8
from tests.library.third_party.checkpoints import export_folder, load_with_transformers
from tests.library.third_party.llama import convert, is_not_head
from tests.library.third_party.zoo import make
from tests.reference import sqnr_db
from tests.steps import assert_same

TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
KEYS = {"num_key_value_heads": 2}
VISION = {**TEXT, "image_size": 28, "patch_size": 14}
MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16}
SPEECH = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SPEECH |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 16, "vocab_size": 32}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def llava():
    text, vision = transformers.LlamaConfig(**TEXT, **KEYS), transformers.CLIPVisionConfig(**VISION)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(text_config=text, vision_config=vision))


def gemma3():
    """Its head is tied."""
    text, vision = transformers.Gemma3TextConfig(**TEXT, **KEYS, head_dim=16), transformers.SiglipVisionConfig(**VISION)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def bamba():
    """Its config has an inf."""
    return transformers.BambaForCausalLM(transformers.BambaConfig(**TEXT, **KEYS, **MAMBA, attn_layer_indices=[]))


def nemotron_h():
    """Its modules are model.layers, and backbone.layers in a checkpoint."""
    sizes = {"mamba_num_heads": 2, "mamba_head_dim": 32, "ssm_state_size": 16, "head_dim": 16, "n_groups": 1}
    config = transformers.NemotronHConfig(**TEXT, **KEYS, **sizes, layers_block_type=["mamba", "attention"])
    return transformers.NemotronHForCausalLM(config)


def qwen3_5_moe():
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 2}
    text = {**TEXT, **KEYS, **experts, "num_experts_per_tok": 1, "head_dim": 16, "layer_types": ["full_attention"]}
    vision = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


def llama4():
    """Its experts are stacks [E, K, N], and linears of single experts in compressed-tensors."""
    text = {**TEXT, **KEYS, "head_dim": 16, "intermediate_size_mlp": 32, "num_local_experts": 2, "moe_layers": [0]}
    vision = {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    vision |= {"intermediate_size": 128, "pixel_shuffle_ratio": 0.5}
    config = transformers.Llama4Config(text_config={**text, "pad_token_id": 0}, vision_config=vision)
    return transformers.Llama4ForConditionalGeneration(config)


MIXTURES = {"qwen3_5_moe": qwen3_5_moe, "llama4": llama4}
FAMILIES = {"llava": llava, "gemma3": gemma3, "bamba": bamba, "nemotron_h": nemotron_h}


def build_model(family):
    torch.manual_seed(0)
    return (FAMILIES | MIXTURES | {"t5": lambda: make("t5")[0]})[family]()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function that returns the folder of a family's export."""
    root = tmp_path_factory.mktemp("families")

    @functools.cache
    def export(family):
        save_float8(convert(build_model(family), "tensorwise"), root / family)
        return root / family

    return export


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_the_names_of_save_pretrained(family, exported, tmp_path):
    folder, model = exported(family), build_model(family)
    model.save_pretrained(tmp_path / "plain")
    names = {name for name in StoredTensors(folder) if not name.endswith("_scale")}
    assert names == set(StoredTensors(tmp_path / "plain"))
    theirs = load_with_transformers(folder, "compressed-tensors", type(model))
    model.load_state_dict(dict(load_float8(folder, model=model, dtype=torch.float32)))
    assert_same(model.state_dict(), theirs.state_dict())
    frozen = convert_to_high_precision(load_frozen(build_model(family), folder))
    assert_same(frozen.state_dict(), model.state_dict())


FORMATS = ("compressed-tensors", "compressed-tensors-block", "fp8")
READ = [*itertools.product(FAMILIES, FORMATS), ("t5", "fp8")]  # which keeps its `wo` in float32


@pytest.mark.parametrize(("family", "format"), READ)
def test_transformers_quantizes_the_linears_that_are_stored_so(family, format, tmp_path):
    """By default it takes the quantized linears from config.json, and not from the scales in the files."""

    def is_quantized(module, name):
        return is_not_head(module, name) and not name.endswith(("q_proj", "k_proj", "v_proj", "fc1"))

    ours = prepare_model_for_float8(build_model(family), "rowwise", module_filter_fn=is_quantized)
    plan = save_float8(ours, tmp_path / "out", format=format).plan
    linears = {name.removesuffix(".weight") for name in plan.float8}
    if format == "fp8":
        assert find_fp8_linears(tmp_path / "out", build_model(family)) == linears
        return
    theirs, info = type(ours).from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert {name for name, module in theirs.named_modules() if hasattr(module, "weight_scale")} == linears
    tokens = torch.arange(1, 25).view(1, 24)
    with torch.no_grad():
        assert sqnr_db(*(model.eval()(tokens, use_cache=False).logits for model in (ours, theirs))) > 20


def find_fp8_linears(folder, plain):
    """Return the linears of `plain` that transformers quantizes on a GPU; on a CPU it dequantizes all."""
    config = transformers.AutoConfig.from_pretrained(folder).quantization_config
    quantizer = AutoHfQuantizer.from_config({**config, "dequantize": False}, pre_quantized=True)
    quantizer._process_model_before_weight_loading(plain)
    return {name for name, module in plain.named_modules() if type(module).__name__ == "FP8Linear"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_exported_and_imported(family, exported, tmp_path):
    plain, out, back = tmp_path / "plain", tmp_path / "out", tmp_path / "back"
    model = build_model(family)
    model.save_pretrained(plain)
    if family == "bamba":  # as older versions of transformers wrote it
        text, infinity = (plain / "config.json").read_text(), '{\n      "__float__": "Infinity"\n    }'
        assert infinity in text
        (plain / "config.json").write_text(text.replace(infinity, "Infinity"))
    export_folder(plain, out, "tensorwise", measure_tokens=4 if family == "llava" else 0)
    assert_same(dict(load_float8(out, dtype=torch.float32)), dict(load_float8(exported(family), dtype=torch.float32)))
    import_float8(out, back, dtype=torch.float32)
    loaded, info = type(model).from_pretrained(back, output_loading_info=True)
    assert not any(info.values()), info
    for folder in (out, back):
        json.loads((folder / "config.json").read_text(), parse_constant=pytest.fail)
    if family == "bamba":
        assert loaded.config.time_step_limit == model.config.time_step_limit


@pytest.mark.parametrize("family", ["llava", "gemma3", *MIXTURES])
def test_a_model_of_text_reads_a_multimodal_folder(family, exported, caplog):
    whole = build_model(family)
    config = whole.config.text_config
    whole.load_state_dict(dict(load_float8(exported(family), model=whole, dtype=torch.float32)))
    text = AutoModelForCausalLM.from_config(config)
    text.load_state_dict(dict(load_float8(exported(family), model=text, dtype=torch.float32)))
    assert "the model is a part of the checkpoint's" in caplog.text
    language_model = whole.language_model.model if family == "llama4" else whole.model.language_model
    assert_same(text.model.state_dict(), language_model.state_dict())
    frozen = convert_to_high_precision(load_frozen(AutoModelForCausalLM.from_config(config), exported(family)))
    assert_same(frozen.state_dict(), text.state_dict())


@pytest.mark.parametrize(
    "build",
    [
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
        lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SPEECH, **TOKENS)),
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)),
    ],
)
def test_models_of_other_classes_are_exported_but_for_tied_heads(build, tmp_path):
    build().save_pretrained(tmp_path / "plain")
    export_folder(tmp_path / "plain", tmp_path / "out", "rowwise")
    loaded = build()
    loaded.load_state_dict(dict(load_float8(tmp_path / "out", model=loaded, dtype=torch.float32)))


def test_a_model_that_takes_no_tokens_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(SafetensorsWriter, "add", None)
    transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)).save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="the logits cannot be measured: ViTForImageClassification has no nn.Emb"):
        export_folder(tmp_path / "plain", tmp_path / "out", "rowwise", measure_tokens=4)
    assert not (tmp_path / "out").exists()


def test_a_config_that_is_no_json_is_refused_before_anything_is_written(tmp_path):
    converted = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(32, 32)))
    with pytest.raises(ValueError, match="config: expected what JSON holds, got Object of type set"):
        save_float8(converted, tmp_path / "out", config={"model_type": "mine", "x": {1}})
    assert not list(tmp_path.iterdir())

"""Tests that `from_pretrained` with a QuaverConfig makes the model that calls after a load would make."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.quantizers.base import HfQuantizer
from trl import SFTConfig, SFTTrainer

from quaver import Float8Linear, Float8LinearConfig, conversion_report, freeze_to_float8
from quaver.export import load_float8, load_frozen, matches_serving, save_float8
from quaver.integrations import transformers_quantizer
from quaver.integrations.transformers import Float8Callback, QuaverConfig, prepare_model_for_float8
from quaver.linear.frozen_weight import FrozenFloat8Weight
from tests.library.third_party.checkpoints import write_folder
from tests.library.third_party.hf_trainer import get_losses, settings, trainer
from tests.library.third_party.llama import (
    BATCHES,
    build_optimizer,
    get_values,
    list_float8_names,
    llama,
    mixture,
    train_by_hand,
)
from tests.library.third_party.sft_trainer import make_dataset, make_tokenizer
from tests.steps import assert_same
from tests.thinned import thinned

MODELS = {"llama": llama, "mixture": mixture}
FLOAT8 = {"fp8": "blockwise", "compressed-tensors": "rowwise"}
INPUT = torch.arange(32).view(2, 16)


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=64, n_layer=1, n_head=2, n_positions=32, use_cache=False))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of folders: the models in shards by name, and in the formats of float8."""
    root = tmp_path_factory.mktemp("folders")
    for name, build in {**MODELS, "gpt2": gpt2}.items():
        build().bfloat16().save_pretrained(root / name, max_shard_size="60KB")
    for name in MODELS:
        for format, recipe in FLOAT8.items():
            model = prepare_model_for_float8(load_high_precision(root / name), recipe)
            save_float8(model, root / f"{name}-{format}", format=format)
    for name in ("llama", "llama-compressed-tensors"):
        make_tokenizer().save_pretrained(root / name)
    return root


def load_high_precision(folder, dtype=torch.bfloat16):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def load(folder, *args, dtype=torch.bfloat16, device_map=None, **options):
    config = QuaverConfig(*args, **options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype, device_map=device_map)


def assert_same_models(model, expected):
    assert list(map(vars, conversion_report(model).converted)) == list(map(vars, conversion_report(expected).converted))
    assert_same(get_values(model), get_values(expected))
    assert_same(model(INPUT).logits, expected.eval()(INPUT).logits)


def build_from_config(folder, name):
    """Return the model that a float8 folder is loaded into."""
    kind = type(MODELS[name]())
    return kind._from_config(kind.config_class.from_pretrained(folder), dtype=torch.bfloat16)


def list_names(folder):
    """Return the names of a folder's tensors without the scales."""
    return sorted(name for file in folder.glob("*.safetensors") for name in load_file(file) if "_scale" not in name)


@pytest.mark.parametrize("name", ["mixture", "gpt2"])
def test_a_folder_in_high_precision_is_converted_or_frozen(folders, tmp_path, name):
    model = load(folders / name, "rowwise", device_map="cpu")
    assert_same_models(model, prepare_model_for_float8(load_high_precision(folders / name), "rowwise"))
    assert model.hf_quantizer.is_trainable
    assert model.hf_quantizer.is_qat_trainable
    assert not model.is_quantized
    frozen = load(folders / name, frozen=True)
    expected = prepare_model_for_float8(load_high_precision(folders / name), "blockwise")
    converted = [layer.name for layer in conversion_report(expected).converted]
    modules = {layer.rpartition(".gate_up_proj")[0] or layer for layer in converted}
    freeze_to_float8(expected, module_filter_fn=lambda module, name: name in modules)
    assert_same_models(frozen, expected)
    assert not any(weight.requires_grad for weight in frozen.parameters() if isinstance(weight, FrozenFloat8Weight))
    for saved, path in ((model, tmp_path / "converted"), (frozen, tmp_path / "frozen")):
        saved.save_pretrained(path)
        assert list_names(path) == list_names(folders / name)
        assert "quantization_config" not in json.loads((path / "config.json").read_text())
        assert_same(get_values(load_high_precision(path)), get_values(saved))


@pytest.mark.parametrize(("name", "format"), thinned(MODELS, FLOAT8, together=1))
def test_a_float8_folder_trains_or_keeps_its_codes(folders, tmp_path, name, format):
    folder = folders / f"{name}-{format}"
    expected = build_from_config(folder, name)
    expected.load_state_dict(dict(load_float8(folder, model=expected)))
    model = load(folder, FLOAT8[format])
    assert_same_models(model, prepare_model_for_float8(expected, FLOAT8[format]))
    frozen = load(folder, frozen=True, device_map="auto")
    assert_same_models(frozen, load_frozen(build_from_config(folder, name), folder))
    assert frozen.is_quantized
    assert frozen.hf_quantizer.is_trainable
    assert not frozen.hf_quantizer.is_qat_trainable
    frozen.save_pretrained(tmp_path / "saved")
    assert list_names(tmp_path / "saved") == list_names(folder)
    assert_same(get_values(load_high_precision(tmp_path / "saved")), get_values(model))
    tensorwise = load(folder, "tensorwise", frozen=True, modules_to_not_convert=["q_proj"])
    layer = tensorwise.model.layers[0].self_attn
    assert layer.k_proj.weight.granularity == "tensorwise"
    assert not isinstance(layer.q_proj, Float8Linear)
    assert type(frozen.dequantize().model.layers[0].self_attn.q_proj) is torch.nn.Linear


def test_a_folder_whose_method_transformers_does_not_know_is_loaded(folders, tmp_path):
    """modelopt's: the config of transformers has no class for it."""
    config = json.loads((folders / "llama-compressed-tensors" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    write_folder(tmp_path, load_file(folders / "llama-compressed-tensors" / "model.safetensors"), config)
    assert_same_models(load(tmp_path, frozen=True), load(folders / "llama-compressed-tensors", frozen=True))
    dictionary = {"quant_method": "quaver", "frozen": True}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=dictionary, dtype=torch.bfloat16)
    assert_same_models(model, load(tmp_path, frozen=True))


def test_a_gather_and_persistent_scales_outlive_the_load(folders):
    gathered = load(folders / "llama", Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    assert type(gathered.model.layers[0].mlp.up_proj.weight).__name__ == "Float8AllGatherWeight"
    delayed = load(folders / "llama", "delayed", dtype=torch.float32)
    expected = prepare_model_for_float8(load_high_precision(folders / "llama", torch.float32), "delayed")
    assert train_by_hand(delayed.train()) == train_by_hand(expected.train())


@pytest.mark.parametrize(("name", "kbit"), [("llama", True), ("llama-compressed-tensors", False)])
def test_adapters_train_on_frozen_weights_in_the_trainer(folders, tmp_path, name, kbit):
    model, expected = (load(folders / name, frozen=True, dtype=torch.float32) for _ in range(2))
    with pytest.raises(ValueError, match="attach trainable adapters"):
        trainer(tmp_path, model)
    if kbit:
        model = prepare_model_for_kbit_training(model)
    adapters = LoraConfig(target_modules="all-linear", init_lora_weights="gaussian")
    with torch.random.fork_rng():
        model = get_peft_model(model, adapters)
    expected = get_peft_model(expected, adapters)
    run = trainer(tmp_path, model, [Float8Callback()], gradient_checkpointing=True)
    run.train()
    losses, by_hand = get_losses(run), train_by_hand(expected.train(), build_optimizer(expected), only=[0])
    assert losses[:1] == pytest.approx(by_hand)
    assert len(losses) == BATCHES
    assert losses != by_hand * BATCHES


def test_trl_loads_the_model_with_no_other_line(folders, tmp_path):
    loading = {"quantization_config": QuaverConfig(frozen=True), "dtype": "float32"}
    config = SFTConfig(**settings(tmp_path, max_steps=2), model_init_kwargs=loading)
    options = {"train_dataset": make_dataset(), "processing_class": make_tokenizer()}
    adapters = LoraConfig(target_modules="all-linear")
    run = SFTTrainer(str(folders / "llama-compressed-tensors"), config, peft_config=adapters, **options)
    adapters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in adapters]
    run.train()
    assert before
    assert not any(map(torch.equal, adapters, before))
    assert json.loads(config.to_json_string())["model_init_kwargs"]["quantization_config"]["frozen"] is True


@pytest.mark.parametrize(("serving", "frozen"), [("vllm-block", False), ("compressed-tensors", True)])
def test_the_forward_multiplies_what_an_engine_does(folders, serving, frozen):
    model = load(folders / "llama", serving=serving, frozen=frozen)
    match = matches_serving(model, INPUT)
    assert match
    assert match.serving == serving
    assert list_float8_names(model) == set(match.inputs)
    assert model.hf_quantizer.quantization_config.to_dict()["serving"] == serving


def test_frozen_codes_of_a_folder_meet_the_inputs_of_an_engine(folders):
    model = load(folders / "llama-fp8", serving="vllm-block", frozen=True)
    plain = build_from_config(folders / "llama-fp8", "llama")
    assert_same_models(model, load_frozen(plain, folders / "llama-fp8", serving="vllm-block"))


def test_a_recipe_may_be_given_as_recipe_name():
    assert QuaverConfig(recipe_name="rowwise").to_dict() == QuaverConfig(recipe="rowwise").to_dict()


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        (["rowwize"], {}, "unknown recipe 'rowwize'"),
        (["delayed"], {"frozen": True}, "no delayed or static scaling"),
        (["rowwise_with_gw_hp"], {"frozen": True}, "stores a weight once"),
        ([], {"forzen": True}, "unexpected keyword argument 'forzen'"),
        ([], {"frozen": 1}, "frozen: expected True or False, got 1"),
        ([], {"modules_to_not_convert": "lm_head"}, "expected a list of names of modules"),
        ([3], {}, "expected a Float8LinearConfig, a recipe's name"),
        ([], {"serving": "vlm"}, "serving: expected one of vllm-per-token, .* got 'vlm'"),
        (["delayed"], {"serving": "deepgemm"}, "expected a recipe with dynamic scaling"),
        (["rowwise"], {"recipe_name": "mxfp8"}, "expected recipe or recipe_name, got both, 'rowwise' and 'mxfp8'"),
    ],
)
def test_a_config_says_what_is_wrong(arguments, options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        QuaverConfig(*arguments, **options)


KEY = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "config", "error"),
    [
        ("llama", {KEY: None}, {}, rf"the folder lacks weights that QuaverConfig\(frozen=True\) freezes: {KEY}"),
        ("llama", {KEY: torch.full((96, 64), torch.nan)}, {}, f"the weight {KEY} holds NaN or inf"),
        ("llama", {KEY: torch.ones(96, 32)}, {}, rf"{KEY}: expected \[96, 64\], as the model has, got \[96, 32\]"),
        ("llama-fp8", {f"{KEY}_scale_inv": None}, {}, f"{KEY}.*: expected one scale, got none"),
        ("llama-fp8", {KEY: torch.ones(96, 32).to(torch.float8_e4m3fn)}, {}, rf"{KEY}.*\[96, 32\]"),
        ("llama-fp8", {}, {"quant_method": "gptq", "bits": 4}, "quant_method in config.json is 'gptq'; quaver reads"),
    ],
)
def test_a_folder_that_cannot_be_frozen_is_refused_in_a_line(folders, tmp_path, name, change, config, error):
    tensors = {}
    for file in (folders / name).glob("*.safetensors"):
        tensors |= load_file(file)
    tensors = {key: tensor for key, tensor in {**tensors, **change}.items() if tensor is not None}
    stored = json.loads((folders / name / "config.json").read_text())
    write_folder(tmp_path, tensors, stored | ({"quantization_config": config} if config else {}))
    with pytest.raises((ValueError, NotImplementedError), match=error) as raised:
        load(tmp_path, frozen=True)
    assert "\n" not in str(raised.value)


def test_frozen_weights_are_not_offloaded_and_no_weights_partitioned(folders, monkeypatch):
    with pytest.raises(NotImplementedError, match="expected a device_map without disk"):
        load(folders / "llama", frozen=True, device_map={"model": "cpu", "lm_head": "disk"})
    monkeypatch.setattr(transformers_quantizer, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(NotImplementedError, match="ZeRO-3 partitions weights while they are loaded"):
        load(folders / "llama", "rowwise")


def test_a_loader_without_converters_of_quantizers_reads_no_codes(folders, monkeypatch):
    monkeypatch.delattr(HfQuantizer, "update_weight_conversions")
    with pytest.raises(NotImplementedError, match="expected transformers 5.8 or newer for a float8 folder"):
        load(folders / "llama-fp8", frozen=True)

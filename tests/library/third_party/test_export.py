"""Tests float8 checkpoints as compressed-tensors, transformers and torch's DCP read them.

vLLM and SGLang, which need a GPU, are tested by the contract of their loaders: names, shapes and dtypes.
"""

import copy
import functools
import itertools
import json
import warnings

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import save_model
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear

from quaver import convert_to_high_precision, freeze_to_float8
from quaver.conversion.freeze import make_blockwise_config
from quaver.experts.module import is_experts
from quaver.export import import_float8, iter_float8_weights, load_float8, load_frozen, save_float8
from quaver.export.files import StoredTensors
from tests.library.third_party.checkpoints import TOKENS, compute_logits, export_folder, load_with_transformers
from tests.library.third_party.llama import convert, is_not_head
from tests.steps import assert_same

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
FORMATS = [("rowwise", "compressed-tensors"), ("tensorwise", "compressed-tensors")]
FORMATS += [("rowwise", "compressed-tensors-block"), ("mxfp8", "compressed-tensors"), ("rowwise", "fp8")]
RAGGED = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
"""Of `deepseek`, whose exports go by that name in place of a recipe's: 192 x 200, which no block divides."""


def llama(recipe=None):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=4, use_cache=False, **SIZES)).eval()
    return model if recipe is None else convert(model, recipe)


def deepseek(kv_lora_rank=160):
    """Return a small DeepSeek-V3 whose weights differ in magnitude from row to row."""
    torch.manual_seed(0)
    ranks = {"kv_lora_rank": kv_lora_rank, "q_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32}
    experts = {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 200, "intermediate_size": 300, "moe_intermediate_size": 64, "v_head_dim": 32}
    others = {"vocab_size": 64, "max_position_embeddings": 64, "use_cache": False}
    config = transformers.DeepseekV3Config(**ranks, **experts, **layers, **sizes, **others)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(torch.logspace(-1, 1, module.out_features)[:, None])
    return model


def build_frozen_deepseek(**options):
    admits = lambda module, name: is_not_head(module, name) and not is_experts(module)  # noqa: E731
    config = make_blockwise_config(power_of_2=False)
    return freeze_to_float8(deepseek(**options), config=config, module_filter_fn=admits)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function that returns the folder of an export, in several files: torch's reader needs an index."""
    root = tmp_path_factory.mktemp("export")

    @functools.cache
    def export(recipe, format):
        model = build_frozen_deepseek() if recipe == "deepseek" else llama(recipe)
        save_float8(model, root / f"{recipe}-{format}", format=format, max_shard_bytes=200_000)
        return root / f"{recipe}-{format}"

    return export


def compute_dequantized_logits(folder):
    model = llama()
    model.load_state_dict(dict(load_float8(folder, dtype=torch.float32)))
    return compute_logits(model)


@pytest.mark.parametrize(("recipe", "format"), [*FORMATS, ("deepseek", "compressed-tensors-block")])
def test_transformers_loads_the_dequantized_weights(recipe, format, exported):
    folder = exported(recipe, format)
    model = load_with_transformers(folder, format)
    assert_same(model.state_dict(), dict(load_float8(folder, dtype=torch.float32, model=model)))
    if recipe != "deepseek":
        assert torch.equal(compute_logits(model), compute_dequantized_logits(folder))


@pytest.mark.parametrize(("recipe", "format"), [*FORMATS[:4], ("deepseek", "compressed-tensors-block")])
def test_compressed_tensors_decompresses_the_same_values(recipe, format, exported):
    folder = exported(recipe, format)
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    scheme = config.config_groups["group_0"]  # another one has weights of the same form
    compressor, stored = BaseCompressor.get_value_from_registry(config.format), StoredTensors(folder)
    count = 0
    for name, tensor in load_float8(folder, dtype=torch.float32).items():
        if f"{name}_scale" in stored:
            parts = {"weight": stored[name], "weight_scale": stored[f"{name}_scale"]}
            assert torch.equal(compressor.decompress(parts, scheme)["weight"].float(), tensor), name
            count += 1
    assert count == (16 if recipe == "deepseek" else 7)  # 5 of each attention, 3 of each dense and shared feed-forward
    assert recipe == "deepseek" or config.ignore == ["embed_tokens", "lm_head", "model.embed_tokens"]


SERVED = [("rowwise", FORMATS[0][1], None), ("tensorwise", FORMATS[0][1], None), ("mxfp8", FORMATS[0][1], None)]
OF_BLOCKS = itertools.product(["compressed-tensors-mxfp8", "fp8", FORMATS[0][1]], [None, torch.float32, torch.bfloat16])


@pytest.mark.parametrize(("recipe", "format", "dtype"), [*SERVED, *(("blockwise", *case) for case in OF_BLOCKS)])
def test_transformers_runs_the_layers_that_training_ran_at_its_defaults(recipe, format, dtype, tmp_path):
    """Logits of its float8 linears, which quantize as config.json says, are near those of training."""
    model = llama(recipe)
    save_float8(model, tmp_path / "out", format=format, dtype=dtype)
    with warnings.catch_warnings(action="ignore"):
        served = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert recipe == "blockwise" or served.model.layers[0].mlp.up_proj.weight.dtype is torch.float8_e4m3fn
        difference = compute_logits(served).float() - compute_logits(model)
    assert difference.norm() < 0.12 * compute_logits(model).norm()


def test_compressed_tensors_runs_blocks_that_the_inputs_cut(tmp_path):
    """It refuses groups of activations that do not divide the inputs, which are 192 here."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 128, "intermediate_size": 192, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes)).eval()
    reference = compute_logits(model)
    save_float8(convert(model, "blockwise"), tmp_path / "out")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (compute_logits(served) - compute_logits(model)).norm() < 0.12 * reference.norm()
    groups = served.config.quantization_config.quantization_config.config_groups
    assert groups["group_1"].targets == ["model.layers.0.mlp.down_proj"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["targets"] += groups.pop("group_1")["targets"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="unflatten"):
        compute_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32))


@pytest.mark.parametrize("recipe", ["rowwise", "deepseek"])
def test_torch_dequantizes_blocks_to_the_same_values(recipe, exported):
    values = dict(load_float8(folder := exported(recipe, "fp8"), dtype=torch.float32))
    state = {name: torch.empty_like(tensor) for name, tensor in values.items()}
    load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(folder)))
    assert_same(state, values)


@pytest.mark.parametrize("format", ["fp8", "compressed-tensors-block"])
def test_a_frozen_deepseek_is_exported_and_loaded_again(format, exported):
    stored = StoredTensors(exported("deepseek", format))
    scale = f"{RAGGED}_scale_inv" if format == "fp8" else f"{RAGGED}_scale"
    assert (stored.get_shape(RAGGED), stored.get_shape(scale)) == ([192, 200], [2, 2])
    frozen = load_frozen(deepseek(), exported("deepseek", format))
    assert compute_logits(frozen).equal(compute_logits(build_frozen_deepseek()))
    if format == "fp8":
        linear = FP8Linear(200, 192, block_size=(128, 128))  # transformers' own takes the codes and scales
        linear.load_state_dict({"weight": stored[RAGGED], "weight_scale_inv": stored[scale]})
        assert linear.weight_scale_inv.equal(stored[scale])


def test_transformers_does_not_dequantize_ragged_fp8(exported, tmp_path):
    """It divides a weight evenly by the number of scales. Once it does not, the warning of save_float8 can go."""
    folder = exported("deepseek", "fp8")
    model, values = load_with_transformers(folder, "fp8"), load_float8(folder, dtype=torch.float32)
    assert not model.state_dict()[RAGGED].equal(values[RAGGED])  # 192 rows become two blocks of 96
    save_float8(build_frozen_deepseek(kv_lora_rank=544), tmp_path / "out", format="fp8")
    with pytest.raises(RuntimeError, match="conversion of the weights"):  # 576 rows do not become 5 blocks
        load_with_transformers(tmp_path / "out", "fp8")


@pytest.mark.parametrize(("recipe", "format"), FORMATS)
def test_names_shapes_and_dtypes_are_those_that_servers_register(recipe, format, exported):
    folder = exported(recipe, format)
    stored = StoredTensors(folder)
    leaf = "weight_scale_inv" if format == "fp8" else "weight_scale"
    for name, tensor in llama().state_dict().items():
        if name in ("lm_head.weight", "model.embed_tokens.weight") or "norm" in name:
            assert stored[name].dtype is torch.float32
            continue
        rows, columns = tensor.shape
        shape = {"rowwise": [rows, 1], "tensorwise": [1], "mxfp8": [rows, columns // 32]}[recipe]
        shape = shape if format == "compressed-tensors" else [rows // 128, columns // 128]
        scale = f"{name.removesuffix('weight')}{leaf}"
        assert (stored.get_dtype(name), stored.get_shape(name)) == ("F8_E4M3", [rows, columns])
        assert (stored.get_dtype(scale), stored.get_shape(scale)) == ("U8" if recipe == "mxfp8" else "F32", shape)


def test_a_hugging_face_folder_is_exported_and_imported(tmp_path):
    llama().save_pretrained(tmp_path / "hf")
    written = export_folder(tmp_path / "hf", tmp_path / "out", "tensorwise", measure_tokens=16)
    assert (written.plan.matrix_count, written.plan.recipe) == (7, "tensorwise")
    record = json.loads((tmp_path / "out" / "quaver_export.json").read_text())
    assert record["logits"]["tokens"] == 16
    assert (tmp_path / "out" / "generation_config.json").exists()
    import_float8(tmp_path / "out", tmp_path / "hp", dtype=torch.float32)
    trainable = AutoModelForCausalLM.from_pretrained(tmp_path / "hp", dtype=torch.float32)
    assert torch.equal(compute_logits(trainable), compute_dequantized_logits(tmp_path / "out"))


def test_an_export_has_the_config_that_save_pretrained_writes(tmp_path):
    """The generation config, the architecture, and the dtype of a model that was cast; a user's own dtype stays."""
    model = convert(llama().to(torch.float16), "rowwise")
    model.generation_config.max_new_tokens = 3
    save_float8(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["max_new_tokens"] == 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("float16", ["LlamaForCausalLM"])
    save_float8(model, tmp_path / "own", config={**model.config.to_dict(), "dtype": "bfloat16"})
    assert json.loads((tmp_path / "own" / "config.json").read_text())["dtype"] == "bfloat16"


UNMERGED = [
    (LoraConfig(target_modules=["q_proj"]), r"self_attn.q_proj has adapters .* not merged: call model.merge_adapter"),
    (PromptTuningConfig(num_virtual_tokens=2), r"adapters of PEFT.* export model.merge_and_unload\(\)"),
    (LoraConfig(trainable_token_indices=[1], target_modules=["q_proj"]), "embed_tokens is a TrainableTokensWrapper"),
]


@pytest.mark.parametrize(("adapters", "message"), UNMERGED)
@pytest.mark.parametrize("recipe", ["rowwise", None])
def test_adapters_that_are_not_merged_are_refused(adapters, message, recipe, tmp_path):
    adapters.task_type = "CAUSAL_LM"
    with pytest.raises((ValueError, NotImplementedError), match=message):
        save_float8(get_peft_model(llama("rowwise"), adapters), tmp_path / "out", recipe=recipe)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("base", ["high precision", "float8", "frozen"])
def test_merged_adapters_are_exported_without_unloading(base):
    """Two adapters, one of them on the head, and a norm that is trained whole; training goes on after the hand-off."""
    model = llama("rowwise" if base == "float8" else None)
    if base == "frozen":
        freeze_to_float8(model, config="rowwise", module_filter_fn=is_not_head)
    adapters = LoraConfig(target_modules=["q_proj", "lm_head"], modules_to_save=["norm"], init_lora_weights=False)
    model = get_peft_model(model, adapters)
    with torch.no_grad():
        model.get_base_model().model.norm.modules_to_save["default"].weight.mul_(2)
    options = {"recipe": "rowwise"} if base == "high precision" else {}
    model.merge_adapter()
    stored = dict(iter_float8_weights(model, **options))
    unloaded = copy.deepcopy(model).merge_and_unload()
    assert_same(stored, dict(iter_float8_weights(unloaded, **options)))
    assert torch.equal(stored["model.norm.weight"], torch.full((128,), 2.0))
    model.unmerge_adapter()
    model(TOKENS).logits.sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("way", ["loaded", "trained", "from frozen", "merged", "its config alone"])
def test_what_is_saved_after_a_float8_folder_was_loaded_says_what_it_is(exported, way, tmp_path):
    """`from_config` of a float8 folder keeps its quantization_config; saved, it made NaN of the weights."""
    folder = exported("rowwise", "compressed-tensors")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    if way in ("from frozen", "merged"):
        load_frozen(model, folder)
    else:
        model.load_state_dict(dict(load_float8(folder)))
    if way == "from frozen":
        convert_to_high_precision(model)
    elif way == "merged":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        model = model.merge_and_unload()
    elif way == "trained":
        convert(model, "tensorwise")
        model(TOKENS, labels=TOKENS).loss.backward()
    if way == "its config alone":
        model.config.save_pretrained(tmp_path)
        save_model(model, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same(loaded.state_dict(), convert_to_high_precision(model).state_dict())

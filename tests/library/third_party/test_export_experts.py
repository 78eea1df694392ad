"""Tests exports of mixtures as transformers reads them: the names of its checkpoints and the dequantized values.

transformers writes a model's checkpoint names in `save_pretrained`, and reads published float8 checkpoints; it is the
oracle of every name and tensor. It reads experts with several blocks in the format fp8 alone.
"""

import copy
import json

import peft
import pytest
import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from quaver import convert_to_float8_training, freeze_to_float8
from quaver.conversion.freeze import make_blockwise_config
from quaver.experts.module import Float8Experts
from quaver.export import import_float8, iter_float8_weights, load_float8, load_frozen, save_float8
from quaver.export.files import StoredTensors
from quaver.integrations.transformers import prepare_model_for_float8
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.recipes.scaling import dequantize
from tests.library.export.mixtures import multiplied_experts
from tests.library.third_party.checkpoints import (
    TOKENS,
    compute_logits,
    export_folder,
    load_with_transformers,
    write_folder,
)
from tests.library.third_party.llama import convert, get_values, is_not_head
from tests.library.third_party.zoo import make
from tests.reference import assert_same_bits, sqnr_db
from tests.steps import assert_same
from tests.thinned import at_night, thinned

MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "glm4_moe")
WHOLE = ("gpt_oss", "llama4")
"""Their checkpoints hold experts as one tensor."""
FORMATS = ("compressed-tensors", "compressed-tensors-block", "fp8")
LLAMA_4 = [("rowwise", FORMATS[0], False), ("tensorwise", FORMATS[0], True), ("blockwise", FORMATS[1], True)]
LLAMA_4 += at_night((recipe, format, not is_frozen) for recipe, format, is_frozen in list(LLAMA_4))
SMALL = {"qwen3_moe": {"moe_intermediate_size": 96}}
"""What the zoo leaves at its default: experts of one block here."""
SCALES = ("weight_scale", "weight_scale_inv", "input_scale")


def mixture(name, **sizes):
    """Return the model in evaluation mode; without `sizes` that of the zoo."""
    torch.manual_seed(0)
    return make(name, **(sizes or SMALL.get(name, {})))[0].eval()


def large(name):
    """Return a model whose experts have several blocks of 128 x 128, which divide all weights."""
    inner = 256 if name == "qwen3_moe" else 128
    sizes = {"hidden_size": 256, "moe_intermediate_size": inner, "intermediate_size": inner, "head_dim": 64}
    ranks = {"q_lora_rank": 128, "kv_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    if name == "deepseek_v3":
        del sizes["head_dim"]
    return mixture(name, **sizes, **(ranks if name == "deepseek_v3" else {}))


def list_weight_names(folder):
    return {name for name in StoredTensors(folder) if name.rpartition(".")[2] not in SCALES}


@pytest.mark.parametrize(
    ("name", "format"),  # test_llama_4_... has the other formats of Llama 4
    [*thinned((*MIXTURES, "gpt_oss"), FORMATS, together=1), ("llama4", "fp8")],
)
def test_names_and_values_are_those_of_transformers(name, format, tmp_path):
    model = mixture(name)
    model.save_pretrained(tmp_path / "plain")
    prepare_model_for_float8(model, "rowwise")
    plan = save_float8(model, tmp_path / "out", format=format).plan
    assert list_weight_names(tmp_path / "out") == list_weight_names(tmp_path / "plain")
    stored = StoredTensors(tmp_path / "out")
    float8_names = [key for key in stored if stored.get_dtype(key) == "F8_E4M3"]
    assert plan.matrix_count == len(float8_names)
    assert bool(plan.whole_stacks) == (name in WHOLE)
    assert any("experts." in key and "shared" not in key for key in float8_names) == (name in MIXTURES)

    loaded = load_float8(tmp_path / "out", dtype=torch.float32, model=model)
    oracle = load_with_transformers(tmp_path / "out", format, type(model))
    assert_same(loaded, oracle.state_dict())
    target = mixture(name)
    target.load_state_dict(dict(loaded))
    assert_same_bits(compute_logits(target), compute_logits(oracle))


def test_transformers_does_not_read_blocks_of_experts(tmp_path):
    """It multiplies the blocks of an expert by their scales as if they were rows. Then docs/export.md can say so."""
    model = prepare_model_for_float8(large("qwen3_moe"), "rowwise")
    for format in ("compressed-tensors-block", "compressed-tensors-mxfp8"):
        save_float8(model, tmp_path / format, format=format)
        with pytest.raises(RuntimeError, match="conversion of the weights"):
            load_with_transformers(tmp_path / format, format, type(model))


@pytest.mark.filterwarnings("ignore:nothing to convert")
@pytest.mark.parametrize(("recipe", "format", "is_frozen"), LLAMA_4)
def test_llama_4_has_linears_of_each_expert_in_compressed_tensors(recipe, format, is_frozen, tmp_path, monkeypatch):
    """transformers makes such linears of its stacks [E, K, N] for this format, in their place in the model."""
    model = mixture("llama4")
    if is_frozen:
        model = freeze_to_float8(model, config=recipe, module_filter_fn=lambda _, name: "experts" in name)
    else:
        prepare_model_for_float8(model, recipe)
    exported = save_float8(model, tmp_path / "out", format=format)
    assert exported.plan.whole_stacks == []
    loaded = load_float8(tmp_path / "out", dtype=torch.float32)
    oracle = load_with_transformers(tmp_path / "out", format, type(model))
    assert_same(loaded, oracle.state_dict())
    is_cut = format == FORMATS[1]  # gate and up have 96 rows each
    assert [name for name in exported.requantized if name.endswith("experts.gate_up_proj")] == (
        [f"model.layers.{layer}.feed_forward.experts.gate_up_proj" for layer in (0, 1)] if is_cut else []
    )
    for index, forward in enumerate(multiplied_experts(lambda: compute_logits(model), monkeypatch)):
        prefix, parts = f"model.layers.{index // 2}.feed_forward.experts", ("gate_proj", "up_proj")
        for expert, (codes, scale) in enumerate(forward):
            leaves = ("down_proj",) if index % 2 else parts
            value = torch.cat([loaded[f"{prefix}.{expert}.{leaf}.weight"] for leaf in leaves])
            forward_value = dequantize(codes.t(), scale.t() if scale.dim() else scale)
            assert (is_cut and not index % 2) or torch.equal(value, forward_value)
    target = mixture("llama4")
    target.load_state_dict(dict(load_float8(tmp_path / "out", dtype=torch.float32, model=target)))
    assert torch.equal(compute_logits(target), compute_logits(oracle))
    frozen = load_frozen(mixture("llama4"), tmp_path / "out")
    experts = "model.layers.1.feed_forward.experts"
    assert torch.equal(get_values(frozen)[f"{experts}.down_proj"][2].t(), loaded[f"{experts}.2.down_proj.weight"])
    stored = frozen.model.layers[0].feed_forward.experts.down_proj
    assert isinstance(stored, FrozenFloat8Weight) == (not is_cut)


def publish(model, folder, scale_dtype=torch.float32, high_precision=("mlp.gate.",)):
    """Write the folder of a model as DeepSeek and Qwen do, with random codes and scales, and return its tensors."""
    plain = folder.with_name("plain")
    model.save_pretrained(plain)
    stored, tensors = StoredTensors(plain), {}
    torch.manual_seed(1)
    for name, tensor in stored.items():
        if tensor.dim() != 2 or any(part in name for part in ("embed_tokens", "lm_head", *high_precision)):
            tensors[name] = tensor.bfloat16()
            continue
        tensors[name] = (torch.randn(tensor.shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        blocks = [-(-length // 128) for length in tensor.shape]
        tensors[f"{name}_scale_inv"] = (torch.rand(blocks) * 1e-3 + 1e-4).to(scale_dtype)
    quantization = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = json.loads((plain / "config.json").read_text())
    write_folder(folder, tensors, config | {"quantization_config": {"quant_method": "fp8", **quantization}})
    return tensors


def dequantize_blocks(tensors, name):
    scale = tensors[f"{name}_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes = tensors[name].float()
    return codes * scale[: codes.shape[0], : codes.shape[1]]


@pytest.mark.parametrize(
    ("name", "scale_dtype"), [("qwen3_moe", torch.bfloat16), ("deepseek_v3", torch.float32), ("mixtral", torch.float32)]
)
def test_published_checkpoints_have_the_values_of_transformers(name, scale_dtype, tmp_path):
    model = large(name)
    tensors = publish(model, tmp_path / "hub", scale_dtype, ("mlp.gate.", "moe.gate."))
    loaded = load_float8(tmp_path / "hub", dtype=torch.float32, model=prepare_model_for_float8(large(name), "rowwise"))
    oracle = load_with_transformers(tmp_path / "hub", "fp8", type(model)).state_dict()
    assert_same(loaded, oracle)
    layer = "model.layers.1.block_sparse_moe.experts.2" if name == "mixtral" else "model.layers.1.mlp.experts.2"
    parts = ("w1", "w3") if name == "mixtral" else ("gate_proj", "up_proj")
    expected = torch.cat([dequantize_blocks(tensors, f"{layer}.{part}.weight") for part in parts])
    assert torch.equal(loaded["model.layers.1.mlp.experts.gate_up_proj"][2], expected)

    count = import_float8(tmp_path / "hub", tmp_path / "hp", dtype=torch.float32)
    assert count == sum("scale_inv" in key for key in tensors)
    imported = AutoModelForCausalLM.from_pretrained(tmp_path / "hp", dtype=torch.float32).state_dict()
    assert_same(imported, oracle)


def test_training_goes_on_with_the_codes_of_the_file(tmp_path):
    """From float32 scales: a block whose largest code is 448 is quantized to itself, and exported to the same bytes."""
    for name in ("first", "second"):
        model = large("qwen3_moe")
        if name == "second":
            model.load_state_dict(dict(load_float8(tmp_path / "first", dtype=torch.float32, model=model)))
        convert_to_float8_training(model, config=make_blockwise_config(power_of_2=False))
        save_float8(model, tmp_path / name, format="fp8")
    first, second = StoredTensors(tmp_path / "first"), StoredTensors(tmp_path / "second")
    assert set(first) == set(second)
    matrices = [name for name in first if "experts." in name and name.endswith(".weight")]
    assert matrices
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in matrices)


def test_layers_of_prediction_are_left_out(tmp_path):
    """DeepSeek-V3's file has a layer 61 for multi-token prediction, which transformers ignores."""
    model = large("deepseek_v3")
    tensors = publish(model, tmp_path / "hub")
    layer_61 = {name.replace("layers.1.", "layers.61."): tensor.clone() for name, tensor in tensors.items()}
    save_file({**tensors, **layer_61}, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    loaded = load_float8(tmp_path / "hub", model=model)
    assert set(loaded) == set(model.state_dict())
    assert any("layers.61." in name for name in load_float8(tmp_path / "hub"))


def test_a_published_checkpoint_is_trained_and_exported_again(tmp_path):
    """transformers keeps the quantization of a model that it dequantized, which the export must not repeat."""
    publish(large("qwen3_moe"), tmp_path / "hub")
    dequantized = load_with_transformers(tmp_path / "hub", "fp8", transformers.Qwen3MoeForCausalLM)
    plain = large("qwen3_moe")
    plain.load_state_dict(dequantized.state_dict())
    models = (prepare_model_for_float8(model, "rowwise") for model in (dequantized, plain))
    assert_same(*(dict(iter_float8_weights(model)) for model in models))


def test_a_published_checkpoint_becomes_a_frozen_base(tmp_path):
    """Attention and experts are frozen in the codes of the file. The values are transformers'."""
    publish(large("qwen3_moe"), tmp_path / "hub")
    oracle = load_with_transformers(tmp_path / "hub", "fp8", transformers.Qwen3MoeForCausalLM).state_dict()
    with init_empty_weights():
        model = large("qwen3_moe")
    assert_same(get_values(load_frozen(model, tmp_path / "hub")), oracle)
    frozen = {name for name, weight in model.named_parameters() if isinstance(weight, FrozenFloat8Weight)}
    assert frozen == {name for name in oracle if "_proj" in name}


@pytest.mark.parametrize(("recipe", "format"), [("rowwise", FORMATS[0]), ("blockwise", "fp8")])
def test_adapters_train_on_frozen_experts_and_are_merged_and_exported(recipe, format, tmp_path):
    """A frozen model is exported, loaded frozen, adapted at attention and experts, merged, and exported again."""
    model = freeze_to_float8(large("qwen3_moe"), config=recipe, module_filter_fn=is_not_head)
    assert save_float8(model, tmp_path / "first", format=format).requantized == {}
    base, expected = load_frozen(large("qwen3_moe"), tmp_path / "first"), compute_logits(model)
    assert torch.equal(compute_logits(base), expected)
    targets = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, **targets))
    assert torch.equal(compute_logits(adapted), expected)
    adapters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(adapters, lr=1e-2), []
    for _ in range(4):
        loss = adapted.train()(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in adapters)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    expected, merged = compute_logits(adapted), adapted.merge_and_unload()
    assert sqnr_db(expected, compute_logits(merged)) > 15
    assert merged.model.layers[0].mlp.experts.gate_up_proj.requantized_sqnr_db > 25
    assert save_float8(merged, tmp_path / "second", format=format).requantized == {}
    oracle = load_with_transformers(tmp_path / "second", format, type(merged)).state_dict()
    assert_same(get_values(merged), oracle)


@pytest.mark.parametrize("name", WHOLE)
def test_frozen_experts_without_names_of_their_own_are_exported_dequantized(name, tmp_path):
    model = freeze_to_float8(mixture(name), config="rowwise", module_filter_fn=is_not_head)
    oracle = dict(iter_float8_weights(model, format="high-precision"))
    experts = {name: value for name, value in get_values(model).items() if name.endswith(("gate_up_proj", "down_proj"))}
    assert len(experts) == 4
    assert all(torch.equal(oracle[name], value) for name, value in experts.items())


def publish_in_mxfp4(model, folder):
    """Write the folder of gpt-oss as OpenAI does: e2m1 in blocks of 32, whose scales span 2^14."""
    plain = folder.with_name("plain")
    model.save_pretrained(plain)
    tensors = dict(StoredTensors(plain))
    torch.manual_seed(1)
    for name in [key for key in tensors if key.endswith("_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = json.loads((plain / "config.json").read_text())
    write_folder(folder, tensors, config | {"quantization_config": quantization})


@pytest.mark.parametrize("config", ["blockwise", "mxfp8", "rowwise"])
def test_gpt_oss_is_frozen_without_a_loss(config, tmp_path):
    """With scales that are powers of two e4m3 holds all that MXFP4 does, as transformers dequantizes it."""
    publish_in_mxfp4(mixture("gpt_oss"), tmp_path / "hub")
    options = {"dtype": torch.bfloat16, "quantization_config": Mxfp4Config(dequantize=True)}
    plain, model = (transformers.GptOssForCausalLM.from_pretrained(tmp_path / "hub", **options) for _ in range(2))
    freeze_to_float8(model, config=config, module_filter_fn=lambda _, name: "experts" in name)
    assert_same(get_values(model), get_values(plain))
    assert sum(isinstance(parameter, FrozenFloat8Weight) for parameter in model.parameters()) == 4
    assert compute_logits(model).isfinite().all()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_hugging_face_folder_is_exported_and_imported(name, tmp_path):
    """Its experts are matrices; the export quantizes each stack's as the forward does."""
    model = mixture(name)
    model.save_pretrained(tmp_path / "hf")
    assert export_folder(tmp_path / "hf", tmp_path / "out", "rowwise", measure_tokens=16).plan.matrix_count == 32
    expected = dict(iter_float8_weights(convert(model, "rowwise")))
    assert_same(StoredTensors(tmp_path / "out"), expected)
    assert json.loads((tmp_path / "out" / "quaver_export.json").read_text())["logits"]["sqnr_db"] > 20
    import_float8(tmp_path / "out", tmp_path / "hp", dtype=torch.float32)
    trainable = AutoModelForCausalLM.from_pretrained(tmp_path / "hp", dtype=torch.float32)
    oracle = load_with_transformers(tmp_path / "out", "compressed-tensors", type(model))
    assert_same_bits(compute_logits(trainable), compute_logits(oracle))


def test_a_layer_in_high_precision_is_listed_as_ignored(tmp_path):
    """Its matrices are listed under `ignore`, with the module that transformers makes of them."""
    model = mixture("qwen3_moe")
    plain = copy.deepcopy(model)
    left_out = ("lm_head", "model.layers.0.mlp.experts")
    convert_to_float8_training(model, config="rowwise", module_filter_fn=lambda _, name: name not in left_out)
    plan = save_float8(model, tmp_path / "out").plan
    assert {left_out[1], f"{left_out[1]}.0.gate_proj", f"{left_out[1]}.3.down_proj"} <= set(plan.ignore)
    assert not [name for name in plan.ignore if "layers.1.mlp.experts" in name]
    served = load_with_transformers(tmp_path / "out", "compressed-tensors", type(model))
    first, second = (layer.mlp.experts for layer in served.model.layers)
    assert torch.equal(first.gate_up_proj, plain.model.layers[0].mlp.experts.gate_up_proj)
    assert not torch.equal(second.gate_up_proj, plain.model.layers[1].mlp.experts.gate_up_proj)
    assert isinstance(model.model.layers[1].mlp.experts, Float8Experts)


def test_ignore_has_the_names_that_servers_ask_of_mixtral():
    """vLLM and SGLang look for gate_proj, up_proj and down_proj of the first expert, also where files have w1 to w3."""
    model = convert_to_float8_training(mixture("mixtral"), module_filter_fn=lambda _, name: "self_attn" in name)
    ignore = iter_float8_weights(model).plan.ignore
    experts = "model.layers.1.block_sparse_moe.experts"
    for name in (experts, *(f"{experts}.0.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))):
        assert name in ignore

"""Tests that float8 experts of llm-compressor, modelopt and Qwen are read into the stacks of transformers."""

import json
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quaver import conversion_report
from quaver.experts.module import Float8Experts
from quaver.export import load_float8, load_frozen
from quaver.integrations.transformers import QuaverConfig
from tests.library.third_party.checkpoints import write_folder
from tests.library.third_party.llama import get_values
from tests.reference import sqnr_db
from tests.steps import assert_same

SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4}
CHANNELS = {"type": "float", "num_bits": 8, "strategy": "channel"}
GROUP = {"targets": ["Linear"], "weights": CHANNELS, "input_activations": {"strategy": "token"}}
ROWS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}


def granite():
    config = transformers.GraniteMoeConfig(num_local_experts=3, num_experts_per_tok=2, **SIZES)
    return transformers.GraniteMoeForCausalLM(config)


def qwen3_vl():
    rotary = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    experts = {"moe_intermediate_size": 32, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 32}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
    text = {**SIZES, **experts, "rope_parameters": rotary}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]})
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def llama4():
    experts = {"num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "head_dim": 32}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(pad_token_id=0, **SIZES, **experts))


def quantize_rows(weight):
    scale = weight.abs().amax(-1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def quantize_blocks(weight):
    *_, rows, columns = weight.shape
    scale = weight.unflatten(-2, (rows // 32, 32)).unflatten(-1, (columns // 32, 32)).abs().amax((-3, -1)) / 448
    return (weight / scale.repeat_interleave(32, -2).repeat_interleave(32, -1)).to(torch.float8_e4m3fn), scale


def write_rows(name, matrix):
    """Return the codes and the scale of a matrix, or of each matrix of a stack, under their names in a file."""
    codes, scale = quantize_rows(matrix)
    return {name: codes, f"{name}_scale": scale}


def write_linears(name, stack, infix=""):
    """Return experts as linears, such as `input_linear.7.weight`."""
    prefix, tensors = f"{name.removesuffix('.weight')}{infix}", {}
    for index, matrix in enumerate(stack):
        tensors |= write_rows(f"{prefix}.{index}.weight", matrix)
    return tensors


def write_gate_and_up(name, stack):
    prefix, _, leaf = name.rpartition(".")
    leaves, tensors = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",), {}
    for index, matrix in enumerate(stack):
        for part, rows in zip(leaves, matrix.chunk(len(leaves)), strict=True):
            tensors |= write_rows(f"{prefix}.{index}.{part}.weight", rows)
    return tensors


def write_transposed_blocks(name, stack):
    codes, scale = quantize_blocks(stack.mT.contiguous())
    return {name: codes, f"{name}_scale_inv": scale}


def write_with_one_scale(name, stack):
    scale = stack.abs().max() / 448
    codes = (stack / scale).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_weight_scale": scale, f"{name}_input_scale": torch.tensor(0.5)}


def write_with_a_scale_for_each_expert(name, stack):
    scale = stack.abs().amax((1, 2)) / 448
    return {name: (stack / scale[:, None, None]).to(torch.float8_e4m3fn), f"{name}_weight_scale": scale[:, None]}


WITH_INFIX = partial(write_linears, infix=".experts")
WRITERS = {
    "llm-compressor, Granite": (granite, write_linears, quantize_rows, "weight_scale", ROWS),
    "llm-compressor, Granite 4": (granite, WITH_INFIX, quantize_rows, "weight_scale", ROWS),
    "llm-compressor, Granite's stacks": (granite, write_rows, quantize_rows, "weight_scale", ROWS),
    "llm-compressor, Qwen3-VL": (qwen3_vl, write_gate_and_up, quantize_rows, "weight_scale", ROWS),
    "Qwen, Qwen3-VL": (qwen3_vl, write_transposed_blocks, quantize_blocks, "weight_scale_inv", BLOCKS),
    "modelopt, Llama 4": (llama4, write_with_one_scale, None, "weight_scale", FP8),
    "modelopt, one an expert": (llama4, write_with_a_scale_for_each_expert, None, "weight_scale", FP8),
}


@pytest.fixture
def written(request, tmp_path):
    """Return a model, and its folder as a tool writes it."""
    build, write_experts, quantize_linear, scale_name, quantization = WRITERS[request.param]
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "hp")
    tensors = {}
    for name, weight in load_file(tmp_path / "hp" / "model.safetensors").items():
        if weight.dim() == 3 and "visual" not in name:
            tensors |= write_experts(name, weight)
        elif quantize_linear is not None and name.endswith("_proj.weight") and "visual" not in name:
            tensors[name], tensors[name.replace("weight", scale_name)] = quantize_linear(weight)
        else:
            tensors[name] = weight
    config = json.loads((tmp_path / "hp" / "config.json").read_text()) | {"quantization_config": quantization}
    write_folder(tmp_path / "fp8", tensors, config)
    return model, tmp_path / "fp8"


@pytest.mark.parametrize("written", WRITERS, indirect=True)
def test_stacks_are_read_and_frozen(written):
    model, folder = written
    kind, weights = type(model), dict(load_float8(folder, model=model, dtype=torch.float32))
    assert all(sqnr_db(tensor, weights[name]) > 30 for name, tensor in model.state_dict().items() if name in weights)
    frozen = load_frozen(kind._from_config(model.config, dtype=torch.float32), folder)
    assert_same({name: get_values(frozen)[name] for name in weights}, weights)
    reasons = [layer.reason for layer in conversion_report(frozen).layers if "gate_up_proj" in layer.name]
    assert "frozen" in reasons[0]
    loaded = kind.from_pretrained(folder, quantization_config=QuaverConfig(frozen=True), dtype=torch.float32)
    assert_same(get_values(loaded), get_values(frozen))
    trained = kind.from_pretrained(folder, quantization_config=QuaverConfig("rowwise"), dtype=torch.float32)
    assert_same(trained.state_dict(), get_values(frozen))
    assert any(isinstance(module, Float8Experts) for module in trained.modules())
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        assert sqnr_db(model(tokens).logits, loaded(tokens).logits) > 25


@pytest.mark.parametrize("written", ["modelopt, Llama 4"], indirect=True)
def test_stacks_in_four_bits_are_refused(written):
    model, folder = written
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("gate_up_proj"))
    tensors[name] = tensors[name].view(torch.uint8)
    tensors[f"{name}_weight_scale_2"] = torch.ones(())
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(NotImplementedError, match="expected float8 weights, got"):
        load_float8(folder, model=model)

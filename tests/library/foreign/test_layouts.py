"""Float8 checkpoints as other tools write them, read to the bit that a reader which is not ours reads."""

import json
import logging

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quaver import convert_to_high_precision
from quaver.export import load_float8, load_frozen
from tests.steps import assert_same

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
CONFIG = LlamaConfig(vocab_size=64, use_cache=False, **SIZES)
BLOCKS = {"weight_block_size": [128, 128]}
E8M0 = torch.float8_e8m0fnu


def scales(weight, rows, columns, *, power_of_2=False):
    """One a block of rows x columns; 0 stands for all."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    amax = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3))
    return torch.exp2((amax / 448).log2().ceil()) if power_of_2 else amax / 448


def quantized(weight, scale):
    rows, columns = (each // count for each, count in zip(weight.shape, scale.shape, strict=True))
    return (weight / scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)).to(torch.float8_e4m3fn)


# name: quantization_config, rows and columns of a block, powers of two, name of the scale, its form, other tensors
LAYOUTS = {
    "AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        0,
        0,
        False,
        "weight_scale",
        torch.squeeze,
        "input_scale",
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        0,
        0,
        False,
        "weight_scale",
        torch.squeeze,
        "k_scale",
    ),
    "no config": (None, 0, 0, False, "weight_scale", lambda scale: scale.view(1), "input_scale"),
    "modelopt rows": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        1,
        0,
        False,
        "weight_scale",
        lambda scale: scale.view(-1),
        None,
    ),
    "modelopt blocks": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        128,
        128,
        False,
        "weight_scale",
        lambda scale: scale[:, None, :, None],
        None,
    ),
    "modelopt MXFP8": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        1,
        32,
        True,
        "weight_scale",
        lambda scale: scale.to(E8M0).view(torch.uint8),
        None,
    ),
    "modelopt groups": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        1,
        32,
        False,
        "weight_scale",
        lambda scale: scale[:, :, None],
        None,
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        1,
        0,
        False,
        "weight_scale",
        lambda scale: scale,
        "input_scale_ub",
    ),
    "DeepSeek-V3": ({"quant_method": "fp8", **BLOCKS}, 128, 128, False, "weight_scale_inv", lambda scale: scale, None),
    "DeepSeek-V4": (
        {"quant_method": "fp8", "scale_fmt": "ue8m0", **BLOCKS},
        128,
        128,
        True,
        "scale",
        lambda scale: scale.to(E8M0),
        None,
    ),
    "E8M0 bytes": (
        {"quant_method": "fp8", "scale_fmt": "ue8m0", **BLOCKS},
        128,
        128,
        True,
        "weight_scale_inv",
        lambda scale: scale.to(E8M0).view(torch.uint8),
        None,
    ),
    "Mistral": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        0,
        0,
        False,
        "qscale_weight",
        torch.squeeze,
        "qscale_act",
    ),
    "MXFP8": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        1,
        32,
        True,
        "weight_scale_inv",
        lambda scale: scale.to(E8M0).view(torch.uint8),
        None,
    ),
    "blocks of 64": (
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        64,
        64,
        False,
        "weight_scale_inv",
        lambda scale: scale,
        None,
    ),
    "columns": ({"quant_method": "fp8"}, 0, 1, False, "weight_scale", lambda scale: scale, None),
    "bfloat16 scales": (
        {"quant_method": "fp8", **BLOCKS},
        128,
        128,
        True,
        "weight_scale_inv",
        torch.Tensor.bfloat16,
        None,
    ),
}
NOT_FROZEN = ("modelopt MXFP8", "modelopt groups", "MXFP8", "blocks of 64", "columns")
OF_TRANSFORMERS = ("DeepSeek-V3", "DeepSeek-V4", "E8M0 bytes", "Mistral", "MXFP8", "blocks of 64", "bfloat16 scales")


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the folder of a layout, made once, and the float8 weights with their scales as matrices."""
    made = {}

    def write(layout):
        if layout in made:
            return made[layout]
        quantization, rows, columns, power_of_2, leaf, form, more = LAYOUTS[layout]
        folder, tensors, codes = tmp_path_factory.mktemp("layout"), {}, {}
        for name, tensor in model().state_dict().items():
            tensors[name] = tensor
            if "_proj" in name or (layout == "AutoFP8" and "embed" in name):
                module = name.removesuffix(".weight")
                scale = scales(tensor, rows, columns, power_of_2=power_of_2)
                tensors[name] = quantized(tensor, scale)
                codes[name] = tensors[name], scale
                tensors[f"{module}.{leaf}"] = form(scale).clone()
                if more:
                    tensors[f"{module}.{more}"] = torch.tensor(0.5)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"]}
        config |= {"quantization_config": quantization} if quantization else {}
        (folder / "config.json").write_text(json.dumps(config))
        made[layout] = folder, codes
        return made[layout]

    return write


def by_compressed_tensors(codes, scale):
    """As compressed-tensors dequantizes a matrix."""
    blocks = [each // count for each, count in zip(codes.shape, scale.shape, strict=True)]
    args = {"num_bits": 8, "type": "float"}
    if scale.numel() == 1:
        args |= {"strategy": "tensor"}
        scale = scale.view(1)
    elif blocks == [1, codes.shape[1]]:
        args |= {"strategy": "channel"}
    elif blocks[0] == codes.shape[0]:  # columns: it has none, and rows of the transpose are the same
        return by_compressed_tensors(codes.t().contiguous(), scale.t().contiguous()).t()
    elif blocks[0] == 1:
        args |= {"strategy": "group", "group_size": blocks[1]}
    else:
        args |= {"strategy": "block", "block_structure": blocks}
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return compressor.decompress({"weight": codes, "weight_scale": scale}, scheme)["weight"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_others_read_it(layout, written, caplog):
    (folder, codes), original = written(layout), model().state_dict()
    with caplog.at_level(logging.WARNING):
        loaded = dict(load_float8(folder, dtype=torch.float32))
    assert ("are left out" in caplog.text) == (LAYOUTS[layout][-1] is not None)
    assert loaded.keys() == original.keys()
    for name, tensor in loaded.items():
        expected = by_compressed_tensors(*codes[name]) if name in codes else original[name]
        assert_same(tensor, expected, name)
    if layout in OF_TRANSFORMERS:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert_same(theirs.state_dict(), loaded)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_frozen_with_its_codes_or_refused(layout, written):
    folder, codes = written(layout)
    if layout in NOT_FROZEN:
        with pytest.raises(NotImplementedError, match="frozen weights are F8_E4M3 .* use load_float8"):
            load_frozen(model(), folder)
        return
    frozen = load_frozen(model(), folder)
    for name in (each for each in codes if "_proj" in each):
        assert_same(frozen.get_parameter(name).data_fp8.view(torch.uint8), codes[name][0].view(torch.uint8), name)
    assert_same(convert_to_high_precision(frozen).state_dict(), dict(load_float8(folder, dtype=torch.float32)))

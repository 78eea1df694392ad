"""Tests that float8 checkpoints of other tools are read to the bits that compressed-tensors and transformers read."""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quaver import convert_to_high_precision
from quaver.export import load_float8, load_frozen
from tests.library.third_party.checkpoints import write_folder
from tests.steps import assert_same

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
CONFIG = LlamaConfig(vocab_size=64, use_cache=False, **SIZES)
E8M0 = torch.float8_e8m0fnu


def compute_scales(weight, rows, columns, *, power_of_2=False):
    """Return a scale for each block of rows x columns; 0 stands for all."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    amax = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3))
    return torch.exp2((amax / 448).log2().ceil()) if power_of_2 else amax / 448


def compute_block_size(weight, scale):
    """Return the rows and columns of a block."""
    return [length // count for length, count in zip(weight.shape, scale.shape, strict=True)]


def quantize(weight, scale):
    rows, columns = compute_block_size(weight, scale)
    return (weight / scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)).to(torch.float8_e4m3fn)


class Layout(NamedTuple):
    """A quantization_config, the rows and columns of a block (0 for all), and the name and the form of its scale."""

    config: dict | None
    block: tuple[int, int]
    scale_name: str = "weight_scale"
    form: Callable[[torch.Tensor], torch.Tensor] = lambda scale: scale
    power_of_2: bool = False
    other: str | None = None
    """A tensor that load_float8 leaves out."""


def modelopt(algorithm):
    return {"quant_method": "modelopt", "quant_algo": algorithm}


def e8m0_bytes(scale):
    return scale.to(E8M0).view(torch.uint8)


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
UE8M0 = {**BLOCKS, "scale_fmt": "ue8m0"}
MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
BLOCKS_OF_64 = {"quant_method": "fp8", "weight_block_size": [64, 64]}
LAYOUTS = {
    "AutoFP8": Layout(STATIC, (0, 0), form=torch.squeeze, other="input_scale"),
    "modelopt": Layout(modelopt("FP8"), (0, 0), form=torch.squeeze, other="k_scale"),
    "no config": Layout(None, (0, 0), form=lambda scale: scale.view(1), other="input_scale"),
    "modelopt rows": Layout(modelopt("FP8_PER_CHANNEL_PER_TOKEN"), (1, 0), form=lambda scale: scale.view(-1)),
    "modelopt blocks": Layout(modelopt("FP8_PB_WO"), (128, 128), form=lambda scale: scale[:, None, :, None]),
    "modelopt MXFP8": Layout(modelopt("MXFP8"), (1, 32), form=e8m0_bytes, power_of_2=True),
    "modelopt groups": Layout(modelopt("FP8_PB_WO"), (1, 32), form=lambda scale: scale[:, :, None]),
    "fbgemm": Layout({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (1, 0), other="input_scale_ub"),
    "DeepSeek-V3": Layout(BLOCKS, (128, 128), "weight_scale_inv"),
    "DeepSeek-V4": Layout(UE8M0, (128, 128), "scale", lambda scale: scale.to(E8M0), power_of_2=True),
    "E8M0 bytes": Layout(UE8M0, (128, 128), "weight_scale_inv", e8m0_bytes, power_of_2=True),
    "Mistral": Layout(STATIC, (0, 0), "qscale_weight", torch.squeeze, other="qscale_act"),
    "MXFP8": Layout(MXFP8, (1, 32), "weight_scale_inv", e8m0_bytes, power_of_2=True),
    "blocks of 64": Layout(BLOCKS_OF_64, (64, 64), "weight_scale_inv"),
    "columns": Layout({"quant_method": "fp8"}, (0, 1)),
    "bfloat16 scales": Layout(BLOCKS, (128, 128), "weight_scale_inv", torch.Tensor.bfloat16, power_of_2=True),
}
NOT_FROZEN = ("modelopt MXFP8", "modelopt groups", "MXFP8", "blocks of 64", "columns")
READ_BY_TRANSFORMERS = "DeepSeek-V3", "DeepSeek-V4", "E8M0 bytes", "Mistral", "MXFP8", "blocks of 64", "bfloat16 scales"


def build_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that returns the folder of a layout, and the float8 weights with their scales as matrices."""

    @functools.cache
    def write(name_of_layout):
        layout, tensors, codes = LAYOUTS[name_of_layout], build_model().state_dict(), {}
        for name, tensor in list(tensors.items()):
            if "_proj" in name or (name_of_layout == "AutoFP8" and "embed" in name):
                module = name.removesuffix(".weight")
                scale = compute_scales(tensor, *layout.block, power_of_2=layout.power_of_2)
                tensors[name] = quantize(tensor, scale)
                codes[name] = tensors[name], scale
                tensors[f"{module}.{layout.scale_name}"] = layout.form(scale).clone()
                if layout.other:
                    tensors[f"{module}.{layout.other}"] = torch.tensor(0.5)
        config = {**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"]}
        config |= {"quantization_config": layout.config} if layout.config else {}
        folder = tmp_path_factory.mktemp("layout")
        write_folder(folder, tensors, config)
        return folder, codes

    return write


def decompress(codes, scale):
    """Dequantize a matrix by compressed-tensors."""
    blocks = compute_block_size(codes, scale)
    args = {"num_bits": 8, "type": "float"}
    if scale.numel() == 1:
        args |= {"strategy": "tensor"}
        scale = scale.view(1)
    elif blocks == [1, codes.shape[1]]:
        args |= {"strategy": "channel"}
    elif blocks[0] == codes.shape[0]:  # columns: it has none, and rows of the transpose are the same
        return decompress(codes.t().contiguous(), scale.t().contiguous()).t()
    elif blocks[0] == 1:
        args |= {"strategy": "group", "group_size": blocks[1]}
    else:
        args |= {"strategy": "block", "block_structure": blocks}
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return compressor.decompress({"weight": codes, "weight_scale": scale}, scheme)["weight"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_others_read_it(layout, written, caplog):
    (folder, codes), original = written(layout), build_model().state_dict()
    with caplog.at_level(logging.WARNING):
        loaded = dict(load_float8(folder, dtype=torch.float32))
    assert ("are left out" in caplog.text) == (LAYOUTS[layout].other is not None)
    assert loaded.keys() == original.keys()
    for name, tensor in loaded.items():
        assert_same(tensor, decompress(*codes[name]) if name in codes else original[name], name)
    if layout in READ_BY_TRANSFORMERS:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert_same(theirs.state_dict(), loaded)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_frozen_with_its_codes_or_refused(layout, written):
    folder, codes = written(layout)
    if layout in NOT_FROZEN:
        with pytest.raises(NotImplementedError, match="frozen weights: expected F8_E4M3 .* use load_float8"):
            load_frozen(build_model(), folder)
        return
    frozen = load_frozen(build_model(), folder)
    for name in (name for name in codes if "_proj" in name):
        assert_same(frozen.get_parameter(name).data_fp8, codes[name][0], name)
    assert_same(convert_to_high_precision(frozen).state_dict(), dict(load_float8(folder, dtype=torch.float32)))

"""Float8 checkpoints as other tools write them, read to the bit that a reader which is not ours reads."""

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
from tests.library.foreign.checkpoints import write_folder
from tests.steps import assert_same

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
CONFIG = LlamaConfig(vocab_size=64, use_cache=False, **SIZES)
E8M0 = torch.float8_e8m0fnu


def scales(weight, rows, columns, *, power_of_2=False):
    """One a block of rows x columns; 0 stands for all."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    amax = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3))
    return torch.exp2((amax / 448).log2().ceil()) if power_of_2 else amax / 448


def quantized(weight, scale):
    rows, columns = (each // count for each, count in zip(weight.shape, scale.shape, strict=True))
    return (weight / scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)).to(torch.float8_e4m3fn)


class Layout(NamedTuple):
    """The quantization_config, and the rows and columns of a block, 0 for all; the name and the form of its scale."""

    config: dict | None
    block: tuple[int, int]
    scale_name: str = "weight_scale"
    form: Callable[[torch.Tensor], torch.Tensor] = lambda scale: scale
    power_of_2: bool = False
    other: str | None = None
    """A tensor that is left out."""


def modelopt(algorithm):
    return {"quant_method": "modelopt", "quant_algo": algorithm}


def e8m0_bytes(scale):
    return scale.to(E8M0).view(torch.uint8)


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
UE8M0 = {**BLOCKS, "scale_fmt": "ue8m0"}
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
    "MXFP8": Layout(
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, (1, 32), "weight_scale_inv", e8m0_bytes, True
    ),
    "blocks of 64": Layout(BLOCKS_OF_64, (64, 64), "weight_scale_inv"),
    "columns": Layout({"quant_method": "fp8"}, (0, 1)),
    "bfloat16 scales": Layout(BLOCKS, (128, 128), "weight_scale_inv", torch.Tensor.bfloat16, power_of_2=True),
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
        its = LAYOUTS[layout]
        folder, tensors, codes = tmp_path_factory.mktemp("layout"), {}, {}
        for name, tensor in model().state_dict().items():
            tensors[name] = tensor
            if "_proj" in name or (layout == "AutoFP8" and "embed" in name):
                module = name.removesuffix(".weight")
                scale = scales(tensor, *its.block, power_of_2=its.power_of_2)
                tensors[name] = quantized(tensor, scale)
                codes[name] = tensors[name], scale
                tensors[f"{module}.{its.scale_name}"] = its.form(scale).clone()
                if its.other:
                    tensors[f"{module}.{its.other}"] = torch.tensor(0.5)
        config = {**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"]}
        write_folder(folder, tensors, config | ({"quantization_config": its.config} if its.config else {}))
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
    assert ("are left out" in caplog.text) == (LAYOUTS[layout].other is not None)
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
        with pytest.raises(NotImplementedError, match="frozen weights: expected F8_E4M3 .* use load_float8"):
            load_frozen(model(), folder)
        return
    frozen = load_frozen(model(), folder)
    for name in (each for each in codes if "_proj" in each):
        assert_same(frozen.get_parameter(name).data_fp8.view(torch.uint8), codes[name][0].view(torch.uint8), name)
    assert_same(convert_to_high_precision(frozen).state_dict(), dict(load_float8(folder, dtype=torch.float32)))

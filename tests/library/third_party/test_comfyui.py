"""Compares ComfyUI's own reader with ours, where COMFYUI names a checkout and comfy-kitchen can be imported.

    COMFYUI=path/to/ComfyUI pytest tests/library/third_party/test_comfyui.py

Both read the files of both. Scales by row and block are those of convert_to_quant, where it is installed. In bfloat16
ComfyUI's eager kernels round a scale before they multiply, and its Triton kernels do not, as load_float8: values are
compared in float32.
"""

import itertools
import json
import os
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from quaver import calibrate_float8_static_scales, convert_to_float8_training
from quaver.export import load_float8, load_frozen, save_float8
from quaver.recipes.sqnr import compute_sqnr_db
from tests.library.export.models import STATIC

if "COMFYUI" not in os.environ:
    pytest.skip("COMFYUI names no checkout of ComfyUI", allow_module_level=True)
sys.path.insert(0, os.environ["COMFYUI"])
pytest.importorskip("comfy_kitchen")
from comfy.cli_args import args

args.cpu = True
import comfy.ops  # noqa: E402
import comfy.utils  # noqa: E402
from comfy.quant_ops import QuantizedTensor  # noqa: E402

LAYOUTS = {"float8_e4m3fn": "TensorCoreFP8E4M3Layout", "float8_e5m2": "TensorCoreFP8E5M2Layout"}
LAYOUTS |= {"mxfp8": "TensorCoreMXFP8Layout"}
WIDTH = 160
"""Five groups of MXFP8 and 1.25 tiles of its scales; 48 is padded."""


class Transformer(nn.Module):
    """A transformer with the names of diffusers."""

    def __init__(self, ops=nn, width=WIDTH):
        super().__init__()
        sizes = dict.fromkeys(("to_q", "to_k", "to_v", "to_out"), (width, width))
        sizes |= {"up": (width, 320), "down": (320, width)}
        linears = ({name: ops.Linear(*size) for name, size in sizes.items()} for _ in range(2))
        self.transformer_blocks = nn.ModuleList(nn.ModuleDict(block) for block in linears)
        self.norm_out, self.proj_out = nn.LayerNorm(width), ops.Linear(width, 16)

    def forward(self, hidden):
        for block in self.transformer_blocks:
            q, k, v = (block[name](hidden) for name in ("to_q", "to_k", "to_v"))
            hidden = hidden + block["to_out"](nn.functional.scaled_dot_product_attention(q, k, v))
            hidden = hidden + block["down"](nn.functional.gelu(block["up"](hidden)))
        return self.proj_out(self.norm_out(hidden))


def build_transformer(width=WIDTH):
    torch.manual_seed(0)
    return Transformer(width=width).requires_grad_(False)


def load_by_comfyui(file, width=WIDTH, prefix="", disabled=tuple(LAYOUTS)):
    """Load a file as ComfyUI does; `disabled`: formats that this machine multiplies dequantized."""
    tensors, metadata = comfy.utils.load_torch_file(str(file), safe_load=True, return_metadata=True)
    tensors, metadata = comfy.utils.convert_old_quants(tensors, prefix, metadata=metadata)
    tensors = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=bool(prefix))
    ops = comfy.ops.mixed_precision_ops({}, torch.float32, disabled=set(disabled))
    model = Transformer(ops, width)
    keys = model.load_state_dict(tensors, strict=False)
    assert not keys.missing_keys
    assert not [name for name in keys.unexpected_keys if not name.endswith("scaled_fp8")]
    return model.requires_grad_(False)


def dequantize(model):
    """Return all tensors of a model of ComfyUI's, dequantized."""
    tensors = {name: p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name}
    for name, module in model.named_modules():
        if hasattr(module, "weight_function"):
            weight = module.weight
            tensors[f"{name}.weight"] = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    return {name: tensor.detach() for name, tensor in tensors.items()}


def quantize_by_comfyui(kind, format, width=WIDTH):
    """Return a file's tensors and metadata: codes and scales of comfy-kitchen, the last linear in high precision."""
    prefix = "model.diffusion_model." if kind == "prefix" else ""
    tensors, layers = {}, {}
    for name, tensor in build_transformer(width).state_dict().items():
        layer = name.removesuffix(".weight")
        if tensor.dim() != 2 or layer == "proj_out":
            tensors[f"{prefix}{name}"] = tensor
            continue
        quantized = QuantizedTensor.from_float(tensor, LAYOUTS[format], scale="recalculate")
        stored = quantized.state_dict(f"{prefix}{name}")
        layers[f"{prefix}{layer}"] = {"format": format}
        if kind == "scaled_fp8":
            stored[f"{layer}.scale_weight"] = stored.pop(f"{name}_scale")
            stored[f"{layer}.scale_input"] = torch.tensor(0.5)
        elif kind == "bytes":
            stored[f"{name}_scale"] = stored[f"{name}_scale"].view(torch.uint8)
        elif kind == "cast":
            stored = {name: (tensor * 8).to(stored[name].dtype)}
        tensors |= stored
        if kind not in ("scaled_fp8", "metadata", "cast"):
            content = {**layers[f"{prefix}{layer}"], "full_precision_matrix_mult": True}
            tensors[f"{prefix}{layer}.comfy_quant"] = as_mark(content)
    if kind == "scaled_fp8":
        tensors["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})} if kind == "metadata" else {}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt", **metadata}, prefix


def as_mark(content):
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


CASES = [*itertools.product(("marks", "metadata", "prefix"), LAYOUTS), ("scaled_fp8", "float8_e4m3fn")]
CASES += [("cast", "float8_e4m3fn"), ("cast", "float8_e5m2"), ("bytes", "mxfp8")]


@pytest.mark.parametrize("width", [WIDTH, 48])
@pytest.mark.parametrize(("kind", "format"), CASES)
def test_a_file_of_comfyui_is_read_as_by_comfyui(kind, format, width, tmp_path):
    file = tmp_path / "model.safetensors"
    tensors, metadata, prefix = quantize_by_comfyui(kind, format, width)
    save_file(tensors, file, metadata=metadata)
    expected = dequantize(load_by_comfyui(file, width, prefix))
    model = build_transformer(width)
    loaded = dict(load_float8(file, dtype=torch.float32, model=model))
    assert loaded.keys() == expected.keys() == model.state_dict().keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    if format == "float8_e4m3fn":
        frozen = load_frozen(model, file).transformer_blocks[1]["up"].weight
        assert torch.equal(frozen.to_high_precision(), expected["transformer_blocks.1.up.weight"])


@pytest.mark.parametrize("width", [WIDTH, 48])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8", "static"])
def test_comfyui_reads_an_exported_file(recipe, width, tmp_path):
    file, model = tmp_path / "model.safetensors", build_transformer(width)
    config = STATIC if recipe == "static" else recipe
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "proj_out")
    inputs = torch.randn(2, 32, width)
    if recipe == "static":
        with calibrate_float8_static_scales(model):
            model(inputs)
    save_float8(model, file, format="comfyui")
    dequantized = build_transformer(width)
    loaded = dict(load_float8(file, dtype=torch.float32, model=dequantized))
    dequantized.load_state_dict(loaded)
    theirs = load_by_comfyui(file, width)
    for name, tensor in dequantize(theirs).items():
        assert torch.equal(loaded[name], tensor), name
    assert compute_sqnr_db(dequantized(inputs), theirs(inputs)) > 100
    quantized = load_by_comfyui(file, width, disabled=())  # as on hardware that multiplies the format
    layer = quantized.transformer_blocks[0]["to_q"]
    assert layer._full_precision_mm == (recipe in ("tensorwise", "rowwise"))
    assert (getattr(layer, "input_scale", None) is not None) == (recipe == "static")
    if recipe != "mxfp8":  # comfy-kitchen has no MXFP8 matmul on a CPU
        expected = dequantized.transformer_blocks[0]["to_q"](inputs)
        assert compute_sqnr_db(expected, layer(inputs)) > (100 if layer._full_precision_mm else 28)


@pytest.mark.parametrize("size", [None, 32, 64])
def test_scales_by_row_and_block_are_read(size, tmp_path):
    layouts = pytest.importorskip("convert_to_quant.comfy.quant_ops").LAYOUTS
    layout = layouts["RowWiseFP8Layout" if size is None else "BlockWiseFP8Layout"]
    codes, parameters = layout.quantize(torch.randn(192, 128), **({} if size is None else {"block_size": size}))
    content = {"format": f"float8_e4m3fn_{'rowwise' if size is None else 'blockwise'}", "group_size": size}
    tensors = {"a.weight": codes, "a.weight_scale": parameters["scale"], "a.comfy_quant": as_mark(content)}
    save_file(tensors, tmp_path / "a.safetensors")
    loaded = load_float8(tmp_path / "a.safetensors", dtype=torch.float32)["a.weight"]
    assert torch.equal(loaded, layout.dequantize(codes, **parameters))

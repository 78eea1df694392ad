"""Tests ComfyUI's files, written here by its rules; tests/library/third_party/test_comfyui.py has its reader."""

import json
import logging
import re

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from quaver import calibrate_float8_static_scales, convert_to_float8_training
from quaver.export import import_float8, load_float8, load_frozen, save_float8
from tests.library.export.mixtures import mixture
from tests.library.export.models import PROJECTIONS, STATIC, tiny
from tests.recipes import E4M3, E5M2
from tests.steps import assert_same

CODES = (torch.arange(32 * 64) % 120).to(torch.uint8).view(E4M3).view(32, 64)
OTHERS = {"b.weight": torch.full((64, 32), 0.1, dtype=torch.bfloat16), "b.bias": torch.zeros(64)}
FLOAT = {name: tensor.float() for name, tensor in OTHERS.items()}


def nest(name, module):
    """Return a module that has `module` under a dotted name."""
    for part in reversed(name.split(".")):
        module = nn.ModuleDict({part: module})
    return module


def build_model():
    return nn.ModuleDict({"a": nn.Linear(64, 32, bias=False), "b": nn.Linear(32, 64)})


def as_mark(text):
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def layer(format="float8_e4m3fn", *, weight=CODES, scale=0.3, **content):
    """Return the tensors of a marked layer; an argument that is None leaves out the mark, the weight or the scale."""
    mark = None if format is None else as_mark(json.dumps({"format": format, **content}))
    scale = None if scale is None else torch.as_tensor(scale)
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.comfy_quant": mark}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def add_prefix(prefix, tensors):
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def metadata(layer="a", format="float8_e4m3fn"):
    return {"_quantization_metadata": json.dumps({"layers": {layer: {"format": format}}})}


def write(folder, tensors, header=None):
    save_file({**OTHERS, **tensors}, folder / "file.safetensors", metadata=header)
    return folder / "file.safetensors"


SCALED = layer(None)
ROWS, BLOCKS = torch.arange(1.0, 33), torch.arange(1.0, 9).view(2, 4)
EXPANDED = BLOCKS.repeat_interleave(16, 0).repeat_interleave(16, 1)
OLDER = {"a.weight": CODES, "a.scale_weight": torch.tensor([0.3]), "a.scale_input": torch.tensor(2.0)}
MARK_OF_FILE = {"scaled_fp8": torch.zeros(2).to(E4M3), "c.bias": CODES[0].clone()}
TOKENIZER = {"spiece_model": torch.ones(9, dtype=torch.uint8)}
READ = {  # tensors, header, and what the codes of each weight are multiplied with
    "marks": (layer(full_precision_matrix_mult=True), None, {"a.weight": 0.3}),
    "one dim": (layer(scale=[0.3]), None, {"a.weight": 0.3}),
    "e5m2": (layer("float8_e5m2", weight=CODES.to(E5M2)), None, {"a.weight": 0.3}),
    "metadata": (SCALED, metadata(), {"a.weight": 0.3}),
    "metadata first": (layer("nvfp4"), metadata(), {"a.weight": 0.3}),
    "rows": (layer("float8_e4m3fn_rowwise", scale=ROWS), None, {"a.weight": ROWS[:, None]}),
    "blocks": (layer("float8_e4m3fn_blockwise", scale=BLOCKS, group_size=16), None, {"a.weight": EXPANDED}),
    "older": ({**OLDER, **MARK_OF_FILE}, None, {"a.weight": 0.3, "c.bias": 1}),
    "cast": ({"a.weight": CODES, "c.weight": CODES.clone().view(8, 4, 64)}, None, {"a.weight": 1, "c.weight": 1}),
    "tokenizer": ({**layer(), **TOKENIZER}, None, {"a.weight": 0.3}),
}


@pytest.mark.parametrize("name", READ)
def test_values_are_codes_times_scales(name, tmp_path, caplog):
    tensors, header, scales = READ[name]
    file = write(tmp_path, tensors, header)
    expected = {name: tensors[name].float() * scale for name, scale in scales.items()}
    with caplog.at_level(logging.WARNING, "quaver"):
        for dtype in (torch.float32, torch.bfloat16):
            loaded = dict(load_float8(file, dtype=dtype))
            assert_same(loaded, {name: tensor.to(dtype) for name, tensor in {**OTHERS, **expected}.items()})
    assert ("float8 without a scale; the codes are the values" in caplog.text) == (name in ("older", "cast"))
    if name not in ("e5m2", "rows", "blocks", "older", "cast"):
        frozen = load_frozen(build_model(), file).a.weight
        assert torch.equal(frozen.data_fp8.view(torch.uint8), CODES.view(torch.uint8))
        assert torch.equal(frozen.to_high_precision(), expected["a.weight"])


def test_names_may_differ_by_a_prefix(tmp_path, caplog):
    prefix, expected = "model.diffusion_model.", {**FLOAT, "a.weight": CODES.float() * 0.3}
    whole = add_prefix(prefix, {**OTHERS, **SCALED}) | {"first_stage_model.x.weight": torch.ones(2)}
    file, model = tmp_path / "whole.safetensors", build_model()
    save_file(whole, file, metadata=metadata())  # ComfyUI names its layers without the prefix, too
    assert_same(dict(load_float8(file, dtype=torch.float32, model=model)), expected)
    assert "a part of the checkpoint's model; left out: first_stage_model.x.weight" in caplog.text
    assert torch.equal(load_frozen(build_model(), file).a.weight.to_high_precision(), expected["a.weight"])
    nested = nest("model.diffusion_model", build_model())
    part = load_float8(write(tmp_path, layer()), dtype=torch.float32, model=nested)
    assert_same(dict(part), add_prefix(prefix, expected))
    with pytest.raises(ValueError, match=r"the model lacks model.diffusion_model.more.weight$"):
        save_file({**whole, f"{prefix}more.weight": torch.ones(2)}, file)
        load_frozen(build_model(), file)
    others = {name: tensor.clone() + 1 for name, tensor in OTHERS.items()}
    save_file({**OTHERS, **layer(), **add_prefix("net.", others)}, file)  # the model's own names come first
    both = load_float8(file, dtype=torch.float32, model=model)
    assert_same({name: both[name] for name in expected}, expected)


def in_tiles(exponents):
    """Return bytes of E8M0 [R, C] in the order in which cuBLAS reads them."""
    rows, columns = (-(-length // tile) for length, tile in zip(exponents.shape, (128, 4), strict=True))
    tiles = torch.zeros(rows * columns * 512, dtype=torch.uint8)
    for (row, column), exponent in np.ndenumerate(exponents):
        tile = row // 128 * columns + column // 4
        tiles[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = int(exponent)
    return tiles.view(rows * 128, columns * 4)


@pytest.mark.parametrize("shape", [(32, 64), (160, 288), (20, 40)])
def test_mxfp8_is_read_in_tiles_and_padded(shape, tmp_path):
    torch.manual_seed(0)
    exponents = torch.randint(120, 134, (shape[0], -(-shape[1] // 32)))
    codes = torch.randint(120, shape).to(torch.uint8)
    stored = torch.zeros([-(-length // 32) * 32 for length in shape], dtype=torch.uint8)
    stored[: shape[0], : shape[1]] = codes
    content = layer("mxfp8", weight=stored.view(E4M3), scale=in_tiles(exponents))
    file, model = tmp_path / "file.safetensors", nest("a", nn.Linear(shape[1], shape[0], bias=False))
    save_file(content, file)
    expected = codes.view(E4M3).float() * torch.exp2(exponents - 127.0).repeat_interleave(32, 1)[:, : shape[1]]
    assert torch.equal(load_float8(file, dtype=torch.float32, model=model)["a.weight"], expected)
    assert list(load_float8(file)["a.weight"].shape) == list(stored.shape)
    save_file({**content, **layer("mxfp8", weight=None, scale=None, orig_shape=shape)}, file)
    assert torch.equal(load_float8(file, dtype=torch.float32)["a.weight"], expected)


IN_HEADER = "_quantization_metadata"
BAD = {  # the message, the tensors and the header
    "a.weight (nvfp4); expected one of float8_e4m3fn, float8_e5m2": (layer("nvfp4"),),
    "formats of ComfyUI: a.weight (int8_tensorwise); expected": (SCALED, metadata(format="int8_tensorwise")),
    "a.weight (F8_E4M3): expected one scale, got none; quaver reads": (layer(scale=None),),
    "c.weight (F8_E4M3): expected one scale, got none; quaver reads": ({**SCALED, "c.weight": CODES.clone()},),
    "a.weight is marked as float8_e4m3fn: expected F8_E4M3, got no such tensor": (layer(weight=None, scale=None),),
    "z.weight is marked as float8_e4m3fn: expected F8_E4M3, got no such tensor": (SCALED, metadata("z")),
    "a.weight is marked as float8_e4m3fn: expected F8_E4M3, got BF16": (layer(weight=CODES.bfloat16()),),
    "scales without a float8 weight: b.scale_weight": ({**OLDER, "b.scale_weight": torch.ones(())},),
    "expected float8 weights, got a.pre_quant_scale": ({**layer(), "a.pre_quant_scale": torch.ones(64)},),
    "a.comfy_quant: expected a JSON object: Expecting": ({**SCALED, "a.comfy_quant": as_mark("{no")},),
    "a.comfy_quant: expected a JSON object, got a list": ({**SCALED, "a.comfy_quant": as_mark("[]")},),
    "the mark of a: expected a format, got '{}'": ({**SCALED, "a.comfy_quant": as_mark("{}")},),
    "the mark of a: expected a group_size of 1 or more, got 'None'": (layer("float8_e4m3fn_blockwise"),),
    "[32, 64]: expected [128, 4] bytes, got [32, 2] in torch.float32": (layer("mxfp8", scale=torch.ones(32, 2)),),
    "metadata: expected an object of layers, got a NoneType": (SCALED, {IN_HEADER: "{}"}),
    "metadata: expected a JSON object: maximum recursion": (SCALED, {IN_HEADER: "[" * 10**5}),
    "marked as mxfp8: expected a matrix, or a stack of them": (layer("mxfp8", weight=CODES.view(1, 2, 16, 64)),),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_refused(message, tmp_path):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        import_float8(write(tmp_path, *BAD[message]), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_file_becomes_a_file(tmp_path):
    file, out = write(tmp_path, layer(), {**metadata(), "config": "{}"}), tmp_path / "hp" / "out.safetensors"
    assert import_float8(file, out, dtype=torch.float32) == 1
    assert_same(load_file(out), {**FLOAT, "a.weight": CODES.float() * 0.3})
    with safe_open(out, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "config": "{}"}
    (tmp_path / "other.bin").touch()
    alone = tmp_path / "alone" / "file.safetensors"
    alone.parent.mkdir()
    alone.write_bytes(file.read_bytes())
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file.name, "b": "more"}}))
    for source, target, message in (
        (alone, "x", "x': expected a name that ends in .safetensors, because "),
        (tmp_path / "other.bin", "x.safetensors", "other.bin': expected a folder or a .safetensors file"),
        (file, "x.safetensors", "is one of the files of x.safetensors.index.json; give their folder"),
    ):
        with pytest.raises(ValueError, match=message):
            import_float8(source, tmp_path / target)


def test_a_folder_with_marks_is_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path, layer())
    assert_same(dict(load_float8(tmp_path, dtype=torch.float32)), {**FLOAT, "a.weight": CODES.float() * 0.3})
    write(tmp_path, {"a.weight": CODES})
    with pytest.raises(ValueError, match="expected one scale, got none; give the file and not its folder"):
        load_float8(tmp_path)


WRITTEN = {  # recipe, size, what the mark says, whether codes are those of the training
    "tensorwise": ("tensorwise", 32, {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}, True),
    "rowwise": ("rowwise", 32, {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}, False),
    "static": (STATIC, 32, {"format": "float8_e4m3fn"}, True),
    "mxfp8": ("mxfp8", 160, {"format": "mxfp8"}, True),
    "mxfp8 padded": ("mxfp8", 48, {"format": "mxfp8"}, True),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_file_has_its_tensors_and_marks(name, tmp_path):
    recipe, size, content, is_exact = WRITTEN[name]
    model, file = tiny(recipe, size), tmp_path / "out.safetensors"
    if recipe is STATIC:
        with calibrate_float8_static_scales(model):
            model(torch.arange(20).view(1, 20))
    written = save_float8(model, file, format="comfyui")
    assert bool(written.requantized) is not is_exact
    assert list(tmp_path.iterdir()) == [file]
    stored, linears = load_file(file), [f"layer.{projection}" for projection in PROJECTIONS]
    leaves = ("weight_scale", "comfy_quant", *(("input_scale",) if recipe is STATIC else ()))
    assert set(stored) == {*model.state_dict(), *(f"{linear}.{leaf}" for linear in linears for leaf in leaves)}
    loaded = load_float8(file, dtype=torch.float32, model=tiny(recipe, size))
    for linear in linears:
        assert json.loads(bytes(stored[f"{linear}.comfy_quant"].tolist())) == content
        codes, scale = stored[f"{linear}.weight"], stored[f"{linear}.weight_scale"]
        weight = model.get_submodule(linear).weight.detach()
        if content["format"] == "mxfp8":
            padded = -(-size // 32) * 32
            whole = nn.functional.pad(weight, (0, padded - size) * 2)
            amax = whole.unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).abs().amax((1, 3))
            exponents = (torch.ceil(torch.log2(amax / 448)) + 127).repeat_interleave(32, 0)
            assert torch.equal(scale, in_tiles(exponents[:size]))
            assert list(codes.shape) == [padded, padded]
            assert not codes.float()[size:].any()
        else:
            assert scale.dim() == 0
            assert torch.equal(loaded[f"{linear}.weight"], codes.float() * scale)
        assert stored.get(f"{linear}.input_scale", torch.ones(())).dim() == 0
        assert (loaded[f"{linear}.weight"] - weight).norm() < 0.04 * weight.norm()
    with safe_open(file, "pt") as opened:
        record = json.loads(opened.metadata()["quaver_export"])
    assert (record["format"], bool(record["requantized"])) == ("comfyui", not is_exact)


def test_a_file_is_frozen_and_written_again(tmp_path):
    file, again = tmp_path / "out.safetensors", tmp_path / "again.safetensors"
    save_float8(tiny("tensorwise"), file, format="comfyui")
    assert not save_float8(load_frozen(type(tiny())(), file), again, format="comfyui").requantized
    assert_same(load_file(again), load_file(file))


def test_other_paths_and_options_are_refused(tmp_path):
    file = tmp_path / "out.safetensors"
    for path, options, message in (
        (tmp_path / "out", {}, "out': expected a name that ends in .safetensors; the format comfyui is one file"),
        (file, {"config": {"model_type": "tiny"}}, "config: expected none for the format comfyui"),
        (file, {"files": [tmp_path]}, "files: expected none for the format comfyui"),
        (file, {"make_hp_model": tiny}, "make_hp_model: expected none for the format comfyui"),
    ):
        with pytest.raises(ValueError, match=message):
            save_float8(tiny(), path, format="comfyui", **options)
    families = {
        "Flux or AuraFlow": ("single_transformer_blocks.0.attn.to_q",),
        "SD3": ("transformer_blocks.0.attn.add_q_proj", "pos_embed.proj"),
        "PixArt": ("transformer_blocks.0.a", "adaln_single.emb.timestep_embedder.a", "pos_embed.proj"),
        "Z-Image": ("noise_refiner.0.attention.to_q",),
        "a UNet": ("down_blocks.0.a", "mid_block.a", "up_blocks.0.a", "conv_in"),
    }
    for family, names in families.items():
        model = nn.Module()
        for name in names:
            first, _, rest = name.partition(".")
            model.add_module(first, nest(rest, nn.Linear(32, 32)) if rest else nn.Linear(32, 32))
        convert_to_float8_training(model, config="tensorwise")
        with pytest.raises(NotImplementedError, match=f"ComfyUI replaces the names of {family} in diffusers"):
            save_float8(model, file, format="comfyui")
    with pytest.raises(NotImplementedError, match="reads no matrices of single experts, got experts.gate_up_proj"):
        save_float8(mixture(), file, format="comfyui")
    assert not list(tmp_path.iterdir())

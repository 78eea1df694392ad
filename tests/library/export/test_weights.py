"""Tests that exported codes and scales are those of the training forward, and what a format cannot hold."""

import json
import math
import re

import pytest
import torch
from torch import nn

import quaver.linear.module
from quaver import CastConfig, Float8LinearConfig, convert_to_float8_training, freeze_to_float8
from quaver.export import iter_float8_weights, save_float8
from quaver.export.formats import make_weight_format
from quaver.recipes.scaling import dynamic_cast_blocks
from tests.library.export.models import PROJECTIONS, STATIC, Tiny, is_not_head, tiny
from tests.recipes import NON_BLOCK_RECIPES, PERSISTENT_RECIPES
from tests.reference import sqnr_db
from tests.steps import assert_same

TOKENS = torch.arange(40).view(2, 20)


def train_scales(recipe):
    """Return a model with the persistent scales of its recipe, if it has any."""
    model = tiny(recipe)
    if recipe is STATIC:
        with quaver.calibrate_float8_static_scales(model):
            model(TOKENS)
    elif recipe in PERSISTENT_RECIPES:
        model(TOKENS).sum().backward()
        quaver.sync_float8_amax_and_scale_history(model)
        with torch.no_grad():
            model.layer["o_proj"].weight.mul_(1.5)  # the scale of its codes is the delayed one, which saturates
    return model


def test_the_result_says_what_was_written(tmp_path):
    written = save_float8(tiny("rowwise"), tmp_path / "out", config={})
    expected = rf"CheckpointTensors\({len(PROJECTIONS)} float8 weights, [\d,]+ bytes yielded, in high precision: .*\)"
    assert re.fullmatch(expected, repr(written))


def export_what_a_forward_multiplies(model, monkeypatch, **options):
    """Export the model, whose codes must be those of its forward without a new cast.

    Return the export, its tensors by name, and for each linear its stored scale and that of the forward.
    """
    operands = []
    multiply = quaver.linear.function.multiply_operands

    def record_and_multiply(a, b, *args):
        operands.append(b.t())
        return multiply(a, b, *args)

    with monkeypatch.context() as patch:
        patch.setattr(quaver.linear.function, "multiply_operands", record_and_multiply)
        model.eval()(TOKENS)
    exported = iter_float8_weights(model, **options)
    tensors, scales = dict(exported), []
    for name, operand in zip(PROJECTIONS, operands, strict=True):
        assert_same(tensors[f"layer.{name}.weight"], operand.data.contiguous(), name)
        scales.append((tensors[f"layer.{name}.{exported.plan.format.scale_name}"], operand.dequant_scale))
    assert not exported.requantized
    return exported, tensors, scales


@pytest.mark.parametrize("recipe", [*NON_BLOCK_RECIPES, *PERSISTENT_RECIPES, pytest.param(STATIC, id="static")])
def test_codes_and_scales_are_those_of_the_forward(recipe, monkeypatch):
    model = train_scales(recipe)
    exported, tensors, scales = export_what_a_forward_multiplies(model, monkeypatch, share_fused_scales=False)
    assert tensors["layer.q_proj.weight"].dtype is torch.float8_e4m3fn
    for scale, expected in scales:
        assert_same(scale, expected if expected.dim() == 2 else expected.view(1))
        assert scale.shape in ((32, 1), (1,))
    assert exported.plan.ignore == ["embed_tokens", "lm_head"]
    assert exported.bytes_yielded == sum(tensor.nbytes for tensor in tensors.values())
    assert exported.bytes_moved == 0


@pytest.mark.parametrize("format", ["compressed-tensors", "compressed-tensors-block", "fp8"])
def test_blocks_of_a_training_are_exported_as_they_are(format, monkeypatch):
    """The last blocks of 128 x 128 are cut by 150 rows and columns."""
    *_, scales = export_what_a_forward_multiplies(tiny("blockwise", size=150), monkeypatch, format=format)
    for scale, expected in scales:
        assert torch.equal(scale, expected)


def test_smaller_blocks_are_quantized_again_in_128_x_128():
    exported = iter_float8_weights(tiny("mxfp8", size=150), format="compressed-tensors-block")
    tensors = dict(exported)
    assert tensors["layer.q_proj.weight_scale"].shape == (2, 2)
    assert set(exported.requantized) == {f"layer.{name}" for name in PROJECTIONS}
    with pytest.raises(NotImplementedError, match=r"layer.q_proj \[150, 150\].*use the format compressed-tensors-"):
        iter_float8_weights(tiny("mxfp8", size=150))
    assert len(dict(iter_float8_weights(tiny("mxfp8", size=150), format="high-precision"))) == 11


@pytest.mark.parametrize("format", ["compressed-tensors", "compressed-tensors-mxfp8"])
def test_mxfp8_has_the_scales_of_its_blocks_in_each_row(format, monkeypatch):
    """96 rows are three blocks, one of which is zero."""
    model = tiny("mxfp8", size=96)
    with torch.no_grad():
        model.layer["q_proj"].weight[32:64, :32] = 0
    _, tensors, scales = export_what_a_forward_multiplies(model, monkeypatch, format=format)
    for scale, expected in scales:
        assert (scale.dtype, scale.shape) == (torch.uint8, (96, 3))
        assert torch.equal(torch.exp2(scale.double() - 127), expected.double().repeat_interleave(32, 0))
    assert tensors["layer.q_proj.weight_scale"][32, 0] == 0


@pytest.mark.parametrize("trained", ["rowwise", "blocks of 32 with other scales"])
def test_mxfp8_of_what_it_cannot_hold_is_quantized_again(trained):
    """The weights get groups of 32 elements of a row, which lose less than blocks."""
    if trained == "rowwise":
        model = tiny("rowwise", size=64)
    else:
        model = freeze_to_float8(Tiny(64), config="mxfp8", module_filter_fn=is_not_head)
        for name in PROJECTIONS:
            model.layer[name].weight.dequant_scale.mul_(1.25)
    exported = iter_float8_weights(model, format="compressed-tensors-mxfp8")
    tensors = dict(exported)
    assert set(exported.requantized) == {f"layer.{name}" for name in PROJECTIONS}
    for name in PROJECTIONS:
        weight = model.layer[name].weight.detach()
        weight = weight.to_high_precision() if hasattr(weight, "to_high_precision") else weight
        codes, _, scale = dynamic_cast_blocks(weight, torch.float8_e4m3fn, block_size=(1, 32), rule="rceil")
        assert_same(tensors[f"layer.{name}.weight"], codes)
        assert_same(tensors[f"layer.{name}.weight_scale"].view(torch.float8_e8m0fnu).float(), scale)


def test_fused_linears_share_the_smallest_scale_and_the_cost_is_stated():
    model = tiny("tensorwise")
    own = dict(iter_float8_weights(model, share_fused_scales=False))
    exported = iter_float8_weights(model)
    shared = dict(exported)
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        scales = [own[f"layer.{name}.weight_scale"] for name in group]
        assert len({scale.item() for scale in scales}) == len(group)
        assert all(torch.equal(shared[f"layer.{name}.weight_scale"], max(scales)) for name in group)
    assert torch.equal(shared["layer.o_proj.weight_scale"], own["layer.o_proj.weight_scale"])
    assert set(exported.requantized) == {"layer.q_proj", "layer.k_proj", "layer.gate_proj"}
    for name, cost in exported.requantized.items():
        weight = model.get_submodule(name).weight
        for tensors, decibels in ((own, cost.training_db), (shared, cost.stored_db)):
            values = tensors[f"{name}.weight"].double() * tensors[f"{name}.weight_scale"].double()
            assert math.isclose(sqnr_db(weight.detach(), values), decibels, abs_tol=1e-4)


def test_static_activations_have_the_scale_of_the_forward():
    model = train_scales(STATIC)
    exported = iter_float8_weights(model)
    tensors = dict(exported)
    inputs = exported.plan.format.make_quantization_config([])["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["dynamic"]) == ("tensor", False)
    for name in PROJECTIONS:
        quant_scale = model.layer[name].get_persistent_scales(torch.device("cpu")).input.quant_scale
        assert torch.equal(tensors[f"layer.{name}.input_scale"], (1 / quant_scale).reshape(1))
    with pytest.raises(ValueError, match="scale of the input of layer.q_proj is unknown"):
        dict(iter_float8_weights(tiny("delayed_with_dynamic_weight")))


def test_the_control_format_writes_high_precision(tmp_path):
    model = tiny()
    plain = dict(iter_float8_weights(model, format="high-precision", dtype=torch.bfloat16))
    assert_same(plain, model.bfloat16().state_dict())
    with pytest.raises(NotImplementedError, match="high-precision is for iter_float8_weights; save_pretrained writes"):
        save_float8(model, tmp_path / "out", config={}, format="high-precision")
    assert not list(tmp_path.iterdir())


def test_wrappers_leave_names_as_they_are():
    names = list(dict(iter_float8_weights(tiny())))
    model = tiny()
    model.layer["q_proj"].compile(backend="eager")
    assert list(dict(iter_float8_weights(torch.compile(model, backend="eager")))) == names


def test_weights_may_come_from_elsewhere():
    model = tiny()
    expected = dict(iter_float8_weights(model))
    with torch.device("meta"):
        structure = Tiny()
    convert_to_float8_training(structure, config="rowwise", module_filter_fn=is_not_head)
    assert_same(dict(iter_float8_weights(structure, weights=model.state_dict())), expected)
    rounded = dict(iter_float8_weights(structure, weights=model.state_dict(), forward_dtype=torch.bfloat16))
    for name, tensor in iter_float8_weights(model.bfloat16()):
        if "_proj.weight" in name:
            assert torch.equal(rounded[name].float(), tensor.float()), name
    with pytest.raises(ValueError, match="expected all float8 weights of the model, got none for layer.q_proj"):
        iter_float8_weights(structure, weights={})


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise", "mxfp8"])
def test_a_model_in_high_precision_has_the_codes_of_a_converted_one(recipe):
    """Rounded float32 masters get the codes of a bfloat16 model, and the model in high precision does not change."""
    model = quaver.convert_to_high_precision(tiny("rowwise", 64))
    classes = [type(module) for module in model.modules()]
    weights = iter_float8_weights(model, recipe=recipe, forward_dtype="bfloat16", dtype=torch.bfloat16)
    stored = dict(weights)
    assert_same(stored, dict(iter_float8_weights(tiny(recipe, 64).bfloat16())))
    assert not weights.requantized  # nothing trained with other codes, if fused linears share a scale
    assert [type(module) for module in model.modules()] == classes
    from_float32 = dict(iter_float8_weights(model, recipe=recipe))
    assert not torch.equal(stored["layer.q_proj.weight"], from_float32["layer.q_proj.weight"])
    with torch.device("meta"):
        structure = Tiny(64)
    given = {"weights": model.state_dict(), "forward_dtype": torch.bfloat16, "dtype": torch.bfloat16}
    assert_same(dict(iter_float8_weights(structure, recipe=recipe, **given)), stored)


def test_a_recipe_is_for_layers_that_a_filter_admits_and_a_format_holds():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    first = dict(iter_float8_weights(model, recipe="rowwise", module_filter_fn=lambda _, name: name == "0"))
    assert [name for name in first if "scale" in name] == ["0.weight_scale"]
    for options, error, message in (
        ({"recipe": "delayed"}, ValueError, "scales follow from the weights alone, got delayed"),
        ({"recipe": "rowwise", "format": "fp8"}, NotImplementedError, "expected weights with a scale per block"),
        ({"recipe": "int4"}, ValueError, "unknown recipe 'int4'"),
        ({"recipe": "rowwise", "forward_dtype": "int8"}, ValueError, "expected one of float32, bfloat16, float16, got"),
        ({"recipe": "rowwise", "dtype": torch.int8}, ValueError, "dtype: expected one of float32, bfloat16, float16"),
        ({"module_filter_fn": bool}, ValueError, "expected none without a recipe"),
    ):
        with pytest.raises(error, match=message):
            iter_float8_weights(model, **options)
    with pytest.raises(ValueError, match="already converted with"):
        iter_float8_weights(tiny("rowwise"), recipe="tensorwise")
    model[0].weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"0\.weight has an inf"):
        dict(iter_float8_weights(model, recipe="rowwise", forward_dtype="float16"))


def test_buffers_may_be_infinite():
    """Gemma 4 has limits of clipped linears in buffers, which are infinite if its config sets none."""
    model = tiny()
    model.norm.register_buffer("input_max", torch.tensor(torch.inf))
    assert dict(iter_float8_weights(model, dtype=torch.bfloat16))["norm.input_max"].isinf()
    model.norm.input_max.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"norm\.input_max has an inf or a NaN"):
        dict(iter_float8_weights(model))


def test_what_no_format_holds_is_refused():
    with pytest.raises(ValueError, match="expected a model with float8 linears, got none"):
        iter_float8_weights(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="format: expected one of compressed-tensors"):
        iter_float8_weights(tiny(), format="gguf")
    mixed = tiny("rowwise")
    convert_to_float8_training(mixed, config="tensorwise", module_filter_fn=lambda module, name: name == "lm_head")
    with pytest.raises(NotImplementedError, match="expected one recipe for all float8 linears"):
        iter_float8_weights(mixed)
    e4m3, e5m2 = (CastConfig(target_dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
    e5m2 = Float8LinearConfig(cast_config_weight=e5m2, cast_config_grad_output=e4m3)
    with pytest.raises(NotImplementedError, match="weight: checkpoints hold codes in e4m3"):
        make_weight_format("compressed-tensors", e5m2)
    in_16_columns = convert_to_float8_training(nn.Sequential(nn.Linear(16, 64)), config="mxfp8")
    with pytest.raises(NotImplementedError, match=r"columns are a multiple of 32, got 0 \[64, 16\]"):
        iter_float8_weights(in_16_columns, format="compressed-tensors-mxfp8")
    diverged = tiny()
    with torch.no_grad():
        diverged.layer["k_proj"].weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match="layer.k_proj.weight has an inf or a NaN"):
        dict(iter_float8_weights(diverged))
    tied = Tiny()
    tied.lm_head.weight = tied.embed_tokens.weight
    convert_to_float8_training(tied, config="rowwise")
    with pytest.raises(ValueError, match=r"tied weight cannot be stored in float8: .*lm_head.weight"):
        iter_float8_weights(tied)
    with pytest.raises(ValueError, match="embed_tokens.weight is on the meta device, where Accelerate's offload"):
        dict(iter_float8_weights(tiny().to("meta")))


def test_config_json_is_what_save_pretrained_writes(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    model.config._name_or_path = str(tmp_path / "secret")
    model.save_pretrained(tmp_path / "saved")
    save_float8(model, tmp_path / "served", recipe="rowwise")
    served, saved_config = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("served", "saved"))
    assert served.pop("quantization_config")
    assert served == saved_config
    assert "secret" not in (tmp_path / "served" / "config.json").read_text()

"""A float8 checkpoint as a frozen base: the codes of the file, the logits of the exported forward, what is refused."""

import pytest
import torch
from torch import nn

from quaver import FrozenFloat8Linear, convert_to_float8_training, freeze_to_float8
from quaver.export import iter_float8_weights, load_float8, load_frozen, save_float8
from tests.unit.export.models import PROJECTIONS, Tiny, tiny

TOKENS = torch.arange(40).view(2, 20)
TRAINED = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "rowwise_with_tensorwise_weight")
FROZEN = ("blockwise", "tensorwise", "rowwise")


def not_the_head(module, name):
    return name != "lm_head"


def other(size=128):
    """A model with other weights than `tiny`."""
    torch.manual_seed(1)
    return Tiny(size)


def exported(model, folder, **options):
    save_float8(model, folder, config={}, share_fused_scales=False, **options)
    return folder


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS)


def codes_of(model):
    return {name: model.layer[name].weight.data_fp8.view(torch.uint8) for name in PROJECTIONS}


@pytest.mark.parametrize("recipe", TRAINED)
def test_logits_are_those_of_the_exported_forward(recipe, tmp_path):
    model = tiny(recipe, 128)
    folder = exported(model, tmp_path / "out")
    with torch.device("meta"):
        on_meta = Tiny(128)
    for loaded in (load_frozen(other(), folder), load_frozen(on_meta, folder, dtype=torch.float32)):
        assert torch.equal(logits(loaded), logits(model))
        assert all(isinstance(loaded.layer[name], FrozenFloat8Linear) for name in PROJECTIONS)
        assert loaded.layer["q_proj"].bias.requires_grad
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize("config", FROZEN)
def test_a_frozen_base_is_exported_with_the_codes_that_it_holds(config, tmp_path):
    torch.manual_seed(0)
    model = freeze_to_float8(Tiny(128), config, module_filter_fn=not_the_head)
    loaded = load_frozen(other(), exported(model, tmp_path / "out"))
    assert torch.equal(logits(loaded), logits(model))
    for name, codes in codes_of(model).items():
        assert torch.equal(codes_of(loaded)[name], codes)
    control = dict(iter_float8_weights(model, format="high-precision"))
    assert set(control) == set(other().state_dict())
    assert torch.equal(control["layer.k_proj.weight"], model.layer["k_proj"].weight.to_high_precision())


def test_fused_linears_of_a_frozen_base_share_a_scale(tmp_path):
    torch.manual_seed(0)
    model = freeze_to_float8(Tiny(128), "tensorwise", module_filter_fn=not_the_head)
    weights = iter_float8_weights(model)
    stored = dict(weights)
    assert len({stored[f"layer.{name}.weight_scale"].item() for name in ("q_proj", "k_proj", "v_proj")}) == 1
    largest = max(model.layer[name].weight_dequant_scale.item() for name in ("q_proj", "k_proj", "v_proj"))
    assert stored["layer.q_proj.weight_scale"].item() == largest
    assert len(weights.requantized) == 3  # two of q, k, v, and one of gate, up


def test_other_formats(tmp_path):
    """Blocks with float32 scales, as of DeepSeek's checkpoints: the values of the dequantized weights."""
    for format in ("fp8", "compressed-tensors-block"):
        folder = exported(tiny("rowwise", 128), tmp_path / format, format=format)
        loaded = load_frozen(other(), folder)
        for name in PROJECTIONS:
            expected = load_float8(folder, dtype=torch.float32)[f"layer.{name}.weight"]
            assert torch.equal(loaded.layer[name].weight.to_high_precision(), expected)
            assert loaded.layer[name].config.round_scales_to_power_of_2 is False
    given = load_frozen(other(), exported(tiny("rowwise", 128), tmp_path / "rows"), config="rowwise")
    assert given.layer["q_proj"].config.casts.input.is_rowwise


def test_blocks_at_an_edge_are_refused():
    """No loader takes blocks that are smaller than 128 x 128."""
    model = freeze_to_float8(Tiny(64), "blockwise", module_filter_fn=not_the_head)
    with pytest.raises(ValueError, match=r"layer.q_proj must be a multiple of the block of 128 x 128, got \[64, 64\]"):
        dict(iter_float8_weights(model))


class Buffered(Tiny):
    def __init__(self):
        super().__init__(128)
        self.register_buffer("angles", torch.ones(4), persistent=False)


def renamed():
    model = other()
    model.layer["other"] = model.layer.pop("q_proj")
    return model


def without_linear():
    model = other()
    model.layer["q_proj"] = nn.Bilinear(1, 1, 1)
    return model


def tied():
    model = other()
    model.layer["k_proj"].weight = model.layer["q_proj"].weight
    return model


def on_meta(make):
    with torch.device("meta"):
        return make()


REFUSED = {
    "another size": (lambda: other(64), "embed_tokens.weight: expected"),
    "another name": (renamed, "layer.q_proj.weight belongs to no nn.Linear of the model"),
    "another module": (without_linear, "layer.q_proj.weight belongs to no nn.Linear of the model"),
    "a converted model": (
        lambda: convert_to_float8_training(other()),
        "expected an nn.Linear in high precision, got Float8Linear",
    ),
    "tied weights": (tied, "is tied to"),
    "buffers without values": (lambda: on_meta(Buffered), "buffers on the meta device: angles"),
    "a part on the meta device": (
        lambda: other().to_empty(device="cpu") and _with_a_meta_head(),
        "some parameters are on the meta device",
    ),
}


def _with_a_meta_head():
    model = other()
    model.lm_head.to_empty(device="meta")
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_does_not_fit_stays_as_it_was(case, tmp_path):
    make, message = REFUSED[case]
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as refused:
        load_frozen(model, exported(tiny("rowwise", 128), tmp_path / "out"))
    assert "\n" not in str(refused.value)
    assert not any(isinstance(module, FrozenFloat8Linear) for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta or torch.equal(tensor, before[name])

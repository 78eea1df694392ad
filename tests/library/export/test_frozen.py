"""Tests that `load_frozen` makes the codes of an export a frozen base, which is exported again."""

import functools
import json
import math

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import nn

import quaver
from quaver import conversion_report, convert_to_float8_training, convert_to_high_precision, freeze_to_float8
from quaver.conversion.freeze import make_blockwise_config
from quaver.export import iter_float8_weights, load_float8, load_frozen, save_float8
from quaver.linear import frozen_weight
from tests.library.export.models import PROJECTIONS, Tiny, is_not_head, saved, tiny
from tests.reference import lowest_sqnr_db, sqnr_db
from tests.steps import assert_same

TOKENS = torch.arange(40).view(2, 20)
CONFIGS = {
    "rowwise": "rowwise",
    "tensorwise": "tensorwise",
    "mixed": "rowwise_with_tensorwise_weight",
    "mxfp8": "mxfp8",
}
CONFIGS |= {"blockwise": make_blockwise_config(), "float32 blocks": make_blockwise_config(power_of_2=False)}


def logits(model):
    with torch.no_grad():
        return model(TOKENS)


def assert_values(frozen, folder, codes=None):
    """The weights are what the folder's codes stand for; `codes`: its tensors, if they stay as they are."""
    values = load_float8(folder, dtype=torch.float32)
    for name in (f"layer.{projection}.weight" for projection in PROJECTIONS):
        weight = frozen.get_parameter(name)
        assert weight.to_high_precision().equal(values[name])
        assert codes is None or weight.data_fp8.view(torch.uint8).equal(codes[name].view(torch.uint8))


def write_folder(folder, tensors, source):
    """Write the tensors with the config of `source`."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function that returns the folder of an export with the codes of training, and its tensors."""
    root = tmp_path_factory.mktemp("export")

    @functools.cache
    def export(config):
        folder = saved(root / config, CONFIGS[config], 128, share_fused_scales=False)
        return folder, load_file(folder / "model.safetensors")

    return export


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("config", CONFIGS)
def test_an_export_imported_frozen_has_the_logits_of_the_exporter(config, device, exported):
    folder, tensors = exported(config)
    with torch.device(device):
        model = Tiny(128)
    assert load_frozen(model, folder) is model
    assert logits(model).equal(logits(tiny(CONFIGS[config], 128)))
    assert sum(isinstance(module, quaver.FrozenFloat8Linear) for module in model.modules()) == len(PROJECTIONS)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    reasons = {layer.name: layer.reason for layer in conversion_report(model).layers}
    assert reasons["lm_head"] == "in high precision in the checkpoint"
    assert reasons["layer.q_proj"].startswith("frozen, stored in ")
    assert_same(dict(iter_float8_weights(model, share_fused_scales=False)), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_frozen_weights_of_other_dtypes_keep_the_codes(dtype, tmp_path):
    model = tiny("rowwise", 128).to(dtype)
    save_float8(model, tmp_path / "out", config={})
    with torch.device("meta"):
        frozen = Tiny(128).to(dtype)
    load_frozen(frozen, tmp_path / "out")
    assert {parameter.dtype for parameter in frozen.parameters()} == {dtype}
    assert logits(frozen).equal(logits(model))


def test_mxfp8_of_one_group_in_a_row_stays_blocks(tmp_path):
    """Its scales have the shape of those of rows, and are blocks as those of the other weights."""
    frozen = load_frozen(Tiny(32), saved(tmp_path / "out", "mxfp8", 32))
    assert frozen.layer["q_proj"].weight.dequant_scale.shape == (1, 1)
    assert logits(frozen).equal(logits(tiny("mxfp8", 32)))


def test_a_deepseek_style_folder_is_frozen_in_float32_blocks(tmp_path):
    """fp8 with weight_scale_inv: blocks that a training recipe does not have, and scales in bfloat16."""
    folder = saved(tmp_path / "out", "rowwise", 128, format="fp8")
    frozen = load_frozen(Tiny(128), folder)
    plain = convert_to_high_precision(tiny(size=128))
    reference = freeze_to_float8(plain, config=CONFIGS["float32 blocks"], module_filter_fn=is_not_head)
    assert logits(frozen).equal(logits(reference))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor.bfloat16() if name.endswith("_inv") else tensor for name, tensor in tensors.items()}, path)
    (folder / "quaver_export.json").unlink()
    assert_values(load_frozen(Tiny(128), folder), folder, codes=tensors)


def test_blocks_of_32_with_float32_scales_are_frozen(exported, tmp_path):
    """As the codes of MXFP8, with scales that E8M0 does not hold, and activations to match."""
    _, tensors = exported("mxfp8")
    others = {name: tensor for name, tensor in tensors.items() if "scale" not in name}
    rows = {f"{name}_inv": tensor[::32] for name, tensor in tensors.items() if "scale" in name}
    scales = {name: scale.view(torch.float8_e8m0fnu).float() * 1.1 for name, scale in rows.items()}
    save_file(others | scales, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    frozen = load_frozen(Tiny(128), tmp_path)
    assert not frozen.layer["q_proj"].config.round_scales_to_power_of_2
    assert_values(frozen, tmp_path, codes=others)
    plain = Tiny(128)
    plain.load_state_dict(dict(load_float8(tmp_path, dtype=torch.float32)))
    assert sqnr_db(logits(plain), logits(frozen)) > lowest_sqnr_db(*[3] * len(PROJECTIONS))  # casts of inputs alone


def test_float32_scales_per_row_are_frozen_as_llm_compressor_writes_them(exported, tmp_path):
    folder, tensors = exported("rowwise")
    tensors = {name: tensor * 1.1 if "scale" in name else tensor for name, tensor in tensors.items()}
    frozen = load_frozen(Tiny(128), write_folder(tmp_path, tensors, folder))
    assert not frozen.layer["q_proj"].config.round_scales_to_power_of_2
    assert load_frozen(Tiny(128), folder).layer["q_proj"].config.round_scales_to_power_of_2
    assert_values(frozen, tmp_path)
    assert logits(frozen).isfinite().all()


@pytest.mark.parametrize(("config", "power_of_2"), [("rowwise", True), ("tensorwise", False), ("blockwise", True)])
@pytest.mark.parametrize("codes", [0.0, 3.0])
def test_a_row_with_scale_or_codes_zero_is_zero(config, power_of_2, codes, exported, tmp_path):
    """Either its scale alone is 0, as some writers leave codes of any value there, or its codes are."""
    folder, tensors = exported(config)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    weight, scale = sorted(name for name in tensors if "v_proj.weight" in name)
    dead = slice(2, 3) if config == "rowwise" else slice(None)  # the small matrix has one scale
    tensors[weight][dead] = torch.tensor(codes).to(torch.float8_e4m3fn)
    if codes:
        tensors[scale][dead] = 0.0
    frozen = load_frozen(Tiny(128), write_folder(tmp_path, tensors, folder))
    assert not load_float8(tmp_path, dtype=torch.float32)[weight][dead].any()
    assert_values(frozen, tmp_path)
    assert frozen.layer["v_proj"].config.round_scales_to_power_of_2 is power_of_2
    assert logits(frozen).isfinite().all()


@pytest.mark.parametrize(("config", "other"), [("rowwise", "scales"), ("tensorwise", "tokens"), ("rowwise", "nan")])
def test_what_is_not_loaded_changes_nothing(config, other, exported, tmp_path):
    """A layer that predicts further tokens, which the model's class ignores, is of another kind."""
    (folder, tensors), model = exported(config), Tiny(128)
    model._keys_to_ignore_on_load_unexpected = [r"^mtp\."]
    codes = torch.full((16, 16), math.nan if other == "nan" else 1.0).to(torch.float8_e4m3fn)
    extra = {"mtp.weight": codes, "mtp.weight_scale": torch.full((16, 1), 0.3)}
    path = write_folder(tmp_path, tensors | extra, folder) / "config.json"
    about = json.loads(path.read_text())
    groups = about["quantization_config"]["config_groups"]
    groups["mtp"] = {**groups["group_0"], "targets": ["re:mtp"], "input_activations": {"strategy": "token"}}
    path.write_text(json.dumps(about))
    assert logits(load_frozen(model, tmp_path)).equal(logits(tiny(CONFIGS[config], 128)))


def test_delayed_exports_are_quantized_dynamically(tmp_path):
    model = tiny("delayed_with_dynamic_weight", 32)
    model(TOKENS).sum().backward()
    quaver.sync_float8_amax_and_scale_history(model)
    save_float8(model, tmp_path / "out", config={}, share_fused_scales=False)
    frozen = load_frozen(Tiny(32), tmp_path / "out")
    assert logits(frozen).equal(logits(tiny("tensorwise", 32)))


def test_a_card_tells_of_a_merge(tmp_path, caplog):
    frozen_weight.log_merge_cost.cache_clear()
    frozen = freeze_to_float8(Tiny(), module_filter_fn=is_not_head)
    save_float8(frozen, tmp_path / "plain", config={})
    assert "are bit-identical to the training forward" in (tmp_path / "plain/README.md").read_text()
    for name in ("q_proj", "k_proj"):
        frozen.layer[name].weight.data += torch.full((32, 32), 0.01)  # as PEFT merges
    save_float8(frozen, tmp_path / "merged", config={})
    card = (tmp_path / "merged/README.md").read_text()
    assert "are bit-identical to the forward of the merged model" in card
    assert f"| layer.q_proj.weight | {frozen.layer['q_proj'].weight.requantized_sqnr_db:.2f} |" in card
    assert "| layer.v_proj.weight |" not in card
    assert "not run yet" not in card
    assert caplog.text.count("changes the logits by 10% to 25%") == 1


def test_tied_parameters_stay_tied(tmp_path):
    def build_tied():
        model = Tiny(32)
        model.lm_head.weight = model.embed_tokens.weight
        return model

    model = convert_to_float8_training(build_tied(), config="rowwise", module_filter_fn=is_not_head)
    save_float8(model, tmp_path / "out", config={})
    with torch.device("meta"):
        frozen = build_tied()
    load_frozen(frozen, tmp_path / "out")
    assert frozen.lm_head.weight is frozen.embed_tokens.weight
    assert logits(frozen).equal(logits(model))


def test_ties_that_init_empty_weights_undid_are_made_again(tmp_path):
    class Tied(Tiny):
        def tie_weights(self):  # as models of transformers have it
            self.lm_head.weight = self.embed_tokens.weight

    model = Tied(32)
    model.tie_weights()
    save_float8(convert_to_float8_training(model, module_filter_fn=is_not_head), tmp_path / "out", config={})
    with init_empty_weights():
        frozen = Tied(32)
        frozen.tie_weights()
    assert frozen.lm_head.weight is not frozen.embed_tokens.weight
    load_frozen(frozen, tmp_path / "out")
    assert frozen.lm_head.weight is frozen.embed_tokens.weight
    assert logits(frozen).isfinite().all()


def test_a_frozen_base_survives_changes_of_its_files(exported, tmp_path):
    folder, tensors = exported("rowwise")
    frozen = load_frozen(Tiny(128), write_folder(tmp_path, tensors, folder))
    for tensor in frozen.state_dict().values():
        stored = getattr(tensor, "data_fp8", tensor)
        assert stored.untyped_storage().nbytes() == stored.nbytes
    before = logits(frozen)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes(200_000))
    assert logits(frozen).equal(before)


def test_merged_weights_are_exported_as_they_are_stored(exported, tmp_path):
    frozen = load_frozen(Tiny(128), exported("tensorwise")[0])
    with torch.no_grad():
        for index, name in enumerate(PROJECTIONS):
            frozen.layer[name].weight += 0.01 * (index + 1)
    for share in (False, True):
        written = save_float8(frozen, tmp_path / str(share), config={}, share_fused_scales=share)
        again = load_frozen(Tiny(128), tmp_path / str(share))
        assert logits(again).equal(logits(frozen)) is not share
        assert len(written.requantized) == (3 if share else 0)
        assert all(cost.training_db == math.inf and 25 < cost.stored_db < 40 for cost in written.requantized.values())
    second = iter_float8_weights(again)
    assert len(dict(second)) == 17
    assert not second.requantized


def test_a_frozen_base_is_exported_in_other_formats(exported):
    frozen = load_frozen(Tiny(128), exported("rowwise")[0]).to(torch.bfloat16)
    plain = dict(iter_float8_weights(frozen, format="high-precision"))
    assert plain.keys() == Tiny(128).state_dict().keys()
    assert {tensor.dtype for tensor in plain.values()} == {torch.bfloat16}
    blocks = iter_float8_weights(frozen, format="fp8")
    assert list(dict(blocks)["layer.q_proj.weight_scale_inv"].shape) == [1, 1]
    assert len(blocks.requantized) == len(PROJECTIONS)
    folder, tensors = exported("blockwise")
    same = iter_float8_weights(load_frozen(Tiny(128), folder), format="fp8")
    assert dict(same)["layer.q_proj.weight_scale_inv"].equal(tensors["layer.q_proj.weight_scale"])
    assert not same.requantized


FREQUENCIES, CONV = torch.ones(2, device="meta"), {"q_proj": nn.Conv1d(1, 1, 1)}
SHAPE = r"expected \[50, 32\], as the model has, got \[50, 128\]"
TIED = "the weight of layer.o_proj is tied to layer.up_proj|layer.up_proj is tied to layer.o_proj"
CONVERTED = "is converted to float8 already; call convert_to_high_precision first"
META = "on the meta device: frequencies; make the model in accelerate's init_empty_weights"
CHANGES = {
    "dtype": (nn.Module.double, "the weight of layer.gate_proj: expected torch.float32.*got torch.float64"),
    "no linear": (lambda model: model.layer.update(CONV), "q_proj.bias: expected .1., as the model has, got .128."),
    "tied": (lambda model: setattr(model.layer["o_proj"], "weight", model.layer["up_proj"].weight), TIED),
    "missing": (lambda model: model.add_module("more", nn.Linear(2, 2)), "the checkpoint lacks more.weight, more.bias"),
    "unknown": (lambda model: delattr(model, "norm"), "names differ: the model lacks norm.bias, norm.weight"),
    "shape": (lambda model: setattr(model, "embed_tokens", nn.Embedding(50, 32)), SHAPE),
    "buffer": (lambda model: model.register_buffer("frequencies", FREQUENCIES, persistent=False), META),
    "converted": (lambda model: convert_to_float8_training(model, config="delayed"), CONVERTED),
    "frozen": (freeze_to_float8, "is converted to float8 already"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_model_that_does_not_fit_stays_as_it_was(case, exported):
    change, message = CHANGES[case]
    model = Tiny(128)
    change(model)
    before = [(type(module), *module._parameters.values()) for module in model.modules()]
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_frozen(model, exported("rowwise")[0])
    after = [(type(module), *module._parameters.values()) for module in model.modules()]
    assert [list(map(id, parts)) for parts in after] == [list(map(id, parts)) for parts in before]
    assert_same(model.state_dict(), values)


V_PROJ = "layer.v_proj.weight"
BAD_TENSORS = {
    f"{V_PROJ} has a NaN": (V_PROJ, torch.full((128, 128), torch.nan).to(torch.float8_e4m3fn)),
    f"{V_PROJ}: expected numbers of 0 or more, got one below": (f"{V_PROJ}_scale", torch.full((128, 1), -1.0)),
    "one granularity of .* got block 128 x 1, channel; use load_float8": (f"{V_PROJ}_scale", torch.ones(1, 128)),
    f"{V_PROJ} in F8_E5M2; use load_float8": (V_PROJ, torch.ones(128, 128).to(torch.float8_e5m2)),
}


@pytest.mark.parametrize("message", BAD_TENSORS)
def test_a_checkpoint_that_does_not_fit_is_refused(message, exported, tmp_path):
    (folder, tensors), (name, tensor), model = exported("rowwise"), BAD_TENSORS[message], Tiny(128)
    with pytest.raises(NotImplementedError if "use load_float8" in message else ValueError, match=message):
        load_frozen(model, write_folder(tmp_path, {**tensors, name: tensor}, folder))
    assert type(model.layer["gate_proj"]) is nn.Linear

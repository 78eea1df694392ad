"""Tests the scales of a float8 KV cache beside transformers' cache and compressed-tensors, which applies them."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, DynamicCache

import quaver.export
from quaver.export import calibrate_kv_cache, import_float8, load_float8, load_frozen, save_float8, set_kv_scales
from quaver.export.files import StoredTensors
from tests.library.third_party.checkpoints import export_folder
from tests.library.third_party.llama import llama
from tests.library.third_party.zoo import make
from tests.ranks import on_ranks
from tests.steps import assert_same

TOKENS = torch.arange(1, 25).view(2, 12)
ATTENTIONS = ("model.layers.0.self_attn", "model.layers.1.self_attn")


def compute_scales(model):
    return quaver.export.iter_float8_weights(model).kv_scales


def calibrate(model, *batches):
    with calibrate_kv_cache(model.eval()), torch.no_grad():
        for batch in batches:
            model(batch)
    return model


@torch.no_grad()
def fill_cache(model, tokens=TOKENS):
    """Return the keys and values that transformers' cache holds for each layer after a forward."""
    cache = DynamicCache(config=model.config)
    model.eval()(tokens, past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return a folder with scales, and the scales that it must have: in each layer those of the larger batch of two."""
    folder, model = tmp_path_factory.mktemp("served") / "model", llama("rowwise")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(30)
    written = save_float8(calibrate(model, TOKENS, TOKENS + 50), folder)
    scales = {}
    for attention, *batches in zip(ATTENTIONS, fill_cache(model), fill_cache(model, TOKENS + 50), strict=True):
        for leaf, *states in zip(("k_scale", "v_scale"), *batches, strict=True):
            amax = max(state.abs().max() for state in states)
            scales[f"{attention}.{leaf}"] = (amax.double() / 448).float().item()
    assert written.kv_scales == scales
    return folder, scales


def test_compressed_tensors_caches_keys_and_values_with_the_scales(served):
    folder, scales = served
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    quantized = fill_cache(theirs)
    for module in theirs.modules():
        module.quantization_enabled = not hasattr(module, "k_scale")
    for leaf, states, plain in zip(("k_scale", "v_scale"), quantized[0], fill_cache(theirs)[0], strict=True):
        scale = scales[f"{ATTENTIONS[0]}.{leaf}"]
        assert_same(states, (plain / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale, leaf)


def test_scales_are_kept_by_load_frozen_and_by_import_and_export(served, tmp_path):
    folder, scales = served
    save_float8(load_frozen(llama(), folder), tmp_path / "again")
    import_float8(folder, tmp_path / "plain")
    export_folder(tmp_path / "plain", tmp_path / "new", "rowwise", kv_scales=load_float8(folder).kv_scales)
    for written in (tmp_path / "again", tmp_path / "new"):
        assert load_float8(written).kv_scales == scales
        config, expected = (json.loads((path / "config.json").read_text()) for path in (written, folder))
        assert config["quantization_config"] == expected["quantization_config"]
        for name in scales:
            assert_same(StoredTensors(written)[name], StoredTensors(folder)[name], name)


NAMES_OF_SCALES = {
    "modelopt": {"k_proj.k_scale": 1, "v_proj.v_scale": 2},
    "Quark": {"k_proj.output_scale": 1, "v_proj.output_scale": 2},
    "AutoFP8": {"kv_scale": 1},
}


@pytest.mark.parametrize("writer", NAMES_OF_SCALES)
def test_names_of_other_writers_are_read(writer, served, tmp_path):
    folder, scales = served
    tensors, names = load_file(folder / "model.safetensors"), NAMES_OF_SCALES[writer]
    for name in scales:
        del tensors[name]
    for attention in ATTENTIONS:
        tensors |= {f"{attention}.{name}": torch.tensor(float(value)) for name, value in names.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    key, value = min(names.values()), max(names.values())
    expected = {name: key if "k_scale" in name else value for name in scales}
    loaded = load_float8(tmp_path, model=llama())
    assert loaded.kv_scales == expected
    assert loaded.keys() == llama().state_dict().keys()
    tensors[f"{ATTENTIONS[0]}.k_scale"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"0\.self_attn\.k_scale: expected one scale of a KV cache, above 0"):
        load_float8(tmp_path)


def test_what_cannot_be_measured_or_kept_is_refused():
    for model, what in (("deepseek_v3", "latent attention"), ("t5", "an encoder-decoder")):
        with pytest.raises(NotImplementedError, match=what), calibrate_kv_cache(make(model)[0]):
            pass
    with pytest.raises(ValueError, match="Linear: expected a decoder"), calibrate_kv_cache(torch.nn.Linear(2, 2)):
        pass
    model = llama("rowwise")
    hooks = dict(model.model.layers[0].self_attn._forward_pre_hooks)
    before = compute_scales(calibrate(model, TOKENS))
    with pytest.raises(RuntimeError, match="no batch reached"), calibrate_kv_cache(model):
        pass
    with pytest.raises(RuntimeError, match=r"0\.self_attn .*nan.*no scale was changed"), calibrate_kv_cache(model):
        model(inputs_embeds=torch.full((1, 4, 64), float("nan")))
    with pytest.raises(ValueError, match="no attention for .*: elsewhere.k_scale"):
        set_kv_scales(model, {"elsewhere.k_scale": 1.0})
    assert compute_scales(model) == before
    assert hooks == dict(model.model.layers[0].self_attn._forward_pre_hooks)


class PositionalAttention(torch.nn.Module):
    """Takes its cache by position, and updates a copy of it."""

    def forward(self, states, past_key_values=None, scale=1.0):
        return copy.copy(past_key_values).update(states, states * scale, 0)


def test_a_cache_that_is_passed_by_position_is_measured_and_can_be_copied():
    model = torch.nn.Sequential(PositionalAttention())
    with calibrate_kv_cache(model):
        keys, _ = model[0](torch.full((1, 1, 2, 4), 448.0), DynamicCache(), 2.0)
    assert keys.shape == (1, 1, 2, 4)
    assert quaver.export.kv_cache.get_kv_scales(model) == {"0.k_scale": 1.0, "0.v_scale": 2.0}


@pytest.mark.nightly
@on_ranks(2)
def test_ranks_agree_on_the_largest_also_without_a_batch():
    expected = compute_scales(calibrate(llama("rowwise"), TOKENS, TOKENS + 50))
    sharded = llama("rowwise")
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    assert compute_scales(calibrate(sharded, TOKENS + 50 * dist.get_rank())) == expected
    alone = calibrate(llama("rowwise"), *([TOKENS, TOKENS + 50] if dist.get_rank() else []))
    assert compute_scales(alone) == expected

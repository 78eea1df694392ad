"""Compares rules of scales with the engines that can be installed, and exports of models trained with them."""

import contextlib
import copy
from types import SimpleNamespace

import peft
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from quaver import calibrate_float8_static_scales, convert_to_float8_training
from quaver.export import load_frozen, matches_serving, save_float8
from quaver.recipes import scaling
from tests.library.third_party.llama import convert, llama, mixture
from tests.recipes import E4M3
from tests.reference import assert_same_bits, draw_samples

HP = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
TOKENS = torch.arange(48).view(2, 24)


@HP
@pytest.mark.parametrize("strategy", ["token", "tensor"])
def test_codes_are_those_of_compressed_tensors(strategy, dtype):
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, dynamic=True)
    for hp in draw_samples(dtype):
        hp = hp if strategy == "token" else hp.nan_to_num(0, 1, 1)
        scale, zero = compute_dynamic_scales_and_zp(hp[None], args, None)
        dim = 1 if strategy == "token" else None
        codes, _, dequant = scaling.dynamic_cast(hp, E4M3, dim, rule="compressed-tensors")
        assert_same_bits(codes, quantize(hp[None], scale, zero, args, dtype=E4M3)[0])
        assert_same_bits(dequant.view(-1), scale.float().view(-1))


@HP
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_codes_are_those_of_transformers(scale_fmt, dtype):
    """But blocks with an inf or a NaN, which it casts with a scale of 1."""
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=scale_fmt)
    hp = next(draw_samples(dtype)).repeat(2, 1)[:256, :256].contiguous()
    expected = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": hp})
    rule = "transformers" if scale_fmt == "float" else "transformers-ue8m0"
    codes, _, dequant = scaling.dynamic_cast_blocks(hp, E4M3, rule=rule)
    assert_same_bits(codes, expected["a.weight"])
    assert_same_bits(dequant, expected["a.weight_scale_inv"].float())


def train_one_step(serving, build=llama, dtype=torch.float32):
    """Return a converted model after a step, so that its weights are no round numbers."""
    model = convert_to_float8_training(build().to(dtype), serving=serving)
    with calibrate_float8_static_scales(model) if serving == "vllm-static" else contextlib.nullcontext():
        model(TOKENS)
    model(TOKENS, labels=TOKENS).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return model


@pytest.mark.parametrize(
    ("dtype", "bound", "serving"),
    [
        *((torch.float32, 1e-2, serving) for serving in ("compressed-tensors", "vllm-static")),
        *((torch.bfloat16, 0.1, serving) for serving in ("vllm-per-token", "transformers")),
    ],
)
def test_the_engine_multiplies_what_training_multiplied(serving, dtype, bound):
    """In float32 transformers computes what compressed-tensors does, else weights and activations in bfloat16."""
    match = matches_serving(train_one_step(serving, dtype=dtype), TOKENS)
    assert match, match
    assert len(match.weights) == len(match.inputs) == 14
    assert match.engine_max_difference < bound
    assert match.transformers_max_difference < bound
    assert "weights: 14 of 14 with equal codes" in str(match)


def test_experts_have_the_codes_of_the_folder(tmp_path):
    model = train_one_step("vllm-per-token", mixture)
    save_float8(model, tmp_path / "served")
    match = matches_serving(model, TOKENS, folder=tmp_path / "served")
    experts = [share for name, share in match.weights.items() if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    assert len(match.inputs) == 8


def test_a_saved_folder_computes_the_forward_of_training(tmp_path):
    """Its codes and the engine's rule are the forward of training, to the bit."""
    model = train_one_step("vllm-block", dtype=torch.bfloat16).eval()
    save_float8(model, tmp_path / "served", format="fp8")
    config = copy.deepcopy(model.config)
    loaded = load_frozen(type(model)(config).bfloat16().eval(), tmp_path / "served", serving="vllm-block")
    assert_same_bits(loaded(TOKENS).logits, model(TOKENS).logits)
    match = matches_serving(tmp_path / "served", TOKENS, serving="vllm-block")
    assert match, match
    assert match.engine_max_difference < 0.1
    with pytest.raises(ValueError, match="and blockwise 128 x 128 weights as the checkpoint, got 'vllm-per-token'"):
        matches_serving(tmp_path / "served", TOKENS, serving="vllm-per-token")
    with pytest.raises(ValueError, match="folder: expected None for a model that is a folder"):
        matches_serving(tmp_path / "served", TOKENS, folder=tmp_path / "other", serving="vllm-block")
    with pytest.raises(ValueError, match="serving: expected one of vllm-per-token, .* for a folder, got None"):
        matches_serving(tmp_path / "served", TOKENS)


def test_matches_serving_reports_codes_that_differ():
    """A model trained with quaver's rule multiplies other codes than an engine."""
    model = convert(llama().bfloat16(), "rowwise")
    with pytest.raises(ValueError, match="for a model that was not converted with one serving="):
        matches_serving(model, TOKENS)
    match = matches_serving(model, TOKENS, serving="vllm-per-token")
    assert not match
    assert all(share == 1 for share in match.weights.values())
    assert max(match.inputs.values()) < 0.5
    assert "inputs: 0 of 14 with equal codes" in str(match)
    adapted = peft.get_peft_model(train_one_step("vllm-per-token"), peft.LoraConfig(target_modules=["q_proj"]))
    adapted.merge_adapter()
    with pytest.raises(NotImplementedError, match="names of the export, got no .*merge_and_unload"):
        matches_serving(adapted, TOKENS)
    compiled = matches_serving(torch.compile(model, backend="eager"), TOKENS, serving="vllm-per-token")
    assert compiled.engine_max_difference == match.engine_max_difference > 0
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.compile(attention.q_proj, backend="eager")
    compiled = matches_serving(model, TOKENS, serving="vllm-per-token")
    assert compiled.engine_max_difference == match.engine_max_difference

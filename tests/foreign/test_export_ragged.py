"""Ragged blocks in the eyes of other libraries: a small DeepSeek-V3, whose `kv_a_proj_with_mqa` no block divides."""

import json
import warnings

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config

from quaver import FrozenFloat8Linear, freeze_to_float8
from quaver.experts.module import is_experts
from quaver.export import load_float8, load_frozen, save_float8
from quaver.export.files import StoredTensors
from quaver.frozen import blockwise_config
from tests.foreign.llama import not_the_head

FORMATS = ("fp8", "compressed-tensors-block")
RAGGED = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
TOKENS = torch.arange(24).view(1, 24) % 64


def deepseek(kv_lora_rank=160):
    """Its kv_a_proj_with_mqa is kv_lora_rank + 32 x 200, 192 x 200; magnitudes differ from row to row."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=200,
        intermediate_size=300,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=kv_lora_rank,
        q_lora_rank=96,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=1,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(torch.logspace(-1, 1, module.out_features)[:, None])
    return model


def frozen(**options):
    def is_a_linear(module, name):
        return not_the_head(module, name) and not is_experts(module)

    return freeze_to_float8(deepseek(**options), blockwise_config(power_of_2=False), module_filter_fn=is_a_linear)


def logits_of(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the folder of an export, made once; in several files, as torch's reader needs an index."""
    root = tmp_path_factory.mktemp("export")

    def folder(format):
        if not (root / format).exists():
            save_float8(frozen(), root / format, format=format, max_shard_bytes=200_000)
        return root / format

    return folder


def from_transformers(folder, config):
    with warnings.catch_warnings(action="ignore"):  # that the checkpoint has a quantization_config too
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


@pytest.mark.parametrize("format", FORMATS)
def test_a_frozen_deepseek_is_exported_and_loaded_again(format, exported):
    stored = StoredTensors(exported(format))
    leaf = "_scale_inv" if format == "fp8" else "_scale"
    assert (stored.shape(RAGGED), stored.shape(RAGGED + leaf)) == ([192, 200], [2, 2])
    again = load_frozen(deepseek(), exported(format))
    assert logits_of(again).equal(logits_of(frozen()))
    values = load_float8(exported(format), dtype=torch.float32)
    count = 0
    for name, linear in again.named_modules():
        if isinstance(linear, FrozenFloat8Linear):
            assert values[f"{name}.weight"].equal(linear.weight.to_high_precision()), name
            count += 1
    assert count == 16  # 5 of each attention, 3 of the dense feed-forward, 3 of the shared expert


def test_transformers_and_compressed_tensors_read_the_same_values(exported):
    folder = exported("compressed-tensors-block")
    model = from_transformers(folder, CompressedTensorsConfig(dequantize=True))
    values = load_float8(folder, dtype=torch.float32, model=model)
    read = model.state_dict()
    assert all(read[name].equal(tensor) for name, tensor in values.items())
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    (scheme,) = config.config_groups.values()
    compressor, stored = BaseCompressor.get_value_from_registry(config.format), StoredTensors(folder)
    parts = {"weight": stored[RAGGED], "weight_scale": stored[f"{RAGGED}_scale"]}
    assert compressor.decompress(parts, scheme)["weight"].equal(values[RAGGED])


def test_torch_reads_the_same_values(exported):
    values = load_float8(exported("fp8"), dtype=torch.float32)
    state = {name: torch.empty_like(tensor) for name, tensor in values.items()}
    load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(exported("fp8"))))
    assert all(state[name].equal(tensor) for name, tensor in values.items())


def test_the_float8_linear_of_transformers_takes_the_codes_and_scales(exported):
    stored = StoredTensors(exported("fp8"))
    linear = FP8Linear(200, 192, block_size=(128, 128))
    state = {"weight": stored[RAGGED], "weight_scale_inv": stored[f"{RAGGED}_scale_inv"]}
    linear.load_state_dict(state)
    assert linear.weight_scale_inv.equal(state["weight_scale_inv"])


def test_transformers_does_not_dequantize_ragged_fp8(exported, tmp_path):
    """It divides a weight evenly by the number of scales. Once it does not, the warning of save_float8 can go."""
    config = FineGrainedFP8Config(dequantize=True)
    model = from_transformers(exported("fp8"), config)
    values = load_float8(exported("fp8"), dtype=torch.float32)
    assert not model.state_dict()[RAGGED].equal(values[RAGGED])  # 192 rows become two blocks of 96
    save_float8(frozen(kv_lora_rank=544), tmp_path / "out", format="fp8")
    with pytest.raises(RuntimeError, match="conversion of the weights"):  # 576 rows do not become 5 blocks
        from_transformers(tmp_path / "out", config)

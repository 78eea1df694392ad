"""Computes a model's logits and transformers' own reading of a float8 folder, for tests of exports."""

import json
import warnings

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config

from quaver.export import save_float8, set_kv_scales
from quaver.export.companion_files import list_copied_files
from quaver.export.files import StoredTensors, read_config

TOKENS = torch.arange(1, 49).view(2, 24)


def compute_logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def load_with_transformers(folder, format, model_class=AutoModelForCausalLM):
    """The model that transformers dequantizes, in float32; what is not quantized keeps its dtype in the folder."""
    config = FineGrainedFP8Config(dequantize=True) if format == "fp8" else CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings(action="ignore"):  # that the checkpoint has a quantization_config too
        return model_class.from_pretrained(folder, dtype=torch.float32, quantization_config=config).float()


def export_folder(folder, out, recipe, *, kv_scales=None, measure_tokens=0):
    """Export a Hugging Face folder in high precision; its model is on the meta device."""
    config = read_config(folder)
    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = model_class._from_config(AutoConfig.from_pretrained(folder))
    set_kv_scales(model, kv_scales or {})
    options = {"config": config, "weights": StoredTensors(folder), "files": list_copied_files(folder)}
    if measure_tokens:
        options["make_hp_model"] = lambda: model_class.from_pretrained(folder, dtype=torch.float32)
    return save_float8(model, out, recipe=recipe, measure_tokens=measure_tokens, **options)


def write_folder(folder, tensors, config):
    """Write a checkpoint as other tools do, from its tensors and its config.json."""
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))

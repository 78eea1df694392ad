"""Hugging Face's config.json of a Llama and quaver's [model] section, one from the other.

What transformers 5 calls `rope_parameters` is `rope_theta` and `rope_scaling` in versions before it. Both are read, and
both are written, so that either version makes the same model of the file. Absent keys mean what `LlamaConfig` means.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quaver.trainer.config import Model
from quaver.trainer.config.model import RopeScaling
from quaver.trainer.huggingface.names import listed

ARCHITECTURE = "LlamaForCausalLM"

_SCALING_NAMES = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position",
}

_ROPE_NAMES = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SCALING_NAMES}

_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
}
"""The one value that each of these may have: quaver's Llama has no other."""

KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""What does not change the model but what others do with it."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of `folder`.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no config.json; give the folder of a Hugging Face model, with its *.safetensors"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}; download it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{str(path)!r} must be a JSON object, got a {type(config).__name__}; download it again")
    return config


def model_from_hf(config: dict[str, Any]) -> Model:
    """Return the [model] settings that a config.json stands for.

    Raises:
        NotImplementedError: for anything that quaver's Llama does not do.
        ValueError: a value is missing, of the wrong type, or does not fit the others.
    """
    _check_architecture(config)
    for name, only in _ONLY.items():
        _check_only(config, name, only)
    heads, width = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    if config.get("head_dim") is not None and config["head_dim"] * heads != width:
        raise NotImplementedError(
            f"head_dim in config.json must be hidden_size / num_attention_heads = {width} / {heads}, got "
            f"{config['head_dim']!r}; quaver's Llama has no other heads"
        )
    try:
        return Model(
            vocab_size=_whole(config, "vocab_size"),
            dim=width,
            n_layers=_whole(config, "num_hidden_layers"),
            n_heads=heads,
            n_kv_heads=_whole(config, "num_key_value_heads", heads),
            hidden_dim=_whole(config, "intermediate_size"),
            norm_eps=_number(config, "rms_norm_eps", 1e-6),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            **_rope_settings(config),
        )
    except ValueError as error:
        raise ValueError(f"config.json does not make a model: {error}") from error


def kept_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return what `hf_config` is to write again of the config.json that a model came from."""
    return {name: config[name] for name in KEPT if name in config}


def hf_config(model: Model, *, dtype: str, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of `model`, readable by transformers 4 and 5.

    Args:
        dtype: of the weights, as torch names it.
        kept: values for the names in `KEPT`. Token ids that are missing become null: the defaults of transformers would
            end a text at tokens that mean something else.
    """
    scaling = _hf_scaling(model.rope_scaling)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.hidden_dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": model.rope_theta},
        "torch_dtype": dtype,
        **{name: kept.get(name) for name in KEPT},
    }


def _hf_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values = dict(zip(_SCALING_NAMES, asdict(scaling).values(), strict=True))
    return {"rope_type": "llama3", **values}


def _check_architecture(config: dict[str, Any]) -> None:
    architectures, kind = config.get("architectures"), config.get("model_type")
    if kind != "llama" or architectures not in (None, [ARCHITECTURE]):
        raise NotImplementedError(
            f"config.json must be of a {ARCHITECTURE} (model_type 'llama'), got {architectures!r} "
            f"(model_type {kind!r}); quaver trains no other architecture"
        )
    if config.get("quantization_config") is not None:
        raise NotImplementedError(
            "config.json must have no quantization_config: quaver trains from weights in float32, bfloat16 or float16; "
            "convert the model that was quantized"
        )


def _check_only(config: dict[str, Any], name: str, only: object) -> None:
    value = config.get(name)
    if value is not None and value != only:
        raise NotImplementedError(
            f"{name} in config.json must be {json.dumps(only)}, got {value!r}; quaver's Llama knows no other"
        )


def _rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The [model] settings of the rotary embeddings; a `rope_scaling` wins, as it does in transformers."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise ValueError(f"rope_scaling must be an object, got {found!r}")
    unknown = sorted(name for name, value in found.items() if name not in _ROPE_NAMES and value is not None)
    if unknown:
        raise NotImplementedError(f"the rope settings in config.json must have none but Llama's, got {listed(unknown)}")
    _check_only(found, "partial_rotary_factor", 1.0)
    theta = {"rope_theta": _number(found if "rope_theta" in found else config, "rope_theta", 10000.0)}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return theta
    if kind != "llama3":
        raise NotImplementedError(f"the rope_type in config.json must be 'default' or 'llama3', got {kind!r}")
    factor, low, high, original = _SCALING_NAMES
    if _number(found, factor) == 1:
        return theta
    before = _whole(found, original, config.get("max_position_embeddings"))
    return {
        **theta,
        **{_SCALING_NAMES[name]: _number(found, name) for name in (factor, low, high)},
        _SCALING_NAMES[original]: before,
    }


def _value(config: dict[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{name} is missing")
    return value


def _whole(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = _value(config, name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def _number(config: dict[str, Any], name: str, default: float | None = None) -> float:
    value = _value(config, name, default)
    if type(value) not in (int, float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _flag(config: dict[str, Any], name: str) -> bool:
    value = _value(config, name, False)
    if type(value) is not bool:
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value

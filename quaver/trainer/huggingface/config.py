"""Converts between Hugging Face's config.json of a Llama and quaver's [model] section.

transformers 5 writes `rope_parameters` where older versions write `rope_theta` and `rope_scaling`. Both are read and
written, so that either version makes the same model of the file. Absent keys mean what they mean to `LlamaConfig`.
"""

import json
from collections.abc import Callable
from typing import Any

from quaver.export.files import listed
from quaver.trainer.config import Model

ARCHITECTURE = "LlamaForCausalLM"

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
"""Positive integers that a config.json must have, and their names in [model]."""

_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
"""The only value of each that quaver's Llama supports."""

_SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
}
_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL_CONTEXT, *_SCALING}

KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""Keys that do not change the model, but the way that others use it."""

_KINDS: dict[str, Callable[[Any], bool]] = {
    "a positive integer": lambda value: type(value) is int and value >= 1,
    "a number": lambda value: type(value) in (int, float),
    "true or false": lambda value: type(value) is bool,
}


def model_from_hf(config: dict[str, Any]) -> Model:
    """Return the [model] settings of a config.json.

    Raises:
        NotImplementedError: quaver's Llama does not support the model.
        ValueError: a value is missing, has a wrong type, or does not fit the others.
    """
    _check_architecture(config)
    for name, only in _FIXED.items():
        _check_fixed(config, name, only)
    sizes = {ours: _get(config, theirs, "a positive integer") for theirs, ours in _SIZES.items()}
    width, heads = sizes["dim"], sizes["n_heads"]
    if config.get("head_dim") is not None and config["head_dim"] * heads != width:
        raise NotImplementedError(
            f"head_dim in config.json must be hidden_size / num_attention_heads = {width} / {heads}, got "
            f"{config['head_dim']!r}; quaver's Llama supports no other head size"
        )
    try:
        return Model(
            **sizes,
            n_kv_heads=_get(config, "num_key_value_heads", "a positive integer", heads),
            norm_eps=float(_get(config, "rms_norm_eps", "a number", 1e-6)),
            tie_word_embeddings=_get(config, "tie_word_embeddings", "true or false", False),
            **_rope_settings(config),
        )
    except ValueError as error:
        raise ValueError(f"config.json does not make a model: {error}") from error


def hf_config(model: Model, *, dtype: str, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of `model`, readable by transformers 4 and 5.

    Args:
        dtype: of the weights, as torch names it.
        kept: values of the keys in `KEPT`. Missing token ids become null: with the defaults of transformers, generation
            would stop at tokens that have another meaning.
    """
    scaling = None
    if model.rope_scaling:
        scaling = {"rope_type": "llama3", **{theirs: getattr(model, ours) for theirs, ours in _SCALING.items()}}
        scaling[_ORIGINAL_CONTEXT] = model.rope_original_max_position
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{theirs: getattr(model, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        **_FIXED,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": model.rope_theta},
        "torch_dtype": dtype,
        **{name: kept.get(name) for name in KEPT},
    }


def _check_architecture(config: dict[str, Any]) -> None:
    architectures, kind = config.get("architectures"), config.get("model_type")
    if kind != "llama" or architectures not in (None, [ARCHITECTURE]):
        raise NotImplementedError(
            f"config.json must describe a {ARCHITECTURE} (model_type 'llama'), got {architectures!r} "
            f"(model_type {kind!r}); quaver trains no other architecture"
        )
    if config.get("quantization_config") is not None:
        raise NotImplementedError(
            "config.json must have no quantization_config: quaver trains weights in float32, bfloat16 or float16; "
            "dequantize the model first"
        )


def _check_fixed(config: dict[str, Any], name: str, only: object) -> None:
    value = config.get(name)
    if value is not None and value != only:
        raise NotImplementedError(
            f"{name} in config.json must be {json.dumps(only)}, got {value!r}; quaver's Llama supports no other value"
        )


def _rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the [model] settings of the rotary embeddings; `rope_scaling` has priority, as in transformers."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling must be an object, got {rope!r}")
    unknown = sorted(name for name, value in rope.items() if name not in _ROPE_KEYS and value is not None)
    if unknown:
        raise NotImplementedError(f"the rope settings in config.json must be those of Llama, got {listed(unknown)}")
    for source in (config, rope):
        _check_fixed(source, "partial_rotary_factor", 1.0)
    theta = _get(rope if "rope_theta" in rope else config, "rope_theta", "a number", 10000.0)
    settings = {"rope_theta": float(theta)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise NotImplementedError(f"the rope_type in config.json must be 'default' or 'llama3', got {kind!r}")
    if kind == "default" or _get(rope, "factor", "a number") == 1:
        return settings
    settings |= {ours: float(_get(rope, theirs, "a number")) for theirs, ours in _SCALING.items()}
    context = _get(rope, _ORIGINAL_CONTEXT, "a positive integer", config.get("max_position_embeddings"))
    return {**settings, "rope_original_max_position": context}


def _get(config: dict[str, Any], name: str, kind: str, default: Any = None) -> Any:
    """Return the value of `name`, checked to be of a kind in `_KINDS`; null means absent."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{name} is missing")
    if not _KINDS[kind](value):
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    return value

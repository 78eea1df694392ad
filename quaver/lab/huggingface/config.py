"""Converts between Hugging Face's config.json of a Llama, or of a GLM-4.5 mixture, and quaver's [model] section.

A mixture is a GLM-4.5 whose rotary embeddings turn whole heads, and whose blocks all have experts.

transformers 5 writes `rope_parameters` where older versions write `rope_theta` and `rope_scaling`. Both are read and
written, so either version makes the same model of the file. Absent keys have the defaults of `LlamaConfig`.
"""

import json
from collections.abc import Callable
from typing import Any

from quaver.lab.settings import Model
from quaver.runtime.errors import InputError, reraise_as_input_error
from quaver.runtime.module_names import join_names

DENSE, MIXTURE = ("llama", "LlamaForCausalLM"), ("glm4_moe", "Glm4MoeForCausalLM")
"""model_type and architecture."""

_SIZE_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
"""Positive integers that a config.json must have, and their names in [model]."""

_FIXED_FIELDS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
"""Keys for which quaver's Llama supports one value only."""

_EXPERT_SIZE_NAMES = {
    "moe_intermediate_size": "hidden_dim",
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "top_k",
}
"""Additional sizes of a mixture's config.json, and their names in [model]. Its `intermediate_size` is the hidden dim of
dense blocks, which such a model does not have."""

_MIXTURE_FIXED_FIELDS = {
    **{name: _FIXED_FIELDS[name] for name in ("hidden_act", "attention_bias", "attention_dropout")},
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "use_qk_norm": False,
}
_MIXTURE_DEFAULTS = {"first_k_dense_replace": 1, "norm_topk_prob": True, "rms_norm_eps": 1e-5}
"""Defaults of `Glm4MoeConfig` that differ from `LlamaConfig`'s."""

_ROPE_SCALING_NAMES = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
}
_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_PARTIAL_ROTARY = "partial_rotary_factor"
_ROPE_KEYS = {"rope_type", "type", "rope_theta", _PARTIAL_ROTARY, _ORIGINAL_CONTEXT, *_ROPE_SCALING_NAMES}

USAGE_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""Keys that do not change the model, but its use by other software."""

_VALUE_CHECKS: dict[str, Callable[[Any], bool]] = {
    "an integer of 0 or more": lambda value: type(value) is int and value >= 0,
    "a positive integer": lambda value: type(value) is int and value >= 1,
    "a number": lambda value: type(value) in (int, float),
    "true or false": lambda value: type(value) is bool,
}


def read_hf_config(config: dict[str, Any]) -> Model:
    """Return the [model] settings of a config.json.

    Raises:
        NotImplementedError: quaver's Llama does not support the model.
        InputError: a value is missing, has a wrong type, or does not fit the others.
    """
    architecture = _read_architecture(config)
    names, fixed, experts = _SIZE_NAMES, _FIXED_FIELDS, {}
    if architecture is MIXTURE:
        config = _MIXTURE_DEFAULTS | config
        names, fixed = _SIZE_NAMES | _EXPERT_SIZE_NAMES, _MIXTURE_FIXED_FIELDS
        experts = {"n_shared_experts": _get_checked(config, "n_shared_experts", "an integer of 0 or more", 1)}
    for name, supported in fixed.items():
        _check_fixed(config, name, supported)
    sizes = {name: _get_checked(config, hf_name, "a positive integer") for hf_name, name in names.items()}
    width, heads = sizes["dim"], sizes["n_heads"]
    if config.get("head_dim") is not None and config["head_dim"] * heads != width:
        raise NotImplementedError(
            f"head_dim in config.json must be hidden_size / num_attention_heads = {width} / {heads}, got "
            f"{config['head_dim']!r}; quaver's Llama supports no other head size"
        )
    settings = {
        **sizes,
        **experts,
        "n_kv_heads": _get_checked(config, "num_key_value_heads", "a positive integer", heads),
        "norm_eps": float(_get_checked(config, "rms_norm_eps", "a number", 1e-6)),
        "tie_word_embeddings": _get_checked(config, "tie_word_embeddings", "true or false", False),
        **_read_rope_settings(config, 0.5 if architecture is MIXTURE else 1.0),
    }
    with reraise_as_input_error("config.json does not make a model: "):
        return Model(**settings)


def make_hf_config(model: Model, *, dtype: str, usage: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of `model`, readable by transformers 4 and 5.

    Args:
        dtype: torch's name of the weights' dtype.
        usage: values of the keys in `USAGE_KEYS`. Missing token ids become null: with the defaults of transformers,
            generation would stop at tokens that have another meaning.
    """
    scaling = None
    if model.rope_scaling:
        scaling = {
            "rope_type": "llama3",
            **{hf_name: getattr(model, name) for hf_name, name in _ROPE_SCALING_NAMES.items()},
        }
        scaling[_ORIGINAL_CONTEXT] = model.rope_original_max_position
    model_type, architecture = MIXTURE if model.n_experts else DENSE
    sizes, architecture_fields = _SIZE_NAMES, _FIXED_FIELDS
    if model.n_experts:
        sizes = _SIZE_NAMES | _EXPERT_SIZE_NAMES
        mixture_fields = {"n_shared_experts": model.n_shared_experts, "num_mtp_layers": 0, _PARTIAL_ROTARY: 1.0}
        architecture_fields = _MIXTURE_FIXED_FIELDS | mixture_fields
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **{hf_name: getattr(model, name) for hf_name, name in sizes.items()},
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        **architecture_fields,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            **(scaling or {"rope_type": "default"}),
            "rope_theta": model.rope_theta,
            **({_PARTIAL_ROTARY: 1.0} if model.n_experts else {}),
        },
        "torch_dtype": dtype,
        **{name: usage.get(name) for name in USAGE_KEYS},
    }


def _read_architecture(config: dict[str, Any]) -> tuple[str, str]:
    """Return DENSE or MIXTURE."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    supported = next((known for known in (DENSE, MIXTURE) if known[0] == model_type), None)
    if supported is None or architectures not in (None, [supported[1]]):
        raise NotImplementedError(
            f"config.json must describe a {DENSE[1]} (model_type {DENSE[0]!r}) or a {MIXTURE[1]} (model_type "
            f"{MIXTURE[0]!r}), got {architectures!r} (model_type {model_type!r}); quaver trains no other architecture"
        )
    if config.get("quantization_config") is not None:
        raise NotImplementedError(
            "config.json must have no quantization_config: quaver trains weights in float32, bfloat16 or float16; "
            "dequantize the model first"
        )
    return supported


def _check_fixed(config: dict[str, Any], name: str, supported: object, default: object = None) -> None:
    value = config.get(name, default)
    if value is not None and value != supported:
        raise NotImplementedError(
            f"{name} in config.json must be {json.dumps(supported)}, got {value!r}; quaver supports no other value"
        )


def _read_rope_settings(config: dict[str, Any], default_factor: float) -> dict[str, Any]:
    """Return the [model] settings of the rotary embeddings; `rope_scaling` has priority, as in transformers.

    `default_factor` is the default of partial_rotary_factor.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise InputError(f"rope_scaling in config.json must be an object, got {rope!r}")
    unknown = sorted(name for name, value in rope.items() if name not in _ROPE_KEYS and value is not None)
    if unknown:
        raise NotImplementedError(f"the rope settings in config.json must be those of Llama, got {join_names(unknown)}")
    _check_fixed(config | rope, _PARTIAL_ROTARY, 1.0, default_factor)
    theta = _get_checked(rope if "rope_theta" in rope else config, "rope_theta", "a number", 10000.0)
    settings = {"rope_theta": float(theta)}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise NotImplementedError(f"the rope_type in config.json must be 'default' or 'llama3', got {rope_type!r}")
    if rope_type == "default" or _get_checked(rope, "factor", "a number") == 1:
        return settings
    settings |= {name: float(_get_checked(rope, hf_name, "a number")) for hf_name, name in _ROPE_SCALING_NAMES.items()}
    context = _get_checked(rope, _ORIGINAL_CONTEXT, "a positive integer", config.get("max_position_embeddings"))
    return {**settings, "rope_original_max_position": context}


def _get_checked(config: dict[str, Any], name: str, requirement: str, default: Any = None) -> Any:
    """Return the value of `name`; null means absent. Raises InputError if it fails `_VALUE_CHECKS[requirement]`."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise InputError(f"{name} in config.json must be {requirement}, but is missing")
    if not _VALUE_CHECKS[requirement](value):
        raise InputError(f"{name} in config.json must be {requirement}, got {value!r}")
    return value

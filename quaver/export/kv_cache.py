"""Scales of a float8 KV cache: measured on batches or taken from a checkpoint, and written beside the weights.

    <attention>.k_scale, .v_scale    float32 [1]; cached key = code * k_scale, so k_scale = amax / 448 (e4m3)

compressed-tensors 0.20 and vLLM's BaseKVCacheMethod (main branch, 2026) define these names and this meaning. The reader
of compressed-tensors quantizes the keys and values that an attention passes to transformers' cache. In vLLM,
`kv_cache_scheme` of compressed-tensors turns on `kv_cache_dtype="fp8"`. Without a q_scale vLLM scales queries by
k_scale. The scales are not in the state dict: training that changes keys and values makes them stale.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quaver.export.checkpoint_names import make_checkpoint_names
from quaver.recipes.formats import E4M3
from quaver.runtime.errors import InputError
from quaver.runtime.module_names import join_names, strip_wrappers
from quaver.runtime.process_group import has_process_group

SCALE_LEAVES = ("k_scale", "v_scale")

_SCALES_ATTRIBUTE = "_float8_kv_scales"
_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")
_STORED_LEAVES = {
    "k_proj.k_scale": ("k_scale",),  # modelopt
    "v_proj.v_scale": ("v_scale",),
    "k_proj.output_scale": ("k_scale",),  # Quark, and compressed-tensors before it had k_scale
    "v_proj.output_scale": ("v_scale",),
    "kv_scale": SCALE_LEAVES,  # AutoFP8
    "k_scale": ("k_scale",),
    "v_scale": ("v_scale",),
}
"""The last names of tensors that vLLM reads as scales of its cache. `q_proj.k_scale` and the like are ignored."""


@contextmanager
def calibrate_kv_cache(model: nn.Module) -> Iterator[None]:
    """Measure the scales of a float8 KV cache on the batches that run in the block; `save_float8` writes them.

        with calibrate_kv_cache(model.eval()), torch.no_grad():
            for batch in batches:
                model(**batch)
        save_float8(model, "served")

    Measures the tensors that each attention passes to the cache: keys after the rotary embedding, and values, before
    the heads of a group are repeated. A scale is the amax over all batches and ranks, divided by 448. Padding tokens
    count, too.

    Args:
        model: a decoder of transformers; every rank of a process group runs the block, sharded or not.
    Raises:
        ValueError: no attention of the model takes a cache.
        NotImplementedError: an encoder-decoder, or latent attention, whose cache in servers holds the latent.
        RuntimeError: at the exit, if no batch reached an attention, or keys or values were all 0 or not finite. The
            scales then stay unchanged.
    """
    attentions = {name: module for name, module in model.named_modules() if _find_cache_argument(module)}
    if not attentions:
        raise ValueError(f"{type(model).__name__}: expected a decoder of transformers, whose attention takes a cache")
    latent = [name for name, attention in attentions.items() if hasattr(attention, "kv_b_proj")]
    if latent or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise NotImplementedError(
            "scales of a KV cache: expected a decoder whose cache holds keys and values, got "
            + (f"latent attention in {join_names(latent)}" if latent else "an encoder-decoder")
        )
    amaxes: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for name, attention in attentions.items():
            hook = partial(_wrap_cache, amaxes.setdefault(name, []))
            hooks.callback(attention.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield
    scales = _compute_kv_scales(amaxes)
    for name, scale in scales.items():
        setattr(attentions[name], _SCALES_ATTRIBUTE, scale)


def _find_cache_argument(module: nn.Module) -> str | None:
    """Return the name of an attention's argument for its cache, as compressed-tensors does; None for other modules."""
    if "attention" not in type(module).__name__.lower():
        return None
    arguments = inspect.signature(module.forward).parameters
    return next((cache for cache in _CACHE_ARGUMENTS if cache in arguments), None)


def _wrap_cache(
    amaxes: list[Tensor], module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Wrap the cache of an attention in one that records amaxes, as a pre-hook."""
    argument = str(_find_cache_argument(module))
    position = list(inspect.signature(module.forward).parameters).index(argument)
    if position < len(args):
        return (*args[:position], _RecordingCache(amaxes, args[position]), *args[position + 1 :]), kwargs
    return args, {**kwargs, argument: _RecordingCache(amaxes, kwargs.get(argument))}


class _RecordingCache:
    """Records the amaxes of keys and values, and forwards to the cache of transformers, if there is one."""

    def __init__(self, amaxes: list[Tensor], cache: Any) -> None:
        self._amaxes, self._cache = amaxes, cache

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        measured = torch.stack([states.detach().abs().amax().float() for states in (keys, values)])
        self._amaxes[:] = [torch.maximum(measured, *self._amaxes)] if self._amaxes else [measured]
        return (keys, values) if self._cache is None else self._cache.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_cache" or name.startswith("__"):  # copy and pickle ask before `_cache` is set
            raise AttributeError(name)
        return getattr(self._cache, name)


def _compute_kv_scales(amaxes: dict[str, list[Tensor]]) -> dict[str, dict[str, float]]:
    amaxes_by_rank: list[dict[str, list[float]]] = [{name: amax[0].tolist() for name, amax in amaxes.items() if amax}]
    if has_process_group():
        local, amaxes_by_rank = amaxes_by_rank[0], [{}] * dist.get_world_size()
        dist.all_gather_object(amaxes_by_rank, local)
    names = [name for name in amaxes if any(name in measured for measured in amaxes_by_rank)]
    options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    pairs_of_ranks = {
        name: torch.tensor([amaxes[name] for amaxes in amaxes_by_rank if name in amaxes], **options) for name in names
    }
    largest = {name: pairs.amax(0).tolist() for name, pairs in pairs_of_ranks.items()}
    invalid = [f"{name} {pair}" for name, pair in largest.items() if not all(0 < amax < float("inf") for amax in pair)]
    if invalid or not largest:
        problem = (
            f"the amaxes of keys and values are {join_names(invalid)}" if invalid else "no batch reached an attention"
        )
        raise RuntimeError(f"calibration of the KV cache: {problem}; no scale was changed")
    scales = torch.tensor(
        [[amax / E4M3.max for amax in pair] for pair in largest.values()], dtype=torch.float32, device="cpu"
    )
    return {
        name: dict(zip(SCALE_LEAVES, pair, strict=True)) for name, pair in zip(largest, scales.tolist(), strict=True)
    }


def get_kv_scales(model: nn.Module) -> dict[str, float]:
    """Return the scales of `model` from a calibration or a checkpoint, by name: `model.layers.0.self_attn.k_scale`."""
    return {
        strip_wrappers(f"{name}.{leaf}".lstrip(".")): scale
        for name, module in model.named_modules()
        for leaf, scale in getattr(module, _SCALES_ATTRIBUTE, {}).items()
    }


def set_kv_scales(model: nn.Module, scales: Mapping[str, float]) -> None:
    """Replace the scales of `model`'s KV cache by a checkpoint's, for `save_float8` to write them.

        set_kv_scales(model, load_float8(folder).kv_scales)

    Args:
        scales: by name in the model or in its checkpoints: `model.layers.0.self_attn.k_scale`.
    Raises:
        ValueError: the model has no module for a scale. It is then unchanged.
    """
    modules = {strip_wrappers(name): module for name, module in model.named_modules()}
    model_names = {f"{name}.{leaf}".lstrip(".") for name in modules for leaf in SCALE_LEAVES}
    in_model = make_checkpoint_names(model).find_model_names(model_names, scales)
    unknown = [stored for stored, name in in_model.items() if name not in model_names]
    if unknown:
        raise InputError(f"the model has no attention for these scales of a KV cache: {join_names(unknown)}")
    for module in modules.values():
        module.__dict__.pop(_SCALES_ATTRIBUTE, None)
    for stored, name in in_model.items():
        owner, _, leaf = name.rpartition(".")
        modules[owner].__dict__.setdefault(_SCALES_ATTRIBUTE, {})[leaf] = scales[stored]


def find_kv_scale_names(names: list[str], quantized: Container[str]) -> dict[str, tuple[str, ...]]:
    """Return the names in a model, one or two, of each scale of a KV cache, by its name in the file.

    Other modules may have parameters with these names. A scale therefore counts only if its module has both scales, or
    is in `quantized`.
    """
    stored: dict[str, tuple[str, ...]] = {}
    for name in names:
        suffix = next((leaf for leaf in _STORED_LEAVES if name.endswith(f".{leaf}")), None)
        owner = name.removesuffix(f".{suffix}")
        if suffix is not None and not owner.endswith("_proj"):
            stored[name] = tuple(f"{owner}.{leaf}" for leaf in _STORED_LEAVES[suffix])
    in_model = set(itertools.chain(*stored.values()))
    owners = {name: names_in_model[0].rpartition(".")[0] for name, names_in_model in stored.items()}
    complete = [owner for owner in owners.values() if in_model.issuperset(f"{owner}.{leaf}" for leaf in SCALE_LEAVES)]
    return {name: stored[name] for name, owner in owners.items() if owner in quantized or owner in complete}

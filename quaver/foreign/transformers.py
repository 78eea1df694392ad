"""Recognizes experts of Llama 4, and drops a stale `quantization_config` from models that are not quantized.

`AutoConfig.from_pretrained` of a float8 folder returns a config with a `quantization_config`. `from_config` makes a
high-precision model that keeps this stale entry. A later reader would then interpret the weights that `save_pretrained`
writes as float8 codes without scales, and get NaN. transformers sets `hf_quantizer` on a model that it quantized, and
`_is_quantized` in its configs; from other high-precision models this file removes the entry. A state_dict does not know
its model, so `patch_transformers_models` hooks into the loading and saving of models. This file can go when
`from_config` drops the entry or quantizes (transformers 5.23 does neither).
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


def is_llama4_experts(cls: type[nn.Module]) -> bool:
    """Return whether a class is Llama 4's experts, by its name: their attributes do not say how gate and up combine."""
    return cls.__name__ == "Llama4TextExperts"


QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""The entries of config.json that say how the weights are quantized."""


def drop_stale_quantization_config(model: nn.Module) -> None:
    """Remove the `quantization_config` of `model`, and of models inside it, if their parameters are not quantized."""
    for module in model.modules():
        if getattr(module, "hf_quantizer", None) is not None:
            continue
        configs = [
            config
            for config in iter_model_configs(getattr(module, "config", None))
            if any(vars(config).get(key) for key in QUANTIZATION_KEYS) and not getattr(config, "_is_quantized", False)
        ]
        dtypes = {parameter.dtype for parameter in module.parameters()}
        if not configs or any(not dtype.is_floating_point or dtype.itemsize == 1 for dtype in dtypes):
            continue
        for config in configs:
            for key in QUANTIZATION_KEYS:
                vars(config).pop(key, None)
        logger.info(
            "removed quantization_config from the config of %s, which is in high precision", type(module).__name__
        )


def iter_model_configs(config: object) -> Iterator[Any]:
    """Yield the config of a transformers model and of its parts (text, vision and so on); nothing for other models."""
    if hasattr(config, "__dict__"):
        yield config
        yield from (part for part in vars(config).values() if hasattr(part, "to_diff_dict"))


_DROPS_STALE_CONFIG = "_drops_stale_quantization_config"
"""The attribute of the methods that `patch_transformers_models` made, and of wrappers of them."""


def patch_transformers_models() -> None:
    """If transformers is imported, run `drop_stale_quantization_config` when a model loads a state_dict or is saved.

    The new methods call what is there, also another library's, which may have replaced them since an earlier call.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    base: Any = getattr(modeling, "PreTrainedModel", None)
    if base is None:
        return
    load, save = vars(base).get("load_state_dict"), base.save_pretrained

    @functools.wraps(load or nn.Module.load_state_dict)
    def load_and_drop(self: nn.Module, *args: Any, **options: Any) -> Any:
        result = (load or nn.Module.load_state_dict)(self, *args, **options)
        drop_stale_quantization_config(self)
        return result

    @functools.wraps(save)
    def drop_and_save(self: nn.Module, *args: Any, **options: Any) -> Any:
        drop_stale_quantization_config(self)
        return save(self, *args, **options)

    for name, method in (("load_state_dict", load_and_drop), ("save_pretrained", drop_and_save)):
        if not hasattr(method, _DROPS_STALE_CONFIG):  # `wraps` copies the attribute of the method that is there
            setattr(method, _DROPS_STALE_CONFIG, True)
            setattr(base, name, method)
            logger.info("wrapped PreTrainedModel.%s of transformers, to drop a stale quantization_config", name)

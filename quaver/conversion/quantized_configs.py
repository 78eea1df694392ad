"""Configs of transformers that say that a model is quantized when it is not.

`AutoConfig.from_pretrained` of a float8 folder has a `quantization_config`, and `from_config` makes a model in high
precision that keeps it. What `save_pretrained` writes of that model would be read as float8 codes without scales: NaN.
transformers sets `hf_quantizer` on a model that it quantized, and `_is_quantized` in its configs; other models in high
precision lose the entry here. A state_dict does not know its model, so `keep_configs_true` does it where a model of
transformers loads or is saved. It can go when `from_config` drops the entry or quantizes (transformers 5.23 does not).
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""The entries of config.json that say how the weights are quantized."""


def drop_false_quantization(model: nn.Module) -> None:
    """Remove from the configs of `model`, and of models in it, a quantization that its parameters do not have."""
    for module in model.modules():
        if getattr(module, "hf_quantizer", None) is not None:
            continue
        configs = [
            config
            for config in configs_of(getattr(module, "config", None))
            if any(vars(config).get(key) for key in QUANTIZATION_KEYS)
        ]
        configs = [config for config in configs if not getattr(config, "_is_quantized", False)]
        if not configs or any(not each.dtype.is_floating_point or each.itemsize == 1 for each in module.parameters()):
            continue
        for config in configs:
            for key in QUANTIZATION_KEYS:
                vars(config).pop(key, None)
        logger.info("%s is in high precision: its config says so now", type(module).__name__)


def configs_of(config: object) -> Iterator[Any]:
    """The config of a model of transformers, and those of its parts: of text, vision and so on; of another none."""
    if hasattr(config, "__dict__"):
        yield config
        yield from (part for part in vars(config).values() if hasattr(part, "to_diff_dict"))


def keep_configs_true() -> None:
    """`drop_false_quantization` whenever a model of transformers loads a state_dict or is saved, if it is imported."""
    modeling = sys.modules.get("transformers.modeling_utils")
    base: Any = getattr(modeling, "PreTrainedModel", None)
    if base is None or "load_state_dict" in vars(base):
        return
    save_pretrained = base.save_pretrained

    def load_state_dict(self: nn.Module, *args: Any, **options: Any) -> Any:
        result = nn.Module.load_state_dict(self, *args, **options)
        drop_false_quantization(self)
        return result

    @functools.wraps(save_pretrained)
    def save_true(self: nn.Module, *args: Any, **options: Any) -> Any:
        drop_false_quantization(self)
        return save_pretrained(self, *args, **options)

    base.load_state_dict, base.save_pretrained = functools.wraps(nn.Module.load_state_dict)(load_state_dict), save_true

"""`QuaverConfig`: models of transformers that train in float8 as `from_pretrained` returns them.

    from_pretrained(folder, quantization_config=QuaverConfig("rowwise"))       all weights train, in high precision
    from_pretrained(folder, quantization_config=QuaverConfig(frozen=True))     float8 weights, for adapters

A folder in high precision is converted, or frozen parameter by parameter as it is read. A float8 folder, in any layout
that `load_float8` reads, is dequantized so, or its codes and scales are the frozen weights (transformers_loading.py).
What a config.json says of its own quantization is for quaver to read; transformers refuses two configs, so it does not
see it. `save_pretrained` writes high precision, and a config.json that says so.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import modeling_utils
from transformers.core_model_loading import ConversionOps
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from quaver.conversion.convert import (
    FilterDecision,
    ModuleFilter,
    convert_to_float8_training,
    convert_to_high_precision,
    decide,
)
from quaver.conversion.freeze import frozen_config
from quaver.conversion.layer_recipes import LayerRecipes
from quaver.conversion.quantized_configs import QUANTIZATION_KEYS, configs_of
from quaver.experts.module import is_experts
from quaver.export.files import CONFIG, SUFFIX, read_config
from quaver.export.frozen import StoredWeights, obstacle_to_frozen
from quaver.export.kv_cache import set_kv_scales
from quaver.export.layouts import CODES, quantization_of
from quaver.export.load import Float8Checkpoint, ModelTensors
from quaver.export.plan import float8_weights
from quaver.integrations.transformers_conv1d import Conv1DLinear
from quaver.integrations.transformers_convert import conv1ds_as_linears, float8_filter, prepare_model_for_float8
from quaver.integrations.transformers_loading import Float8Tensors, QuaverWeights
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.linear.shared_input import share_inputs
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.serving import serving_config
from quaver.runtime.names import listed

METHOD = "quaver"
"""The `quant_method` of a QuaverConfig."""


@register_quantization_config(METHOD)
class QuaverConfig(QuantizationConfigMixin):
    """How `from_pretrained(folder, quantization_config=...)` makes a model that trains in float8.

    Args:
        recipe: a recipe's name, a config, or a recipe for each layer, `LayerRecipes.read(path)`. None is "tensorwise";
            with `frozen` "blockwise", or the codes and scales of a float8 folder as they are.
        frozen: store the weights once in float8, for adapters, as `freeze_to_float8` and `load_frozen` do. They do not
            train. Of a float8 folder with a `recipe` they are dequantized and quantized again.
        modules_to_not_convert: names of modules that stay in high precision, as other quantizers of transformers take
            them, beside those of `prepare_model_for_float8`. A float8 folder that is frozen without a recipe has in
            float8 what is stored so.
        serving: the engine whose codes the forward multiplies, as `convert_to_float8_training` takes it; `recipe` is
            then for the backward. A float8 folder that is frozen without a recipe keeps its codes.
        include_subclasses: as `convert_to_float8_training` takes it; Falcon needs it.
    Raises:
        ValueError: an unknown recipe or engine, or a recipe that does not freeze weights.
        TypeError: an argument of another type or name.
    """

    def __init__(
        self,
        recipe: Float8LinearConfig | Float8LinearRecipeName | LayerRecipes | str | None = None,
        *,
        frozen: bool = False,
        modules_to_not_convert: Sequence[str] | None = None,
        serving: str | None = None,
        include_subclasses: bool = False,
    ) -> None:
        self.quant_method = typing.cast(Any, METHOD)
        for name, flag in (("frozen", frozen), ("include_subclasses", include_subclasses)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: expected True or False, got {flag!r}")
        names = [] if modules_to_not_convert is None else modules_to_not_convert
        if isinstance(names, str) or not all(isinstance(each, str) for each in names):
            raise TypeError(f"modules_to_not_convert: expected a list of names of modules, got {names!r}")
        if frozen and isinstance(recipe, LayerRecipes):
            raise TypeError("recipe: frozen weights have one recipe, got LayerRecipes")
        if serving is not None and isinstance(recipe, LayerRecipes):
            raise TypeError("serving: an engine has one cast for all linears, got LayerRecipes; give one recipe")
        self.recipe, self.serving, self.frozen, self.include_subclasses = recipe, serving, frozen, include_subclasses
        self.modules_to_not_convert = list(names)
        if frozen:
            frozen_config(typing.cast(Any, self.of_linears))
        elif not isinstance(recipe, LayerRecipes):
            resolve_config(typing.cast(Any, self.of_linears))

    @property
    def of_linears(self) -> Float8LinearConfig | Float8LinearRecipeName | LayerRecipes | str | None:
        """The recipe, or the config, that the linears are converted to or frozen with."""
        if self.serving is None:
            return self.recipe
        return serving_config(self.serving, typing.cast(Any, self.recipe))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The config of a dict, whose `quant_method` is "quaver". Raises as the config."""
        own = {name: each for name, each in config_dict.items() if name != "quant_method"}
        return super().from_dict(own, return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """What JSON holds of it, for logs; of a config that is no recipe its text."""
        recipe = getattr(self.recipe, "recipe_name", self.recipe)
        recipe = self.recipe if recipe is None else recipe
        return {**vars(self), "recipe": recipe if recipe is None else str(getattr(recipe, "value", recipe))}


@register_quantizer(METHOD)
class QuaverQuantizer(HfQuantizer):
    """transformers' quantizer of a `QuaverConfig`; transformers calls its methods in the order of this class."""

    quantization_config: QuaverConfig
    is_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: QuaverConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = False  # the loader asks `param_needs_quantization`, and reads one parameter at a time
        self._start()

    def _start(self) -> None:
        """Hold nothing of a model."""
        self._operation: QuaverWeights | None = None
        self._tensors: Float8Tensors | None = None
        self._frozen: set[str] = set()
        self._keeps_own_forms = self.quantization_config.frozen  # and Conv1Ds that are linears

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the weights themselves train: transformers' Trainer asks for adapters otherwise."""
        return not self.quantization_config.frozen

    @property
    def quantized_element_size(self) -> float | None:
        """Bytes of an element of a frozen weight, for `device_map="auto"`."""
        return 1.0 if self.quantization_config.frozen else None

    def is_serializable(self, **options: Any) -> bool:
        """`save_pretrained` writes high precision."""
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise NotImplementedError for a loader of transformers, or an offload, that quaver takes no part in."""
        if is_deepspeed_zero3_enabled():
            raise NotImplementedError(
                "QuaverConfig: DeepSpeed's ZeRO-3 partitions weights while they are loaded; load the model without "
                "it, and call prepare_model_for_float8"
            )
        if isinstance(device_map, dict) and "disk" in device_map.values() and self._keeps_own_forms:
            raise NotImplementedError(
                "QuaverConfig: an offload to disk would store frozen weights in high precision, and GPT-2's as they "
                "are in the file: give a device_map without disk"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the model in high precision: bfloat16 where transformers took it from float8 weights."""
        return dtype if dtype in HP_DTYPES else torch.bfloat16

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Convert the model, on the meta device, and find out which of its parameters are read how."""
        with torch.device("cpu"):  # transformers makes whatever has no device on the meta device
            self._convert_empty(model, _float8_checkpoint(checkpoint_files))
        self._keeps_own_forms |= any(isinstance(each, Conv1DLinear) for each in model.modules())
        self.validate_environment(device_map=kwargs.get("device_map"))

    def _convert_empty(self, model: nn.Module, checkpoint: Float8Checkpoint | None) -> None:
        config, stored = self.quantization_config, None
        if _is_distributed(model) and (config.frozen or checkpoint is not None):
            raise NotImplementedError(
                "QuaverConfig with a distributed_config trains folders in high precision, and no frozen weights or "
                "float8 folders: load the model on each rank and call fully_shard, or quaver import first"
            )
        if checkpoint is not None and not hasattr(HfQuantizer, "update_weight_conversions"):
            raise NotImplementedError(
                f"QuaverConfig reads float8 folders with transformers 5.8 and newer, got {transformers.__version__}; "
                "use quaver import, or load_frozen"
            )
        loaded = None if checkpoint is None else ModelTensors(model, checkpoint)
        if checkpoint is not None and loaded is not None and config.frozen and config.recipe is None:
            stored = StoredWeights(model, checkpoint, loaded, self._left_out(model), config.serving)
            stored.convert(model, include_subclasses=config.include_subclasses)
        elif config.frozen:
            self._convert_frozen(model)
        elif not self._is_late(model):
            self._prepare(model)
        if config.frozen:
            self._frozen = set(float8_weights(model))
        self._operation = QuaverWeights(self._frozen, self._frozen_config if config.frozen else None)
        if checkpoint is not None and loaded is not None:
            set_kv_scales(model, checkpoint.kv_scales)
            self._tensors = Float8Tensors(model, checkpoint, loaded, stored, self._operation)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """The converters of the model, behind that of a float8 checkpoint."""
        return weight_conversions if self._tensors is None else self._tensors.in_front_of(weight_conversions)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Whether quaver makes this parameter of what the loader reads."""
        of_checkpoint = self._tensors is not None and param_name in self._tensors.names
        return of_checkpoint or param_name in self._frozen or _is_of_conv1d(model, param_name)

    def get_quantize_ops(self) -> ConversionOps:
        """The operation for such a parameter in high precision."""
        return typing.cast(QuaverWeights, self._operation)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        """Check that all is frozen, and make the config say what `save_pretrained` writes."""
        problem = typing.cast(QuaverWeights, self._operation).problem
        if problem is not None:
            raise problem
        unread = [name for name in sorted(self._frozen) if not isinstance(_parameter(model, name), FrozenFloat8Weight)]
        if unread:
            raise ValueError(f"the folder lacks weights that QuaverConfig(frozen=True) freezes: {listed(unread)}")
        if self._frozen:
            share_inputs(model, Float8Linear)
        if self._is_late(model) and not self.quantization_config.frozen:
            self._prepare(model)
        for module in model.modules():
            _drop_quantization(getattr(module, "config", None))
        conversions: Any = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [each for each in conversions if each is not self._tensors]  # type: ignore[assignment]
        model.is_quantized = self.quantization_config.frozen  # type: ignore[assignment]
        self._start()

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        """`model.dequantize()`: the model in high precision; a config that was saved names the dtype."""
        return convert_to_high_precision(model).to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    @property
    def _frozen_config(self) -> Float8LinearConfig:
        return frozen_config(typing.cast(Any, self.quantization_config.of_linears))

    def _is_late(self, model: nn.Module) -> bool:
        """Whether the model is converted after its weights are loaded: parts of it on other ranks, or their gather."""
        recipe = self.quantization_config.of_linears
        if _is_distributed(model):
            return True
        return not isinstance(recipe, LayerRecipes) and resolve_config(recipe).enable_fsdp_float8_all_gather

    def _prepare(self, model: nn.Module) -> None:
        config = self.quantization_config
        options: dict[str, Any] = {"include_subclasses": config.include_subclasses}
        prepare_model_for_float8(model, config.of_linears, module_filter_fn=self._filter(model), **options)

    def _convert_frozen(self, model: nn.Module) -> None:
        options: dict[str, Any] = {"include_subclasses": self.quantization_config.include_subclasses}
        admits = float8_filter(model, self._filter(model))
        with conv1ds_as_linears(model):
            convert_to_float8_training(model, config=self._frozen_config, module_filter_fn=admits, **options)

    def _filter(self, model: nn.Module) -> ModuleFilter:
        """What the config leaves out; and tied weights, which cannot be frozen."""
        names, keys = self.quantization_config.modules_to_not_convert, getattr(model, "all_tied_weights_keys", {})
        tied = {name.rpartition(".")[0] for name in (*keys, *keys.values())} if self.quantization_config.frozen else ()

        def admits(module: nn.Module, name: str) -> FilterDecision:
            if not should_convert_module(name, names):
                return FilterDecision(False, "filter: modules_to_not_convert")
            return FilterDecision(name not in tied, "its weight is tied" if name in tied else "")

        return admits

    def _left_out(self, model: nn.Module) -> dict[str, FilterDecision]:
        """The linears and experts whose float8 weights in a folder are not frozen as they are."""
        admits, include_subclasses = self._filter(model), self.quantization_config.include_subclasses
        found: dict[str, FilterDecision] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) or is_experts(module):
                decision = decide(admits, module, name)
                obstacle = obstacle_to_frozen(module, include_subclasses)
                if not decision or obstacle:
                    found[name] = FilterDecision(False, decision.reason or obstacle)
        return found


def _float8_checkpoint(files: Sequence[str] | None) -> Float8Checkpoint | None:
    """The float8 checkpoint that transformers has found; None for one in high precision.

    Raises:
        OSError, ValueError, NotImplementedError: as `load_float8`.
    """
    if not files:
        return None
    folder = Path(files[0]).parent
    stored = quantization_of(read_config(folder)) if (folder / CONFIG).is_file() else None
    if stored is None or (isinstance(stored, dict) and stored.get("quant_method") == METHOD):
        opened = [safe_open(file, framework="pt") for file in files if file.endswith(SUFFIX)]
        if not any(str(file.get_slice(name).get_dtype()) in CODES for file in opened for name in file.keys()):  # noqa: SIM118
            return None
    checkpoint = Float8Checkpoint(folder, torch.float32)
    if set(checkpoint.files) != set(map(Path, files)):
        raise NotImplementedError(
            f"float8 weights are read from the files {listed([each.name for each in checkpoint.files])}, and "
            f"transformers reads {listed([Path(each).name for each in files])}: leave variant out"
        )
    return checkpoint


def _is_distributed(model: Any) -> bool:
    return getattr(model.config, "distributed_config", None) is not None


def _is_of_conv1d(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf == "weight" and isinstance(model.get_submodule(owner), Conv1DLinear)


def _parameter(model: nn.Module, name: str) -> Any:
    return model.get_parameter(name)


def _drop_quantization(config: Any) -> None:
    """Remove what the config of a model, and those of its parts, say of a quantization."""
    for each in configs_of(config):
        for key in (*QUANTIZATION_KEYS, "_is_quantized"):
            vars(each).pop(key, None)


_modeling: Any = modeling_utils
_get_hf_quantizer = _modeling.get_hf_quantizer


@functools.wraps(_get_hf_quantizer)
def _get_quantizer(config: Any, quantization_config: Any, *args: Any, **options: Any) -> Any:
    """transformers' own, which raises for a QuaverConfig and a config.json with another method; see the top."""
    method = getattr(quantization_config, "quant_method", None)
    if isinstance(quantization_config, Mapping):
        method = quantization_config.get("quant_method")
    if method == METHOD:
        _drop_quantization(config)
    return _get_hf_quantizer(config, quantization_config, *args, **options)


_modeling.get_hf_quantizer = _get_quantizer

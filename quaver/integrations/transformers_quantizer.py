"""`QuaverConfig`: makes `from_pretrained` of transformers return models that train in float8.

    from_pretrained(folder, quantization_config=QuaverConfig("rowwise"))       all weights train, in high precision
    from_pretrained(folder, quantization_config=QuaverConfig(frozen=True))     float8 weights, for adapters

A high-precision folder is converted, or frozen one parameter at a time while it is read. A float8 folder, in any layout
that `load_float8` reads, is dequantized one parameter at a time. With `frozen`, its codes and scales become the frozen
weights instead (transformers_loading.py). transformers refuses two quantization configs, so the one in config.json is
hidden from it and read by quaver. `save_pretrained` writes high precision, and a config.json without quantization.
"""

from __future__ import annotations

import functools
import logging
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
    apply_filter,
    convert_to_float8_training,
    convert_to_high_precision,
)
from quaver.conversion.freeze import resolve_frozen_config
from quaver.conversion.layer_recipes import LayerRecipes
from quaver.experts.module import is_experts
from quaver.export.files import CONFIG_JSON, SAFETENSORS, read_config
from quaver.export.frozen import StoredWeights, explain_frozen_obstacle
from quaver.export.kv_cache import set_kv_scales
from quaver.export.load import Float8Checkpoint, ModelTensors
from quaver.export.plan import find_float8_weights
from quaver.export.tensor_roles import CODE_DTYPES, find_quantization
from quaver.foreign.transformers import QUANTIZATION_KEYS, iter_model_configs
from quaver.integrations.transformers_conv1d import Conv1DLinear
from quaver.integrations.transformers_convert import (
    make_float8_filter,
    prepare_model_for_float8,
    treat_conv1ds_as_linears,
)
from quaver.integrations.transformers_loading import Float8WeightConverter, QuaverQuantize
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.linear.shared_input import share_input_casts
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.serving import serving_config
from quaver.runtime.module_names import join_names

logger = logging.getLogger(__name__)

METHOD = "quaver"
"""The `quant_method` of a QuaverConfig."""

_ACCEPTS_QUAVER = "_accepts_quaver_config"
"""The attribute of a `get_hf_quantizer` that `install_quantizer` made, or of a wrapper of it."""


@register_quantization_config(METHOD)
class QuaverConfig(QuantizationConfigMixin):
    """The `quantization_config` with which `from_pretrained` makes a model that trains in float8.

    Args:
        recipe: a recipe's name, a config, or a recipe for each layer, `LayerRecipes.read(path)`. None is "tensorwise";
            with `frozen` it is "blockwise" for a high-precision folder, and the stored codes for a float8 folder.
        recipe_name: the same as `recipe`, for a name.
        frozen: store the weights once in float8, for adapters, as `freeze_to_float8` and `load_frozen` do. They do not
            train. With a `recipe`, the weights of a float8 folder are dequantized and quantized again.
        modules_to_not_convert: names of further modules that stay in high precision, beyond the defaults of
            `prepare_model_for_float8`, in the format of transformers' other quantizers. For a float8 folder that is
            frozen without a recipe, the folder determines which layers are in float8.
        serving: as for `convert_to_float8_training`, the inference engine whose codes the forward multiplies; `recipe`
            then applies to the backward. A float8 folder that is frozen without a recipe keeps its codes.
        include_subclasses: as for `convert_to_float8_training`; Falcon needs it.
    Raises:
        ValueError: a recipe or an engine is unknown, or the recipe cannot freeze weights.
        TypeError: an argument has a wrong type or name.
    """

    def __init__(
        self,
        recipe: Float8LinearConfig | Float8LinearRecipeName | LayerRecipes | str | None = None,
        *,
        recipe_name: Float8LinearRecipeName | str | None = None,
        frozen: bool = False,
        modules_to_not_convert: Sequence[str] | None = None,
        serving: str | None = None,
        include_subclasses: bool = False,
    ) -> None:
        self.quant_method: Any = METHOD
        if recipe is not None and recipe_name is not None:
            raise TypeError(f"expected recipe or recipe_name, got both, {recipe!r} and {recipe_name!r}")
        recipe = recipe_name if recipe is None else recipe
        for name, flag in (("frozen", frozen), ("include_subclasses", include_subclasses)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: expected True or False, got {flag!r}")
        names = [] if modules_to_not_convert is None else modules_to_not_convert
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"modules_to_not_convert: expected a list of names of modules, got {names!r}")
        if frozen and isinstance(recipe, LayerRecipes):
            raise TypeError("recipe: expected one recipe for frozen weights, got LayerRecipes")
        if serving is not None and isinstance(recipe, LayerRecipes):
            raise TypeError("recipe: expected one recipe for all linears with serving, got LayerRecipes")
        self.recipe: Any = recipe
        self.serving, self.frozen, self.include_subclasses = serving, frozen, include_subclasses
        self.modules_to_not_convert = list(names)
        if frozen:
            resolve_frozen_config(self.linear_recipe)
        elif not isinstance(recipe, LayerRecipes):
            resolve_config(self.linear_recipe)

    @property
    def linear_recipe(self) -> Any:
        """The recipe or config of the linears; with `serving` the config with the engine's casts."""
        return self.recipe if self.serving is None else serving_config(self.serving, self.recipe)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Make a config from a dict whose `quant_method` is "quaver". Raises what the constructor raises."""
        arguments = {name: value for name, value in config_dict.items() if name != "quant_method"}
        return super().from_dict(arguments, return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the config for JSON, for logs. A config that is not a recipe becomes a string."""
        recipe = getattr(self.recipe, "recipe_name", self.recipe)
        recipe = self.recipe if recipe is None else recipe
        return {**vars(self), "recipe": recipe if recipe is None else str(getattr(recipe, "value", recipe))}


@register_quantizer(METHOD)
class QuaverQuantizer(HfQuantizer):
    """transformers' quantizer of a `QuaverConfig`."""

    quantization_config: QuaverConfig
    is_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: QuaverConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = False  # the loader then asks `param_needs_quantization`, and reads one parameter at a time
        self._reset()

    def _reset(self) -> None:
        self._operation = QuaverQuantize((), None)
        self._converter: Float8WeightConverter | None = None
        self._frozen: set[str] = set()
        self._has_transformed_weights = self.quantization_config.frozen  # set for Conv1Ds, too

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the weights train. If false, transformers' Trainer asks for adapters."""
        return not self.quantization_config.frozen

    @property
    def quantized_element_size(self) -> float | None:
        """Bytes of an element of a frozen weight, for `device_map="auto"`."""
        return 1.0 if self.quantization_config.frozen else None

    def is_serializable(self, **options: Any) -> bool:
        """Return whether `save_pretrained` works, which writes high precision."""
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise NotImplementedError for ZeRO-3, and for an offload to disk of transformed weights."""
        if is_deepspeed_zero3_enabled():
            raise NotImplementedError(
                "QuaverConfig: DeepSpeed's ZeRO-3 partitions weights while they are loaded; load the model without "
                "it, and call prepare_model_for_float8"
            )
        if isinstance(device_map, dict) and "disk" in device_map.values() and self._has_transformed_weights:
            raise NotImplementedError(
                "QuaverConfig: expected a device_map without disk, where frozen weights would be in high precision and "
                "GPT-2's weights transposed"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the high-precision dtype of the model: bfloat16 if transformers took float8 from the weights."""
        return dtype if dtype in HP_DTYPES else torch.bfloat16

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Convert the model on the meta device, and decide how each parameter is read."""
        with torch.device("cpu"):  # overrides transformers' default device, meta
            self._convert_empty(model, _open_float8_checkpoint(checkpoint_files))
        self._has_transformed_weights |= any(isinstance(module, Conv1DLinear) for module in model.modules())
        self.validate_environment(device_map=kwargs.get("device_map"))

    def _convert_empty(self, model: nn.Module, checkpoint: Float8Checkpoint | None) -> None:
        config, stored = self.quantization_config, None
        if _is_distributed(model) and (config.frozen or checkpoint is not None):
            raise NotImplementedError(
                "QuaverConfig with a distributed_config: expected a folder in high precision and frozen=False, got "
                f"{'frozen=True' if config.frozen else 'a float8 folder'}; load the model on each rank and call "
                "fully_shard, or dequantize the folder with quaver.export.import_float8"
            )
        if checkpoint is not None and not hasattr(HfQuantizer, "update_weight_conversions"):
            raise NotImplementedError(
                "QuaverConfig: expected transformers 5.8 or newer for a float8 folder, got "
                f"{transformers.__version__}; use quaver.export.import_float8 or load_frozen"
            )
        loaded = None if checkpoint is None else ModelTensors(model, checkpoint)
        if checkpoint is not None and loaded is not None and config.frozen and config.recipe is None:
            stored = StoredWeights(model, checkpoint, loaded, self._find_modules_left_out(model), config.serving)
            stored.convert(model, include_subclasses=config.include_subclasses)
        elif config.frozen:
            self._convert_frozen(model)
        elif not self._converts_after_loading(model):
            self._convert(model)
        if config.frozen:
            self._frozen = set(find_float8_weights(model))
        self._operation = QuaverQuantize(self._frozen, self._frozen_config if config.frozen else None)
        if checkpoint is not None and loaded is not None:
            set_kv_scales(model, checkpoint.kv_scales)
            self._converter = Float8WeightConverter(model, checkpoint, loaded, stored, self._operation)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Return the converters of the model, preceded by the converter of a float8 checkpoint, if there is one."""
        return weight_conversions if self._converter is None else self._converter.prepend_to(weight_conversions)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Return whether quaver makes this parameter from the tensor that the loader reads."""
        owner, _, leaf = param_name.rpartition(".")
        is_conv1d_weight = leaf == "weight" and isinstance(model.get_submodule(owner), Conv1DLinear)
        is_float8 = self._converter is not None and param_name in self._converter.names
        return is_float8 or param_name in self._frozen or is_conv1d_weight

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation for parameters in high precision."""
        return self._operation

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        """Check that all weights are frozen, and remove the quantization from the config for `save_pretrained`."""
        if self._operation.problem is not None:
            raise self._operation.problem
        missing = [
            name for name in sorted(self._frozen) if not isinstance(model.get_parameter(name), FrozenFloat8Weight)
        ]
        if missing:
            raise ValueError(f"the folder lacks weights that QuaverConfig(frozen=True) freezes: {join_names(missing)}")
        if self._frozen:
            share_input_casts(model, Float8Linear)
        if self._converts_after_loading(model) and not self.quantization_config.frozen:
            self._convert(model)
        for module in model.modules():
            _drop_quantization(getattr(module, "config", None))
        conversions: Any = getattr(model, "_weight_conversions", None) or []
        loaded: Any = model
        loaded._weight_conversions = [conversion for conversion in conversions if conversion is not self._converter]
        loaded.is_quantized = self.quantization_config.frozen
        self._reset()

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        """Convert back to high precision, for `model.dequantize()`; a saved config gives `dtype` by its name."""
        return convert_to_high_precision(model).to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    @property
    def _frozen_config(self) -> Float8LinearConfig:
        return resolve_frozen_config(self.quantization_config.linear_recipe)

    def _converts_after_loading(self, model: nn.Module) -> bool:
        """Return whether to convert after loading, as for distributed models and configs with a float8 all-gather."""
        recipe = self.quantization_config.linear_recipe
        if _is_distributed(model):
            return True
        return not isinstance(recipe, LayerRecipes) and resolve_config(recipe).enable_fsdp_float8_all_gather

    def _convert(self, model: nn.Module) -> None:
        prepare_model_for_float8(
            model,
            self.quantization_config.linear_recipe,
            module_filter_fn=self._make_filter(model),
            include_subclasses=self.quantization_config.include_subclasses,
        )

    def _convert_frozen(self, model: nn.Module) -> None:
        with treat_conv1ds_as_linears(model):
            convert_to_float8_training(
                model,
                config=self._frozen_config,
                module_filter_fn=make_float8_filter(model, self._make_filter(model)),
                include_subclasses=self.quantization_config.include_subclasses,
            )

    def _make_filter(self, model: nn.Module) -> ModuleFilter:
        """Return a filter that leaves out `modules_to_not_convert`, and tied weights, which cannot be frozen."""
        config, tied_keys = self.quantization_config, getattr(model, "all_tied_weights_keys", {})
        tied = {name.rpartition(".")[0] for name in (*tied_keys, *tied_keys.values())} if config.frozen else ()

        def decide(module: nn.Module, name: str) -> FilterDecision:
            if not should_convert_module(name, config.modules_to_not_convert):
                return FilterDecision(convert=False, reason="filter: modules_to_not_convert")
            return FilterDecision(convert=name not in tied, reason="its weight is tied" if name in tied else "")

        return decide

    def _find_modules_left_out(self, model: nn.Module) -> dict[str, FilterDecision]:
        """Return the decisions on linears and experts whose stored float8 weights are dequantized, by name."""
        filter_fn, include_subclasses = self._make_filter(model), self.quantization_config.include_subclasses
        decisions: dict[str, FilterDecision] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) or is_experts(module):
                decision = apply_filter(filter_fn, module, name)
                obstacle = explain_frozen_obstacle(module, include_subclasses)
                if not decision or obstacle:
                    decisions[name] = FilterDecision(convert=False, reason=decision.reason or obstacle)
        return decisions


def _open_float8_checkpoint(files: Sequence[str] | None) -> Float8Checkpoint | None:
    """Return the checkpoint that transformers found if it is in float8, else None. Raises as `load_float8`."""
    if not files:
        return None
    folder = Path(files[0]).parent
    quantization = find_quantization(read_config(folder)) if (folder / CONFIG_JSON).is_file() else None
    if quantization is None or (isinstance(quantization, dict) and quantization.get("quant_method") == METHOD):
        opened = [safe_open(file, framework="pt") for file in files if file.endswith(SAFETENSORS)]
        if not any(str(file.get_slice(name).get_dtype()) in CODE_DTYPES for file in opened for name in file.keys()):  # noqa: SIM118
            return None
    checkpoint = Float8Checkpoint(folder, torch.float32)
    if set(checkpoint.files) != set(map(Path, files)):
        raise NotImplementedError(
            f"expected transformers to read the files {join_names([file.name for file in checkpoint.files])}, got "
            f"{join_names([Path(file).name for file in files])}; leave out variant"
        )
    return checkpoint


def _is_distributed(model: Any) -> bool:
    return getattr(model.config, "distributed_config", None) is not None


def _drop_quantization(config: Any) -> None:
    for part in iter_model_configs(config):
        for key in (*QUANTIZATION_KEYS, "_is_quantized"):
            vars(part).pop(key, None)


def install_quantizer() -> None:
    """Make transformers' `get_hf_quantizer` accept a QuaverConfig for a folder whose config.json has another method.

    Calls the function that is there, also another library's, which may have replaced it since an earlier call.
    """
    modeling: Any = modeling_utils
    original = modeling.get_hf_quantizer
    if hasattr(original, _ACCEPTS_QUAVER):
        return

    @functools.wraps(original)
    def get_quantizer(config: Any, quantization_config: Any, *args: Any, **options: Any) -> Any:
        method = getattr(quantization_config, "quant_method", None)
        if isinstance(quantization_config, Mapping):
            method = quantization_config.get("quant_method")
        if method == METHOD:
            _drop_quantization(config)
        return original(config, quantization_config, *args, **options)

    setattr(get_quantizer, _ACCEPTS_QUAVER, True)
    modeling.get_hf_quantizer = get_quantizer
    logger.info("wrapped get_hf_quantizer of transformers, to accept a QuaverConfig for every folder")

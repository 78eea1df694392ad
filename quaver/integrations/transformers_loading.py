"""The operation and the converter with which transformers' loader makes the parameters for a `QuaverConfig`.

`convert_and_load_state_dict_in_model` of transformers 5 iterates over the tensors of a checkpoint and sets the
parameters of the model one at a time. It calls

    QuaverQuantize(...)         an operation on a high-precision tensor that was read: freezes it, or transposes GPT-2's
    Float8WeightConverter(...)  a converter in front of the model's converters: makes each parameter that a float8
                                checkpoint holds in float8, from codes and scales, one matrix at a time

Both return the parameter on the device of `device_map`. One parameter at a time is in high precision.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Container
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from quaver.conversion.freeze import freeze_weight
from quaver.experts.module_weight import ModuleWeight
from quaver.export.frozen import StoredWeights
from quaver.export.load import Float8Checkpoint, ModelTensors
from quaver.integrations.transformers_conv1d import Conv1DLinear
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.scaling import compute_amax

_SOURCE_PATTERN = "float8 tensors of quaver"
"""The source pattern under which transformers' loader collects the tensors of a `Float8WeightConverter`."""


class QuaverQuantize(ConversionOps):
    """Turns tensors in high precision into the parameters of a converted model.

    Args:
        frozen: the names of the weights to freeze.
        config: the config of frozen weights; None if there are none.
    """

    def __init__(self, frozen: Container[str], config: Float8LinearConfig | None) -> None:
        self._frozen, self._config = frozen, config
        self.problem: ValueError | None = None
        """The first error. transformers would raise a RuntimeError with the tracebacks of all errors."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **about: Any
    ) -> dict[str, list[Tensor]]:
        """Return the parameters for the tensors in `input_dict`, by name in the model `about["model"]`."""
        lists = {name: value if isinstance(value, list) else [value] for name, value in input_dict.items()}
        try:
            return {name: [self.make_parameter(about["model"], name, tensors[0])] for name, tensors in lists.items()}
        except ValueError as error:
            self.problem = self.problem or error
            return lists

    def make_parameter(self, model: nn.Module, name: str, tensor: Tensor) -> Tensor:
        """Return the parameter `name` of `model` with the values `tensor`. Raises ValueError if it cannot be frozen."""
        owner, _, leaf = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        if isinstance(module, Conv1DLinear) and leaf == "weight":
            tensor = tensor.t().contiguous()
        if self._config is None or name not in self._frozen:
            return tensor
        expected = getattr(module, leaf).shape
        if tensor.shape != expected:
            raise ValueError(f"{name}: expected {list(expected)}, as the model has, got {list(tensor.shape)}")
        if not bool(compute_amax(tensor).isfinite()):
            raise ValueError(f"the weight {name} holds NaN or inf, so it cannot be frozen in float8")
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
        freeze_weight(ModuleWeight(module, leaf), self._config)
        return getattr(module, leaf)


class Float8WeightConverter(WeightConverter):
    """Makes the parameters that a checkpoint holds in float8; the model's converters make all others.

    Args:
        model: its parameters are on the meta device.
        checkpoint: the float8 checkpoint.
        loaded: its tensors under the names of the model.
        stored: the weights that the model holds as codes; None if it holds none.
        operation: the operation on dequantized tensors.
    Raises:
        ValueError: a shape differs from the model's.
    """

    names: set[str]
    """The names of the parameters that this converter makes."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Float8Checkpoint,
        loaded: ModelTensors,
        stored: StoredWeights | None,
        operation: QuaverQuantize,
    ) -> None:
        super().__init__(_SOURCE_PATTERN, "", [operation])
        self._checkpoint, self._loaded, self._stored, self._operation = checkpoint, loaded, stored, operation
        self._targets: dict[str, str] = {}
        self._targets_by_renamed: dict[str, str] = {}
        in_model = model.state_dict()
        float8 = set(checkpoint.float8_names)
        for name, stack in loaded.parts.items():
            parts = list(itertools.chain(*stack))
            if name in loaded.tied or name not in in_model or (name not in loaded.stacks and float8.isdisjoint(parts)):
                continue
            if loaded.get_shape(name) != list(in_model[name].shape):
                raise ValueError(
                    f"{name}: expected {list(in_model[name].shape)}, as the model has, got {loaded.get_shape(name)}"
                )
            self._targets |= dict.fromkeys(parts, name)
        if self._targets:  # the loader reports every other name as unexpected
            first = next(iter(self._targets.values()))
            self._targets |= dict.fromkeys(checkpoint.scales_and_marks, first)
        self.names = set(self._targets.values())

    def prepend_to(self, conversions: list[Any]) -> list[Any]:
        """Return this converter followed by the model's `conversions`.

        Marks the converters of the same names as used: transformers reverses used converters when it saves the model.
        """
        renamings = copy.deepcopy([renaming for renaming in conversions if isinstance(renaming, WeightRenaming)])
        converters = [converter for converter in conversions if isinstance(converter, WeightConverter)]
        for stored, target in self._targets.items():
            name = stored
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)
            self._targets_by_renamed[name] = target
            if stored in self._checkpoint:  # marks the first converter that matches
                any(converter.rename_source_key(name)[1] is not None for converter in converters)
        return [self, *conversions]

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8WeightConverter:
        """Copy this converter, which the loader does for each parameter to collect its tensors."""
        copied = copy.copy(self)
        copied.collected_tensors, copied.layer_targets = defaultdict(list), defaultdict(set)
        return copied

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the parameter for a stored tensor, with the pattern; None as the pattern if this does not read it."""
        target = self._targets_by_renamed.get(source_key)
        return (source_key, None) if target is None else (target, _SOURCE_PATTERN)

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Keep the first tensor, which has the device and the dtype of the parameter, without reading it."""
        if not self.collected_tensors:
            super().add_tensor(target_key, source_key, source_pattern, future)

    def convert(self, layer_name: str, model: Any = None, *args: Any, **about: Any) -> dict[str, Tensor]:
        """Return the parameter `layer_name` of `model`. Raises ValueError for invalid codes or scales."""
        sample = self.materialize_tensors()[_SOURCE_PATTERN][0]
        if self._stored is not None and layer_name in self._stored.frozen:
            self._stored.store(model, layer_name, sample.dtype, sample.device)
            return {layer_name: model.get_parameter(layer_name)}
        tensor = self._loaded.read(layer_name, sample.dtype).to(sample.device)
        return {layer_name: self._operation.make_parameter(model, layer_name, tensor)}

"""What transformers' loader asks for the tensors of a model that a `QuaverConfig` loads.

`convert_and_load_state_dict_in_model` of transformers 5 goes through the tensors of a checkpoint, and sets one
parameter of the model after the other. It asks

    QuaverWeights(...)              for a parameter in high precision, to freeze it, or to transpose GPT-2's: the
                                    operation that it runs on the tensor that it has read
    Float8Tensors(...)              for every parameter of a float8 checkpoint, by the checkpoint's names: the converter
                                    in front of those of the model. It reads codes and scales, matrix by matrix

Both return what the loader sets, on the device of `device_map`; a parameter at a time is in high precision.
"""

from __future__ import annotations

import copy
import itertools
import typing
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
from quaver.recipes.scaling import amax

_PATTERN = "float8 tensors of quaver"
"""The source pattern under which transformers' loader collects the tensors of a `Float8Tensors`."""


class QuaverWeights(ConversionOps):
    """Makes of a tensor in high precision what a converted model holds.

    Args:
        frozen: the names of the weights that are frozen.
        config: of their modules.
    """

    def __init__(self, frozen: Container[str], config: Float8LinearConfig | None) -> None:
        self._frozen, self._config = frozen, config
        self.problem: ValueError | None = None
        """The first error: transformers would raise a RuntimeError with the traceback of each."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **about: Any
    ) -> dict[str, list[Tensor]]:
        """The parameters of the tensors in `input_dict`, by name in the model, which `about` has."""
        tensors = {name: each if isinstance(each, list) else [each] for name, each in input_dict.items()}
        try:
            return {name: [self.parameter(about["model"], name, each[0])] for name, each in tensors.items()}
        except ValueError as error:
            self.problem = self.problem or error
            return tensors

    def parameter(self, model: nn.Module, name: str, tensor: Tensor) -> Tensor:
        """The parameter `name` of `model` with the values `tensor`. Raises ValueError for one that cannot be frozen."""
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, Conv1DLinear) and leaf == "weight":
            tensor = tensor.t().contiguous()
        if name not in self._frozen:
            return tensor
        expected = getattr(module, leaf).shape
        if tensor.shape != expected:
            raise ValueError(f"{name}: expected {list(expected)}, as the model has, got {list(tensor.shape)}")
        if not bool(amax(tensor).isfinite()):
            raise ValueError(f"the weight {name} holds NaN or inf, so it cannot be frozen in float8")
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
        freeze_weight(ModuleWeight(typing.cast(Any, module), leaf), typing.cast(Float8LinearConfig, self._config))
        return typing.cast(Tensor, getattr(module, leaf))


class Float8Tensors(WeightConverter):
    """The converter of a float8 checkpoint: reads what has float8 codes; the model's own converters read the rest.

    Args:
        model: whose parameters are on the meta device.
        checkpoint: that is read.
        loaded: its tensors under the names of the model.
        stored: the weights that the model holds as codes; None for none.
        operation: for the tensors that are dequantized.
    Attributes:
        names: the parameters of the model that it reads.
    Raises:
        ValueError: a shape differs from the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Float8Checkpoint,
        loaded: ModelTensors,
        stored: StoredWeights | None,
        operation: QuaverWeights,
    ) -> None:
        super().__init__(_PATTERN, "", [operation])
        self._checkpoint, self._loaded, self._stored, self._operation = checkpoint, loaded, stored, operation
        self._target: dict[str, str] = {}
        self._renamed: dict[str, str] = {}
        in_model = model.state_dict()
        float8 = set(checkpoint.float8_names)
        for name, stack in loaded.parts.items():
            parts = list(itertools.chain(*stack))
            if name in loaded.tied or name not in in_model or (name not in loaded.stacks and float8.isdisjoint(parts)):
                continue
            if loaded.shape(name) != list(in_model[name].shape):
                raise ValueError(
                    f"{name}: expected {list(in_model[name].shape)}, as the model has, got {loaded.shape(name)}"
                )
            self._target |= dict.fromkeys(parts, name)
        if self._target:  # the loader reports every other name as unexpected
            first = next(iter(self._target.values()))
            self._target |= dict.fromkeys(checkpoint.scales_beside, first)
        self.names = set(self._target.values())

    def in_front_of(self, conversions: list[Any]) -> list[Any]:
        """`conversions` of the model behind this one. The converters that read the same names count as used.

        transformers saves a model by the reverse of those that were used.
        """
        renamings = copy.deepcopy([each for each in conversions if isinstance(each, WeightRenaming)])
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        for stored, target in self._target.items():
            name = stored
            for each in renamings:
                name, _ = each.rename_source_key(name)
            self._renamed[name] = target
            if stored in self._checkpoint:
                any(each.rename_source_key(name)[1] is not None for each in converters)
        return [self, *conversions]

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Tensors:
        """The loader copies a converter for each parameter, to collect its tensors."""
        copied = copy.copy(self)
        copied.collected_tensors, copied.layer_targets = defaultdict(list), defaultdict(set)
        return copied

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The parameter of a tensor of the checkpoint that it reads, with its pattern."""
        target = self._renamed.get(source_key)
        return (source_key, None) if target is None else (target, _PATTERN)

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Keep the first tensor, which tells the device and the dtype of the parameter; it is not read yet."""
        if not self.collected_tensors:
            super().add_tensor(target_key, source_key, source_pattern, future)

    def convert(self, layer_name: str, model: Any = None, *args: Any, **about: Any) -> dict[str, Tensor]:
        """The parameter `layer_name` of `model`. Raises ValueError for codes or scales that it cannot have."""
        sample = self.materialize_tensors()[_PATTERN][0]
        if self._stored is not None and layer_name in self._stored.frozen:
            self._stored.store(model, layer_name, sample.dtype, sample.device)
            return {layer_name: model.get_parameter(layer_name)}
        tensor = self._loaded.read(layer_name, sample.dtype).to(sample.device)
        return {layer_name: self._operation.parameter(model, layer_name, tensor)}

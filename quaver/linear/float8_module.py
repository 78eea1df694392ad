"""`Float8Module`: the state that all modules with float8 matmuls have, a Float8Linear and experts."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from quaver.kernels.operands import Operands
from quaver.linear.class_change import change_class
from quaver.linear.last_run import LastRun
from quaver.linear.protocols import NO_PROBE, CastOnceOperands, GatherState, MatmulProbe
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.torch_private.autograd import find_checkpoint_frame, is_checkpoint_hook, top_saved_tensors_hooks

_cast_once_by_frame: WeakKeyDictionary[Any, dict[tuple[int, str], Operands]] = WeakKeyDictionary()
"""Operands of a checkpoint's forward in an open `cast_weights_once`: by its frame, module's id and weight's name."""


class Float8Module(nn.Module):
    """Base class of modules whose matmuls run in float8.

    The state of a weight is stored under the name of its parameter, which in a Float8Linear is "weight".
    """

    _float8_attributes: ClassVar[tuple[str, ...]] = (
        "float8_config",
        "_float8_config",
        "all_gather_state",
        "cast_once_weights",
        "probes",
        "_last_run",
    )
    """The attributes that the float8 class adds to the original class."""
    _describe_backends: ClassVar[Callable[..., str]]
    """Returns the backends of the module's matmuls with a config on a device; see `backends.describe_backends`."""
    _float8_config: Float8LinearConfig
    all_gather_state: GatherState | None
    """Set if FSDP2 all-gathers the weights in float8 (fsdp/all_gather_weight.py)."""
    cast_once_weights: dict[str, CastOnceOperands]
    """Quantized weights by name, while a `cast_weights_once` is open."""
    config_observers: Sequence[Callable[[], None]] = ()
    """Called when the module has a new config (parallel/input_all_gather.py). They outlive a conversion back."""
    probes: Mapping[str, MatmulProbe] | None = None
    """Probes by the name of the weight, while a monitor is attached (numerics/monitoring.py)."""
    _last_run: LastRun

    def _init_float8(self, config: Float8LinearConfig) -> None:
        """Initialize `_float8_attributes`, in the constructor of the float8 class or after `change_to_float8`."""
        self._float8_config = config
        self.all_gather_state = None
        self.cast_once_weights = {}
        self._last_run = self._make_last_run()
        for observe in self.config_observers:
            observe()

    @property
    def float8_config(self) -> Float8LinearConfig:
        """The config. It may be set to a config, a recipe or a recipe's name. torchao names it `config` on a linear."""
        return self._float8_config

    @float8_config.setter
    def float8_config(self, config: Float8LinearConfig | Float8LinearRecipeName | str) -> None:
        if config is None:
            raise TypeError("config: expected a config, a recipe or a recipe's name, got None")
        config = resolve_config(config)
        self.check_config(config)
        self._float8_config = config
        for observe in self.config_observers:
            observe()

    def check_config(self, config: Float8LinearConfig) -> None:
        """Raise ValueError if the module cannot run with `config`, given its scale slots and its sharding."""
        raise NotImplementedError

    def _make_last_run(self) -> LastRun:
        had_grad = any(weight.grad is not None for weight in self.parameters(recurse=False))
        return LastRun(self._get_code_sharing_kind(), had_grad)

    def _get_code_sharing_kind(self) -> str:
        return "experts"

    def get_cast_once_operands(self, name: str) -> Operands | None:
        """Return the operands that a forward multiplies by instead of quantizing the weight `name`, or None.

        A checkpoint's recomputation must dispatch and save the same as its forward, even if a `cast_weights_once` was
        opened or closed between the two. So an eager forward stores its operands with the checkpoint's frame, and the
        recomputation multiplies by them. Other eager forwards check that the weight did not change.
        """
        cast_once = self.cast_once_weights.get(name)
        if torch.compiler.is_compiling():
            return None if cast_once is None else cast_once.operands
        hooks: Any = top_saved_tensors_hooks(True)
        checkpoint = find_checkpoint_frame(hooks) if is_checkpoint_hook(hooks) else None
        if checkpoint is not None:
            frame, is_recomputed = checkpoint
            if is_recomputed:
                return _cast_once_by_frame.get(frame, {}).get((id(self), name))
            if cast_once is not None:
                _cast_once_by_frame.setdefault(frame, {})[id(self), name] = cast_once.operands
        if cast_once is None:
            return None
        cast_once.check(getattr(self, name))
        return cast_once.operands

    def get_probe(self, name: str) -> MatmulProbe:
        """Return the probe of the weight `name` for a forward."""
        return self.probes[name] if self.probes is not None and self.training else NO_PROBE

    def extra_repr(self) -> str:
        recipe = self.float8_config.recipe_name
        name = f"recipe={recipe.value}, " if recipe else ""
        before = super().extra_repr()
        return f"{before}{', ' if before else ''}{name}cast_configs={self.float8_config.short_str()}"

    def __getstate__(self) -> dict[str, Any]:
        # These belong to an open scope, to a model and to this module; probes belong to a monitor.
        state = {**self.__dict__, "cast_once_weights": {}, "all_gather_state": None, "_last_run": self._make_last_run()}
        state.pop("probes", None)
        return state


Float8 = TypeVar("Float8", bound=Float8Module)


def list_taken_attributes(module: nn.Module, float8: type[Float8Module]) -> list[str]:
    """Return the names of attributes of `module` that the class `float8` would replace."""
    return [name for name in float8._float8_attributes if hasattr(module, name)]


def change_to_float8(module: nn.Module, float8: type[Float8], config: Float8LinearConfig) -> Float8:
    """Convert `module` in place to the class `float8`: same object, parameters, hooks and attributes."""
    change_class(module, float8=float8)
    converted = typing.cast(Float8, module)
    converted._init_float8(config)
    return converted


def restore_class(module: Float8Module) -> None:
    """Convert `module` back in place to its original class, without the attributes of the float8 class."""
    names = module._float8_attributes
    change_class(module, float8=None)
    for name in names:
        vars(module).pop(name, None)

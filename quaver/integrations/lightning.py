"""Lightning's Trainer and Fabric, of `lightning` or `pytorch_lightning`: float8 as a precision plugin.

    Trainer(plugins=[Float8Precision("rowwise")])
    Fabric(plugins=[Float8FabricPrecision("rowwise")])
    Trainer(..., callbacks=[Float8Monitor(every=100)])    # writes numerics.jsonl; see docs/monitor.md

The plugins convert the module before it is sharded and run forwards under bfloat16 autocast. After each optimizer step
they update the delayed scales of the modules that it stepped, and the scales of their float8 all-gathers. The Trainer's
checkpoints hold the persistent scales. Under Fabric save `float8_scaling_state(model)` with the model.

Both packages have the same classes, and each accepts only its own. The plugins therefore derive from the classes of all
installed packages, beginning with the packages that the program imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import weakref
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from quaver.conversion.convert import ModuleFilter, convert_to_float8_training
from quaver.conversion.persistent_scales import (
    float8_scaling_state,
    load_checkpoint_scales,
    sync_float8_amax_and_scale_history,
)
from quaver.fsdp.weight_group import precompute_scales
from quaver.numerics.monitoring import Monitor
from quaver.numerics.record import RECORD_FILE_NAME
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config


def _combine_bases(names: dict[str, str], attribute: str, submodule: str = "") -> Any:
    """Return a class that derives from the class `attribute` in each installed package, imported packages first.

    Args:
        names: the module of the Trainer or of Fabric, by package.
        attribute: the name of the class.
        submodule: the submodule of the class, after a dot.
    """
    installed = [package for package in names if importlib.util.find_spec(package) is not None]
    if not installed:
        raise ImportError(f"expected {' or '.join(names)} to be installed, got neither; pip install lightning")
    installed.sort(key=lambda package: package not in _imported_packages)
    modules = [importlib.import_module(names[package] + submodule) for package in installed]
    return type(attribute, tuple(getattr(module, attribute) for module in modules), {})


_TRAINER_MODULES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_FABRIC_MODULES = {"lightning": "lightning.fabric", "lightning_fabric": "lightning_fabric"}
_imported_packages = {package for package in (*_TRAINER_MODULES, *_FABRIC_MODULES) if package in sys.modules}
_TrainerPrecision: Any = _combine_bases(_TRAINER_MODULES, "Precision", ".plugins.precision")
_FabricPrecision: Any = _combine_bases(_FABRIC_MODULES, "Precision", ".plugins.precision")
_Callback: Any = _combine_bases(_TRAINER_MODULES, "Callback")


class _PrecisionPlugin:
    """Shared base of the precision plugins of Trainer and Fabric.

    Args:
        config: as `convert_to_float8_training` takes it.
        module_filter_fn: as `convert_to_float8_training` takes it; names begin at the LightningModule.
        autocast_dtype: the dtype of autocast for everything except float8 matmuls; None for no autocast.
    Raises:
        ValueError: an unknown recipe.
        TypeError: `config` has a wrong type, or `module_filter_fn` is not a function.
    """

    precision: Any = "bf16-mixed"

    def __init__(
        self,
        config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
        *,
        module_filter_fn: ModuleFilter | None = None,
        autocast_dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        resolve_config(config)
        if module_filter_fn is not None and not callable(module_filter_fn):
            raise TypeError(f"module_filter_fn: expected a function of a module and its name, got {module_filter_fn!r}")
        self.config, self.module_filter_fn, self.autocast_dtype = config, module_filter_fn, autocast_dtype
        self._module_refs: list[weakref.ref[nn.Module]] = []
        """The converted modules, the last one at the end."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the module in place. Raises RuntimeError if a strategy has already sharded it."""
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise RuntimeError(
                "this module is sharded before Lightning converts it (ModelParallelStrategy): call "
                "convert_to_float8_training at the beginning of configure_model, before fully_shard, and leave "
                "the plugin out"
            )
        convert_to_float8_training(module, config=self.config, module_filter_fn=self.module_filter_fn)
        self._module_refs = [other for other in self._module_refs if other() not in (None, module)]
        self._module_refs.append(weakref.ref(module))
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return an autocast for the device of the modules."""
        parameters = (parameter for module in self._list_modules() for parameter in module.parameters())
        parameter = next(parameters, None)
        device_type = "cpu" if parameter is None else parameter.device.type
        return torch.autocast(device_type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def _list_modules(self) -> list[nn.Module]:
        return [module for reference in self._module_refs if (module := reference()) is not None]

    def _update_scales(self, optimizer: Any) -> None:
        """Update the scales of the modules that `optimizer` has stepped."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        modules = self._list_modules()
        owners = [module for module in modules if any(id(parameter) in stepped for parameter in module.parameters())]
        for module in owners or modules:  # FSDP1's flat parameters belong to no module inside
            sync_float8_amax_and_scale_history(module)
            precompute_scales(module)


class Float8Precision(_PrecisionPlugin, _TrainerPrecision):
    """The plugin of Lightning's Trainer."""

    def state_dict(self) -> dict[str, Any]:
        """Return the persistent scales of the last converted module, whose weights the Trainer's checkpoint holds."""
        modules = self._list_modules()
        return {**float8_scaling_state(modules[-1]).state_dict()} if modules else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        modules = self._list_modules()
        if modules:
            load_checkpoint_scales(float8_scaling_state(modules[-1]), state_dict, "the checkpoint")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Log that a checkpoint has no scales. Lightning then does not call `load_state_dict`."""
        super().on_load_checkpoint(checkpoint)
        if type(self).__qualname__ not in checkpoint:
            self.load_state_dict({})

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **options: Any) -> Any:
        result = super().optimizer_step(optimizer, model, closure, **options)
        self._update_scales(optimizer)
        return result


class Float8Monitor(_Callback):
    """A callback of Lightning's Trainer that samples the numerics of float8 matmuls.

    Args:
        every: the number of optimizer steps between samples.
        options: further options of `quaver.monitor`. `sink` is by default numerics.jsonl in the Trainer's log folder.
    Raises:
        TypeError: `quaver.monitor` has no such option, or the callback gives it itself.
    """

    def __init__(self, every: int = 100, **options: Any) -> None:
        self._options = {"every": every, **options}
        inspect.signature(Monitor).bind(None, completed_steps=0, **self._options)  # raises now, not in training
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Attach the monitor, after the strategy converted and sharded the module."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if trainer.is_global_zero:
            with suppress(OSError):  # the monitor raises it on all ranks
                folder.mkdir(parents=True, exist_ok=True)
        options = {"sink": folder / RECORD_FILE_NAME, **self._options}
        self.monitor = Monitor(pl_module, completed_steps=trainer.global_step, **options)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


class Float8FabricPrecision(_PrecisionPlugin, _FabricPrecision):
    """The plugin of Lightning's Fabric."""

    def optimizer_step(self, optimizer: Any, **options: Any) -> Any:
        result = super().optimizer_step(optimizer, **options)
        self._update_scales(optimizer)
        return result

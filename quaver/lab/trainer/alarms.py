"""Acts on the alarms of a run: shows them, stops with a checkpoint, or changes the recipe of a linear.

The first rank has the record and raises the alarms. After sampled steps it tells the other ranks what to do.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from quaver import conversion_report, convert_to_float8_training, convert_to_high_precision
from quaver.conversion.layer_recipes import HIGH_PRECISION
from quaver.conversion.persistent_scales import float8_scaling_state
from quaver.export.folders import NotWrittenError
from quaver.lab.runs.checkpoint import Checkpointer
from quaver.lab.runs.errors import OutputFailures, convert_to_not_written
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.settings import Float8, Numerics
from quaver.lab.trainer.display import Display
from quaver.lab.trainer.float8 import fuse_producers, make_linear_config
from quaver.lab.trainer.mixture import Experts
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.numerics.alarm_sink import AlarmSink
from quaver.numerics.alarms import Alarm, AlarmCleared, Alarms
from quaver.numerics.record import Sink
from quaver.numerics.rules import REMEDIED_RULES
from quaver.runtime.errors import InputError, blame_input


@dataclass
class RunAlarms:
    """The alarms of a run, on every rank. Only the first rank receives them."""

    config: Numerics
    display: Display
    model: nn.Module
    """The model whose linears and experts fall back."""
    fallen_back: set[str]
    """The layers that have fallen back. A linear, and all weights of a layer's experts, fall back once."""
    stop_reason: str = ""
    """The first alarm that stops the run."""
    fallbacks: dict[str, str] = field(default_factory=dict)
    """Layers to change after this step, with their new recipe."""
    sink: AlarmSink | None = None
    """The sink of the monitor, on the first rank."""

    def make_sink(self, sink: Sink, folder: RunFolder, failures: OutputFailures) -> AlarmSink:
        """Return a sink that passes lines on to `sink` and raises alarms.

        A resumed run recalls earlier bad values, so it changes a recipe in the same step as an uninterrupted run. With
        on_alarm = stop it recalls nothing: the alarm that stopped the run would stop it again.
        """
        alarms = Alarms(action=self.config.on_alarm)
        recalls = None if self.config.on_alarm == "stop" else folder.numerics_path
        files = {"post_mortem": folder.post_mortem_path, "recalls": recalls}
        return _RunSink(failures, folder, sink, alarms=alarms, on_event=self._handle_event, **files)

    def take_fallbacks(self) -> dict[str, str]:
        """Return the layers to change now, and forget them."""
        taken, self.fallbacks = self.fallbacks, {}
        return taken

    def _handle_event(self, event: Alarm | AlarmCleared) -> None:
        if isinstance(event, AlarmCleared):
            self.display.print_line(f"step {event.step}: {event.message}")
            return
        self.display.print_line(f"step {event.step}: alarm: {event.message}")
        if self.config.on_alarm == "stop" and not self.stop_reason:
            self.stop_reason = event.message
        elif self.config.on_alarm == "fallback" and event.rule in REMEDIED_RULES:
            module = _find_module_name(self.model, event.layer)
            if module not in self.fallen_back:
                self.fallen_back.add(module)
                self.fallbacks[module] = self.config.fallback_recipe


class _RunSink(AlarmSink):
    """Keeps its errors, which end the run on all ranks, instead of raising them in the first rank's monitor."""

    def __init__(self, failures: OutputFailures, folder: RunFolder, sink: Sink, **options: Any) -> None:
        super().__init__(sink, **options)
        self._failures, self._folder = failures, folder

    def write(self, line: dict[str, Any]) -> None:
        with self._failures.catch(), convert_to_not_written(self._folder.post_mortem_path):
            try:
                super().write(line)
            except InputError as error:  # a line of an earlier start is damaged
                raise NotWrittenError(str(error)) from error


def fall_back(trained: TrainedModel, checkpoints: Checkpointer, layers: dict[str, str]) -> None:
    """Change the recipes of linears during training. `trained.config` is updated to name these recipes.

    Parameters, their gradients and the optimizer's state stay. All weights of a layer of experts change together.
    Later checkpoints have the new config. Discards all code that this process has compiled, so that the next step
    compiles the blocks with their new recipes.

    Raises:
        InputError: a layer is not in this model, or the config allows no layer recipes; nothing has changed.
    """
    model, config, float8 = trained.model, trained.config, trained.config.float8
    with blame_input():
        changes = {_find_module_name(model, name): recipe for name, recipe in layers.items()}
    recipes = {**dict(float8.parse_layer_recipes().layers), **changes}
    entries = tuple(f"{name}={recipe}" for name, recipe in recipes.items())
    trained.config = replace(config, float8=replace(float8, layer_recipes=entries))
    for name, recipe in changes.items():
        _convert_layer(model.get_submodule(name), float8, recipe)
    if float8.fused_producers:
        fuse_producers(model)
    torch.compiler.reset()
    trained.scaling = float8_scaling_state(model)
    report = conversion_report(model).to_dict()
    checkpoints.description = checkpoints.description | {"config": asdict(trained.config), "conversion_report": report}


def _find_module_name(model: nn.Module, name: str) -> str:
    """Return the name of the linear, or of the experts that own the weight `name`. Raises ValueError if none is."""
    modules = dict(model.named_modules())
    for module_name in (name, name.rpartition(".")[0]):
        if isinstance(modules.get(module_name), (nn.Linear, Experts)):
            return module_name
    raise ValueError(f"{name!r} is neither a linear nor an expert weight of this model")


def _convert_layer(module: nn.Module, config: Float8, recipe: str) -> None:
    convert_to_high_precision(module)
    if recipe != HIGH_PRECISION:
        convert_to_float8_training(module, config=make_linear_config(config, recipe))

"""What a run does about alarms: it shows them, stops with a checkpoint, or changes the recipe of a linear.

The first rank has the record and raises the alarms; every rank learns what is to be done from it, after steps that were
sampled.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from quaver import conversion_report, convert_to_float8_training, convert_to_high_precision
from quaver.layer_recipes import HIGH_PRECISION
from quaver.numerics.alarms import Alarm, Alarms, Cleared
from quaver.numerics.rules import REMEDIED
from quaver.numerics.watch import AlarmSink, LineSink
from quaver.trainer.config import Float8, Numerics, TrainConfig
from quaver.trainer.display import Display
from quaver.trainer.float8 import fuse_producers, linear_config
from quaver.trainer.model import Llama
from quaver.trainer.run_folder import RunFolder


@dataclass
class RunAlarms:
    """The alarms of a run, on every rank; only the first one hears them."""

    config: Numerics
    display: Display
    reason: str = ""
    """The first alarm that stops the run."""
    fallbacks: dict[str, str] = field(default_factory=dict)
    """Layers to change after this step, with their new recipe."""
    done: set[str] = field(default_factory=set)

    def sink(self, sink: LineSink, folder: RunFolder) -> AlarmSink:
        """A sink in front of another one that hears the alarms."""
        alarms = Alarms(action=self.config.on_alarm)
        return AlarmSink(sink, alarms=alarms, on_event=self._hear, post_mortem=folder.post_mortem)

    def take_fallbacks(self) -> dict[str, str]:
        """The layers to change now."""
        taken, self.fallbacks = self.fallbacks, {}
        self.done |= taken.keys()
        return taken

    def _hear(self, event: Alarm | Cleared) -> None:
        if isinstance(event, Cleared):
            self.display.line(f"step {event.step}: {event.rule} of {event.layer} {event.operand} has ended")
            return
        self.display.line(f"step {event.step}: alarm: {event.message}")
        if self.config.on_alarm == "stop" and not self.reason:
            self.reason = event.message
        elif self.config.on_alarm == "fallback" and event.rule in REMEDIED and event.layer not in self.done:
            self.fallbacks[event.layer] = self.config.fallback_recipe


def fall_back(model: Llama, config: TrainConfig, layers: dict[str, str]) -> TrainConfig:
    """Give linears of a model that trains other recipes; return the config of a run that has them from its beginning.

    Parameters, their gradients and the optimizer's state stay. Compiled code is compiled anew. A layer of experts is
    changed with all of its weights.
    """
    float8, recipes = config.float8, dict(config.float8.by_layer.layers)
    for name, recipe in layers.items():
        module_name = _module_of(model, name)
        _change(model.get_submodule(module_name), float8, recipe)
        recipes[module_name] = recipe
    if float8.fused_producers:
        fuse_producers(model)
    torch.compiler.reset()
    entries = tuple(f"{name}={recipe}" for name, recipe in recipes.items())
    return replace(config, float8=replace(float8, layer_recipes=entries))


def _module_of(model: nn.Module, name: str) -> str:
    """The linear, or the experts whose weight it is."""
    names = dict(model.named_modules())
    return name if name in names else name.rpartition(".")[0]


def _change(module: nn.Module, config: Float8, recipe: str) -> None:
    convert_to_high_precision(module)
    if recipe != HIGH_PRECISION:
        convert_to_float8_training(module, config=linear_config(config, recipe))


def described(config: TrainConfig, model: Llama) -> dict[str, Any]:
    """What checkpoints say of a run whose recipes changed."""
    return {"config": asdict(config), "conversion_report": conversion_report(model).to_dict()}

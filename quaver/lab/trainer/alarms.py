"""Acts on the alarms of a run: shows them, stops with a checkpoint, or changes the recipe of a linear.

The first rank has the record and raises the alarms. After sampled steps it tells the other ranks what to do.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from quaver.lab.model.float8 import find_layer_name
from quaver.lab.runs.errors import OutputFailures, reraise_as_not_written
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.settings import Numerics
from quaver.lab.trainer.display import Display
from quaver.lab.trainer.numerics import close_monitor, open_monitor
from quaver.lab.trainer.recipe_change import change_recipes
from quaver.lab.trainer.training_run import TrainingRun
from quaver.numerics.alarm_rules import REMEDIED_RULES
from quaver.numerics.alarm_sink import AlarmSink
from quaver.numerics.alarms import Alarm, AlarmCleared, Alarms
from quaver.numerics.record import Sink


@dataclass
class RunAlarms:
    """The alarms of a run. Only the first rank receives them."""

    config: Numerics
    display: Display
    model: nn.Module
    """The model whose linears and experts fall back."""
    fallen_back: set[str]
    """The layers that have fallen back. A linear, and all weights of a layer's experts, fall back once."""
    stop_reason: str = ""
    """The first alarm that stops the run."""
    pending_fallbacks: dict[str, str] = field(default_factory=dict)
    """Layers to change after this step, with their new recipe."""
    sink: AlarmSink | None = None
    """The sink of the monitor, on the first rank."""

    def make_sink(self, sink: Sink, folder: RunFolder, failures: OutputFailures) -> AlarmSink:
        """Return a sink that passes lines on to `sink` and raises alarms.

        A resumed run recalls earlier bad values, so it changes a recipe in the same step as an uninterrupted run. With
        on_alarm = stop it recalls nothing: the alarm that stopped the run would stop it again.
        """
        alarms = Alarms(action=self.config.on_alarm)
        resumed_record = None if self.config.on_alarm == "stop" else folder.numerics_path
        files = {"post_mortem": folder.post_mortem_path, "resumed_record": resumed_record}
        return _RunSink(failures, folder, sink, alarms=alarms, on_event=self.handle_event, **files)

    def pop_fallbacks(self) -> dict[str, str]:
        """Return the layers to change now, and forget them."""
        taken, self.pending_fallbacks = self.pending_fallbacks, {}
        return taken

    def handle_event(self, event: Alarm | AlarmCleared) -> None:
        """Show an alarm, and note what it does to the run: a stop, or another recipe of its layer."""
        if isinstance(event, AlarmCleared):
            self.display.print_line(f"step {event.step}: {event.message}")
            return
        self.display.print_line(f"step {event.step}: alarm: {event.message}")
        if self.config.on_alarm == "stop" and not self.stop_reason:
            self.stop_reason = event.message
        elif self.config.on_alarm == "fallback" and event.rule in REMEDIED_RULES:
            module = find_layer_name(self.model, event.layer)
            if module not in self.fallen_back:
                self.fallen_back.add(module)
                self.pending_fallbacks[module] = self.config.fallback_recipe


class _RunSink(AlarmSink):
    """Keeps its errors, which end the run on all ranks, instead of raising them in the first rank's monitor."""

    def __init__(self, failures: OutputFailures, folder: RunFolder, sink: Sink, **options: Any) -> None:
        super().__init__(sink, **options)
        self._failures, self._folder = failures, folder

    def write(self, line: dict[str, Any]) -> None:
        with self._failures.catch(), reraise_as_not_written(self._folder.post_mortem_path):
            super().write(line)


def apply_fallbacks(run: TrainingRun, alarms: RunAlarms) -> None:
    """Change the recipes of the layers that alarms of the last step named. A collective."""
    step, trained = run.progress.step, run.models[0]
    if alarms.config.on_alarm != "fallback" or trained.monitor is None or not trained.monitor.is_sampled(step):
        return
    with run.watch_for_hangs(f"the fallback after step {step}"):
        layers: dict[str, str] = run.ranks.all_gather_objects(alarms.pop_fallbacks())[0]
        if not layers:
            return
        close_monitor(trained)
        run.checkpoints.update_description(change_recipes(trained, layers))
    run.progress.fallbacks |= layers
    for name, recipe in layers.items():
        alarms.display.print_line(f"step {step}: fallback: {name} computes in {recipe} from now on")
    open_monitor(trained, alarms.sink, completed_steps=step)

"""The monitor of a run's float8 model: opened, closed, and opened again after layers have fallen back."""

from quaver.lab.trainer.alarms import RunAlarms, fall_back
from quaver.lab.trainer.training_run import TrainingRun
from quaver.numerics.monitoring import Monitor


def open_monitor(run: TrainingRun, alarms: RunAlarms) -> None:
    """Sample the first model's numerics from the next step on. A collective."""
    numerics, model = run.config.numerics, run.models[0]
    model.monitor = Monitor(
        model.model,
        every=numerics.every,
        extras_every=numerics.extras_every,
        hardware=None if numerics.hardware == "none" else numerics.hardware,
        sink=alarms.sink,
        completed_steps=run.progress.step,
        steps_by_hand=True,
    )


def close_monitor(run: TrainingRun) -> None:
    """Close the monitor if it is open."""
    if run.models[0].monitor is not None:
        run.models[0].monitor.close()
        run.models[0].monitor = None


def apply_fallbacks(run: TrainingRun, alarms: RunAlarms) -> None:
    """Change the recipes of the layers that alarms of the last step named. A collective."""
    step, model = run.progress.step, run.models[0]
    if alarms.config.on_alarm != "fallback" or model.monitor is None or not model.monitor.is_sampled(step):
        return
    with run.watch(f"the fallback after step {step}"):
        layers: dict[str, str] = run.ranks.all_gather_objects(alarms.take_fallbacks())[0]
        if not layers:
            return
        close_monitor(run)
        fall_back(model, run.checkpoints, layers)
    run.flops_per_token[model.name] = model.count_flops_per_token()
    run.progress.fallbacks |= layers
    for name, recipe in layers.items():
        alarms.display.print_line(f"step {step}: fallback: {name} computes in {recipe} from now on")
    open_monitor(run, alarms)

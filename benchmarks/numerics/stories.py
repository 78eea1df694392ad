"""Trains with six faults and their remedies: the alarm, a picture of the run, and the effect of the remedy.

    python -m benchmarks.numerics.stories --runs /tmp/stories --update-docs               # all six
    python -m benchmarks.numerics.stories --runs /tmp/stories --only "dead expert"        # one

Each is a run of `quaver train` of 60 steps with a fault from step 31 on. Its remedy comes after step 40; the same run
without it is the control.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.numerics.faults import STORIES_PAGE, make_config
from benchmarks.numerics.inject import patch
from benchmarks.numerics.picture import draw_run
from benchmarks.numerics.scenarios import DOWN, EXPERTS, FAULTS, LAST, UP, Fault, get_expert_bias
from benchmarks.record import ROOT, show_tables
from quaver.lab.report.run import read_runs
from quaver.lab.report.statistics import STATISTICS
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.trainer.alarms import RunAlarms
from quaver.lab.trainer.train import train
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import TrainingRun, prepare_run
from quaver.numerics.record import Record

STEPS, REMEDY_AFTER = 60, 40
IMAGES = ROOT / "docs" / "images"
WIDTH, COLORS = 1000, 48
"""Pixels and colors of a picture in the page."""

Repair = Callable[[TrainedModel, dict[str, Any]], None]
"""Takes the trained model, and its states from before the fault."""


@dataclass(frozen=True)
class Story:
    """A fault, its remedy, and the statistic that shows the effect."""

    fault: str
    file: str
    remedy: str
    layer: str
    operand: str
    statistic: str
    shown: str
    """The statistic of the heat map in the picture."""
    recipe: str | None = None
    """The recipe for the linear if that is the remedy."""
    ends: bool = False
    """Whether the remedy removes the fault itself."""
    repair: Repair | None = None
    loss_factor: float = 1.0


def restore(trained: TrainedModel, before: dict[str, Any]) -> None:
    trained.model.load_state_dict(before["model"])
    trained.optimizer.load_state_dict(before["optimizer"])


def revive(trained: TrainedModel, before: dict[str, Any]) -> None:
    get_expert_bias(trained)[3] = 0.0


STORIES = (
    Story(
        *("an outlier channel x 2^17", "outlier", "mxfp8 for that linear"),
        *(UP, "input", "underflow", "underflow"),
        recipe="mxfp8",
    ),
    Story(
        *("gradients below e5m2's subnormals", "subnormals", "mxfp8 for that linear"),
        *(UP, "grad_output", "underflow", "underflow"),
        recipe="mxfp8",
    ),
    Story(
        *("an input grows x 1.5 a step, delayed", "growth", "tensorwise for that linear"),
        *(DOWN, "input", "sqnr_db", "amax"),
        recipe="tensorwise",
    ),
    Story(
        *("learning rate x 1000", "learning_rate", "the checkpoint of step 30, and its learning rate"),
        *("model.layers.0.mlp.down_proj", "weight", "rms", "amax"),
        ends=True,
        repair=restore,
    ),
    Story(
        *("a dead expert", "expert", "the router's bias as it was"),
        *(f"{EXPERTS}.experts.down_proj", "grad_weight", "zeros", "amax"),
        repair=revive,
    ),
    Story(
        *("loss x 1e-6", "loss_scale", "a loss scale of 1"),
        *(LAST, "grad_output", "rms", "amax"),
        ends=True,
        loss_factor=1e-6,
    ),
)


def train_story(story: Story, folder: Path, *, remedied: bool) -> Path:
    """Train with the fault, and with the remedy if `remedied`, unless the run exists. Returns the folder of the run."""
    if (folder / "summary.json").is_file():
        return folder
    (fault,) = (candidate for candidate in FAULTS if candidate.name == story.fault)
    numerics = {"every": 2, "on_alarm": "fallback"}
    config = make_config({**fault.settings, "numerics": numerics}, STEPS, str(folder.parent))
    config = replace(config, job=replace(config.job, name=folder.name))
    with ExitStack() as stack:
        run = prepare_run(config)
        stack.callback(run.folder.release)
        patch(stack, RunAlarms, "pop_fallbacks", lambda _: _choose_recipes(story, run) if remedied else {})
        run.models[0].train_step = _break_step(run, fault, story if remedied else None, stack)
        train(run)
    return folder


def _choose_recipes(story: Story, run: TrainingRun) -> dict[str, str]:
    return {story.layer: story.recipe} if story.recipe and run.progress.step == REMEDY_AFTER else {}


def _break_step(run: TrainingRun, fault: Fault, remedy: Story | None, stack: ExitStack) -> Callable[..., Any]:
    """Return a `train_step` with the fault, and with the remedy if there is one."""
    trained, original_step = run.models[0], run.models[0].train_step
    fault_stack = stack.enter_context(ExitStack())
    before: dict[str, Any] = {}

    def train_step(step: int, *args: Any, **options: Any) -> Any:
        if step == fault.first_step:
            before.update(
                model=deepcopy(trained.model.state_dict()), optimizer=deepcopy(trained.optimizer.state_dict())
            )
            fault.inject(trained, fault_stack)
        if remedy is not None and step == REMEDY_AFTER + 1:
            if remedy.ends:
                fault_stack.close()
            if remedy.repair is not None:
                remedy.repair(trained, before)
        return original_step(step, *args, **options)

    return train_step


def measure_story(story: Story, with_remedy: Path, without: Path) -> dict[str, Any]:
    """Return the statistic and the loss before the fault, with it, after the remedy, and without a remedy."""
    figures, losses = [], []
    for folder, steps in ((with_remedy, (30, 40, STEPS)), (without, (STEPS,))):
        record = Record.read(folder)
        by_step = {
            line["step"]: line["loss"] for line in read_json_lines(folder / "metrics.jsonl") if line["kind"] == "step"
        }
        for step in steps:
            figures.append(_find_statistic(record, story, step))
            is_scaled = step > 30 and not (folder == with_remedy and step > REMEDY_AFTER)
            losses.append(by_step[step] / (story.loss_factor if is_scaled else 1))
    named = next(line for line in Record.read(with_remedy).alarms if line["kind"] == "alarm" and line["since"] >= 31)
    return {"story": story.fault, "alarm": named, "figures": figures, "losses": losses}


def _find_statistic(record: Record, story: Story, step: int) -> float | None:
    """Return the statistic of the worst cast at a step; None without a cast."""
    row = record.steps.tolist().index(step)
    values = [
        float(record.statistics[story.statistic][row, at])
        for at, tensor in enumerate(record.tensors)
        if (tensor["layer"], tensor["operand"]) == (story.layer, story.operand)
    ]
    worst = min if story.statistic == "sqnr_db" else max
    return worst((value for value in values if not math.isnan(value)), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs; those that it has stay")
    parser.add_argument("--only", default="", help="those with this in the name of the fault")
    parser.add_argument("--update-docs", action="store_true", help="write docs/experiments/alarms.md and its pictures")
    options = parser.parse_args()
    results = []
    for story in (story for story in STORIES if options.only in story.fault):
        runs = [train_story(story, options.runs / f"{story.file}{end}", remedied=not end) for end in ("", "_control")]
        results.append(measure_story(story, *runs) | {"remedy": story.remedy, "statistic": story.statistic})
        image = runs[0] / "story.png"
        (run,) = read_runs(runs[:1])
        draw_run(image, run, next(statistic for statistic in STATISTICS if statistic.name == story.shown))
        if options.update_docs:
            shrink(image, IMAGES / f"story_{story.file}.png")
    (options.runs / "stories.json").write_text(json.dumps(results, indent=1))
    show_tables({"remedies": make_table(results)}, STORIES_PAGE, update=options.update_docs)


def shrink(image: Path, to: Path) -> None:
    """Write the picture `image` to `to`, smaller and in fewer colors."""
    whole = Image.open(image).convert("RGB")
    whole.thumbnail((WIDTH, WIDTH))
    whole.quantize(COLORS, dither=Image.Dither.NONE).save(to, optimize=True)


def make_table(results: list[dict[str, Any]]) -> str:
    rows = ["story | figure, at steps 30, 40, 60; 60 without remedy | loss at these | remedy", "---|---|---|---"]
    for result in results:
        figures = ", ".join("-" if value is None else f"{value:.3g}" for value in result["figures"])
        losses = ", ".join(f"{value:.3f}" for value in result["losses"])
        rows.append(f"{result['story']} | {result['statistic']} {figures} | {losses} | {result['remedy']}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

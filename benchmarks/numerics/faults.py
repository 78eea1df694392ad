"""Tests the alarms of a monitor: which alarms seeded faults raise, after how many samples, and healthy runs.

    python -m benchmarks.numerics.faults --update-docs               half an hour on two cores; writes
                                                                     benchmarks/results/numerics{_faults.json,.md}
    python -m benchmarks.numerics.faults --recorded --update-docs    the pages again, from the recorded runs
    python -m benchmarks.numerics.faults --only "weights of a layer" runs with this in the name, to the terminal

The runs are those of train_configs/llama3_debug.toml at a quarter of the width, on sequences of 64 tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.numerics.scenarios import FAULTS, HEALTHY, Fault, Healthy
from benchmarks.record import ROOT, describe_provenance, make_page_parser, record_and_show, show_tables
from quaver.lab.data import Batch
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.config_file import load_config
from quaver.lab.trainer.nonfinite import NonFiniteError
from quaver.lab.trainer.training_run import TrainingRun, prepare_run
from quaver.numerics.alarms import Alarm, AlarmCleared, Alarms
from quaver.numerics.monitoring import Monitor
from quaver.numerics.record import Record, RecordWriter

STORIES_PAGE = ROOT / "docs" / "experiments" / "alarms.md"
PAGE = ROOT / "benchmarks" / "results" / "numerics.md"
RECORD = ROOT / "benchmarks" / "results" / "numerics_faults.json"
STORIES = (
    "an outlier channel x 2^17",
    "gradients below e5m2's subnormals",
    "an input grows x 1.5 a step, delayed",
    "learning rate x 1000",
    "a dead expert",
    "loss x 1e-6",
)
SMALL = {
    "model": {"dim": 64, "hidden_dim": 192},
    "training": {"seq_len": 64, "local_batch_size": 4, "device": "cpu"},
    "lr_scheduler": {"warmup_steps": 20, "schedule": "constant"},
    "validation": {"freq": 1_000_000},
    "checkpoint": {"enable": False},
}


class Named(Protocol):
    """A run with a name."""

    @property
    def name(self) -> str: ...


def make_config(settings: dict[str, dict[str, Any]], steps: int, folder: str) -> TrainConfig:
    flags = {section: {**values} for section, values in SMALL.items()}
    for section, values in settings.items():
        flags.setdefault(section, {}).update(values)
    flags["training"]["steps"] = steps
    flags["job"] = {"dump_folder": folder}
    base = "llama3_debug_mixture.toml" if "n_experts" in flags["model"] else "llama3_debug.toml"
    return load_config(ROOT / "train_configs" / base, flags)


class RecordingSink:
    """The sink of a monitor, which gives each sample to alarms."""

    def __init__(self, record: Path | None = None) -> None:
        self.alarms, self.events, self.samples = Alarms(), [], []
        self.header: dict[str, Any] = {}
        self.writer = RecordWriter(record) if record else None

    def write(self, line: dict[str, Any]) -> None:
        if self.writer:
            self.writer.write(line)
        if line["kind"] == "header":
            self.header = line
        elif line["kind"] == "sample":
            self.samples.append(line["step"])
            self.events += self.alarms.update(self.header, line)

    def close(self) -> None:
        if self.writer:
            self.writer.close()

    @property
    def raised(self) -> list[Alarm]:
        return [event for event in self.events if isinstance(event, Alarm)]


def run_monitored(scenario: Fault | Healthy, records: Path | None = None) -> RecordingSink:
    """Run a scenario to its end, or to a NaN or an inf. Its record goes to the folder `records`."""
    sink = RecordingSink(make_record_path(scenario, records) if records else None)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if isinstance(scenario, Healthy) and scenario.kind == "lora":
            _train_lora(scenario, folder, sink)
            return sink
        run = prepare_run(make_config(scenario.settings, 1000, folder))
        stack.callback(run.folder.release)
        if isinstance(scenario, Healthy) and scenario.kind == "finetune":
            _run_steps(run, range(1, 61))
            run.models[0].config = replace(run.config, optimizer=replace(run.config.optimizer, lr=3e-5))
        with Monitor(run.models[0].model, every=scenario.every, sink=sink) as monitor:
            run.models[0].monitor = monitor
            if isinstance(scenario, Healthy):
                _run_steps(run, range(1, scenario.steps + 1))
                return sink
            _run_steps(run, range(1, scenario.first_step))
            scenario.inject(run.models[0], stack)
            with suppress(NonFiniteError):  # the trainer repeats such a step first, and the monitor samples it
                _run_steps(run, range(scenario.first_step, scenario.steps + 1), scenario.change_batch)
    return sink


def replay(scenario: Named, records: Path) -> RecordingSink:
    """Give a recorded run to new alarms."""
    sink = RecordingSink()
    for line in Record.read(make_record_path(scenario, records), keeps_lines=True).lines:
        sink.write(line)
    return sink


def make_record_path(scenario: Named, records: Path) -> Path:
    return records / f"{scenario.name.replace('/', ' of ')}.jsonl"


def _run_steps(run: TrainingRun, steps: range, change: Callable[[Batch], Batch] | None = None) -> None:
    training = run.config.training
    for step in steps:
        batches = run.data.make_step_batches(training, (step - 1) * training.step_batch_size)
        run.models[0].train_step(step, [change(batch) if change else batch for batch in batches])


def _train_lora(scenario: Healthy, folder: str, sink: RecordingSink) -> None:
    """Train adapters of PEFT on a frozen float8 base of transformers."""
    import peft
    import transformers

    from quaver.integrations.transformers import prepare_model_for_float8

    config = make_config(scenario.settings, 1000, folder)
    run = prepare_run(config)
    run.folder.release()
    torch.manual_seed(config.training.seed)
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, num_key_value_heads=2, **shape))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    prepare_model_for_float8(adapted, config.float8.recipe_name)
    optimizer = torch.optim.AdamW([parameter for parameter in adapted.parameters() if parameter.requires_grad], lr=1e-3)
    with Monitor(adapted, every=scenario.every, sink=sink):
        for step in range(scenario.steps):
            (batch,) = run.data.make_step_batches(config.training, step * config.training.step_batch_size)
            adapted(input_ids=batch.tokens, labels=batch.tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def judge(fault: Fault, sink: RecordingSink) -> dict[str, Any]:
    """Return whether an alarm named the fault, after how many samples, and all alarms."""
    raised = sink.raised
    before = [alarm for alarm in raised if alarm.step < fault.first_step]
    after = [alarm for alarm in raised if alarm.step >= fault.first_step]
    right = next((alarm for alarm in after if _is_named(fault, alarm)), None)
    steps = [step for step in sink.samples if step >= fault.first_step]
    return {
        "fault": fault.name,
        "found": right is not None,
        "first": after[:1] == [right] if right else False,
        "samples": steps.index(right.step) + 1 if right else None,
        "alarms": [shorten(alarm) for alarm in after],
        "before": [shorten(alarm) for alarm in before],
        "expected": list(fault.rules),
        "layer": fault.layer,
        "operand": fault.operand,
    }


def _is_named(fault: Fault, alarm: Alarm) -> bool:
    return (
        alarm.rule in fault.rules
        and (fault.layer is None or alarm.layer.startswith(fault.layer))
        and (fault.operand is None or alarm.operand == fault.operand)
    )


def shorten(alarm: Alarm) -> dict[str, Any]:
    names = ("step", "since", "rule", "layer", "operand", "value", "threshold", "message")
    return {
        name: value if not isinstance(value := getattr(alarm, name), float) else float(f"{value:.4g}") for name in names
    }


def make_tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the table of results/numerics.md by name."""
    faults, healthy = results["faults"], results["healthy"]
    found, quiet = sum(fault["found"] for fault in faults), sum(not run["alarms"] for run in healthy)
    lines = make_grouped_table(
        "alarm | faults that it named, and after how many samples", map(_describe_outcome, faults)
    )
    counts = f"{found} of {len(faults)} faults were named; {quiet} of {len(healthy)} healthy runs raised no alarm"
    return {"faults": f"{lines}\n\n{counts}{describe_exceptions(healthy)}"}


def make_story_table(faults: list[dict[str, Any]]) -> str:
    """Return the table of docs/experiments/alarms.md."""
    stories = [f"{fault['fault']} | {_find_message(fault)}" for fault in faults if fault["fault"] in STORIES]
    return "\n".join(["story | alarm", "---|---", *stories])


def make_grouped_table(head: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return a table with a row for each first string of `pairs`, and its second strings in one cell."""
    groups: dict[str, list[str]] = {}
    for group, name in pairs:
        groups.setdefault(group, []).append(name)
    return "\n".join([head, "---|---", *(f"{group} | {'; '.join(names)}" for group, names in groups.items())])


def describe_exceptions(healthy: list[dict[str, Any]]) -> str:
    """Return the end of a sentence on healthy runs: the runs with alarms, and their first alarm of each rule."""
    runs = []
    for run in healthy:
        alarms = {alarm["rule"]: alarm for alarm in reversed(run["alarms"])}
        said = [
            f"`{rule}` of {alarm['layer'].removeprefix('model.')} {alarm['operand']}" for rule, alarm in alarms.items()
        ]
        runs += [f"- {run['run']}: {', '.join(said)}"] if said else []
    return ":\n\n" + "\n".join(runs) if runs else "."


def _find_message(result: dict[str, Any]) -> str:
    """Return the message of the alarm that names a fault, preferably one with a remedy."""
    right = [alarm for alarm in result["alarms"] if alarm["rule"] in result["expected"]]
    message_alarms = (alarm for alarm in reversed(right) if " gives " in alarm["message"])
    alarm = next(message_alarms, next(iter(right), None))
    return "none" if alarm is None else f"step {alarm['step']}: `{alarm['rule']}`: {alarm['message']}"


def _describe_outcome(result: dict[str, Any]) -> tuple[str, str]:
    alarm = next((alarm for alarm in result["alarms"] if alarm["rule"] in result["expected"]), None)
    if alarm is None or not result["found"]:
        return "**missed**", result["fault"]
    return f"`{alarm['rule']}`", f"{result['fault']} ({result['samples']})"


def iter_scenarios(part: str) -> Iterator[Fault | Healthy]:
    every: tuple[Fault | Healthy, ...] = (*FAULTS, *HEALTHY)
    yield from (scenario for scenario in every if part in scenario.name)


def parse_options(description: str | None) -> argparse.Namespace:
    """Parse the options of a command that runs scenarios, or replays their records."""
    parser = make_page_parser(description)
    parser.add_argument("--only", default="", help="run those with this in their name")
    parser.add_argument("--records", type=Path, help="keep each run's numerics.jsonl in this folder")
    parser.add_argument("--replay", type=Path, help="run nothing: alarm over the records of --records here")
    options = parser.parse_args()
    if options.only and (options.recorded or options.update_docs):
        parser.error("--recorded and --update-docs are for all runs: leave out --only")
    return options


def run_scenarios(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {**describe_provenance("numerics.faults"), "faults": [], "healthy": []}
    for scenario in iter_scenarios(options.only):
        sink = replay(scenario, options.replay) if options.replay else run_monitored(scenario, options.records)
        if isinstance(scenario, Fault):
            results["faults"].append(judge(scenario, sink))
        else:
            alarms = [shorten(alarm) for alarm in sink.raised]
            results["healthy"].append({"run": scenario.name, "samples": len(sink.samples), "alarms": alarms})
        print(scenario.name, *(f"\n    {format_event(event)}" for event in sink.events), file=sys.stderr, flush=True)
    return results


def main() -> None:
    options = parse_options(__doc__)
    results = record_and_show(options, lambda: run_scenarios(options), RECORD, make_tables, PAGE)
    show_tables({"stories": make_story_table(results["faults"])}, STORIES_PAGE, update=options.update_docs)


def format_event(event: Alarm | AlarmCleared) -> str:
    what = event.message if isinstance(event, Alarm) else f"cleared: {event.layer} {event.operand}"
    return f"{event.step:>4} {event.rule:<10} {what}"


if __name__ == "__main__":
    main()

"""Whether float8 changes what a model learns: each recipe against bfloat16, with paired seeds.

    python -m benchmarks.loss_curves --update-docs
    python -m benchmarks.loss_curves --recorded --update-docs

Trains the debug model on real text, one run after the other; the runs of a seed have the same weights and samples. A
run takes three to four minutes on one CPU core. Each finished run is recorded at once, so the command can be stopped,
and goes on where it was. The second command makes the table and the picture of docs/results.md from the record.
"""

import argparse
import json
import math
import shlex
import statistics
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, markdown, page_parser, provenance, run_quaver, show
from quaver.recorder.figure import figure_of

RECORD = ROOT / "benchmarks" / "results" / "loss_curves.json"
DOCS = ROOT / "docs" / "results.md"
PICTURE = ROOT / "docs" / "images" / "loss_curves.png"
CONFIG = "train_configs/llama3_debug.toml"
REFERENCE = "bfloat16"
CONTROL = "bfloat16 again"
"""The same run with AdamW's foreach kernels, which round otherwise in the last place: its gap to bfloat16 is chance."""
COLORS = {
    REFERENCE: "black",
    CONTROL: "gray",
    "tensorwise": "#d1495b",
    "rowwise": "#30638e",
    "rowwise_with_gw_hp": "#66a182",
    "delayed": "#edae49",
    "blockwise": "#00798c",
    "blockwise_with_gw_hp": "#7fb7be",
    "mxfp8": "#8d5a97",
    "mxfp8_with_gw_hp": "#c49bbb",
}
"""By run, in the order in which they are made."""

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t distribution with 1, 2, ... degrees of freedom."""


def words(name: str, seed: int | str, steps: int, runs: Path) -> list[str]:
    """The command of one run."""
    options = ["--float8.recipe_name", name]
    if name in (REFERENCE, CONTROL):
        options = ["--float8.no-enable_float8_linear"]
    if name == CONTROL:
        options += ["--optimizer.implementation", "foreach"]
    return [
        *("quaver", "train", CONFIG, *options, "--training.seed", str(seed), "--training.steps", str(steps)),
        *("--validation.freq", "50", "--validation.steps", "32", "--checkpoint.interval", "100"),
        *("--checkpoint.resume", "auto", "--job.dump_folder", str(runs), "--job.name", folder_of(name, seed)),
    ]


def folder_of(name: str, seed: int | str) -> str:
    """The name of a run's folder."""
    return f"{name.replace(' ', '_')}_seed_{seed}"


def measure(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Make the runs that the record lacks, and write each into it.

    The runs of a seed are compared, so they come from one kind of device: on another one the seed begins again.
    """
    run = shlex.join(words("RECIPE", "SEED", options.steps, Path("runs")))
    if record.get("run") != run:
        record.clear()
        record.update(run=run, steps=options.steps, seeds={})
    for seed in map(str, options.seeds):
        environment = provenance("loss_curves")
        of_seed = record["seeds"].setdefault(seed, {"environment": environment, "curves": {}})
        if of_seed["environment"]["device"] != environment["device"]:
            of_seed.update(environment=environment, curves={})
        for name in COLORS:
            if name in of_seed["curves"]:
                continue
            code = run_quaver(words(name, seed, options.steps, options.runs)[1:])
            if code:
                raise SystemExit(code)
            folder = options.runs / folder_of(name, seed)
            data = json.loads((folder / "data.json").read_text())
            record["data"] = {key: data[key] for key in ("path", "train_tokens", "validation_tokens", "sha256")}
            of_seed["curves"][name] = curve(folder)
            RECORD.write_text(json.dumps(record, indent=1) + "\n")


def curve(run: Path) -> dict[str, list[float]]:
    """The losses that a run recorded."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = [record for record in records if "validation_loss" in record]
    return {
        "train": [record["loss"] for record in records if "loss" in record],
        "validation_steps": [record["step"] for record in validations],
        "validation": [record["validation_loss"] for record in validations],
    }


def whole_seeds(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The curves of the seeds of which all runs are recorded."""
    return {s: each["curves"] for s, each in record["seeds"].items() if each["curves"].keys() == COLORS.keys()}


def gaps(seeds: dict[str, dict[str, Any]], name: str) -> list[list[float]]:
    """For each seed: each validation loss over that of bfloat16 with the same seed, minus one."""
    pairs = [(curves[name]["validation"], curves[REFERENCE]["validation"]) for curves in seeds.values()]
    return [[a / b - 1 for a, b in zip(*pair, strict=True)] for pair in pairs]


def interval(values: list[float]) -> float:
    """Half of the 95 % confidence interval of the mean of normal values; infinite for one value."""
    if len(values) < 2:
        return math.inf
    return STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def table(seeds: dict[str, dict[str, Any]]) -> str:
    """The final losses and gaps, in Markdown."""
    rows = []
    for name in COLORS:
        row = [name, f"{statistics.fmean(curves[name]['validation'][-1] for curves in seeds.values()):.4f}", "", "", ""]
        if name != REFERENCE:
            of_seeds = gaps(seeds, name)
            last = [gap[-1] for gap in of_seeds]
            row[2] = f"{statistics.fmean(last):+.2%} ± {100 * interval(last):.2f}%"
            row[3] = f"{min(last):+.2%} to {max(last):+.2%}"
            row[4] = f"{max(abs(gap) for each in of_seeds for gap in each[len(each) // 2 :]):.2%}"
        rows.append(row)
    head = ["", "validation loss", "mean gap to bfloat16, 95 % interval", f"of seeds {', '.join(seeds)}"]
    return markdown([*head, "largest gap, second half"], rows)


def mean(curves: list[list[float]]) -> list[float]:
    """At each step the mean of the curves."""
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def draw(seeds: dict[str, dict[str, Any]], image: Path) -> None:
    """Validation losses; gaps to bfloat16 at the end, with their intervals."""
    with figure_of(image, (9.6, 4.2)) as figure:
        losses, final = figure.subplots(1, 2)
        for place, (name, color) in enumerate(COLORS.items()):
            of_name = [curves[name] for curves in seeds.values()]
            width = 2.4 if name in (REFERENCE, CONTROL) else 1.1
            values = mean([curve["validation"] for curve in of_name])
            losses.plot(of_name[0]["validation_steps"], values, label=name, color=color, linewidth=width)
            if name != REFERENCE:
                last = [100 * gap[-1] for gap in gaps(seeds, name)]
                half = interval(last)
                final.plot(last, [-place] * len(last), ".", color=color, alpha=0.5)
                final.errorbar(
                    statistics.fmean(last), -place, xerr=half if math.isfinite(half) else None, fmt="o", color=color
                )
        losses.set(title=f"Validation loss (nats per byte), mean of {len(seeds)} seeds", xlabel="step")
        losses.legend(frameon=False, fontsize=8)
        final.axvline(0, color="black", linewidth=0.8)
        final.axvspan(-0.25, 0.25, color="gray", alpha=0.15, linewidth=0)
        final.set(title="Gap to bfloat16 at the end (%), 95 % interval\n(points: seeds; gray: within 0.25 %)")
        final.set_yticks([-place for place in range(1, len(COLORS))], [name for name in COLORS if name != REFERENCE])
        for axis in (losses, final):
            axis.grid(alpha=0.3, linewidth=0.5)


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each model")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)), help="of weights and samples")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "loss_curves", help="folder of the runs")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if not options.recorded:
        measure(options, record)
    seeds = whole_seeds(record)
    if not seeds:
        raise SystemExit(f"{RECORD}: no seed has all of {', '.join(COLORS)} yet; run this without --recorded")
    show({"losses": table(seeds)}, DOCS, update=options.update_docs)
    if options.update_docs:
        draw(seeds, PICTURE)


if __name__ == "__main__":
    main()

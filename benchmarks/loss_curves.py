"""Whether float8 changes what a model learns: each recipe against bfloat16, with paired seeds.

    python -m benchmarks.loss_curves --update-docs
    python -m benchmarks.loss_curves --recorded --update-docs
    python -m benchmarks.loss_curves --mixture --seeds 0 --update-docs

Trains the debug model, or the one with experts, on real text, one run after the other; the runs of a seed have the same
weights and samples. A run takes two to five minutes on one CPU core. Each finished run is recorded at once, so the
command can be stopped and continued. The second command makes the table and the picture of docs/results.md from the
record, benchmarks/results/loss_curves.json or mixture_curves.json.
"""

import argparse
import json
import math
import shlex
import statistics
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, describe_provenance, make_markdown_table, make_page_parser, run_quaver, show_tables
from quaver.lab.figure import open_figure

DOCS = ROOT / "docs" / "results.md"
MIXTURE_DOCS = ROOT / "docs" / "experiments" / "mixture-curves.md"
CONFIGS = {
    "loss_curves": "train_configs/llama3_debug.toml",
    "mixture_curves": "train_configs/llama3_debug_mixture.toml",
}
"""The config by the name of the record and of the picture."""
REFERENCE = "bfloat16"
CONTROL = "bfloat16 again"
"""The control: AdamW's foreach kernels round differently in the last bit, so its gap to bfloat16 is chance."""
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
"""The color of each run, in the order of training."""
RECIPES_WITHOUT_EXPERTS = ("delayed",)
"""Recipes that leave experts in high precision."""

STUDENT_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t distribution with 1, 2, ... degrees of freedom."""


def list_names(kind: str) -> list[str]:
    """Return the names of the runs of a kind of model."""
    return [name for name in COLORS if kind == "loss_curves" or name not in RECIPES_WITHOUT_EXPERTS]


def make_command(kind: str, name: str, seed: int | str, steps: int, runs: Path) -> list[str]:
    """Return the command of one run."""
    options = ["--float8.recipe_name", name]
    if name in (REFERENCE, CONTROL):
        options = ["--float8.no-enable_float8_linear"]
    if name == CONTROL:
        options += ["--optimizer.implementation", "foreach"]
    return [
        *("quaver", "train", CONFIGS[kind], *options, "--training.seed", str(seed), "--training.steps", str(steps)),
        *("--validation.freq", "50", "--validation.steps", "32", "--checkpoint.interval", "100"),
        *("--checkpoint.resume", "auto", "--job.dump_folder", str(runs), "--job.name", make_folder_name(name, seed)),
    ]


def make_folder_name(name: str, seed: int | str) -> str:
    """Return the name of a run's folder."""
    return f"{name.replace(' ', '_')}_seed_{seed}"


def measure(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Train the runs that the record lacks, and add each to it.

    Runs of a seed are compared with each other. If the device differs from that of the record, the seed starts again.
    """
    kind = get_kind(options)
    run = shlex.join(make_command(kind, "RECIPE", "SEED", options.steps, Path("runs")))
    if record and record["run"] != run:
        raise SystemExit(f"{get_record_path(kind)} has other runs ({record['run']}): take their --steps, or remove it")
    record.update(run=run, steps=options.steps, seeds=record.get("seeds", {}))
    for seed in map(str, options.seeds):
        environment = describe_provenance("loss_curves")
        of_seed = record["seeds"].setdefault(seed, {"environment": environment, "curves": {}})
        if of_seed["environment"]["device"] != environment["device"]:
            of_seed.update(environment=environment, curves={})
        for name in list_names(kind):
            if name in of_seed["curves"]:
                continue
            code = run_quaver(make_command(kind, name, seed, options.steps, options.runs)[1:])
            if code:
                raise SystemExit(code)
            folder = options.runs / make_folder_name(name, seed)
            data = json.loads((folder / "data.json").read_text())
            record["data"] = {key: data[key] for key in ("path", "train_tokens", "validation_tokens", "sha256")}
            of_seed["curves"][name] = read_curve(folder)
            get_record_path(kind).write_text(json.dumps(record, indent=1) + "\n")


def get_kind(options: argparse.Namespace) -> str:
    return "mixture_curves" if options.mixture else "loss_curves"


def get_record_path(kind: str) -> Path:
    return ROOT / "benchmarks" / "results" / f"{kind}.json"


def read_curve(run: Path) -> dict[str, Any]:
    """Return the losses that a run recorded; with experts also the final share of tokens of each, [layers, E]."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = [record for record in records if record["kind"] == "validation"]
    return {
        "train": [record["loss"] for record in records if record["kind"] == "step"],
        "validation_steps": [record["step"] for record in validations],
        "validation": [record["validation_loss"] for record in validations],
        **{name: load for name, load in validations[-1].items() if name == "expert_load"},
    }


def select_whole_seeds(record: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the curves of the seeds whose runs are all recorded."""
    return {seed: runs["curves"] for seed, runs in record["seeds"].items() if list(runs["curves"]) == names}


def compute_gaps(seeds: dict[str, dict[str, Any]], name: str) -> list[list[float]]:
    """Return, for each seed, each validation loss divided by that of bfloat16 with the same seed, minus one."""
    pairs = [(curves[name]["validation"], curves[REFERENCE]["validation"]) for curves in seeds.values()]
    return [[a / b - 1 for a, b in zip(*pair, strict=True)] for pair in pairs]


def compute_interval(values: list[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean of normal values; infinite for one value."""
    if len(values) < 2:
        return math.inf
    return STUDENT_T_QUANTILES[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def make_table(seeds: dict[str, dict[str, Any]]) -> str:
    """Return the table of final losses and gaps, in Markdown."""
    rows = []
    for name in next(iter(seeds.values())):
        row = [name, f"{statistics.fmean(curves[name]['validation'][-1] for curves in seeds.values()):.4f}", "", "", ""]
        if name != REFERENCE:
            of_seeds = compute_gaps(seeds, name)
            last = [gap[-1] for gap in of_seeds]
            row[2] = f"{statistics.fmean(last):+.2%} ± {100 * compute_interval(last):.2f}%"
            row[3] = f"{min(last):+.2%} to {max(last):+.2%}"
            row[4] = f"{max(abs(gap) for of_seed in of_seeds for gap in of_seed[len(of_seed) // 2 :]):.2%}"
        rows.append(row)
    head = ["", "validation loss", "mean gap to bfloat16, 95 % interval", f"of seeds {', '.join(seeds)}"]
    return make_markdown_table([*head, "largest gap, second half"], rows)


def compute_mean(curves: list[list[float]]) -> list[float]:
    """Return the mean of the curves at each step."""
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def draw(seeds: dict[str, dict[str, Any]], image: Path) -> None:
    """Draw the validation losses, and the gaps to bfloat16 at the end with their intervals."""
    with open_figure(image, (9.6, 4.2)) as figure:
        losses, final = figure.subplots(1, 2)
        names = list(next(iter(seeds.values())))
        for place, name in enumerate(names):
            color = COLORS[name]
            of_name = [curves[name] for curves in seeds.values()]
            width = 2.4 if name in (REFERENCE, CONTROL) else 1.1
            values = compute_mean([curve["validation"] for curve in of_name])
            losses.plot(of_name[0]["validation_steps"], values, label=name, color=color, linewidth=width)
            if name != REFERENCE:
                last = [100 * gap[-1] for gap in compute_gaps(seeds, name)]
                half = compute_interval(last)
                final.plot(last, [-place] * len(last), ".", color=color, alpha=0.5)
                final.errorbar(
                    statistics.fmean(last), -place, xerr=half if math.isfinite(half) else None, fmt="o", color=color
                )
        plural = "s" if len(seeds) > 1 else ""
        losses.set(title=f"Validation loss (nats per byte), mean of {len(seeds)} seed{plural}", xlabel="step")
        losses.legend(frameon=False, fontsize=8)
        final.axvline(0, color="black", linewidth=0.8)
        final.axvspan(-0.25, 0.25, color="gray", alpha=0.15, linewidth=0)
        final.set(title="Gap to bfloat16 at the end (%), 95 % interval\n(points: seeds; gray: within 0.25 %)")
        final.set_yticks([-place for place in range(1, len(names))], names[1:])
        for axis in (losses, final):
            axis.grid(alpha=0.3, linewidth=0.5)


def main() -> None:
    parser = make_page_parser(__doc__)
    parser.add_argument("--mixture", action="store_true", help="the debug model with experts")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each model")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(range(6)), help="seeds of the weights and of the order of samples"
    )
    parser.add_argument("--runs", type=Path, help="folder of the runs")
    options = parser.parse_args()
    kind = get_kind(options)
    options.runs = options.runs or ROOT / "runs" / kind
    path = get_record_path(kind)
    record = json.loads(path.read_text()) if path.exists() else {}
    if not options.recorded:
        measure(options, record)
    seeds = select_whole_seeds(record, list_names(kind))
    if not seeds:
        raise SystemExit(f"{path}: no seed has all of {', '.join(list_names(kind))} yet; run this without --recorded")
    name, page = ("mixture losses", MIXTURE_DOCS) if options.mixture else ("losses", DOCS)
    show_tables({name: make_table(seeds)}, page, update=options.update_docs)
    if options.update_docs:
        draw(seeds, ROOT / "docs" / "images" / f"{kind}.png")


if __name__ == "__main__":
    main()

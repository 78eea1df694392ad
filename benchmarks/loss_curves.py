"""Loss curves of every recipe and of bfloat16: the debug model on real text, weights and samples alike, several seeds.

    python -m benchmarks.loss_curves --update-docs
    python -m benchmarks.loss_curves --recorded --update-docs

Trains one model after the other with `quaver train`, about 20 minutes in all on two quiet CPU cores. A restart resumes
from the checkpoints in --runs. The second command makes the table and the picture of
docs/results.md again from the recorded figures.
"""

import itertools
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, make_page, markdown, page_parser, provenance, run_quaver
from quaver.recorder.figure import figure_of

RECORD = ROOT / "benchmarks" / "results" / "loss_curves.json"
DOCS = ROOT / "docs" / "results.md"
PICTURE = ROOT / "docs" / "images" / "loss_curves.png"
CONFIG = "train_configs/llama3_debug.toml"
REFERENCE = "bfloat16"
CONTROL = "bfloat16 again"
"""The same run with AVX2 in PyTorch's own kernels: its results differ in their last bits, which measures chance."""
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
COLORS = {
    REFERENCE: "black",
    CONTROL: "gray",
    "tensorwise": "#d1495b",
    "rowwise": "#30638e",
    "rowwise_with_gw_hp": "#66a182",
} | {"delayed": "#edae49"}
"""Also told apart by their order: the last panel names each line."""


def words(name: str, seed: int, steps: int, runs: Path) -> list[str]:
    """The command of one run."""
    is_float8 = name not in (REFERENCE, CONTROL)
    precision = ["--float8.recipe_name", name] if is_float8 else ["--float8.no-enable_float8_linear"]
    return [
        *("quaver", "train", CONFIG, *precision, "--training.seed", str(seed), "--training.steps", str(steps)),
        *("--optimizer.lr", "1.5e-3", "--lr_scheduler.warmup_steps", "40"),
        *("--validation.freq", "50", "--validation.steps", "32", "--checkpoint.interval", "100"),
        *("--checkpoint.resume", "auto", "--job.dump_folder", str(runs), "--job.name", folder_of(name, seed)),
    ]


def folder_of(name: str, seed: int) -> str:
    """The name of a run's folder."""
    return f"{name.replace(' ', '_')}_seed_{seed}"


def measure(steps: int, seeds: list[int], runs: Path) -> dict[str, Any]:
    """Train every model with every seed; return the curves."""
    names = (REFERENCE, CONTROL, *RECIPES)
    for seed, name in itertools.product(seeds, names):
        kernels = {"ATEN_CPU_CAPABILITY": "avx2"} if name == CONTROL else {}
        code = run_quaver(words(name, seed, steps, runs)[1:], **kernels)
        if code:
            sys.exit(code)
    data = json.loads((runs / folder_of(REFERENCE, seeds[0]) / "data.json").read_text())
    return {
        "environment": provenance("loss_curves"),
        "run": shlex.join(words("RECIPE", 0, steps, Path("runs"))),
        "steps": steps,
        "seeds": seeds,
        "data": {key: data[key] for key in ("path", "train_tokens", "validation_tokens", "sha256")},
        "curves": {name: [curve(runs / folder_of(name, seed)) for seed in seeds] for name in names},
    }


def curve(run: Path) -> dict[str, list[float]]:
    """The losses that a run recorded."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = [record for record in records if "validation_loss" in record]
    return {
        "train": [record["loss"] for record in records if "loss" in record],
        "validation_steps": [record["step"] for record in validations],
        "validation": [record["validation_loss"] for record in validations],
    }


def gaps(results: dict[str, Any], name: str) -> list[list[float]]:
    """For each seed: each validation loss over that of bfloat16 with the same seed, minus one."""
    pairs = zip(results["curves"][name], results["curves"][REFERENCE], strict=True)
    return [
        [a / b - 1 for a, b in zip(ours["validation"], reference["validation"], strict=True)]
        for ours, reference in pairs
    ]


def table(results: dict[str, Any]) -> str:
    """The final losses and gaps, in Markdown."""
    rows = []
    for name, curves in results["curves"].items():
        losses = statistics.fmean(curve["validation"][-1] for curve in curves)
        train = statistics.fmean(statistics.fmean(curve["train"][-100:]) for curve in curves)
        row = [name, f"{losses:.4f}", *[""] * 3, f"{train:.4f}"]
        if name != REFERENCE:
            of_seeds = gaps(results, name)
            last = [gap[-1] for gap in of_seeds]
            row[2] = f"{statistics.fmean(last):+.2%}"
            row[3] = ", ".join(f"{gap:+.2%}" for gap in last)
            row[4] = f"{max(abs(gap) for each in of_seeds for gap in each[len(each) // 2 :]):.2%}"
        rows.append(row)
    head = ["", "validation loss", "gap to bfloat16", f"of seeds {', '.join(map(str, results['seeds']))}"]
    return markdown([*head, "largest gap, second half", "train loss, last 100 steps"], rows)


def mean(curves: list[list[float]]) -> list[float]:
    """At each step the mean of the curves."""
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def draw(results: dict[str, Any], image: Path) -> None:
    """Validation losses, and their gap to bfloat16."""
    curves = results["curves"]
    with figure_of(image, (9.6, 3.8)) as figure:
        losses, differences = figure.subplots(1, 2)
        for name, of_seeds in curves.items():
            is_bfloat16 = name in (REFERENCE, CONTROL)
            style = {"color": COLORS[name], "linewidth": 2.4 if is_bfloat16 else 1.1}
            steps = of_seeds[0]["validation_steps"]
            losses.plot(steps, mean([curve["validation"] for curve in of_seeds]), label=name, **style)
            if name != REFERENCE:
                of_name = [[100 * gap for gap in each] for each in gaps(results, name)]
                differences.plot(steps, mean(of_name), **style)
                for each in of_name:
                    differences.plot(steps, each, color=COLORS[name], linewidth=0.4, alpha=0.6)
        losses.set(title="Validation loss (nats per byte), mean of seeds", xlabel="step")
        differences.axhline(0, color="black", linewidth=0.8)
        differences.axhspan(-0.25, 0.25, color="gray", alpha=0.15, linewidth=0)
        differences.set(title="Gap to bfloat16 (%); thin: each seed; gray: within 0.25 %", xlabel="step")
        for axis in (losses, differences):
            axis.grid(alpha=0.3, linewidth=0.5)
        losses.legend(frameon=False)


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of each model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of weights and of the order of samples")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "loss_curves", help="folder of the runs")
    options = parser.parse_args()
    results = make_page(
        options,
        lambda: measure(options.steps, options.seeds, options.runs),
        RECORD,
        lambda r: {"losses": table(r)},
        DOCS,
    )
    if options.update_docs:
        draw(results, PICTURE)


if __name__ == "__main__":
    main()

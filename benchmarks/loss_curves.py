"""Loss curves of every recipe and of bfloat16: the debug model on real text, from the same weights and samples.

    python -m benchmarks.loss_curves --update-docs
    python -m benchmarks.loss_curves --recorded --update-docs

Trains one model after the other with `quaver train`, about 20 minutes in all on two quiet CPU cores; started again it
goes on where it stopped, from the checkpoints in --runs. The second command makes the table and the picture of
docs/results.md again from the recorded figures.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.record import ROOT, fill, has_changed, markdown
from quaver.bench.harness import environment

RECORD = ROOT / "benchmarks" / "results" / "loss_curves.json"
DOCS = ROOT / "docs" / "results.md"
PICTURE = ROOT / "docs" / "images" / "loss_curves.png"
CONFIG = "train_configs/llama3_debug.toml"
REFERENCE = "bfloat16"
CONTROL = "bfloat16 again"
"""The same run with AVX2 in PyTorch's own kernels: it differs in last places only, and so shows what chance does."""
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
COLORS = {
    REFERENCE: "black",
    CONTROL: "gray",
    "tensorwise": "#d1495b",
    "rowwise": "#30638e",
    "rowwise_with_gw_hp": "#66a182",
} | {"delayed": "#edae49"}
"""Also told apart by their order: the last panel names each line."""


def words(name: str, steps: int, runs: Path) -> list[str]:
    """The command of one run."""
    is_float8 = name not in (REFERENCE, CONTROL)
    precision = ["--float8.recipe_name", name] if is_float8 else ["--float8.no-enable_float8_linear"]
    return [
        *("quaver", "train", CONFIG, *precision, "--training.steps", str(steps)),
        *("--validation.freq", "50", "--validation.steps", "32", "--checkpoint.interval", "100"),
        *("--checkpoint.resume", "auto", "--job.dump_folder", str(runs), "--job.name", folder_of(name)),
    ]


def folder_of(name: str) -> str:
    """The name of a run's folder."""
    return name.replace(" ", "_")


def measure(steps: int, runs: Path) -> dict[str, Any]:
    """Train every model; return the curves."""
    curves = {}
    for name in (REFERENCE, CONTROL, *RECIPES):
        command = [sys.executable, "-m", "quaver.cli", *words(name, steps, runs)[1:]]
        kernels = {"ATEN_CPU_CAPABILITY": "avx2"} if name == CONTROL else {}
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **kernels})
        metrics = runs / folder_of(name) / "metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        curves[name] = {
            "train": [record["loss"] for record in records if "loss" in record],
            "validation_steps": [record["step"] for record in records if "validation_loss" in record],
            "validation": [record["validation_loss"] for record in records if "validation_loss" in record],
        }
    data = json.loads((runs / REFERENCE / "data.json").read_text())
    return {
        "environment": environment(torch.device("cpu"))
        | {"command": shlex.join(["python", "-m", "benchmarks.loss_curves", *sys.argv[1:]])}
        | {"uncommitted_changes_in_quaver": has_changed("quaver")},
        "run": shlex.join(words("RECIPE", steps, Path("runs"))),
        "steps": steps,
        "data": {key: data[key] for key in ("path", "train_tokens", "validation_tokens", "sha256")},
        "curves": curves,
    }


def gap(results: dict[str, Any], name: str) -> float:
    """The last validation loss over that of bfloat16, minus one."""
    curves = results["curves"]
    return curves[name]["validation"][-1] / curves[REFERENCE]["validation"][-1] - 1


def largest_gap(results: dict[str, Any], name: str) -> float:
    """The largest distance of a validation loss from bfloat16's, relative, in the second half of the run."""
    ours, reference = (results["curves"][each]["validation"] for each in (name, REFERENCE))
    half = len(ours) // 2
    return max(abs(a / b - 1) for a, b in zip(ours[half:], reference[half:], strict=True))


def table(results: dict[str, Any]) -> str:
    """What is left at the end, in Markdown."""
    rows = []
    for name, curve in results["curves"].items():
        last = curve["train"][-100:]
        against = "" if name == REFERENCE else f"{gap(results, name):+.2%}"
        rows.append(
            [
                name,
                f"{curve['validation'][-1]:.4f}",
                against,
                f"{largest_gap(results, name):.2%}",
                f"{sum(last) / 100:.4f}",
            ]
        )
    head = ["", "validation loss", "gap to bfloat16", "largest gap, second half", "train loss, last 100 steps"]
    return markdown(head, rows)


def draw(results: dict[str, Any], image: Path) -> None:
    """Validation losses, and their gap to bfloat16."""
    curves = results["curves"]
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.6, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        losses, gaps = figure.subplots(1, 2)
        for name, curve in curves.items():
            style = {"color": COLORS[name], "linewidth": 2.4 if name in (REFERENCE, CONTROL) else 1.1}
            losses.plot(curve["validation_steps"], curve["validation"], label=name, **style)
            if name != REFERENCE:
                values = zip(curve["validation"], curves[REFERENCE]["validation"], strict=True)
                gaps.plot(curve["validation_steps"], [100 * (a / b - 1) for a, b in values], label=name, **style)
        losses.set(title="Validation loss (nats per byte)", xlabel="step")
        gaps.axhline(0, color="black", linewidth=0.8)
        gaps.axhspan(-0.25, 0.25, color="gray", alpha=0.15, linewidth=0)
        gaps.set(title="Gap to bfloat16 (%); gray: within 0.25 %", xlabel="step")
        for axis in (losses, gaps):
            axis.grid(alpha=0.3, linewidth=0.5)
        losses.legend(frameon=False)
        figure.savefig(image, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of each model")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "loss_curves", help="folder of the runs")
    parser.add_argument("--recorded", action="store_true", help="measure nothing; take what is recorded")
    parser.add_argument("--update-docs", action="store_true", help=f"rewrite {DOCS.relative_to(ROOT)} and its picture")
    options = parser.parse_args()
    results = json.loads(RECORD.read_text()) if options.recorded else measure(options.steps, options.runs)
    if not options.recorded:
        RECORD.write_text(json.dumps(results) + "\n")
    print(table(results))
    if options.update_docs:
        DOCS.write_text(fill(DOCS.read_text(), {"losses": table(results)}))
        draw(results, PICTURE)


if __name__ == "__main__":
    main()

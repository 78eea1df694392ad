"""Measures whether optimizer states and activations in float8 change what a model learns, and times a step.

    python -m benchmarks.optimizer_states                    # 1,000 steps, three seeds, hours
    python -m benchmarks.optimizer_states --time             # a step's time, a minute

Trains the debug model on real text with float8 linears (`tensorwise`): with AdamW, with AdamW's foreach kernels (the
control: its gap is chance), with Float8AdamW, with activations stored in float8, with both, with torchao's AdamWFp8 and
with bitsandbytes' AdamW8bit where they can be imported. The runs of a seed have the same weights and samples. Each
finished run is recorded at once, and the command continues after the last one. It prints a table of the gaps.
"""

import argparse
import importlib.util
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.loss_curves import read_curve
from benchmarks.record import ROOT, describe_provenance, make_markdown_table
from quaver.activations import store_activations_in_float8
from quaver.lab.settings import Optimizer
from quaver.lab.settings.config_file import load_config
from quaver.lab.trainer.optimizer import build_optimizer
from quaver.lab.trainer.train import train
from quaver.lab.trainer.training_run import prepare_run
from quaver.optim import Float8AdamW

RECORD = ROOT / "benchmarks" / "results" / "optimizer_states.json"
REFERENCE = "AdamW"
BATCH_SIZE = 4  # half of the debug model's: twice the steps in the same time


def _make_peer_builder(module: str, name: str) -> Callable[[nn.Module, Optimizer], torch.optim.Optimizer]:
    """Return a builder that gives AdamW's param groups and options to another library's optimizer."""

    def build(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
        kind = getattr(importlib.import_module(module), name)
        groups = build_optimizer(model, config).param_groups
        options = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
        peer = kind(
            [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups if g["params"]], **options
        )
        if module.startswith("torchao"):
            peer.register_step_pre_hook(_make_rates_tensors)
        return peer

    return build


def _make_rates_tensors(optimizer: torch.optim.Optimizer, *step: Any) -> None:
    """Make the learning rates tensors: torchao's optimizers refuse the floats that the trainer sets."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"])


def _make_trainer_builder(**options: str) -> Callable[[nn.Module, Optimizer], torch.optim.Optimizer]:
    return lambda model, config: build_optimizer(model, replace(config, **options))


LIBRARY_OF_CONTESTANT = {"torchao AdamWFp8": "torchao", "bitsandbytes AdamW8bit": "bitsandbytes"}
CONTESTANTS = {
    REFERENCE: _make_trainer_builder(),
    "AdamW again": _make_trainer_builder(implementation="foreach"),
    "Float8AdamW": _make_trainer_builder(name="Float8AdamW"),
    "activations in float8": _make_trainer_builder(),
    "activations, but not attention's": _make_trainer_builder(),
    "both": _make_trainer_builder(name="Float8AdamW"),
    "torchao AdamWFp8": _make_peer_builder("torchao.optim", "AdamWFp8"),
    "bitsandbytes AdamW8bit": _make_peer_builder("bitsandbytes.optim", "AdamW8bit"),
}
STORING_MODULES: dict[str, list[str] | None] = {
    "activations in float8": None,
    "activations, but not attention's": ["*norm*", "*.mlp"],
    "both": None,
}
"""The modules that store activations in float8; None for the default."""


def list_contestants() -> list[str]:
    """Return the names of the contestants whose library is installed."""
    return [
        name
        for name in CONTESTANTS
        if name not in LIBRARY_OF_CONTESTANT or importlib.util.find_spec(LIBRARY_OF_CONTESTANT[name])
    ]


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the validation loss after each tenth of the steps."""
    folder = re.sub(r"\W+", "_", name)
    config = load_config(
        ROOT / "train_configs" / "llama3_debug.toml",
        {
            "training": {"steps": options.steps, "local_batch_size": BATCH_SIZE, "seed": seed, "device": "cpu"},
            "activation_checkpoint": {"store_in_float8": name in STORING_MODULES},
            "checkpoint": {"enable": False},  # a copy of torchao's states to host memory fails
            "validation": {"freq": max(options.steps // 10, 1), "steps": 32},
            "job": {"dump_folder": str(options.runs), "name": f"{folder}_{seed}_{options.steps}"},
        },
    )
    with (
        mock.patch("quaver.lab.trainer.trained_model.build_optimizer", CONTESTANTS[name]),
        mock.patch(
            "quaver.lab.model.parallelize.store_activations_in_float8",
            partial(store_activations_in_float8, modules=STORING_MODULES.get(name)),
        ),
        # torchao does not compile while a step is recorded.
        mock.patch("quaver.lab.trainer.train.is_memory_due", return_value=False),
    ):
        prepared = prepare_run(config)
        status = train(prepared)["status"]
    if status != "finished":
        raise SystemExit(f"{name}: the run ended as {status}")
    return {"validation": read_curve(prepared.folder.path)["validation"]}


def make_table(runs: dict[str, dict[str, Any]]) -> str:
    """Return the table of final validation losses and gaps to AdamW with the same seed."""
    rows = []
    for name in CONTESTANTS:
        final = {seed: by_name[name]["validation"][-1] for seed, by_name in runs.items() if name in by_name}
        gaps = [loss / runs[seed][REFERENCE]["validation"][-1] - 1 for seed, loss in final.items()]
        if final:
            spread = f"{min(gaps):+.2%} to {max(gaps):+.2%}"
            loss, gap = f"{statistics.fmean(final.values()):.4f}", f"{statistics.fmean(gaps):+.2%}"
            rows.append([name, str(len(final)), loss, gap, spread])
    return make_markdown_table(["optimizer", "seeds", "validation loss", "mean gap", "of seeds"], rows)


def measure_times(rounds: int = 11) -> str:
    """Return a table of the milliseconds of a step, with ratios to AdamW's foreach kernels. Optimizers take turns."""
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
        "Float8AdamW": lambda p: Float8AdamW(p),
        "Float8AdamW, `compile=True`": lambda p: Float8AdamW(p, compile=True),
    }
    shapes = {"3 M": [(256, 256)] * 24 + [(768, 256)] * 8, "25 M": [(1024, 1024)] * 8 + [(4096, 1024)] * 4}
    rows: dict[str, list[str]] = {name: [name] for name in makers}
    for sizes in shapes.values():
        optimizers = {}
        for name, make in makers.items():
            parameters = [nn.Parameter(torch.randn(shape)) for shape in sizes]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizers[name] = make(parameters)
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(rounds):
            for name, optimizer in optimizers.items():
                start = time.perf_counter()
                optimizer.step()
                seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(of[1:]) for name, of in seconds.items()}
        for name, median in medians.items():
            rows[name].append(f"{median * 1e3:.1f} ms, {median / medians['AdamW, foreach']:.2f}")
    return make_markdown_table(["", *(f"{name} parameters" for name in shapes)], list(rows.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and samples")
    parser.add_argument(
        "--names", nargs="+", default=list_contestants(), choices=list(CONTESTANTS), help="which optimizers"
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "optimizer_states", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=RECORD, help="JSON file of the results")
    parser.add_argument("--time", action="store_true", help="time a step instead")
    options = parser.parse_args()
    if options.time:
        print(measure_times())
        return
    record = {"steps": options.steps, "environment": describe_provenance("optimizer_states"), "seeds": {}}
    if options.output.exists():
        record = json.loads(options.output.read_text())
    if record["steps"] != options.steps:
        parser.error(f"{options.output} has runs of {record['steps']} steps; give another --output")
    for seed in options.seeds:
        of_seed = record["seeds"].setdefault(str(seed), {})
        for name in options.names:
            if name not in of_seed:
                of_seed[name] = run(name, seed, options)
                options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(make_table(record["seeds"]))


if __name__ == "__main__":
    main()

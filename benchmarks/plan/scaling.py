"""Simulates tokens/s per GPU on 8 to 100,352 H100s: the tables and the picture of docs/experiments/scaling-curves.md.

Tries the `layouts` that fit for each config of CONFIGS, precision and number of GPUs: FSDP2 and HSDP, each with tensor
parallelism, and for mixtures with expert parallelism. Scaling is weak, with a fixed number of tokens per GPU, or at a
fixed global batch, of which each data-parallel rank gets at least one sequence.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.plan.published_runs import TRAIN_CONFIGS
from benchmarks.record import ROOT, make_markdown_table
from quaver.lab.plan.changes import with_precision
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.extrapolate import extrapolate_seconds
from quaver.lab.plan.peak_memory import estimate_peak
from quaver.lab.plan.planned_run import PlannedRun
from quaver.lab.plan.search import USABLE_MEMORY_SHARE
from quaver.lab.plan.step import ComputeTimes
from quaver.lab.settings import ActivationCheckpoint, TrainConfig
from quaver.lab.settings.config_file import load_config
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.recipes.config import Float8LinearRecipeName
from quaver.roofline.device_specs import DEVICE_SPECS

PAGE = ROOT / "docs" / "experiments" / "scaling-curves.md"
RECORD = ROOT / "benchmarks" / "results" / "plan_scaling.json"
PICTURE = ROOT / "docs" / "images" / "plan-scaling.png"
GPU_COUNTS = (*(2**power for power in range(3, 17)), 100_352)
SHOWN_GPU_COUNTS = (8, 64, 512, 4096, 16_384, 100_352)
CONFIGS = {  # checkpointing, and the global batch in tokens
    "llama3_8b": ("op", 2**22),
    "llama3_70b": ("full", 2**24),
    "llama3_405b": ("full", 2**24),
    "mixture_30b_a3b": ("op", 2**22),
}
PRECISIONS = ("bfloat16", "float8, gather in bfloat16", "float8")
"""float8 is the recipe tensorwise, for the mixture rowwise, whose codes take as many bytes as bfloat16."""
H100 = next(spec for spec in DEVICE_SPECS if spec.name == "H100")


@dataclass(frozen=True)
class Layout:
    """How GPUs divide a model. `dp_shard` 0 means all GPUs, without replicas."""

    dp_shard: int
    tp: int
    ep: int = 1

    @property
    def name(self) -> str:
        """The name in the tables, such as "HSDP 64 x TP 8"."""
        parts = [f"HSDP {self.dp_shard}" if self.dp_shard else "FSDP2"]
        parts += [f"TP {self.tp}"] if self.tp > 1 else []
        parts += [f"EP {self.ep}"] if self.ep > 1 else []
        return " x ".join(parts)


GATHER_LAYOUTS = {"llama3_8b": Layout(0, 1), "llama3_70b": Layout(0, 1), "llama3_405b": Layout(0, 2)}
NETWORKS = (400.0, 100.0)
GATHER_GPU_COUNTS = (8, 64, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 100_352)


def iter_layouts(config: str) -> Iterator[Layout]:
    """Yield all layouts to try for a config."""
    for shard, tensor in itertools.product((0, 8, 64, 512), (1, 2, 4, 8)):
        yield Layout(shard, tensor)
        if config.startswith("mixture") and shard != 8 and tensor == 1:
            yield Layout(shard, tensor, 8)


def make_run(config: str, precision: str, layout: Layout, gpus: int, *, is_weak: bool) -> PlannedRun | None:
    """Return a run of a config, or None if the layout does not divide the GPUs or the batch, or does not fit."""
    settings = load_config(TRAIN_CONFIGS / f"{config}.toml")
    checkpointing, batch = CONFIGS[config]
    model, seq_len = settings.model, settings.training.seq_len
    ranks, undivided_gpus = divmod(gpus, layout.tp)
    shard = layout.dp_shard or ranks
    replicate, undivided_ranks = divmod(ranks, shard)
    if undivided_gpus or undivided_ranks or replicate < 1 or (layout.dp_shard and replicate == 1) or shard % layout.ep:
        return None
    sequences = layout.tp * 8192 // seq_len if is_weak else batch // seq_len // ranks
    if sequences < 1:
        return None
    mixture = model.n_experts > 0
    recipe = Float8LinearRecipeName.ROWWISE if mixture else Float8LinearRecipeName.TENSORWISE
    run = PlannedRun(
        model,
        seq_len,
        sequences,
        dp_replicate=replicate,
        dp_shard=shard,
        tp=layout.tp,
        ep=layout.ep,
        checkpointing=checkpointing,
        checkpointed_blocks=model.n_layers,
    )
    if precision != "bfloat16":
        float8_shares = {**run.float8_shares, "experts": 1.0} if mixture else run.float8_shares
        run = replace(run, recipe=recipe, float8_shares=float8_shares, float8_all_gather=precision == "float8")
    return fit_micro_batches(run, settings, precision)


def fit_micro_batches(run: PlannedRun, settings: TrainConfig, precision: str) -> PlannedRun | None:
    """Return `run` with the fewest microbatches that fit into memory.

    Returns None if single sequences do not fit, or if the trainer refuses the layout.
    """
    try:
        make_run_config(run, settings, precision)
    except ValueError:
        return None
    usable_bytes, sequences = USABLE_MEMORY_SHARE * H100.memory_gb * 1e9, run.local_batch
    while estimate_peak(make_run_config(run, settings, precision), run.world_size) > usable_bytes:
        if run.local_batch == 1:
            return None
        local = run.local_batch // 2
        run = replace(run, local_batch=local, micro_batches=sequences // local)
    return run


def make_run_config(run: PlannedRun, settings: TrainConfig, precision: str) -> TrainConfig:
    """Return the config of a run, eager for fully recomputed blocks under tensor parallelism."""
    recipe = "bfloat16" if run.recipe is None else run.recipe.value
    config = with_precision(
        settings, recipe, float8_all_gather=run.float8_all_gather and run.reuses_weight_codes and run.dp_shard > 1
    )
    mode = {"op": "selective"}.get(run.checkpointing, run.checkpointing)
    sequences = run.local_batch * run.micro_batches * run.dp_replicate * run.dp_shard
    return replace(
        config,
        parallelism=ParallelDims(run.dp_replicate, run.dp_shard, run.tp, ep=run.ep).apply_to(config.parallelism),
        training=replace(
            config.training,
            local_batch_size=run.local_batch,
            global_batch_size=sequences,
            compile=run.tp == 1 or mode != "full",
        ),
        activation_checkpoint=ActivationCheckpoint(mode=mode),
    )


def predict_tokens_per_s(run: PlannedRun, cluster: Cluster) -> float:
    """Return tokens/s per GPU. Microbatches after the third are taken to be as long as the third."""
    compute_times = ComputeTimes.from_formulas(run, cluster)
    seconds = extrapolate_seconds(run, min(run.micro_batches, 3), cluster, compute_times)
    if run.micro_batches > 3:
        seconds += (run.micro_batches - 3) * (seconds - extrapolate_seconds(run, 2, cluster, compute_times))
    return run.step_tokens / seconds / run.world_size


def predict_all() -> dict[str, Any]:
    """Predict tokens/s of every layout that fits, by config, precision, kind of scaling, layout and GPUs."""
    cluster = Cluster.from_spec(H100)
    curves = []
    for config, precision, is_weak in itertools.product(CONFIGS, PRECISIONS, (True, False)):
        for layout in iter_layouts(config):
            points = {}
            for gpus in GPU_COUNTS:
                run = make_run(config, precision, layout, gpus, is_weak=is_weak)
                if run is not None:
                    points[str(gpus)] = round(predict_tokens_per_s(run, cluster), 1)
            if points:
                scaling = "weak" if is_weak else "fixed batch"
                curve = {"config": config, "precision": precision, "scaling": scaling, "layout": layout.name}
                curves.append({**curve, "tokens_per_s": points})
    return {"curves": curves, "gather": _predict_gathers()}


def _predict_gathers() -> list[dict[str, Any]]:
    """Predict tokens/s in float8 with the gather in bfloat16 and in float8, by network and GPUs."""
    rows = []
    for (config, layout), gbps in itertools.product(GATHER_LAYOUTS.items(), NETWORKS):
        cluster = replace(Cluster.from_spec(H100), network_gbit_per_s=gbps)
        rates: dict[str, list[float]] = {}
        for gpus in GATHER_GPU_COUNTS:
            runs = [make_run(config, precision, layout, gpus, is_weak=True) for precision in PRECISIONS[1:]]
            if None not in runs:
                rates[str(gpus)] = [round(predict_tokens_per_s(run, cluster), 1) for run in runs if run]
        rows.append({"config": config, "layout": layout.name, "network_gbps": gbps, "tokens_per_s": rates})
    return rows


Curves = list[dict[str, Any]]
SCALING_LABELS = {"weak": "8,192 tokens of each GPU", "fixed batch": "a fixed global batch"}


def find_best(curves: Curves, config: str, precision: str, scaling: str, gpus: int) -> tuple[float, str] | None:
    """Return the most tokens/s and their layout; None where nothing fits."""
    found = [
        (curve["tokens_per_s"][str(gpus)], curve["layout"])
        for curve in _select_curves(curves, config, precision, scaling)
        if str(gpus) in curve["tokens_per_s"]
    ]
    return max(found, default=None)


def _select_curves(curves: Curves, config: str, precision: str, scaling: str) -> Curves:
    asked = {"config": config, "precision": precision, "scaling": scaling}
    return [curve for curve in curves if all(curve[key] == value for key, value in asked.items())]


def find_points(curves: Curves, config: str, precision: str, scaling: str, layout: str) -> dict[int, float]:
    """Return the tokens/s of one layout by the number of GPUs."""
    of_layout = [curve for curve in _select_curves(curves, config, precision, scaling) if curve["layout"] == layout]
    return {int(gpus): value for curve in of_layout for gpus, value in curve["tokens_per_s"].items()}


def make_tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the best layouts, of the limits of layouts, and of the gain of the float8 gather."""
    curves = results["curves"]
    return {
        "scaling weak": _make_best_table(curves, "weak"),
        "scaling fixed batch": _make_best_table(curves, "fixed batch"),
        "where layouts stop": _make_stop_table(curves),
        "what the gather buys": _make_gather_table(results["gather"]),
    }


def _make_best_table(curves: Curves, scaling: str) -> str:
    """Return a table whose cells have tokens/s in bfloat16 and in float8, the gain, and float8's layout."""
    lines = []
    for config in CONFIGS:
        cells = []
        for gpus in SHOWN_GPU_COUNTS:
            plain, float8 = (
                find_best(curves, config, precision, scaling, gpus) for precision in ("bfloat16", "float8")
            )
            if float8 is None:
                cells.append("")
                continue
            before = f"{plain[0]:,.0f} -> " if plain else ""
            gain = f" ({float8[0] / plain[0]:.2f})" if plain else ""
            cells.append(f"{before}{float8[0]:,.0f}{gain} {float8[1]}")
        lines.append([config, *cells])
    return make_markdown_table(["config", *(f"{gpus:,} GPUs" for gpus in SHOWN_GPU_COUNTS)], lines)


def _make_stop_table(curves: Curves) -> str:
    """Return a table of float8 layouts: up to how many GPUs each keeps 95% and 50% of its best, and where it wins."""
    lines = []
    for config in CONFIGS:
        for layout in dict.fromkeys(curve["layout"] for curve in _select_curves(curves, config, "float8", "weak")):
            points = find_points(curves, config, "float8", "weak", layout)
            top = max(points.values())
            most = [max(gpus for gpus, value in points.items() if value >= share * top) for share in (0.95, 0.5)]
            wins = [
                gpus for gpus in points if (find_best(curves, config, "float8", "weak", gpus) or ("", ""))[1] == layout
            ]
            if wins or layout == "FSDP2":
                where = f"{min(wins):,} to {max(wins):,}" if wins else "nowhere"
                lines.append([config, layout, f"{top:,.0f}", *(f"{gpus:,}" for gpus in most), where])
    heads = ["config", "layout", "most tokens/s", "95% of it up to", "50% up to", "the best on (GPUs)"]
    return make_markdown_table(heads, lines)


def _make_gather_table(rows: list[dict[str, Any]]) -> str:
    """Return a table of tokens/s with the float8 gather divided by those with the bfloat16 gather."""
    lines = []
    for row in rows:
        points = row["tokens_per_s"]
        cells = [f"{points[str(g)][1] / points[str(g)][0]:.3f}" if str(g) in points else "" for g in GATHER_GPU_COUNTS]
        lines.append([row["config"], row["layout"], f"{row['network_gbps']:.0f} Gb/s", *cells])
    return make_markdown_table(["config", "layout", "network", *(f"{gpus:,}" for gpus in GATHER_GPU_COUNTS)], lines)


def draw(results: dict[str, Any]) -> None:
    """Draw the curves: a column for each config, a row for each kind of scaling."""
    curves, drawn = results["curves"], ("float8", "bfloat16")
    figure, axes = plt.subplots(2, len(CONFIGS), figsize=(17, 8), sharex=True, layout="constrained")
    colors = {"float8": "tab:blue", "bfloat16": "tab:orange"}
    for row, scaling in zip(axes, SCALING_LABELS, strict=True):
        for axis, config in zip(row, CONFIGS, strict=True):
            for precision in drawn:
                points_of_best = {gpus: find_best(curves, config, precision, scaling, gpus) for gpus in GPU_COUNTS}
                line = {gpus: point[0] for gpus, point in points_of_best.items() if point}
                axis.plot(
                    line.keys(), line.values(), color=colors[precision], linewidth=2.5, label=f"{precision}, best"
                )
                for layout, style in (("FSDP2", "--"), ("FSDP2 x TP 8", ":")):
                    points = find_points(curves, config, precision, scaling, layout)
                    axis.plot(
                        points.keys(), points.values(), style, color=colors[precision], label=f"{precision}, {layout}"
                    )
            axis.set_title(f"{config}, {SCALING_LABELS[scaling]}", fontsize=10)
            axis.set_xscale("log")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("tokens/s of each GPU")
    for axis in axes[-1]:
        axis.set_xlabel("H100s")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(PICTURE, dpi=90)
    plt.close(figure)

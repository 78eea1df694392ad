"""The published runs as `quaver plan` predicts them: the table of docs/experiments/published-runs.md.

One row per GPU determines the share of the best matmul rate that the GPU sustains (`calibrate_share`). Nothing else
is fitted.
"""

from dataclasses import replace
from typing import Any

from benchmarks.plan.pipeline import PipelinedRun, build_pipeline_tasks
from benchmarks.plan.published_runs import Published, load_published
from benchmarks.record import ROOT, make_markdown_table
from quaver.lab.plan import calibration
from quaver.lab.plan.calibration import CalibratedGPU
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.planned_run import Framework
from quaver.lab.plan.simulate import simulate
from quaver.lab.plan.step import build_tasks
from quaver.recipes.config import Float8LinearRecipeName
from quaver.roofline.device_specs import require_device_spec

PAGE = ROOT / "docs" / "experiments" / "published-runs.md"
RECORD = ROOT / "benchmarks" / "results" / "plan_published.json"
NETWORK_GBPS = 400.0
"""The bandwidth of a network whose source does not state it."""
_B200, _H100 = require_device_spec("B200", option="GPU"), require_device_spec("H100", option="GPU")
_OTHER_SETUPS = {
    "B200-limited": CalibratedGPU(_B200, 0.326, "torchao-202508 8B 8 B200 bfloat16"),
    "H100-500W": CalibratedGPU(
        replace(_H100, memory_gb_per_s=2400.0), 0.684, "torchtitan-202412 8B 8gpu FSDP compile bf16"
    ),
    "H100-DGX": CalibratedGPU(_H100, 0.909, "dgxc-25.04 llama3.1-8b 8 H100 BF16 TP1 PP1 CP2"),
    "H800": CalibratedGPU(replace(_H100, link_gb_per_s=200.0), 0.794, "deepseek-v3 pretraining"),
}
"""B200-limited: "power limited", the limit is not stated (torchao). H100-500W: HBM2e and a limit of 500 W (torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md). H100-DGX: NVIDIA's runs with Megatron and TransformerEngine. H800: 160
GB/s of NVLink reached. Its run used DualPipe, simulated as 1F1B with exchanges behind compute, whose bubbles are
longer, so its share is a bit too high."""
CALIBRATED_GPUS = dict(sorted({**calibration.CALIBRATED_GPUS, **_OTHER_SETUPS}.items()))
MAX_UNEXPLAINED_ERROR = 0.15
"""A row whose ratio differs from 1 by more needs a reason."""
NODE_LIMITED_SHARE = (0.5 * 0.5 + 0.5) / 2
"""DeepSeek-V3 sends a token to 4 nodes at most for its 8 experts, in float8 there and in bfloat16 back (arXiv
2412.19437, section 3.2.2)."""
REASONS = {
    "torchtitan-202412 8B 8gpu FSDP2 CP4": "twice the sequence of the row above made it 2.4 times slower: context "
    "parallelism lost more than attention's FLOPs, which are at most twice as many",
    "torchtitan-202412 8B 8gpu FSDP1 CP8": "as CP4",
    "torchtitan-202412 405B 512gpu FSDP1 TP8 PP8 CP8": "as 8B with CP8",
    "torchtitan-202506 llama3.1-8b 64gpu FSDP8 TP8 rowwise": "rowwise matmuls 128 to 1,792 features wide, of which no "
    "rate is known; torchtitan's gathers in bfloat16, casts on each rank and passes that scale are in the prediction",
}
"""Reasons for rows that differ by more than MAX_UNEXPLAINED_ERROR, by the beginning of their names."""
CHECKPOINTING = {"none": "none", "selective op": "op", "selective 2": "full", "full": "full"}


def is_megatron(row: Published) -> bool:
    """Whether NVIDIA's Megatron ran it, with TransformerEngine."""
    return row.name.startswith(("dgxc", "megatron", "nemo"))


def make_run(row: Published) -> PipelinedRun:
    """Return a published run as input of the simulation."""
    model, megatron, mode = row.shape, is_megatron(row), CHECKPOINTING[row.checkpointing]
    if row.pp_schedule == "DualPipe":  # recomputes norms and up-projections of attention: no exchange, little compute
        mode = "none"
    blocks = model.n_layers // 2 if row.checkpointing == "selective 2" else model.n_layers
    recipe = None if row.recipe == "bfloat16" else Float8LinearRecipeName(row.recipe)
    run = PipelinedRun(
        model,
        row.seq_len,
        row.local_batch,
        row.micro_batches,
        dp_replicate=row.dp_replicate,
        dp_shard=row.dp_shard,
        tp=row.tp,
        ep=row.ep,
        cp=row.cp,
        pipeline=row.pp,
        virtual=row.pp_virtual,
        recipe=recipe,
        float8_all_gather=row.float8_all_gather,
        checkpointing=mode,
        checkpointed_blocks=0 if mode == "none" else blocks,
        reshard_after_forward="default" if row.sharding == "fsdp" else "never",
        casts_weights_once=megatron,
        residual_bytes=2,
        framework=Framework(
            async_tensor=row.async_tp,
            async_expert=row.pp_schedule == "DualPipe",
            exchanged_share=NODE_LIMITED_SHARE if row.pp_schedule == "DualPipe" else 1.0,
            compiled=row.compiled or not row.name.startswith(("aws", "torchtitan")),
            casts_gathered=row.recipe == "rowwise",
            rescales_rows=True,  # all rowwise runs used torchao
            attention="cudnn" if megatron or row.gpu.startswith("B200") else "flash",
        ),
    )
    if row.sharding == "zero1":
        run = replace(run, dp_shard=row.dp_replicate * row.dp_shard, dp_replicate=1, reduce="last")
    if recipe is not None and run.model.n_experts:
        run = replace(run, float8_shares={**run.float8_shares, "experts": 1.0})
    return run


def simulate_seconds(row: Published, gpu: CalibratedGPU) -> float:
    """Return the simulated seconds of a step."""
    cluster = Cluster(gpu.spec, row.gpus_per_node, row.network_gbps_per_gpu or NETWORK_GBPS, gpu.sustained_share)
    run = make_run(row)
    return simulate(build_pipeline_tasks(run, cluster) if run.pipeline > 1 else build_tasks(run, cluster)).seconds


def predict_tokens_per_s(row: Published, gpu: CalibratedGPU | None = None) -> float:
    """Return the predicted tokens/s per GPU, on the row's GPU unless another is given."""
    run = make_run(row)
    return run.step_tokens / simulate_seconds(row, gpu or CALIBRATED_GPUS[row.gpu]) / run.world_size


def calibrate_share(name: str) -> float:
    """Return the share of a GPU at which the prediction of its row equals the published figure, by bisection."""
    gpu = CALIBRATED_GPUS[name]
    row = next(row for row in load_published() if row.name == gpu.published_run)
    low, high = 0.1, 1.2
    for _ in range(30):
        middle = (low + high) / 2
        faster = predict_tokens_per_s(row, gpu._replace(sustained_share=middle)) > row.tokens_per_s_per_gpu
        low, high = (low, middle) if faster else (middle, high)
    return (low + high) / 2


def predict_all() -> dict[str, Any]:
    """Predict the tokens/s of every row."""
    rows = []
    for row in load_published():
        measured, predicted = row.tokens_per_s_per_gpu, predict_tokens_per_s(row)
        rows.append({"name": row.name, "published": measured, "predicted": round(predicted, 1)})
    return {"rows": rows}


def find_note(name: str) -> str:
    """Return the note of a row: that it fixes its GPU's share, or why its error is large; else ""."""
    if name in {gpu.published_run for gpu in CALIBRATED_GPUS.values()}:
        return "fixes its GPU"
    return next((why for part, why in REASONS.items() if name.startswith(part)), "")


def make_tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the rows, of the GPUs' shares, and of the errors."""
    by_name, lines = {row.name: row for row in load_published()}, []
    for result in results["rows"]:
        row, ratio = by_name[result["name"]], result["predicted"] / result["published"]
        group, _, name = row.name.partition(" ")
        note = find_note(row.name)
        shown = f"{ratio:.2f}" if abs(ratio - 1) <= MAX_UNEXPLAINED_ERROR else f"**{ratio:.2f}**"
        lines.append(
            [group, name, row.gpu, f"{row.tokens_per_s_per_gpu:,g}", f"{result['predicted']:,.0f}", shown, note]
        )
    shares = [[name, f"{gpu.sustained_share:.3f}", gpu.published_run] for name, gpu in CALIBRATED_GPUS.items()]
    heads = ["source", "run", "GPU", "published", "predicted", "ratio", "note"]
    return {
        "published runs": make_markdown_table(heads, lines),
        "gpus": make_markdown_table(["GPU", "share", "the run that fixes it"], shares),
        "summary": make_summary(results),
    }


def make_summary(results: dict[str, Any]) -> str:
    """Return a table of the errors of the rows that do not fix a GPU."""
    fixed = {gpu.published_run for gpu in CALIBRATED_GPUS.values()}
    errors = sorted(abs(row["predicted"] / row["published"] - 1) for row in results["rows"] if row["name"] not in fixed)
    near = [sum(error <= limit for error in errors) for limit in (0.05, 0.10, MAX_UNEXPLAINED_ERROR)]
    counts = [len(errors), *near, f"{errors[len(errors) // 2]:.0%}", f"{errors[-1]:.0%}"]
    return make_markdown_table(
        ["predicted runs", "within 5%", "within 10%", "within 15%", "median error", "largest"], [counts]
    )


def draw(results: dict[str, Any]) -> None:
    """Draw nothing: this part has no picture."""

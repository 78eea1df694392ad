"""Predicts the memory of published runs as the trainer does: a table of docs/experiments/published-runs.md.

Each run is predicted twice: as the trainer would run it, and with torchtitan's differences (`use_published_loss`). The
published figures are bytes that the caching allocator reserved; the predictions are live bytes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.plan.published_runs import Published, load_published
from benchmarks.record import ROOT, make_markdown_table
from quaver.lab.memory.train_step.predict_run import predict_run_memory
from quaver.lab.model import parallelize
from quaver.lab.settings import ActivationCheckpoint, Float8, Parallelism, TrainConfig, Training
from quaver.lab.trainer import trained_model

PAGE = ROOT / "docs" / "experiments" / "published-runs.md"
RECORD = ROOT / "benchmarks" / "results" / "plan_memory.json"
CHECKPOINTING = {
    "none": ActivationCheckpoint(mode="none"),
    "selective op": ActivationCheckpoint(mode="selective"),
    "full": ActivationCheckpoint(mode="full"),
}


def list_missing_features(row: Published) -> str:
    """Return the features of a published run that the trainer lacks, or "" if it supports the run."""
    lacks = {"pipeline stages": row.pp > 1, "context parallelism": row.cp > 1, "asynchronous TP": row.async_tp}
    return ", ".join(name for name, has in lacks.items() if has)


def make_run_config(row: Published) -> TrainConfig:
    """A published run as a config of the trainer: a residual stream in bfloat16, as torchtitan's activations are.

    The config is eager if the trainer cannot compile it: fully recomputed blocks under tensor parallelism.
    """
    is_compiled = row.compiled and not (row.tp > 1 and row.checkpointing == "full")
    is_float8 = row.recipe != "bfloat16"
    gathers = (
        {"enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"} if row.float8_all_gather else ()
    )
    float8 = Float8(enable_float8_linear=is_float8, **{"recipe_name": row.recipe} if is_float8 else {})
    return TrainConfig(
        model=row.shape,
        training=Training(
            seq_len=row.seq_len,
            local_batch_size=row.local_batch,
            global_batch_size=row.local_batch * row.micro_batches * row.data_parallel,
            compile=is_compiled,
            residual_dtype="bfloat16",
        ),
        parallelism=Parallelism(
            data_parallel_replicate_degree=row.dp_replicate,
            data_parallel_shard_degree=row.dp_shard,
            tensor_parallel_degree=row.tp,
        ),
        activation_checkpoint=CHECKPOINTING[row.checkpointing],
        float8=Float8(**asdict(float8) | dict.fromkeys(gathers, True)),
    )


@contextmanager
def use_published_loss(row: Published) -> Iterator[None]:
    """Use torchtitan's loss and FSDP2 groups inside the block.

    Its cross entropy converts all logits of a rank to float32. It was eager until April 2025 and is compiled since.
    Until July 2025 the output projection was in the root's group, whose weights stay gathered after the forward.
    """
    loss: Callable[[Tensor, Tensor], Tensor] = torch.compile(_compute_loss) if row.loss == "compiled" else _compute_loss
    with ExitStack() as stack:
        stack.enter_context(patch.object(trained_model, "compute_next_token_loss", loss))
        if row.root_has_head:
            fully_shard = patch.object(parallelize, "fully_shard", _skip_linears(parallelize.fully_shard))
            stack.enter_context(fully_shard)
        yield


def _compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    if isinstance(logits, DTensor):
        logits = logits.to_local()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _skip_linears(fully_shard: Callable[..., Any]) -> Callable[..., Any]:
    def shard(module: nn.Module, **options: Any) -> Any:
        return module if isinstance(module, nn.Linear) else fully_shard(module, **options)

    return shard


def get_key_without_recipe(row: Published) -> tuple[object, ...]:
    """Return the fields that distinguish runs, without the recipe, which changes a peak by less than 1%."""
    return row.name.partition(" ")[0], row.model, row.gpus, row.tp, row.seq_len, row.local_batch, row.compiled


def predict_all() -> dict[str, Any]:
    """Predict the live peaks of the runs with published memory that the trainer supports.

    Of runs that differ only in their recipe, the first is predicted as published.
    """
    known: dict[TrainConfig, int] = {}
    seen: set[tuple[object, ...]] = set()
    rows = []
    for row in list_with_memory():
        if list_missing_features(row):
            continue
        config, as_theirs = make_run_config(row), None
        if config not in known:
            known[config] = predict_peak_bytes(config, row.gpus)
        if get_key_without_recipe(row) not in seen:
            seen.add(get_key_without_recipe(row))
            with use_published_loss(row):
                as_theirs = predict_peak_bytes(config, row.gpus)
        rows.append({"name": row.name, "trainer": known[config], "as_published": as_theirs})
    return {"rows": rows}


def predict_peak_bytes(config: TrainConfig, ranks: int) -> int:
    """Return the predicted live peak of the first rank, on a GPU."""
    return predict_run_memory(config, ranks, "cuda").prediction.peak_bytes


def count_added_bytes(row: Published) -> int:
    """Return the bytes that torchtitan needs in addition to `use_published_loss`.

    These are the bfloat16 logits: eager cross entropy frees them before the backward, but the allocator cannot reuse
    their memory for the larger float32 logits. In eager code selective checkpointing also saves the result of the last
    matmul of each block, which nothing reads.
    """
    tokens = row.local_batch * row.seq_len
    logits = 2 * tokens * row.shape.vocab_size // row.tp if row.loss == "float32" else 0
    is_saved = row.checkpointing == "selective op" and not row.compiled
    return logits + (2 * tokens * row.shape.dim * row.shape.n_layers if is_saved else 0)


def list_with_memory() -> list[Published]:
    """Return the runs whose memory was published."""
    return [row for row in load_published() if row.memory_gib is not None]


def make_tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the table of published and predicted memory."""
    by_name = {row["name"]: row for row in results["rows"]}
    lines = []
    for row in list_with_memory():
        group, _, name = row.name.partition(" ")
        known = by_name.get(row.name)
        if known is None:
            cells = [f"not in the trainer: {list_missing_features(row)}", "", "", "", ""]
        else:
            theirs, measured = known["as_published"], (row.memory_gib or 0.0) * 2**30
            cells = [_format_gib(known["trainer"]), f"{known['trainer'] / measured:.2f}", _format_gib(theirs), "", ""]
            if theirs is not None:
                counted = theirs + count_added_bytes(row)
                cells[3:] = [_format_gib(counted), f"{counted / measured:.2f}"]
        lines.append([group, name, f"{row.memory_gib:g}", *cells])
    heads = ["source", "run", "published", "in the trainer", "ratio", "as published", "and counted", "ratio"]
    return {"published memory": make_markdown_table(heads, lines)}


def _format_gib(peak: int | None) -> str:
    return "" if peak is None else f"{peak / 2**30:.1f}"

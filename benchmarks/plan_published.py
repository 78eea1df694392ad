"""The published runs as `quaver plan` predicts them: the table of docs/plan.md.

Each card's share of its best matmul rate is that at which one row is met (`calibrated`); nothing else is fitted.
"""

from dataclasses import replace

from benchmarks.published import Published, published
from quaver.plan.calibration import CARDS, Card
from quaver.plan.cluster import Cluster
from quaver.plan.pipeline import pipeline_step
from quaver.plan.run import Run
from quaver.plan.simulate import simulate
from quaver.plan.step import training_step
from quaver.recipes.config import Float8LinearRecipeName

NETWORK_GBPS = 400.0
"""Where a source does not state it."""
OFF = 0.15
"""A ratio further from 1 needs a reason."""
NODE_LIMITED = (0.5 * 0.5 + 0.5) / 2
"""DeepSeek-V3 sends a token to 4 nodes at most for its 8 experts, in float8 there and in bfloat16 back (arXiv
2412.19437, section 3.2.2)."""
CHECKPOINTING = {"none": "none", "selective op": "op", "selective 2": "full", "full": "full"}


def is_megatron(row: Published) -> bool:
    """Whether NVIDIA's Megatron ran it, with TransformerEngine."""
    return row.name.startswith(("dgxc", "megatron", "nemo"))


def run_of(row: Published) -> Run:
    """A published run as the model of time sees it."""
    model, megatron, mode = row.shape, is_megatron(row), CHECKPOINTING[row.checkpointing]
    blocks = model.n_layers // 2 if row.checkpointing == "selective 2" else model.n_layers
    recipe = None if row.recipe == "bfloat16" else Float8LinearRecipeName(row.recipe)
    run = Run(
        model,
        row.seq_len,
        row.local_batch,
        row.micro_batches,
        replicate=row.dp_replicate,
        shard=row.dp_shard,
        tensor=row.tp,
        expert=row.ep,
        context=row.cp,
        pipeline=row.pp,
        virtual=row.pp_virtual,
        recipe=recipe,
        float8_gather=row.float8_gather,
        checkpointing=mode,
        checkpointed_blocks=0 if mode == "none" else blocks,
        reshards="default" if row.sharding == "fsdp" else "never",
        casts_weights_once=megatron,
        residual_bytes=2,
        async_tensor=row.async_tp,
        async_expert=row.pp_schedule == "DualPipe",
        exchanged_share=NODE_LIMITED if row.pp_schedule == "DualPipe" else 1.0,
        compiled=row.compiled or not row.name.startswith(("aws", "torchtitan")),
        casts_gathered=row.recipe == "rowwise",
        attention="cudnn" if megatron or row.gpu.startswith("B200") else "flash",
        splits_loss=True,
    )
    if row.sharding == "zero1":
        run = replace(run, shard=row.dp_replicate * row.dp_shard, replicate=1, shards_states=True)
    if recipe is not None and run.model.n_experts:
        run = replace(run, in_float8=run.in_float8 | {"experts"})
    return run


def seconds(row: Published, card: Card) -> float:
    """The simulated time of a step."""
    cluster = Cluster(card.spec, row.nodes_of, row.network_gbps_per_gpu or NETWORK_GBPS, card.sustained)
    run = run_of(row)
    return simulate(pipeline_step(run, cluster) if run.pipeline > 1 else training_step(run, cluster)).seconds


def tokens_per_s(row: Published, card: Card | None = None) -> float:
    """The predicted tokens/s of each GPU, on the row's card unless another is given."""
    run = run_of(row)
    return run.step_tokens / seconds(row, card or CARDS[row.gpu]) / run.ranks


def calibrated(name: str) -> float:
    """The share of a card at which the prediction of its row is what was published, by bisection."""
    card = CARDS[name]
    row = next(row for row in published() if row.name == card.row)
    low, high = 0.1, 1.2
    for _ in range(30):
        middle = (low + high) / 2
        faster = tokens_per_s(row, card._replace(sustained=middle)) > row.tokens_per_s_per_gpu
        low, high = (low, middle) if faster else (middle, high)
    return (low + high) / 2

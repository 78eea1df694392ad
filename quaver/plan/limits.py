"""The limits of a step, in numbers and in words: where its seconds go, what is hidden, and what float8 gains."""

from __future__ import annotations

from dataclasses import dataclass

from quaver.plan.cluster import NETWORK, NVLINK, Cluster
from quaver.plan.compute import weights_of_block
from quaver.plan.run import EXPERTS, HEAD, Run
from quaver.plan.saving import written_s
from quaver.plan.search import Row, in_bfloat16
from quaver.plan.simulate import COMPUTE, Timeline
from quaver.trainer.model import training_flops_per_token

WORDS = {
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters in float32",
    "all_reduce": "all-reduces",
    "all_to_all": "exchanges of experts' tokens",
    "checkpoint": "checkpoints",
}
NOTHING = 0.005
"""A share of a step below which something counts as hidden."""


@dataclass(frozen=True)
class Link:
    """One link in a step of one rank."""

    name: str
    sent_bytes: float
    """Bytes that the rank sends over it."""
    busy_s: float
    exposed_s: float
    """How long it works while nothing is computed."""


@dataclass(frozen=True)
class Utilization:
    """Model FLOPs per second over the peak of the data sheet: that of bfloat16, and each matmul's own."""

    mfu: float
    mfu_by_precision: float


def links_of(timeline: Timeline) -> list[Link]:
    """The links of a step."""
    found = []
    for name in timeline.streams:
        if name in (NVLINK, NETWORK):
            found.append(Link(name, timeline.sent_bytes(name), timeline.busy_s(name), timeline.exposed_on(name)))
    return found


def utilization_of(row: Row, cluster: Cluster) -> Utilization:
    """How well one GPU is used."""
    flops = training_flops_per_token(row.run.model, row.run.seq_len)
    in_float8 = float8_flops_per_token(row.run)
    spec, tokens_per_s = cluster.spec, row.tokens_per_s
    peak8 = spec.float8_tflops or spec.bfloat16_tflops
    least_s = (flops - in_float8) / (spec.bfloat16_tflops * 1e12) + in_float8 / (peak8 * 1e12)
    return Utilization(flops * tokens_per_s / (spec.bfloat16_tflops * 1e12), least_s * tokens_per_s)


def float8_flops_per_token(run: Run) -> float:
    """FLOPs of matmuls in float8, forward and backward."""
    if run.recipe is None:
        return 0
    model = run.model
    weights = sum(run.float8_share(name) * i * o for name, (i, o) in weights_of_block(run).items())
    weights += run.float8_share(EXPERTS) * model.top_k * 3 * model.dim * model.hidden_dim
    weights = weights * model.n_layers + run.float8_share(HEAD) * model.dim * model.vocab_size
    return (4 if run.recipe.value.endswith("gw_hp") else 6) * weights


def limits_in_words(row: Row, cluster: Cluster) -> list[str]:
    """Sentences: what the GPU computes, what is hidden behind it, what is not, and what float8 gains."""
    timeline, whole = row.timeline, row.timeline.seconds
    kinds = [kind for kind in WORDS if any(span.task.kind == kind for span in timeline.spans)]
    exposed = {kind: timeline.exposed_s(kind) / whole for kind in kinds}
    hidden = [WORDS[kind] for kind in kinds if exposed[kind] < NOTHING and kind != "checkpoint"]
    shown = {WORDS[kind]: share for kind, share in exposed.items() if share >= NOTHING}
    busy = timeline.busy_s(COMPUTE) / whole
    sentences = [f"computing takes {busy:.0%} of the step"]
    if hidden:
        sentences.append(f"hidden behind it: {', '.join(hidden)}")
    for words, share in sorted(shown.items(), key=lambda each: -each[1]):
        sentences.append(f"{words} are not: {share:.1%} of the step waits for them")
    between_s, writing_s = row.run.steps_between_saves * row.seconds, written_s(row.run, cluster)
    if writing_s > between_s > 0:
        sentences.append(f"a checkpoint is written in {writing_s:,.0f} s, and one is due every {between_s:,.0f} s")
    return [*sentences, *gain_in_words(row, cluster)]


def gain_in_words(row: Row, cluster: Cluster) -> list[str]:
    """The gain of float8 in this layout, and why not more; nothing for bfloat16."""
    if row.run.recipe is None:
        return []
    bfloat16_s = in_bfloat16(row, cluster)
    flops = training_flops_per_token(row.run.model, row.run.seq_len)
    share = float8_flops_per_token(row.run) / flops
    gain = bfloat16_s / row.seconds
    return [
        f"{gain:.2f} times bfloat16's speed in the same layout: float8 computes {share:.0%} of the FLOPs, so with free "
        f"casts, and nothing else than matmuls, it would be {1 / (1 - share / 2):.2f}"
    ]

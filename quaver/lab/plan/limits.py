"""Explains the time of a step: computing, hidden and exposed communication, the gain of float8."""

from __future__ import annotations

from dataclasses import dataclass

from quaver.lab.plan.cluster import NETWORK, NVLINK, Cluster
from quaver.lab.plan.peak import count_float8_flops_per_token, count_flops_per_token
from quaver.lab.plan.saving import time_writing
from quaver.lab.plan.search import FittingLayout, simulate_in_bfloat16
from quaver.lab.plan.simulate import COMPUTE, SimulatedTimeline

KIND_NAMES = {
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters",
    "all_reduce": "all-reduces",
    "all_to_all": "all-to-alls",
    "checkpoint": "checkpoints",
}
HIDDEN_SHARE = 0.005
"""Communication that is exposed for less than this share of a step counts as hidden."""


@dataclass(frozen=True)
class Link:
    """One link in a step of one rank."""

    name: str
    sent_bytes: float
    """Bytes that the rank sends over the link."""
    busy_s: float
    exposed_s: float
    """The time in which the link works while nothing is computed."""


def list_links(timeline: SimulatedTimeline) -> list[Link]:
    """Return the links that a step uses."""
    return [
        Link(
            name,
            timeline.sum_sent_bytes(name),
            timeline.sum_seconds(stream=name),
            timeline.sum_exposed_seconds(stream=name),
        )
        for name in timeline.streams
        if name in (NVLINK, NETWORK)
    ]


def describe_limits(row: FittingLayout, cluster: Cluster) -> list[str]:
    """Return sentences about the share of computing, hidden and exposed communication, and the gain of float8."""
    timeline, step_s = row.timeline, row.timeline.seconds
    kinds = [kind for kind in KIND_NAMES if kind in timeline.kinds]
    exposed = {kind: timeline.sum_exposed_seconds(kind=kind) / step_s for kind in kinds}
    hidden = [KIND_NAMES[kind] for kind in kinds if exposed[kind] < HIDDEN_SHARE and kind != "checkpoint"]
    shown = {KIND_NAMES[kind]: share for kind, share in exposed.items() if share >= HIDDEN_SHARE}
    busy = timeline.sum_seconds(stream=COMPUTE) / step_s
    sentences = [f"computing takes {busy:.0%} of the step"]
    if hidden:
        sentences.append(f"hidden behind it: {', '.join(hidden)}")
    for name, share in sorted(shown.items(), key=lambda item: -item[1]):
        sentences.append(f"{name} are not: {share:.1%} of the step waits for them")
    between_s, writing_s = row.run.steps_between_saves * row.seconds, time_writing(row.run, cluster)
    if writing_s > between_s > 0:
        sentences.append(f"a checkpoint is written in {writing_s:,.0f} s, and one is due every {between_s:,.0f} s")
    return [*sentences, *describe_gain(row, cluster)]


def describe_gain(row: FittingLayout, cluster: Cluster) -> list[str]:
    """Return a sentence about the gain of float8 in this layout and its bound; an empty list for bfloat16."""
    if row.run.recipe is None:
        return []
    bfloat16_s = simulate_in_bfloat16(row, cluster)
    share = count_float8_flops_per_token(row.run) / count_flops_per_token(row.run)
    gain, spec = bfloat16_s / row.seconds, cluster.spec
    matmuls_s = 1 - share * (1 - spec.bfloat16_tflops / (spec.float8_tflops or spec.bfloat16_tflops))
    return [
        f"{gain:.2f} times bfloat16's speed in the same layout: float8 computes {share:.0%} of the FLOPs, so with free "
        f"casts and no other work the speedup would be at most {1 / matmuls_s:.2f}"
    ]

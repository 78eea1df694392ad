"""Explains the time of a step: computing, hidden and exposed communication, the speedup of float8."""

from __future__ import annotations

from dataclasses import dataclass

from quaver.lab.plan.checkpoint_time import predict_write_seconds
from quaver.lab.plan.cluster import NETWORK, NVLINK, Cluster
from quaver.lab.plan.extrapolate import predict_step_seconds, sum_compute_seconds
from quaver.lab.plan.mfu import count_float8_flops_per_token, count_flops_per_token
from quaver.lab.plan.search import SimulatedLayout, make_bfloat16_run
from quaver.lab.plan.simulate import COMPUTE, SimulatedTimeline
from quaver.lab.plan.step import ComputeTimes

COLLECTIVE_NAMES = {
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters",
    "all_reduce": "all-reduces",
    "all_to_all": "all-to-alls",
    "checkpoint": "checkpoints",
}
MAX_HIDDEN_SHARE = 0.005
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


def describe_limits(layout: SimulatedLayout, cluster: Cluster) -> list[str]:
    """Return sentences about the share of computing, hidden and exposed communication, and the speedup of float8."""
    timeline, step_s = layout.timeline, layout.timeline.seconds
    kinds = [kind for kind in COLLECTIVE_NAMES if kind in timeline.kinds]
    exposed = {kind: timeline.sum_exposed_seconds(kind=kind) / step_s for kind in kinds}
    hidden = [COLLECTIVE_NAMES[kind] for kind in kinds if exposed[kind] < MAX_HIDDEN_SHARE and kind != "checkpoint"]
    exposed_shares = {COLLECTIVE_NAMES[kind]: share for kind, share in exposed.items() if share >= MAX_HIDDEN_SHARE}
    compute_share = timeline.sum_seconds(stream=COMPUTE) / step_s
    sentences = [f"computing takes {compute_share:.0%} of the step"]
    if hidden:
        sentences.append(f"hidden behind it: {', '.join(hidden)}")
    for name, share in sorted(exposed_shares.items(), key=lambda item: -item[1]):
        sentences.append(f"the step waits for {name} for {share:.1%} of its time")
    write_s = predict_write_seconds(layout.run, cluster)
    between_s = layout.run.steps_between_saves * (step_s - timeline.sum_seconds(kind="checkpoint"))
    if layout.run.saves_in_background and write_s > between_s > 0:
        sentences.append(
            f"a checkpoint is written in {write_s:,.0f} s, and the next one waits for it: the steps between two "
            f"take only {between_s:,.0f} s"
        )
    return [*sentences, *describe_float8_speedup(layout, cluster)]


def describe_float8_speedup(layout: SimulatedLayout, cluster: Cluster) -> list[str]:
    """Return a list of one sentence about the speedup by float8 in this layout, or an empty list for bfloat16."""
    if layout.run.recipe is None:
        return []
    speedup = compute_float8_speedup(layout, cluster)
    return [
        f"{speedup.value:.2f} times bfloat16's speed in the same layout: float8 computes {speedup.float8_share:.0%} of "
        f"the FLOPs, so with free casts computing would be at most {speedup.max_compute_speedup:.2f} times as fast, "
        f"and the step {speedup.max_value:.2f} times if no communication were exposed"
    ]


@dataclass(frozen=True)
class Float8Speedup:
    """The speed of a step relative to the same layout in bfloat16."""

    value: float
    float8_share: float
    """The share of the FLOPs that float8 matmuls compute."""
    max_compute_speedup: float
    """The speedup of the compute if casts were free, and matmuls gained as much as the data sheet's peak."""
    max_value: float
    """`value` if also no communication were exposed: the step takes as long as its compute."""


def compute_float8_speedup(layout: SimulatedLayout, cluster: Cluster) -> Float8Speedup:
    """Return the speedup of a layout in float8, even if the layout does not fit in bfloat16."""
    run, spec = make_bfloat16_run(layout), cluster.spec
    bfloat16_s = predict_step_seconds(run, cluster)
    share = count_float8_flops_per_token(layout.run) / count_flops_per_token(layout.run)
    max_compute_speedup = 1 / (1 - share * (1 - spec.bfloat16_tflops / (spec.float8_tflops or spec.bfloat16_tflops)))
    compute_s = sum_compute_seconds(run, ComputeTimes.from_formulas(run, cluster))
    return Float8Speedup(
        bfloat16_s / layout.seconds, share, max_compute_speedup, max_compute_speedup * bfloat16_s / compute_s
    )

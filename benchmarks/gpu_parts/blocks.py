"""One block's forward and backward, all contestants in one process and in turns; then a profile of each by kernel.

Compiled, the question is what the kernels take, one step at a time and in one second of steps back to back, when the
card is as hot and as slow as in training. Eager, the time of a captured CUDA graph is that of the device alone,
and what is above it is the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_parts.categories import by_category, profiled
from benchmarks.gpu_parts.contestants import ORDER, Step, inputs_of, of_lab, step_of
from benchmarks.gpu_parts.lab import Call, Lab, Row, failures_as_rows, timing

ROUNDS = 15
SHARE_OF_COMPILING = 0.7
"""Of the part's time; contestants that are not compiled by then are left out, and said to be."""


def compiled_blocks(lab: Lab) -> Iterator[Row]:
    """The compiled blocks."""
    yield from _blocks(lab, compiled=True)


def eager_blocks(lab: Lab) -> Iterator[Row]:
    """The eager blocks, and replays of each as one CUDA graph."""
    yield from _blocks(lab, compiled=False)


def _blocks(lab: Lab, *, compiled: bool) -> Iterator[Row]:
    inputs, steps = inputs_of(lab), {}
    torch.compiler.reset()

    def prepare(name: str) -> Iterator[Row]:
        start = time.monotonic()
        steps[name] = step_of(lab, name, inputs, compiled=compiled)
        steps[name].settle()
        yield {"prepared_s": round(time.monotonic() - start, 1)}

    for name in of_lab(lab, ORDER):
        if lab.left_s < (1 - SHARE_OF_COMPILING) * lab.seconds:
            yield {"what": name, "error": "left out: no time to compile it"}
            continue
        for row in failures_as_rows([({"what": name}, partial(prepare, name))]):
            yield row
            if "error" in row:
                steps.pop(name, None)
    found = lab.time(dict(steps), rounds=ROUNDS, with_host=not compiled)
    first = next(iter(found.values()), None)
    for name, each in found.items():
        assert first is not None
        ratio = each.median_us / first.median_us
        yield {"what": f"{name}, time", "timing": timing(each), "over_bfloat16": ratio}
    for name, step in steps.items() if compiled else ():
        yield {"what": f"{name}, back to back", "ms": 1e3 * lab.back_to_back(step), "state_after": lab.state()}
    if not compiled:
        of_graphs = [({"what": f"{name}, CUDA graph"}, partial(_graph, lab, step)) for name, step in steps.items()]
        yield from failures_as_rows(of_graphs)
    yield from failures_as_rows(
        ({"what": f"{name}, profile"}, partial(_profile, lab, name, step, compiled)) for name, step in steps.items()
    )


def _graph(lab: Lab, step: Step) -> Iterator[Row]:
    replay = captured(lab, step)
    yield {"timing": timing(lab.time({"it": replay}, rounds=10)["it"])}


def captured(lab: Lab, step: Step) -> Call:
    """Calls of the step, recorded once; on a CPU the step itself."""
    if lab.dry:
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def _profile(lab: Lab, name: str, step: Step, compiled: bool) -> Iterator[Row]:
    kernels = profiled(lab, step)
    total = sum(each["us"] for each in kernels)
    yield {
        "device_ms": total / 1e3,
        "launches": sum(each["count"] for each in kernels),
        "by_category": by_category(kernels, name if compiled else ""),
        "kernels": kernels,
    }

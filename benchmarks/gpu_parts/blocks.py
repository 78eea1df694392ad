"""Times forward and backward of one block, for contestants in turns in one process; then profiles each by kernel.

Compiled blocks are timed one step at a time, and in one second of steps back to back, when the card is as hot and as
slow as in training. Eager blocks are also timed as a captured CUDA graph, which is the time of the device alone; the
rest of an eager step is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_parts.categories import profile_step, sum_by_category
from benchmarks.gpu_parts.contestants import ORDER, Step, make_inputs, make_step, select_contestants
from benchmarks.gpu_parts.part_context import Call, PartContext, Row, catch_failures, make_timing_row

ROUNDS = 15
SHARE_OF_COMPILING = 0.7
"""The share of the part's time for compiling. Contestants that are not compiled by then get a row with an error."""


def time_compiled_blocks(context: PartContext) -> Iterator[Row]:
    """Time and profile the compiled blocks."""
    yield from _time_blocks(context, compiled=True)


def time_eager_blocks(context: PartContext) -> Iterator[Row]:
    """Time and profile the eager blocks, and replays of each as one CUDA graph."""
    yield from _time_blocks(context, compiled=False)


def _time_blocks(context: PartContext, *, compiled: bool) -> Iterator[Row]:
    inputs, steps = make_inputs(context), {}
    torch.compiler.reset()

    def prepare(name: str) -> Iterator[Row]:
        start = time.monotonic()
        steps[name] = make_step(context, name, inputs, compiled=compiled)
        steps[name].settle()
        yield {"prepared_s": round(time.monotonic() - start, 1)}

    for name in select_contestants(context, ORDER):
        if context.left_s < (1 - SHARE_OF_COMPILING) * context.seconds:
            yield {"what": name, "error": "left out: no time to compile it"}
            continue
        for row in catch_failures([({"what": name}, partial(prepare, name))]):
            yield row
            if "error" in row:
                steps.pop(name, None)
    timings = context.time(dict(steps), rounds=ROUNDS, with_host=not compiled)
    first = next(iter(timings.values()), None)
    for name, measured in timings.items():
        assert first is not None
        ratio = measured.median_us / first.median_us
        yield {"what": f"{name}, time", "timing": make_timing_row(measured), "over_bfloat16": ratio}
    for name, step in steps.items() if compiled else ():
        yield {
            "what": f"{name}, back to back",
            "ms": 1e3 * context.time_back_to_back(step),
            "state_after": context.read_state(),
        }
    if not compiled:
        of_graphs = [
            ({"what": f"{name}, CUDA graph"}, partial(_time_graph, context, step)) for name, step in steps.items()
        ]
        yield from catch_failures(of_graphs)
    yield from catch_failures(
        ({"what": f"{name}, profile"}, partial(_profile, context, name, step, compiled)) for name, step in steps.items()
    )


def _time_graph(context: PartContext, step: Step) -> Iterator[Row]:
    replay = capture_graph(context, step)
    yield {"timing": make_timing_row(context.time({"it": replay}, rounds=10)["it"])}


def capture_graph(context: PartContext, step: Step) -> Call:
    """Return the replay of a CUDA graph of the step; on a CPU the step itself."""
    if context.dry:
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


def _profile(context: PartContext, name: str, step: Step, compiled: bool) -> Iterator[Row]:
    kernels = profile_step(context, step)
    total = sum(kernel["us"] for kernel in kernels)
    yield {
        "device_ms": total / 1e3,
        "launches": sum(kernel["count"] for kernel in kernels),
        "by_category": sum_by_category(kernels, name if compiled else ""),
        "kernels": kernels,
    }

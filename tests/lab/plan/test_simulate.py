"""Tests that the simulator runs one task of a stream at a time, in order, and none before what it waits for."""

from itertools import pairwise

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaver.lab.plan.cluster import NETWORK, NVLINK
from quaver.lab.plan.picture import draw_step
from quaver.lab.plan.simulate import COMPUTE, CONTENTION_SHARE, ExtrapolatedTimeline, Task, TaskList, simulate

STREAMS = [(COMPUTE, 0), (NVLINK, 0), (NETWORK, 0), (COMPUTE, 1), (NVLINK, 1), ("send forward", 1)]
TINY = 1e-12


@st.composite
def task_lists(draw):
    """Tasks that wait for some of those before them."""
    tasks = TaskList()
    for number in range(draw(st.integers(1, 25))):
        seconds = draw(st.one_of(st.just(0.0), st.floats(1e-9, 10.0)))
        dependencies = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else ()
        stream, rank = draw(st.sampled_from(STREAMS))
        tasks.append(Task(f"task {number}", stream, seconds, tuple(dependencies), rank=rank))
    return tasks


def find_stream(task):
    return task.stream, task.rank


def sum_longest_path(tasks):
    """Return the seconds of the tasks that wait for each other, on the path that takes longest."""
    ends = []
    for task in tasks:
        ends.append(task.seconds + max((ends[earlier] for earlier in task.dependencies), default=0.0))
    return max(ends)


@settings(max_examples=25, deadline=None)
@given(task_lists())
def test_streams_run_one_task_at_a_time_and_wait_and_take_between_the_longest_part_and_the_sum(tasks):
    for contention in (0.0, CONTENTION_SHARE):
        timeline = simulate(tasks, contention)
        spans = timeline.spans
        assert [span.task for span in spans] == tasks
        for span in spans:
            assert all(spans[earlier].end_s <= span.start_s for earlier in span.task.dependencies)
        for stream in STREAMS:
            ordered = [span for span in spans if find_stream(span.task) == stream]
            assert all(span.end_s <= following.start_s for span, following in pairwise(ordered))
        longest = max(sum(task.seconds for task in tasks if find_stream(task) == stream) for stream in STREAMS)
        slowed = [task.seconds / (1 - contention) if task.stream == COMPUTE else task.seconds for task in tasks]
        assert timeline.seconds >= max(longest, sum_longest_path(tasks)) - TINY
        assert timeline.seconds <= sum(slowed) + 1e-9
        assert all(span.end_s - span.start_s >= span.task.seconds - TINY for span in spans)


@settings(max_examples=15, deadline=None)
@given(task_lists())
def test_a_simulation_is_deterministic_and_each_task_ends_as_early_as_it_can(tasks):
    """Without contention a task begins when its stream is free and what it waits for has ended."""
    spans = simulate(tasks, 0.0).spans
    assert spans == simulate(tasks, 0.0).spans
    free = dict.fromkeys(STREAMS, 0.0)
    for span in spans:
        ready = max([free[find_stream(span.task)], *(spans[earlier].end_s for earlier in span.task.dependencies)])
        assert span.start_s == pytest.approx(ready, abs=TINY)
        free[find_stream(span.task)] = span.end_s


def test_a_collective_slows_its_ranks_compute_stream_while_it_runs():
    tasks = TaskList()
    tasks.add("matmul", COMPUTE, 2.0)
    tasks.append(Task("other rank", COMPUTE, 2.0, rank=1))
    gather = tasks.add("gather", "NVLink", 1.0)
    tasks.add("reduce", "network", 0.5, [gather])
    tasks.append(Task("send", "send forward", 9.0, rank=1))
    ends = [span.end_s for span in simulate(tasks, 0.5).spans]
    assert ends == [2.75, 2.0, 1.0, 1.5, 9.0]  # 1.5 s at half speed leave 1.25


def test_a_timeline_sums_busy_and_exposed_seconds_by_stream_and_kind():
    tasks = TaskList()
    first = tasks.add("gather", "NVLink", 1.0, kind="all_gather")
    tasks.add("forward", COMPUTE, 2.0, [first])
    tasks.add("next gather", "NVLink", 3.0, [first], kind="all_gather")
    timeline = simulate(tasks, 0.0)
    assert timeline.seconds == timeline.sum_seconds(stream="NVLink") == 4.0
    assert timeline.sum_seconds(stream=COMPUTE) == 2.0
    assert timeline.sum_exposed_seconds(kind="all_gather") == timeline.sum_exposed_seconds(stream="NVLink") == 2.0
    assert timeline.streams == (COMPUTE, "NVLink")


def test_tasks_that_wait_for_each_other_are_refused():
    tasks = TaskList([Task("one", COMPUTE, 1.0, (1,)), Task("two", COMPUTE, 1.0)])
    with pytest.raises(ValueError, match="'one', which can never begin"):
        simulate(tasks)
    assert simulate(TaskList()).seconds == 0


def test_the_picture_of_a_step_ignores_a_matplotlibrc_that_needs_latex(tmp_path):
    tasks = TaskList()
    tasks.add("forward", COMPUTE, 1.0, [tasks.add("gather", "NVLink", 1.0, kind="all_gather")], kind="forward")
    with matplotlib.rc_context({"text.usetex": True}):
        draw_step(simulate(tasks), tmp_path / "step.png", title="bfloat16, FSDP2 8")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_an_extrapolated_step_says_what_it_lacks(tmp_path, monkeypatch):
    titles, tasks = [], TaskList()
    tasks.add("forward", COMPUTE, 1.0, kind="forward")
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda axes, title, **_: titles.append(title))
    timeline = simulate(tasks)
    draw_step(ExtrapolatedTimeline(timeline.spans, timeline, 30), tmp_path / "step.png", title="")
    assert titles[0] == "without 30 further microbatches"

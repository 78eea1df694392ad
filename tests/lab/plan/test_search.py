"""Tests that the search finds the fastest layouts whose memory fits, and what it says where none does."""

from dataclasses import replace
from functools import cache
from itertools import islice
from unittest.mock import patch

import pytest

from quaver.lab.model.llama import count_training_flops_per_token
from quaver.lab.plan import search as searching
from quaver.lab.plan.changes import BFLOAT16
from quaver.lab.plan.checkpoint_time import predict_write_seconds
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.layouts import list_layouts
from quaver.lab.plan.limits import Link, compute_float8_speedup, describe_float8_speedup, describe_limits, list_links
from quaver.lab.plan.mfu import check_below_peak, compute_mfu
from quaver.lab.plan.peak_memory import estimate_peak
from quaver.lab.plan.planned_run import make_planned_run
from quaver.lab.plan.search import SimulatedLayout, predict_step_seconds, search
from quaver.lab.plan.simulate import COMPUTE, simulate
from quaver.lab.plan.step import build_tasks
from quaver.lab.settings.config_file import load_config
from quaver.roofline.device_specs import find_device_spec
from tests.lab.trainer.runs import CONFIGS, with_settings

LLAMA_8B = CONFIGS / "llama3_8b.toml"
CLUSTER = Cluster.from_spec(find_device_spec("h100"))
GIB = 2**30


@pytest.fixture(autouse=True, scope="module")
def known_memory():
    """Replace estimates of peaks by a rule: 10 GiB a sequence, 5 less with checkpointing, 2 more in bfloat16."""

    def estimate(config, ranks):
        sequence = 10 if config.activation_checkpoint.mode == "none" else 5
        return GIB * (config.training.local_batch_size * sequence + 2 * (not config.float8.enable_float8_linear))

    with patch.object(searching, "estimate_peak", estimate):
        yield


@cache
def make_layouts(ranks=16, precisions=(BFLOAT16, "tensorwise"), step_batch_size=None, blocks=2):
    config = with_settings(load_config(LLAMA_8B), model={"n_layers": blocks})
    options = {"precisions": list(precisions), "step_batch_size": step_batch_size}
    return list_layouts(config, ranks, gpus_per_node=8, **options, less_precise_storage=False)


def plan_last_layout(**options):
    candidate = make_layouts(**options).candidates[-1]
    return make_planned_run(candidate.config, candidate.dims)


MICRO_BATCHES = {"ranks": 8, "precisions": (BFLOAT16,), "step_batch_size": 48, "blocks": 6}


@pytest.fixture(scope="module")
def search_result(known_memory):
    return search(make_layouts(), CLUSTER, 45 * GIB, top=4)


@pytest.fixture(scope="module")
def timed():
    """Return every layout with its simulated time."""
    candidates = make_layouts().candidates
    runs = [make_planned_run(candidate.config, candidate.dims) for candidate in candidates]
    seconds = [predict_step_seconds(run, CLUSTER) / run.step_tokens for run in runs]
    return list(zip(candidates, runs, seconds, strict=True))


def test_the_rows_are_the_fastest_that_fit(search_result, timed):
    rows = search_result.fastest
    speeds = [row.tokens_per_s for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert all(row.peak_bytes <= 45 * GIB for row in rows)
    fitting = [seconds for candidate, _, seconds in timed if searching.estimate_peak(candidate.config, 16) <= 45 * GIB]
    assert speeds[0] == pytest.approx(1 / min(fitting) / 16)
    assert {row.candidate.precision_label for row in rows} == {BFLOAT16, "tensorwise"}
    assert any(row.candidate.is_configured for row in rows)


def test_rows_have_the_estimated_peaks_of_their_configs(monkeypatch):
    """Half of the layouts fit by the real estimate, in place of the rule of the other tests."""
    monkeypatch.setattr(searching, "estimate_peak", estimate_peak)
    layouts = make_layouts(precisions=(BFLOAT16,))
    peaks = sorted(estimate_peak(candidate.config, 16) for candidate in layouts.candidates)
    limit = peaks[len(peaks) // 2]
    result = search(layouts, CLUSTER, limit, top=3)
    assert all(row.peak_bytes == estimate_peak(row.candidate.config, 16) for row in result.fastest)
    assert result.fitting_count == sum(peak <= limit for peak in peaks) < len(peaks)
    assert result.smallest.peak_bytes == peaks[0]


def test_a_step_is_estimated_from_few_blocks_and_micro_batches():
    run = plan_last_layout(**MICRO_BATCHES)
    assert run.micro_batches > 2
    assert predict_step_seconds(run, CLUSTER) == pytest.approx(searching.simulate_step(run, CLUSTER).seconds, rel=1e-9)


@pytest.mark.parametrize("checkpointed", range(9))
def test_the_estimate_counts_every_checkpointed_block(checkpointed):
    run = plan_last_layout(ranks=8, blocks=8)
    run = replace(run, checkpointing="full", checkpointed_blocks=checkpointed)
    assert predict_step_seconds(run, CLUSTER) == pytest.approx(searching.simulate_step(run, CLUSTER).seconds, rel=2e-3)


def test_limits_of_a_step_are_described(search_result):
    rows = {row.candidate.precision_label: row for row in reversed(search_result.fastest)}
    row = rows["tensorwise"]
    words = " ".join(describe_limits(row, CLUSTER))
    computing_s = sum(span.end_s - span.start_s for span in row.timeline.spans if span.task.stream == COMPUTE)
    assert f"computing takes {computing_s / row.timeline.seconds:.0%} of the step" in words
    assert "hidden behind it: " in words
    assert "times bfloat16's speed in the same layout" in words
    assert not describe_float8_speedup(rows[BFLOAT16], CLUSTER)


def test_the_share_of_the_peak_counts_causal_attention(search_result):
    row = next(row for row in search_result.fastest if row.candidate.precision_label == BFLOAT16)
    run = row.run
    masked = 6 * run.model.n_layers * run.model.n_heads * run.model.head_dim * run.seq_len
    flops = run.step_tokens * (count_training_flops_per_token(run.model, run.seq_len) - masked) / run.world_size
    share = compute_mfu(run, row.seconds, CLUSTER.spec)
    assert share == pytest.approx(flops / row.seconds / 1e12 / CLUSTER.spec.bfloat16_tflops)


@pytest.mark.parametrize("ranks", [1, 16, 64])
@pytest.mark.parametrize("network_gbit_per_s", [0.1, 10.0, 400.0])
@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_no_speedup_is_above_its_bound(ranks, network_gbit_per_s, gpu):
    cluster = Cluster.from_spec(find_device_spec(gpu), network_gbit_per_s=network_gbit_per_s)
    layouts = make_layouts(ranks, precisions=("tensorwise", "rowwise")).candidates
    for candidate in layouts[1 :: max(1, len(layouts) // 12)]:
        run = make_planned_run(candidate.config, candidate.dims)
        row = SimulatedLayout(candidate, run, 0, searching.simulate_step(run, cluster))
        speedup = compute_float8_speedup(row, cluster)
        assert speedup.value <= speedup.max_value


def test_a_step_of_very_many_tasks_is_extrapolated_from_its_first_micro_batches(monkeypatch):
    run = replace(plan_last_layout(**MICRO_BATCHES), steps_between_saves=0)
    assert run.micro_batches > 2
    whole = simulate(build_tasks(run, CLUSTER))
    monkeypatch.setattr(searching, "MAX_SIMULATED_TASKS", 1)
    timeline = searching.simulate_step(run, CLUSTER)
    assert len(timeline.spans) < len(whole.spans)
    assert timeline.seconds == pytest.approx(whole.seconds)
    assert list_links(timeline) == [make_approximate(link) for link in list_links(whole)]
    for kind in whole.kinds:
        assert (timeline.sum_seconds(kind=kind), timeline.sum_exposed_seconds(kind=kind)) == pytest.approx(
            (whole.sum_seconds(kind=kind), whole.sum_exposed_seconds(kind=kind)), abs=1e-9
        )


def make_approximate(link):
    return Link(link.name, *(pytest.approx(value) for value in (link.sent_bytes, link.busy_s, link.exposed_s)))


def test_no_step_is_faster_than_the_peak_of_its_gpu():
    """Attention counts as its causal half: all of it would be above the peak for sequences of a million tokens."""
    run, spec = plan_last_layout(ranks=8, precisions=(BFLOAT16,), blocks=4), CLUSTER.spec
    long = replace(run, seq_len=2**20)
    seconds = predict_step_seconds(long, replace(CLUSTER, sustained_share=1.0))
    as_usual = long.step_tokens * count_training_flops_per_token(long.model, long.seq_len) / long.world_size / seconds
    assert compute_mfu(long, seconds, spec) < 0.7 < 1 < as_usual / 1e12 / spec.bfloat16_tflops
    with pytest.raises(RuntimeError, match=r"a step of .* s would be \d\.\d times as fast as the peak of H100 allows"):
        check_below_peak(long, seconds / 5, spec)


def test_the_fastest_are_found_without_simulating_all(monkeypatch, timed):
    simulated = []
    spy = lambda *arguments: simulated.append(arguments) or predict_step_seconds(*arguments)  # noqa: E731
    monkeypatch.setattr(searching, "predict_step_seconds", spy)
    bounded = [searching.make_timed_layout(candidate, run, 0, CLUSTER) for candidate, run, _ in timed]
    first = [row.simulate_seconds_per_token(CLUSTER) for row in islice(searching.iter_by_speed(bounded, CLUSTER), 5)]
    assert first == pytest.approx(sorted(seconds for *_, seconds in timed)[:5])
    assert len(simulated) < len(timed) / 3


@pytest.mark.parametrize(("float8_gradients", "reduction"), [(False, "reduce-scatters"), (True, "all-to-alls")])
def test_a_slow_network_shows_what_waits(float8_gradients, reduction):
    """At 1/40 of the rate the reduction of gradients is no longer hidden, and each link says how long it waits."""
    slow = replace(CLUSTER, network_gbit_per_s=10.0)
    candidate = make_layouts().candidates[0]
    run = replace(make_planned_run(candidate.config, candidate.dims), float8_gradients=float8_gradients)
    row = SimulatedLayout(candidate, run, 0, searching.simulate_step(run, slow))
    (network,) = [link for link in list_links(row.timeline) if link.name == "network"]
    assert network.exposed_s > 0.2 * row.seconds
    assert f"the step waits for {reduction} for " in "; ".join(describe_limits(row, slow))


def test_storage_that_cannot_keep_up_limits_the_step():
    slow = replace(CLUSTER, storage_gb_per_s=1e-3)
    candidate = make_layouts().candidates[0]
    run = replace(make_planned_run(candidate.config, candidate.dims), steps_between_saves=10)
    row = SimulatedLayout(candidate, run, 0, searching.simulate_step(run, slow))
    writing_s = predict_write_seconds(run, slow)
    assert writing_s < 10 * row.seconds == pytest.approx(writing_s, rel=1e-3)
    sentence = (
        f"a checkpoint is written in {writing_s:,.0f} s, and the next one waits for it: the steps between two take"
    )
    assert sentence in "; ".join(describe_limits(row, slow))

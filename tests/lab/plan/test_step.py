"""Tests that in a simulated step more bandwidth, fewer tokens or more overlap never take longer."""

from dataclasses import replace

import pytest

from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.extrapolate import predict_step_seconds
from quaver.lab.plan.planned_run import Framework, PlannedRun
from quaver.lab.plan.search import simulate_step
from quaver.lab.plan.simulate import COMPUTE, simulate
from quaver.lab.plan.step import build_tasks
from quaver.lab.settings import Model
from quaver.recipes.config import Float8LinearRecipeName
from quaver.roofline.device_specs import find_device_spec

MODEL = Model(vocab_size=32000, dim=4096, n_layers=4, n_heads=32, n_kv_heads=8, hidden_dim=14336)
MIXTURE = replace(MODEL, dim=2048, n_heads=16, hidden_dim=768, n_experts=64, top_k=8)
FAST = Cluster.from_spec(find_device_spec("h100"))
SLOW = replace(FAST, network_gbit_per_s=50.0)
TENSORWISE = Float8LinearRecipeName.TENSORWISE
BASE = PlannedRun(MODEL, 8192, 1, dp_shard=16, checkpointing="op", checkpointed_blocks=4)
RUNS = {
    "one rank": replace(BASE, dp_shard=1),
    "FSDP2": BASE,
    "HSDP": replace(BASE, dp_shard=8, dp_replicate=4),
    "float8 all-gather": replace(BASE, recipe=TENSORWISE, float8_all_gather=True),
    "tensor parallel": replace(BASE, tp=8),
    "asynchronous": replace(BASE, tp=8, framework=Framework(async_tensor=True)),
    "rowwise over nodes": replace(BASE, tp=16, dp_shard=4, recipe=Float8LinearRecipeName.ROWWISE),
    "context parallel": replace(BASE, cp=4),
    "microbatches": replace(BASE, micro_batches=3, reshard_after_forward="never"),
    "states only": replace(BASE, micro_batches=3, reduce="last", reshard_after_forward="never"),
    "last": replace(BASE, micro_batches=3, reduce="last"),
    "last all-reduce": replace(BASE, dp_shard=8, dp_replicate=2, micro_batches=3, reduce="last_all_reduce"),
    "experts": replace(BASE, model=MIXTURE, ep=8, recipe=TENSORWISE),
}


def time_step(run, cluster=FAST):
    return simulate(build_tasks(run, cluster)).seconds


def count_collectives(name):
    """Return the numbers of all-gathers, reduce-scatters and all-reduces of gradients."""
    kinds = [task.kind for task in build_tasks(RUNS[name], FAST)]
    return kinds.count("all_gather"), kinds.count("reduce_scatter"), kinds.count("all_reduce") - 1


@pytest.mark.parametrize("name", RUNS)
def test_more_bandwidth_and_fewer_tokens_are_never_slower(name):
    run, spec = RUNS[name], FAST.spec
    assert time_step(run) <= time_step(run, SLOW)
    nvlink = replace(FAST, spec=replace(spec, link_gb_per_s=2 * spec.link_gb_per_s))
    memory = replace(FAST, spec=replace(spec, memory_gb_per_s=2 * spec.memory_gb_per_s))
    assert max(time_step(run, nvlink), time_step(run, memory)) <= time_step(run)
    assert time_step(run) < time_step(run, replace(FAST, sustained_share=FAST.sustained_share / 2))
    assert time_step(run) < time_step(replace(run, local_batch=2))


def test_one_rank_sends_nothing_and_computes_all_the_time():
    timeline = simulate(build_tasks(RUNS["one rank"], SLOW))
    assert timeline.streams == (COMPUTE,)
    assert timeline.sum_seconds(stream=COMPUTE) == pytest.approx(timeline.seconds)


def test_a_step_has_its_share_of_a_checkpoint():
    """16 ranks in two nodes hold 12 bytes for each parameter: copied by each rank, written by two nodes."""
    held = 12 * (4 * (3 * 14336 * 4096 + 2 * 4096**2 + 2 * 4096 * 1024 + 2 * 4096) + 2 * 32000 * 4096)
    plain, every_10th = time_step(BASE), replace(BASE, steps_between_saves=10)
    copying_s, writing_s = held / 16 / 0.7e9 / 10, held / 2 / 1e9 / 10
    slow, fast = (replace(FAST, storage_gb_per_s=rate * writing_s / plain) for rate in (0.5, 2.0))
    assert predict_step_seconds(every_10th, fast) == pytest.approx(plain + copying_s)
    # The next checkpoint waits for files that take as long as 20 steps.
    assert predict_step_seconds(every_10th, slow) == pytest.approx(2 * plain + copying_s)
    waiting = replace(every_10th, saves_in_background=False)
    assert predict_step_seconds(waiting, FAST) == pytest.approx(plain + writing_s)
    replicas = replace(BASE, dp_shard=8, dp_replicate=2)
    waiting_replicas = replace(waiting, dp_shard=8, dp_replicate=2)
    assert predict_step_seconds(waiting_replicas, FAST) == pytest.approx(time_step(replicas) + writing_s)
    for run, cluster in ((every_10th, fast), (every_10th, slow), (waiting, FAST)):
        timeline = simulate_step(run, cluster)
        assert timeline.seconds == pytest.approx(predict_step_seconds(run, cluster))
        assert timeline.sum_exposed_seconds(kind="checkpoint") == pytest.approx(timeline.seconds - plain)


def test_overlap_and_the_float8_gather_pay_where_the_network_limits():
    assert time_step(RUNS["asynchronous"]) < time_step(RUNS["tensor parallel"])
    gathered, plain = RUNS["float8 all-gather"], replace(RUNS["float8 all-gather"], float8_all_gather=False)
    assert time_step(gathered, SLOW) < 0.95 * time_step(plain, SLOW)
    timeline = simulate(build_tasks(BASE, FAST))
    gathers = [task.seconds for task in build_tasks(BASE, FAST) if task.kind == "all_gather"]
    # All but the first two are prefetched.
    assert timeline.sum_exposed_seconds(kind="all_gather") <= sum(gathers[:2]) * 1.001
    slow = simulate(build_tasks(BASE, replace(SLOW, network_gbit_per_s=10.0)))
    assert slow.sum_exposed_seconds(kind="all_gather") > 0.2 * slow.sum_seconds(stream="network")


def test_states_that_are_sharded_gather_and_reduce_once():
    groups = MODEL.n_layers + 2
    gathers = count_collectives("last")[0]
    assert count_collectives("states only") == (groups, groups, 0)
    assert count_collectives("last") == (gathers, groups, 0)
    assert count_collectives("last all-reduce") == (gathers, 3 * groups, groups)


def test_a_tied_projection_is_gathered_and_reduced_with_the_embedding():
    tied = replace(BASE, model=replace(MODEL, tie_word_embeddings=True))
    steps = [build_tasks(run, FAST) for run in (BASE, tied)]
    sent, sent_tied = (sum(task.sent_bytes for task in tasks if task.kind == "reduce_scatter") for tasks in steps)
    assert sent - sent_tied == pytest.approx(4 * MODEL.vocab_size * MODEL.dim * 15 / 16)
    assert time_step(tied) < time_step(BASE)

"""Tests pipeline stages of published runs: the turns of a stage, and the bubble of a schedule."""

from dataclasses import replace

import pytest

from benchmarks.plan.pipeline import PipelinedRun, build_pipeline_tasks, order_turns, predict_send_seconds
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.simulate import COMPUTE, simulate
from quaver.lab.settings import Model
from quaver.roofline.device_specs import find_device_spec

CLUSTER = Cluster.from_spec(find_device_spec("h100"))


def test_pipeline_sends_use_the_network_between_nodes_only():
    inside, next_node, far = (predict_send_seconds(CLUSTER, 2**26, stride) for stride in (4, 8, 64))
    assert inside < next_node == far


def test_two_stages_take_turns_as_by_hand():
    forward, backward = False, True
    assert order_turns(2, 1, 3, 1) == [(d, 0, m) for m in range(3) for d in (forward, backward)]
    first = [(forward, 0), (forward, 1), (backward, 0), (forward, 2), (backward, 1), (backward, 2)]
    assert order_turns(2, 1, 3, 0) == [(d, 0, m) for d, m in first]
    last = order_turns(2, 2, 2, 1)
    assert last[:4] == [(forward, 0, 0), (forward, 0, 1), (forward, 1, 0), (backward, 1, 0)]
    for parts in (1, 2, 4):
        for stage in range(2):
            turns = order_turns(2, parts, 4, stage)
            assert len(turns) == len(set(turns)) == 2 * 4 * parts
            assert all(turns.index((forward, *rest)) < turns.index((backward, *rest)) for _, *rest in turns)
    with pytest.raises(ValueError, match="a multiple of 2 microbatches"):
        order_turns(2, 2, 3, 0)


@pytest.mark.parametrize(("virtual", "micro_batches"), [(1, 4), (1, 16), (2, 8)])
def test_the_bubble_is_that_of_the_schedule(virtual, micro_batches):
    """(stages - 1) / (virtual microbatches) of the work, for stages that take equally long."""
    stages = 4
    model = Model(vocab_size=1, dim=4096, n_layers=8, n_heads=32, n_kv_heads=8, hidden_dim=14336)
    run = PipelinedRun(
        model, 8192, 1, micro_batches=micro_batches, pipeline=stages, virtual=virtual, checkpointing="none"
    )
    fast = replace(CLUSTER, spec=replace(CLUSTER.spec, link_gb_per_s=1e9))
    timeline = simulate(build_pipeline_tasks(run, fast), 0.0)
    work = sum(s.end_s - s.start_s for s in timeline.spans if (s.task.stream, s.task.rank) == (COMPUTE, 1))
    end = max(s.end_s for s in timeline.spans if s.task.kind in ("forward", "backward"))
    assert end / work - 1 == pytest.approx((stages - 1) / (virtual * micro_batches), rel=0.05)

"""The tasks of a step are what the trainer issues: as many collectives of each kind, of as many bytes."""

from collections import Counter

import pytest

from quaver.memory.faking.gpu import predicting_for
from quaver.memory.runs.links import predict_links
from quaver.memory.runs.predict import SEES_GATHERS
from quaver.plan.cluster import Cluster
from quaver.plan.run import run_of
from quaver.plan.step import training_step
from quaver.roofline.device_specs import find_device_spec
from quaver.settings import Float8, Model, Parallelism, TrainConfig, Training
from quaver.settings.parallel_dims import resolve
from tests.thinned import at_night

pytestmark = pytest.mark.skipif(not SEES_GATHERS, reason="gathers into fake tensors go unseen in this torch")

RANKS = 4
BFLOAT16 = Float8(enable_float8_linear=False)
GATHERED = Float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True)


def config(float8, *, replicate=1, micro_batches=1, reshard="default"):
    return TrainConfig(
        model=Model(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64),
        training=Training(seq_len=32, local_batch_size=2, global_batch_size=2 * RANKS * micro_batches, device="cpu"),
        parallelism=Parallelism(data_parallel_replicate_degree=replicate, fsdp_reshard_after_forward=reshard),
        float8=float8,
    )


CASES = {
    "bfloat16": config(BFLOAT16),
    "two micro-batches, never resharded": config(BFLOAT16, micro_batches=2, reshard="never"),
    "always resharded": config(BFLOAT16, reshard="always"),
    "a float8 gather": config(GATHERED),
    "replicas": config(GATHERED, replicate=2),
}
ALWAYS = ["bfloat16", "two micro-batches, never resharded", "replicas"]


@pytest.mark.parametrize("name", [*ALWAYS, *at_night((name,) for name in CASES if name not in ALWAYS)])
def test_a_step_issues_the_trainers_collectives(name):
    resolved, layout = resolve(CASES[name], rank=0, world_size=RANKS)
    with predicting_for("cuda"):
        links = predict_links(CASES[name], RANKS)
    counted, sizes = Counter(), Counter()
    for traffic in links.traffic:
        counted[traffic.kind] += traffic.number
        sizes[traffic.kind] += traffic.tensor_bytes
    assert counted == Counter(kind for kind in _kinds(resolved, layout))
    # norms stay in bfloat16 where matrices are gathered as codes, and shards are padded: a few percent of these sizes
    assert _bytes_of_gathers(resolved, layout) == pytest.approx(sizes["all_gather"], rel=0.05)


def _kinds(resolved, layout):
    step = training_step(run_of(resolved, layout), Cluster.of(find_device_spec("h100")))
    return [task.kind for task in step.tasks if task.kind.startswith(("all_", "reduce_"))]


def _bytes_of_gathers(resolved, layout):
    """From the seconds of a cluster whose links move a byte a second and start at once."""
    slow = _BytesAsSeconds(find_device_spec("h100"))
    step = training_step(run_of(resolved, layout), slow)
    return sum(task.seconds for task in step.tasks if task.kind == "all_gather")


class _BytesAsSeconds(Cluster):
    def seconds(self, kind, tensor_bytes, ranks, stride=1):
        return tensor_bytes

"""The tasks of a step are what the trainer issues: as many collectives of each kind, of as many bytes."""

from collections import Counter

import pytest

from quaver.lab.memory.faking.gpu import predicting_for
from quaver.lab.memory.runs.links import predict_links
from quaver.lab.memory.runs.predict import SEES_GATHERS
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.run import run_of
from quaver.lab.plan.step import training_step
from quaver.lab.settings import Float8, Model, Parallelism, TrainConfig, Training
from quaver.lab.settings.parallel_dims import resolve
from quaver.roofline.device_specs import find_device_spec
from tests.thinned import at_night

pytestmark = pytest.mark.skipif(not SEES_GATHERS, reason="gathers into fake tensors go unseen in this torch")

RANKS = 4
BFLOAT16 = Float8(enable_float8_linear=False)
GATHERED = Float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True)


def config(float8, *, replicate=1, tensor=1, micro_batches=1, reshard="default"):
    batch = 2 * RANKS // tensor * micro_batches
    return TrainConfig(
        model=Model(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64),
        training=Training(seq_len=32, local_batch_size=2, global_batch_size=batch, device="cpu"),
        parallelism=Parallelism(
            data_parallel_replicate_degree=replicate,
            tensor_parallel_degree=tensor,
            fsdp_reshard_after_forward=reshard,
        ),
        float8=float8,
    )


CASES = {
    "bfloat16": config(BFLOAT16),
    "two micro-batches, never resharded": config(BFLOAT16, micro_batches=2, reshard="never"),
    "always resharded": config(BFLOAT16, reshard="always"),
    "a float8 gather": config(GATHERED),
    "replicas": config(GATHERED, replicate=2),
    "tensor parallel": config(BFLOAT16, tensor=2),
}
ALWAYS = ["bfloat16", "two micro-batches, never resharded", "replicas", "tensor parallel"]


@pytest.mark.parametrize("name", [*ALWAYS, *at_night((name,) for name in CASES if name not in ALWAYS)])
def test_a_step_issues_the_trainers_collectives(name):
    resolved, layout = resolve(CASES[name], rank=0, world_size=RANKS)
    with predicting_for("cuda"):
        links = predict_links(CASES[name], RANKS)
    counted = Counter()
    for traffic in links.traffic:
        counted[traffic.kind] += traffic.number
    assert counted == Counter(_kinds(resolved, layout))
    # norms stay in bfloat16 where matrices are gathered as codes, and shards are padded: a few percent of these sizes
    sent = sum(task.sent_bytes for task in _step(resolved, layout).tasks)
    assert sent == pytest.approx(sum(size for _, size in links.sums.values()), rel=0.05)


def _step(resolved, layout):
    return training_step(run_of(resolved, layout), Cluster.of(find_device_spec("h100")))


def _kinds(resolved, layout):
    return [task.kind for task in _step(resolved, layout).tasks if task.kind.startswith(("all_", "reduce_"))]

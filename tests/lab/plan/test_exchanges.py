"""The collectives of one block, and of a step, are those that `quaver memory --links` counts in the trainer."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from quaver.lab.memory.faking.gpu import predict_for
from quaver.lab.memory.runs.links import predict_links
from quaver.lab.memory.runs.predict import SEES_GATHERS
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.exchanges import list_block_exchanges
from quaver.lab.plan.run import make_planned_run
from quaver.lab.plan.step import GRADIENT_BYTES, build_step, list_block_groups
from quaver.lab.settings import ActivationCheckpoint, Float8, Model, Parallelism, TrainConfig, Training
from quaver.lab.settings.parallel_dims import resolve
from quaver.recipes.config import Float8LinearRecipeName
from quaver.roofline.device_specs import find_device_spec
from tests.thinned import at_night

pytestmark = pytest.mark.skipif(not SEES_GATHERS, reason="gathers into fake tensors go unseen in this torch")

RANKS = 4
DENSE = Model(dim=256, n_layers=1, n_heads=4, n_kv_heads=4, hidden_dim=512, vocab_size=256)
MIXTURE = replace(DENSE, n_experts=8, top_k=2, hidden_dim=128)
MODES = {
    "none": ActivationCheckpoint(),
    "op": ActivationCheckpoint(mode="selective"),
    "full": ActivationCheckpoint(mode="full"),
}


def config(recipe, mode="none", *, gather=False, tensor=1, replicate=1, expert=1, model=DENSE, seq_len=384):
    float8 = Float8(enable_float8_linear=False)
    if recipe != "bfloat16":
        float8 = Float8(recipe_name=recipe, enable_fsdp_float8_all_gather=gather)
    return TrainConfig(
        model=model,
        training=Training(seq_len=seq_len, local_batch_size=1, device="cpu"),
        parallelism=Parallelism(
            tensor_parallel_degree=tensor, data_parallel_replicate_degree=replicate, expert_parallel_degree=expert
        ),
        activation_checkpoint=MODES[mode],
        float8=float8,
    )


def of_a_block(trained):
    """Numbers and bytes of the collectives of one block, by link and kind."""
    sums = []
    for layers in (2, 1):
        deeper = replace(trained, model=replace(trained.model, n_layers=layers))
        counted = defaultdict(lambda: [0, 0])
        with predict_for("cuda"):
            for each in predict_links(deeper, RANKS).traffic:
                counted[each.link, each.kind][0] += each.number
                counted[each.link, each.kind][1] += each.tensor_bytes
        sums.append(counted)
    deep, shallow = sums
    found = {key: [a - b for a, b in zip(deep[key], shallow[key], strict=True)] for key in deep}
    return {key: tuple(value) for key, value in found.items() if value[0]}


def modelled(run):
    """The same of the model."""
    found = defaultdict(lambda: [0, 0])

    def add(link, kind, number, tensor_bytes):
        if number:
            found[link, kind][0] += number
            found[link, kind][1] += number * tensor_bytes

    for backward in (False, True):
        for each in list_block_exchanges(run, backward=backward):
            split = "ep" if each.ranks < run.shard else "dp_shard"
            add("tp" if run.tensor > 1 else split, each.kind, each.number, each.tensor_bytes)
    for group in list_block_groups(run):
        link = "dp_shard / ep" if group.name == "experts" else "dp_shard"
        if group.shard > 1:
            add(link, "all_gather", 2, group.gathered_bytes)
            add(link, "reduce_scatter", 1, GRADIENT_BYTES * group.parameters)
        if run.replicate > 1:
            add("dp_replicate", "all_reduce", 1, GRADIENT_BYTES * group.parameters / group.shard)
    return {key: (number, round(size)) for key, (number, size) in found.items()}


RECIPES = ["bfloat16", *(recipe.value for recipe in Float8LinearRecipeName)]
CASES = [(recipe, mode, gather) for recipe in RECIPES for mode in MODES for gather in (False, recipe != "bfloat16")]
ALWAYS = [("tensorwise", "op", True)]


@pytest.mark.parametrize(
    ("recipe", "mode", "gather"), [*ALWAYS, *at_night(case for case in dict.fromkeys(CASES) if case not in ALWAYS)]
)
def test_tensor_parallel_exchanges_are_those_that_the_trainer_starts(recipe, mode, gather):
    trained = config(recipe, mode, gather=gather, tensor=2)
    resolved, layout = resolve(trained, rank=0, world_size=RANKS)
    found, counted = modelled(make_planned_run(resolved, layout)), of_a_block(trained)
    if gather:  # one all-reduce of a step has the amaxes of all weights' rows: it grows with the layers
        assert found["tp", "all_reduce"][0] == counted["tp", "all_reduce"][0]
        found["tp", "all_reduce"] = counted["tp", "all_reduce"]
    assert found == counted


LAYOUTS = {
    "replicas": config("tensorwise", gather=True, replicate=2),
    "whole blocks of the sequence": config("blockwise", tensor=2, seq_len=512),
    "experts split": config("rowwise", "op", expert=2, model=MIXTURE),
    "experts split, shared experts": config("bfloat16", expert=4, model=replace(MIXTURE, n_shared_experts=1)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_exchanges_of_other_layouts(name):
    resolved, layout = resolve(LAYOUTS[name], rank=0, world_size=RANKS)
    assert modelled(make_planned_run(resolved, layout)) == of_a_block(LAYOUTS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("filtered", ["mlp", "o_proj"])
def test_ranks_gather_bfloat16_for_linears_that_a_filter_leaves_out(filtered):
    trained = config("rowwise", tensor=2)
    trained = replace(trained, float8=replace(trained.float8, filter_fqns=("lm_head", filtered)))
    resolved, layout = resolve(trained, rank=0, world_size=RANKS)
    found, counted = modelled(make_planned_run(resolved, layout)), of_a_block(trained)
    amaxes = ("tp", "all_reduce")  # a few numbers, in the mean over a block's linears
    assert found.pop(amaxes) == pytest.approx(counted.pop(amaxes), rel=0.15)
    assert found == counted


BFLOAT16 = Float8(enable_float8_linear=False)
GATHERED = Float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True)


def step_config(float8, *, replicate=1, tensor=1, micro_batches=1, reshard="default"):
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


STEPS = {
    "bfloat16": step_config(BFLOAT16),
    "two micro-batches, never resharded": step_config(BFLOAT16, micro_batches=2, reshard="never"),
    "always resharded": step_config(BFLOAT16, reshard="always"),
    "a float8 gather": step_config(GATHERED),
    "replicas": step_config(GATHERED, replicate=2),
    "tensor parallel": step_config(BFLOAT16, tensor=2),
}
STEPS_ALWAYS = ["two micro-batches, never resharded", "replicas", "tensor parallel"]


@pytest.mark.parametrize("name", [*STEPS_ALWAYS, *at_night((name,) for name in STEPS if name not in STEPS_ALWAYS)])
def test_a_step_issues_the_trainers_collectives(name):
    resolved, layout = resolve(STEPS[name], rank=0, world_size=RANKS)
    with predict_for("cuda"):
        links = predict_links(STEPS[name], RANKS)
    counted = Counter()
    for traffic in links.traffic:
        counted[traffic.kind] += traffic.number
    assert counted == Counter(_kinds(resolved, layout))
    # norms stay in bfloat16 where matrices are gathered as codes, and shards are padded: a few percent of these sizes
    sent = sum(task.sent_bytes for task in _step(resolved, layout).tasks)
    assert sent == pytest.approx(sum(size for _, size in links.sums.values()), rel=0.05)


def _step(resolved, layout):
    return build_step(make_planned_run(resolved, layout), Cluster.of(find_device_spec("h100")))


def _kinds(resolved, layout):
    return [task.kind for task in _step(resolved, layout).tasks if task.kind.startswith(("all_", "reduce_"))]

"""Compares the collectives of a block and of a step with those that `quaver memory --traffic` counts in the trainer."""

from collections import Counter
from dataclasses import replace

import pytest

from quaver.lab.memory.train_step.traffic import predict_traffic
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.collectives import list_block_collectives, list_scale_collectives
from quaver.lab.plan.planned_run import make_planned_run
from quaver.lab.plan.step import GRADIENT_BYTES, build_tasks, list_block_groups
from quaver.lab.settings import ActivationCheckpoint, Float8, Model, Parallelism, TrainConfig, Training
from quaver.lab.settings.parallel_dims import resolve_parallel_dims
from quaver.recipes.config import Float8LinearRecipeName
from quaver.roofline.device_specs import find_device_spec
from tests.lab.memory.models import needs_gathers
from tests.lab.trainer.runs import with_settings
from tests.thinned import at_night

pytestmark = needs_gathers

RANKS = 4
DENSE = Model(dim=256, n_layers=1, n_heads=4, n_kv_heads=4, hidden_dim=512, vocab_size=256)
MIXTURE = replace(DENSE, n_experts=8, top_k=2, hidden_dim=128)
MODES = {name: ActivationCheckpoint(mode) for name, mode in (("none", "none"), ("op", "selective"), ("full", "full"))}


def make_config(recipe, mode="none", *, gather=False, tp=1, dp_replicate=1, ep=1, model=DENSE, seq_len=384):
    float8 = Float8(enable_float8_linear=False)
    if recipe != "bfloat16":
        float8 = Float8(recipe_name=recipe, enable_fsdp_float8_all_gather=gather)
    return TrainConfig(
        model=model,
        training=Training(seq_len=seq_len, local_batch_size=1, device="cpu"),
        parallelism=Parallelism(
            tensor_parallel_degree=tp, data_parallel_replicate_degree=dp_replicate, expert_parallel_degree=ep
        ),
        activation_checkpoint=MODES[mode],
        float8=float8,
    )


def plan_run(config):
    return make_planned_run(*resolve_parallel_dims(config, rank=0, world_size=RANKS))


def count_block_collectives(config):
    """Return the counts and bytes of the collectives of one block, by mesh dims and kind, in the trainer."""
    counts, sizes = Counter(), Counter()
    for layers, sign in ((2, 1), (1, -1)):
        for collective in predict_traffic(with_settings(config, model={"n_layers": layers}), RANKS, "cuda").collectives:
            counts[collective.mesh_dims, collective.kind] += sign * collective.count
            sizes[collective.mesh_dims, collective.kind] += sign * collective.tensor_bytes
    return {key: (count, sizes[key]) for key, count in counts.items() if count}


def model_block_collectives(config):
    """Return the same counts and bytes as the planner models them."""
    run, counts, sizes = plan_run(config), Counter(), Counter()

    def add(link, kind, count, tensor_bytes):
        if count:
            counts[link, kind] += count
            sizes[link, kind] += count * tensor_bytes

    for backward in (False, True):
        for collective in list_block_collectives(run, backward=backward):
            split = "ep" if collective.ranks < run.dp_shard else "dp_shard"
            add("tp" if run.tp > 1 else split, collective.kind, collective.repeats, collective.tensor_bytes)
    for group in list_block_groups(run):
        link = "dp_shard / ep" if group.name == "experts" else "dp_shard"
        if group.ranks > 1:
            add(link, "all_gather", 2, group.gathered_bytes)
            add(link, "reduce_scatter", 1, GRADIENT_BYTES * group.parameters)
        if run.dp_replicate > 1:
            add("dp_replicate", "all_reduce", 1, GRADIENT_BYTES * group.parameters / group.ranks)
    return {key: (count, round(sizes[key])) for key, count in counts.items()}


RECIPES = ["bfloat16", *(recipe.value for recipe in Float8LinearRecipeName)]
CASES = [(recipe, mode, gather) for recipe in RECIPES for mode in MODES for gather in (False, recipe != "bfloat16")]
ALWAYS = [("tensorwise", "op", True)]


@pytest.mark.parametrize(
    ("recipe", "mode", "gather"), [*ALWAYS, *at_night(case for case in dict.fromkeys(CASES) if case not in ALWAYS)]
)
def test_tensor_parallel_collectives_are_those_of_the_trainer(recipe, mode, gather):
    config = make_config(recipe, mode, gather=gather, tp=2)
    modeled, counted = model_block_collectives(config), count_block_collectives(config)
    if gather:  # one all-reduce of a step has the amaxes of all weights' rows: it grows with the layers
        assert modeled["tp", "all_reduce"][0] == counted["tp", "all_reduce"][0]
        modeled["tp", "all_reduce"] = counted["tp", "all_reduce"]
    assert modeled == counted


LAYOUTS = {
    "replicas": make_config("tensorwise", gather=True, dp_replicate=2),
    "whole blocks of the sequence": make_config("blockwise", tp=2, seq_len=512),
    "experts split": make_config("tensorwise", "op", gather=True, ep=2, model=MIXTURE),
    "tokens sent as codes": with_settings(
        make_config("blockwise", ep=2, model=MIXTURE), float8={"grad_weight_from_codes": True}
    ),
    "experts split, shared experts": make_config("bfloat16", ep=4, model=replace(MIXTURE, n_shared_experts=1)),
}


@pytest.mark.parametrize("name", ["experts split", *at_night((name,) for name in LAYOUTS if name != "experts split")])
def test_modeled_collectives_equal_the_counted_ones(name):
    assert model_block_collectives(LAYOUTS[name]) == count_block_collectives(LAYOUTS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("filtered", ["mlp", "o_proj"])
def test_ranks_gather_bfloat16_for_linears_that_a_filter_leaves_out(filtered):
    config = with_settings(make_config("rowwise", tp=2), float8={"filter_fqns": ("lm_head", filtered)})
    modeled, counted = model_block_collectives(config), count_block_collectives(config)
    amaxes = ("tp", "all_reduce")  # a few numbers, in the mean over a block's linears
    assert modeled.pop(amaxes) == pytest.approx(counted.pop(amaxes), rel=0.15)
    assert modeled == counted


BFLOAT16 = Float8(enable_float8_linear=False)
GATHERED = Float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True)


def make_step_config(float8, *, dp_replicate=1, tp=1, micro_batches=1, reshard="default"):
    batch = 2 * RANKS // tp * micro_batches
    return TrainConfig(
        model=Model(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64),
        training=Training(seq_len=32, local_batch_size=2, global_batch_size=batch, device="cpu"),
        parallelism=Parallelism(
            data_parallel_replicate_degree=dp_replicate, tensor_parallel_degree=tp, fsdp_reshard_after_forward=reshard
        ),
        float8=float8,
    )


def gather_codes(recipe):
    return replace(GATHERED, recipe_name=recipe, filter_fqns=())


@pytest.mark.parametrize(
    "config",
    [
        make_step_config(gather_codes("rowwise"), dp_replicate=2),
        make_step_config(gather_codes("blockwise")),
        make_step_config(gather_codes("delayed")),
        with_settings(make_config("rowwise", gather=True, ep=2, model=MIXTURE), training={"global_batch_size": -1}),
    ],
    ids=["rowwise, replicas", "blockwise", "delayed", "experts split"],
)
def test_a_step_computes_the_trainers_scales(config):
    collectives = predict_traffic(config, RANKS, "cuda").collectives
    counted = [(one.tensor_bytes, one.ranks) for one in collectives if one.dtype == "int32" and one.mesh_dims != "ep"]
    assert sorted((part.tensor_bytes, part.ranks) for part in list_scale_collectives(plan_run(config))) == sorted(
        counted
    )


STEPS = {
    "bfloat16": make_step_config(BFLOAT16),
    "two microbatches, never resharded": make_step_config(BFLOAT16, micro_batches=2, reshard="never"),
    "always resharded": make_step_config(BFLOAT16, reshard="always"),
    "a float8 all-gather": make_step_config(GATHERED),
    "replicas, the head in float8": make_step_config(gather_codes("tensorwise"), dp_replicate=2),
    "tensor parallel": make_step_config(BFLOAT16, tp=2),
}
STEPS_ALWAYS = ["two microbatches, never resharded", "replicas, the head in float8", "tensor parallel"]


@pytest.mark.parametrize("name", [*STEPS_ALWAYS, *at_night((name,) for name in STEPS if name not in STEPS_ALWAYS)])
def test_a_step_issues_the_trainers_collectives(name):
    traffic = predict_traffic(STEPS[name], RANKS, "cuda")
    counted = Counter()
    for collective in traffic.collectives:
        counted[collective.kind] += collective.count
    tasks = build_tasks(plan_run(STEPS[name]), Cluster.from_spec(find_device_spec("h100")))
    assert counted == Counter(task.kind for task in tasks if task.kind.startswith(("all_", "reduce_")))
    # The last norm is in no group of the simulation, and shards are padded: a few thousandths of these sizes.
    sent = sum(task.sent_bytes for task in tasks)
    assert sent == pytest.approx(sum(size for _, size in traffic.sums.values()), rel=0.005)

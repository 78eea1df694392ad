"""The compute of a block: one rank equals the ledger of `quaver bench ledger`, and shares of ranks add up."""

import json
from dataclasses import replace

import pytest

from benchmarks.record import ROOT
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.compute import time_block, time_head
from quaver.lab.plan.run import HEAD, SEVEN, PlannedRun, make_planned_run
from quaver.lab.settings import Float8, Model, TrainConfig
from quaver.lab.settings.parallel_dims import resolve
from quaver.recipes.config import Float8LinearRecipeName
from quaver.roofline.attention import choose_kernel, predict_attention_seconds
from quaver.roofline.device_specs import find_device_spec
from tests.lab.trainer.runs import changed

LEDGERS = {each["name"]: each for each in json.loads((ROOT / "benchmarks/results/ledger.json").read_text())["ledgers"]}
MODEL = Model(vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336)
RUN = PlannedRun(MODEL, 8192, 2, residual_bytes=2, parameter_bytes=2)
H200 = find_device_spec("h200")
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"]


@pytest.mark.parametrize("recipe", ["bfloat16", *RECIPES])
def test_one_rank_equals_the_ledger(recipe, monkeypatch):
    """At the ledger's rates: the best one for each matmul, whatever its shape."""
    monkeypatch.setattr("quaver.roofline.matmul.share_of_shape", lambda *_: 1.0)
    name, run = "bfloat16", RUN
    if recipe != "bfloat16":
        name, run = f"quaver {recipe}", replace(RUN, recipe=Float8LinearRecipeName(recipe))
    times = time_block(run, Cluster(H200))
    counted = sum(LEDGERS[name]["milliseconds"].values())
    assert 1e3 * (times.forward + times.backward) == pytest.approx(counted, rel=0.05)
    assert times.recomputed == 0


def test_selective_checkpointing_recomputes_less_than_full():
    cluster = Cluster(H200)
    of = {
        mode: time_block(replace(RUN, checkpointing=mode, checkpointed_blocks=32), cluster) for mode in ("op", "full")
    }
    assert 0 < of["op"].recomputed < of["full"].recomputed < of["full"].forward
    assert of["op"][:2] == of["full"][:2] == time_block(RUN, cluster)[:2]


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_shares_of_tensor_parallel_ranks_are_no_faster_than_a_part(recipe):
    run = replace(RUN, recipe=recipe and Float8LinearRecipeName(recipe))
    whole, share = (sum(time_block(replace(run, tensor=tensor), Cluster(H200))) for tensor in (1, 8))
    assert whole / 8 < share < whole


def test_linears_in_float8_in_some_blocks_have_their_share_of_it():
    cluster, tensorwise = Cluster(H200), replace(RUN, recipe=Float8LinearRecipeName.TENSORWISE)
    none, half, whole = (
        sum(time_block(replace(tensorwise, in_float8=dict.fromkeys(SEVEN, share)), cluster)) for share in (0, 0.5, 1)
    )
    assert none == pytest.approx(sum(time_block(RUN, cluster)))
    assert half == pytest.approx((none + whole) / 2)


@pytest.mark.parametrize(
    ("float8", "expected"),
    [
        ({}, dict.fromkeys(SEVEN, 1.0)),
        ({"skip_first_layers": 1, "skip_last_layers": 1}, dict.fromkeys(SEVEN, 0.5)),
        ({"filter_fqns": ("lm_head", "mlp")}, dict.fromkeys(SEVEN[:4], 1.0)),
        ({"filter_fqns": ("layers.3.mlp",)}, dict.fromkeys(SEVEN, 1.0) | dict.fromkeys(SEVEN[4:], 0.75) | {HEAD: 1.0}),
        (
            {"layer_recipes": ("model.layers.0.mlp.up_proj=high_precision",)},
            dict.fromkeys(SEVEN, 1.0) | {"up_proj": 0.75},
        ),
        ({"enable_float8_linear": False}, {}),
    ],
)
def test_filters_and_skipped_blocks_are_those_of_the_trainer(float8, expected):
    config = TrainConfig(float8=Float8(**float8))
    assert make_planned_run(*resolve(config)).in_float8 == expected


@pytest.mark.parametrize(("name", "expected"), [("AdamW", 4), ("Muon", 2), ("Float8AdamW", 2), ("Float8Muon", 1)])
def test_states_of_bfloat16_parameters(tiny_config, name, expected):
    config = changed(tiny_config, optimizer={"name": name}, training={"dtype": "bfloat16"})
    assert make_planned_run(*resolve(config)).state_bytes == expected


def test_slower_settings_take_longer():
    cluster, rowwise = Cluster(H200), replace(RUN, recipe=Float8LinearRecipeName.ROWWISE)
    tensorwise = replace(RUN, recipe=Float8LinearRecipeName.TENSORWISE)
    base = sum(time_block(tensorwise, cluster))
    assert base < sum(time_block(rowwise, cluster)) < sum(time_block(RUN, cluster))
    assert base < sum(time_block(replace(tensorwise, compiled=False), cluster))
    assert base == sum(time_block(replace(tensorwise, attention="cudnn"), cluster))  # torch's choice on an H200
    assert base < sum(time_block(replace(tensorwise, attention="flash"), cluster))
    split = replace(tensorwise, tensor=8)
    assert sum(time_block(split, cluster)) < sum(time_block(replace(split, async_tensor=True), cluster))
    assert sum(time_block(split, cluster)) < sum(time_block(replace(split, casts_gathered=True), cluster))
    assert sum(time_head(split, cluster)) < sum(time_head(tensorwise, cluster)) / 7
    assert sum(time_block(rowwise, cluster)) < sum(time_block(replace(rowwise, rescales_rows=True), cluster))
    assert base == sum(time_block(replace(tensorwise, rescales_rows=True), cluster))


def test_torch_takes_cudnn_on_hopper_and_blackwell_of_data_centers():
    kernels = {capability: choose_kernel(capability) for capability in (None, 80, 86, 89, 90, 100, 103, 120)}
    assert [capability for capability, kernel in kernels.items() if kernel == "cudnn"] == [90, 100, 103]
    assert set(kernels.values()) == {"flash", "cudnn"}


@pytest.mark.parametrize(
    ("device", "kernel", "seq_len", "forward", "backward"),
    [
        ("h100", "flash", 1024, 260, 208),
        ("h100", "flash", 8192, 333, 299),
        ("h200", None, 4096, 591, 474),
        ("h200", "cudnn", 32768, 688, 581),
        ("b200", "cudnn", 8192, 1574, 1332),
    ],
)
def test_attention_is_as_fast_as_measured(device, kernel, seq_len, forward, backward):
    tokens, queries = 10**6, 4096
    both = predict_attention_seconds(queries, tokens, seq_len, find_device_spec(device), kernel)
    flops = (2 * queries * seq_len * tokens, 5 * queries * seq_len * tokens)
    found = [each / seconds / 1e12 for each, seconds in zip(flops, both, strict=True)]
    assert found == pytest.approx([forward, backward], rel=0.06)

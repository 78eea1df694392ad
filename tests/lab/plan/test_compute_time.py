"""Tests the compute of a block: one rank equals the ledger of `quaver bench ledger`, and shares of ranks add up."""

import json
from dataclasses import replace

import pytest

from benchmarks.record import ROOT
from quaver.conversion.roles import LM_HEAD
from quaver.lab.model.llama import SPLIT_DIMS
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.compute_time import predict_block_times, predict_head_times
from quaver.lab.plan.planned_run import Framework, PlannedRun, make_planned_run
from quaver.lab.settings import Float8, Model, TrainConfig
from quaver.lab.settings.parallel_dims import resolve_parallel_dims
from quaver.recipes.config import Float8LinearRecipeName
from quaver.roofline import matmul
from quaver.roofline.attention import choose_attention_kernel, predict_attention_seconds
from quaver.roofline.device_specs import find_device_spec
from tests.lab.trainer.runs import with_settings

RECORDED = json.loads((ROOT / "benchmarks/results/ledger.json").read_text())["ledgers"]
LINEARS = list(SPLIT_DIMS)
LEDGERS = {ledger["name"]: ledger for ledger in RECORDED}
MODEL = Model(vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336)
RUN = PlannedRun(MODEL, 8192, 2, residual_bytes=2, parameter_bytes=2)
TENSORWISE = replace(RUN, recipe=Float8LinearRecipeName.TENSORWISE)
H200 = find_device_spec("h200")
CLUSTER = Cluster(H200)
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"]
UP_PROJ = "model.layers.0.mlp.up_proj"


def time_both(run):
    """Return the seconds of a block's forward and backward."""
    return sum(predict_block_times(run, CLUSTER))


@pytest.mark.parametrize("recipe", ["bfloat16", *RECIPES])
def test_one_rank_equals_the_ledger(recipe, monkeypatch):
    """At the ledger's rates: the best one for each matmul, whatever its shape."""
    monkeypatch.setattr(matmul, "compute_shape_share", lambda *_, **__: 1.0)
    name, run = "bfloat16", RUN
    if recipe != "bfloat16":
        name, run = f"quaver {recipe}", replace(RUN, recipe=Float8LinearRecipeName(recipe))
    times = predict_block_times(run, CLUSTER)
    counted = sum(LEDGERS[name]["milliseconds"].values())
    assert 1e3 * (times.forward + times.backward) == pytest.approx(counted, rel=0.05)
    assert times.recomputed == 0


def test_selective_checkpointing_recomputes_less_than_full():
    runs = [replace(RUN, checkpointing=mode, checkpointed_blocks=32) for mode in ("op", "full")]
    op, full = (predict_block_times(run, CLUSTER) for run in runs)
    assert 0 < op.recomputed < full.recomputed < full.forward
    assert op[:2] == full[:2] == predict_block_times(RUN, CLUSTER)[:2]


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_shares_of_tensor_parallel_ranks_are_no_faster_than_a_part(recipe):
    run = replace(RUN, recipe=recipe and Float8LinearRecipeName(recipe))
    whole, share = (time_both(replace(run, tp=tensor)) for tensor in (1, 8))
    assert whole / 8 < share < whole


def test_linears_in_float8_in_some_blocks_have_their_share_of_it():
    shares = [replace(TENSORWISE, float8_shares=dict.fromkeys(LINEARS, share)) for share in (0, 0.5, 1)]
    none, half, whole = map(time_both, shares)
    assert none == pytest.approx(time_both(RUN))
    assert half == pytest.approx((none + whole) / 2)


def test_storing_in_float8_takes_as_long_for_each_expert_of_a_token():
    cluster, seconds = Cluster(H200), []
    for top_k in (1, 2, 3):
        plain = replace(RUN, model=replace(MODEL, n_experts=8, top_k=top_k))
        seconds.append(predict_block_times(replace(plain, stores_in_float8=True), cluster).forward)
        seconds[-1] -= predict_block_times(plain, cluster).forward
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])
    assert seconds[0] < 0.8 * seconds[1]


@pytest.mark.parametrize(
    ("float8", "expected"),
    [
        ({}, dict.fromkeys(LINEARS, 1.0)),
        ({"skip_first_layers": 1, "skip_last_layers": 1}, dict.fromkeys(LINEARS, 0.5)),
        ({"filter_fqns": ("lm_head", "mlp")}, dict.fromkeys(LINEARS[:4], 1.0)),
        (
            {"filter_fqns": ("layers.3.mlp",)},
            dict.fromkeys(LINEARS, 1.0) | dict.fromkeys(LINEARS[4:], 0.75) | {LM_HEAD: 1.0},
        ),
        ({"layer_recipes": (f"{UP_PROJ}=high_precision",)}, dict.fromkeys(LINEARS, 1.0) | {"up_proj": 0.75}),
        ({"enable_float8_linear": False}, {}),
    ],
)
def test_filters_and_skipped_blocks_are_those_of_the_trainer(float8, expected):
    config = TrainConfig(float8=Float8(**float8))
    assert make_planned_run(*resolve_parallel_dims(config)).float8_shares == expected


@pytest.mark.parametrize(("name", "expected"), [("AdamW", 4), ("Muon", 2), ("Float8AdamW", 2), ("Float8Muon", 1)])
def test_states_of_bfloat16_parameters_have_their_bytes(tiny_config, name, expected):
    config = with_settings(tiny_config, optimizer={"name": name}, training={"dtype": "bfloat16"})
    assert make_planned_run(*resolve_parallel_dims(config)).state_bytes == expected


def test_slower_settings_take_longer():
    rowwise, split = replace(RUN, recipe=Float8LinearRecipeName.ROWWISE), replace(TENSORWISE, tp=8)
    base = time_both(TENSORWISE)
    assert base < time_both(rowwise) < time_both(RUN)
    assert base < time_both(replace(TENSORWISE, framework=Framework(compiled=False)))
    assert base == time_both(replace(TENSORWISE, framework=Framework(attention="cudnn")))  # torch's choice on an H200
    assert base < time_both(replace(TENSORWISE, framework=Framework(attention="flash")))
    assert time_both(split) < time_both(replace(split, framework=Framework(async_tensor=True)))
    assert time_both(split) < time_both(replace(split, framework=Framework(casts_gathered=True)))
    assert sum(predict_head_times(split, CLUSTER)) < sum(predict_head_times(TENSORWISE, CLUSTER)) / 7
    assert time_both(rowwise) < time_both(replace(rowwise, framework=Framework(rescales_rows=True)))
    assert base == time_both(replace(TENSORWISE, framework=Framework(rescales_rows=True)))


def test_torch_takes_cudnn_on_hopper_and_blackwell_of_data_centers():
    kernels = {capability: choose_attention_kernel(capability) for capability in (None, 80, 86, 89, 90, 100, 103, 120)}
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
    tflops_per_s = [count / seconds / 1e12 for count, seconds in zip(flops, both, strict=True)]
    assert tflops_per_s == pytest.approx([forward, backward], rel=0.06)

"""Tests that a layout's block, counted by its kernels, is the ledger's block on one rank."""

import tomllib
from dataclasses import replace

import pytest

from benchmarks.record import ROOT
from quaver.lab.bench.ledger.ledger import Ledger
from quaver.lab.bench.ledger.times import sum_milliseconds
from quaver.lab.plan import ledger_times
from quaver.lab.plan.changes import BFLOAT16, with_precision
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.ledger_times import check_ledger_gpu, compile_block, list_block_entries, predict_ledger_times
from quaver.lab.plan.planned_run import make_planned_run
from quaver.lab.plan.simulate import simulate
from quaver.lab.plan.step import ComputeTimes, build_tasks
from quaver.lab.settings import Model, TrainConfig, Training
from quaver.lab.settings.parallel_dims import resolve_parallel_dims
from quaver.roofline import matmul
from quaver.roofline.device_specs import find_device_spec
from tests.lab.trainer.runs import with_settings
from tests.thinned import at_night

pytest.importorskip("triton")
COUNTS = tomllib.loads((ROOT / "tests/lab/bench/ledger_counts.toml").read_text())["block"]
MODEL = Model(vocab_size=512, dim=256, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=768)
DTYPES = dict.fromkeys(("mixed_precision_param", "residual_dtype"), "bfloat16")
STEP = Training(seq_len=512, local_batch_size=2, compile=True, **DTYPES)
CONFIG = TrainConfig(model=MODEL, training=STEP)
H200 = find_device_spec("h200")
RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")


@pytest.mark.parametrize("precision", [BFLOAT16, *at_night((recipe,) for recipe in RECIPES)])
def test_one_rank_equals_the_ledger(precision, monkeypatch):
    """Counts and, at the ledger's rates, the time of a block in a simulated step.

    Halves of rotary tables are an exception: the ledger's block has buffers, and reads them whole in the backward.

    FSDP2 over two ranks gathers weights in bfloat16, as those of the ledger are.
    """
    config = with_precision(CONFIG, precision, float8_all_gather=False)
    entries = list_block_entries(config, 2, H200)
    ledger = Ledger(precision, "H200", entries, ())
    expected = COUNTS[BFLOAT16 if precision == BFLOAT16 else f"quaver {precision}"]
    counts, halves = ledger.list_counts(), 2 * 2 * STEP.seq_len * MODEL.head_dim * 4 // 2
    fused = "hp_bytes", "casts_bytes"  # a cast may be in the kernel that rotates
    same = counts.keys() - {"saved_bytes", *fused}
    assert {name: counts[name] for name in same} == {name: expected[name] for name in same}
    assert sum(expected[name] - counts[name] for name in fused) == halves

    monkeypatch.setattr(ledger_times, "list_block_entries", lambda *_: entries)
    monkeypatch.setattr(matmul, "compute_shape_share", lambda *_, **__: 1.0)
    run, cluster = (
        replace(make_planned_run(*resolve_parallel_dims(config, rank=0, world_size=2)), dp_shard=1),
        Cluster(H200),
    )
    compute_times = predict_ledger_times(config, 2, run, cluster)
    spans = [
        span for span in simulate(build_tasks(run, cluster, compute_times)).spans if "of block 1" in span.task.name
    ]
    seconds = sum(span.end_s - span.start_s for span in spans)
    assert 1e3 * seconds == pytest.approx(sum(sum_milliseconds(ledger, H200).values()))
    assert compute_times.head == ComputeTimes.from_formulas(run, cluster).head


def split_in_two(precision):
    return with_settings(with_precision(CONFIG, precision), parallelism={"tensor_parallel_degree": 2})


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["tensorwise", "rowwise"])
def test_a_tensor_parallel_share_is_counted_without_its_collectives(precision):
    config = split_in_two(precision)
    whole, share = list_block_entries(with_precision(CONFIG, precision), 1, H200), list_block_entries(config, 2, H200)
    assert not any("c10d" in entry.name for entry in share)
    assert sum(entry.flops for entry in whole) == 2 * sum(entry.flops for entry in share)
    assert Ledger(precision, "H200", share, ()).num_surplus_stores == 0


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["tensorwise", "rowwise"])
def test_a_tensor_parallel_block_saves_no_codes_but_those_that_were_gathered(precision):
    """Codes of weights, on whose scales ranks agree, and of inputs are computed again in the backward."""
    graphs = compile_block(split_in_two(precision), 2, H200)
    saved = [tensor for graph in graphs for tensor in graph.saved if tensor.is_float8]
    tokens = STEP.local_batch_size * STEP.seq_len
    assert [tensor.elements for tensor in saved] == [tokens * MODEL.dim] * 2  # of q, k and v, and of gate and up


def test_blocks_that_differ_are_not_counted():
    config = with_settings(with_precision(CONFIG, "tensorwise"), float8={"skip_first_layers": 1})
    run = make_planned_run(*resolve_parallel_dims(config, rank=0, world_size=1))
    with pytest.raises(NotImplementedError, match="expected blocks that are alike, got .*_proj in float8 in some"):
        predict_ledger_times(config, 1, run, Cluster(H200))


def test_other_gpus_are_refused():
    with pytest.raises(NotImplementedError, match="expected a GPU that is one of H100, H200, B200, got A100"):
        check_ledger_gpu(find_device_spec("a100"))

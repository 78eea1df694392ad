"""quaver bench block: its module and step, the memory it measures, the ratios in its rows."""

import pytest
import torch

from quaver.bench.block import bench_block, check_fits
from quaver.bench.modules import Batch, Step, build_subject, make_direction, make_sources, model_of
from quaver.bench.results import BFLOAT16, Setup
from quaver.linear import Float8Linear
from quaver.recorder.allocator import measure_usage

CPU = torch.device("cpu")
BATCH = Batch(2, 32)


@pytest.fixture(scope="module")
def result():
    model = model_of("debug", divisor=2)
    return bench_block(Setup(CPU, 2), "debug/2", model, BATCH, ["tensorwise", "delayed"], ["eager"])


def test_rows_and_ratios(result):
    plain, *float8 = result["rows"]
    assert [(row["library"], row["recipe"]) for row in float8] == [("quaver", "tensorwise"), ("quaver", "delayed")]
    assert (plain["library"], plain["time_over_bfloat16"], plain["peak_over_bfloat16"]) == (BFLOAT16, 1.0, 1.0)
    for row in result["rows"]:
        median_us = row["timing"]["median_us"]
        assert row["tokens_per_s"] == pytest.approx(64 / median_us * 1e6)
        assert row["time_over_bfloat16"] == median_us / plain["timing"]["median_us"]
        assert row["peak_over_bfloat16"] == row["peak_bytes"] / plain["peak_bytes"]
    assert result["batch"] == {"sequences": 2, "seq_len": 32, "tokens": 64}
    assert result["model"]["dim"] == 128


def test_memory_is_counted_to_the_byte(result):
    plain, tensorwise, delayed = result["rows"]
    parameters = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
    tables = 2 * 32 * 64 * 4
    moments = 2 * parameters * 4
    assert plain["resident_bytes"] - (parameters * 4 + moments + tables) in range(1024)  # and the step counters
    assert tensorwise["resident_bytes"] == delayed["resident_bytes"] == plain["resident_bytes"]
    assert tensorwise["kept_bytes"] < plain["kept_bytes"]
    for row in result["rows"]:
        assert row["resident_bytes"] + 4 * parameters < row["tensor_peak_bytes"] <= row["peak_bytes"]


def test_the_step_trains_all_parameters_and_leaves_nothing_behind():
    model = model_of("debug", divisor=4)
    sources, direction = make_sources("block", model, BATCH, CPU), make_direction("block", model, BATCH, CPU)
    subject = build_subject("block", model, "quaver rowwise", seq_len=32, device=CPU, compiled=False)
    assert sum(isinstance(module, Float8Linear) for module in subject.modules()) == 7
    before = [parameter.clone() for parameter in subject.parameters()]
    step = Step(subject, sources, direction)
    step()
    assert not any(torch.equal(old, new) for old, new in zip(before, subject.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in subject.parameters())
    with measure_usage(CPU) as measured:  # raises if the step leaves memory behind
        step(measured.mark)
    assert measured.usage.saved_bytes > 0


@pytest.mark.parametrize("kind", ["linear", "ffn", "block"])
def test_every_kind_has_the_same_weights_in_every_precision(kind):
    model = model_of("debug", divisor=4)
    plain, float8 = (
        build_subject(kind, model, precision, seq_len=32, device=CPU, compiled=False)
        for precision in (BFLOAT16, "quaver tensorwise")
    )
    for expected, got in zip(plain.parameters(), float8.parameters(), strict=True):
        assert torch.equal(expected, got)
    hidden = make_sources(kind, model, BATCH, CPU).next()
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = plain(hidden).float(), float8(hidden).float()
    assert 0 < (got - expected).norm() < 0.1 * expected.norm()
    assert expected.shape == make_direction(kind, model, BATCH, CPU).shape


def test_compiled_is_compiled():
    model = model_of("debug", divisor=4)
    for compiled in (False, True):
        subject = build_subject("ffn", model, BFLOAT16, seq_len=32, device=CPU, compiled=compiled)
        assert (subject._compiled_call_impl is not None) == compiled


def test_shapes_of_models():
    model = model_of("llama-70b", divisor=16)
    assert (model.dim, model.n_heads, model.n_kv_heads, model.hidden_dim, model.head_dim) == (512, 4, 1, 1792, 128)
    with pytest.raises(ValueError, match="--divisor: expected a divisor of llama-8b's 32 heads, got 3"):
        model_of("llama-8b", divisor=3)


def test_blocks_too_large_for_a_gpu_are_refused(monkeypatch):
    class Properties:
        total_memory = 16 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    model = model_of("llama-70b")
    check_fits(model, 1, torch.device("cuda"))
    with pytest.raises(ValueError, match="2 blocks .* take 26 GiB, and this GPU has 16; name fewer --recipes"):
        check_fits(model, 2, torch.device("cuda"))

"""quaver bench block: its module and step, the memory it measures, the ratios in its rows."""

import pytest
import torch

from quaver.bench.block import Block
from quaver.bench.modules import build_subject, make_steps
from quaver.bench.results import BFLOAT16
from quaver.bench.shapes import model_of
from quaver.linear import Float8Linear
from quaver.recorder.allocator import measure_usage

CPU = torch.device("cpu")
SMALL = {"tokens": 64, "seq_len": 32, "device": "cpu"}


@pytest.fixture(scope="module")
def result():
    recipes = ("tensorwise", "delayed")
    return Block(**SMALL, divisor=2, recipes=recipes, modes=("eager",), rounds=2).measure()


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
    (step,) = make_steps(model_of("debug", divisor=4), 2, 32, ["quaver rowwise"], CPU, compiled=False).values()
    assert sum(isinstance(module, Float8Linear) for module in step.subject.modules()) == 7
    before = [parameter.clone() for parameter in step.subject.parameters()]
    step()
    assert not any(torch.equal(old, new) for old, new in zip(before, step.subject.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in step.subject.parameters())
    with measure_usage(CPU) as measured:  # raises if the step leaves memory behind
        step(measured.mark)
    assert measured.usage.saved_bytes > 0


def test_every_precision_has_the_same_weights():
    steps = make_steps(model_of("debug", divisor=4), 2, 32, [BFLOAT16, "quaver tensorwise"], CPU, compiled=False)
    plain, float8 = (step.subject for step in steps.values())
    for expected, got in zip(plain.parameters(), float8.parameters(), strict=True):
        assert torch.equal(expected, got)
    hidden = steps[BFLOAT16].sources.next()
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = plain(hidden).float(), float8(hidden).float()
    assert 0 < (got - expected).norm() < 0.1 * expected.norm()
    assert expected.shape == steps[BFLOAT16].direction.shape


def test_compiled_is_compiled():
    for compiled in (False, True):
        subject = build_subject(model_of("debug", divisor=4), BFLOAT16, 32, CPU, compiled=compiled)
        assert (subject._compiled_call_impl is not None) == compiled


def test_shapes_of_models():
    model = model_of("llama-70b", divisor=16)
    assert (model.dim, model.n_heads, model.n_kv_heads, model.hidden_dim, model.head_dim) == (512, 4, 1, 1792, 128)
    with pytest.raises(ValueError, match="--divisor: expected a divisor of llama-8b's 32 heads, got 3"):
        model_of("llama-8b", divisor=3)


def test_blocks_too_large_for_a_gpu_are_refused(monkeypatch, tmp_path):
    class Properties:
        total_memory = 16 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    options = {"model": "llama-70b", "device": "cuda", "output": str(tmp_path / "x.json")}
    with pytest.raises(ValueError, match="2 blocks .* take 26 GiB, and this GPU has 16; name fewer --recipes"):
        Block(**options, recipes=("rowwise",)).prepare()
    Block(**options, divisor=2, recipes=("rowwise",)).prepare()

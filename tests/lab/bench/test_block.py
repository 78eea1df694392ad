"""quaver bench block: its module and step, and the memory it measures."""

import pytest
import torch

from quaver.lab.bench.block import BlockBenchmark
from quaver.lab.bench.modules import build_subject, make_steps
from quaver.lab.bench.results import BFLOAT16
from quaver.lab.bench.shapes import model_of
from quaver.lab.recorder.allocator import measure_usage
from quaver.linear.module import Float8Linear

CPU = torch.device("cpu")


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


def test_blocks_too_large_for_a_gpu_are_refused(monkeypatch, tmp_path):
    class Properties:
        total_memory = 16 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    options = {"model": "llama-70b", "device": "cuda", "output": str(tmp_path / "x.json")}
    with pytest.raises(ValueError, match="2 blocks .* take 26 GiB, and this GPU has 16; name fewer --recipes"):
        BlockBenchmark(**options, recipes=("rowwise",)).prepare()
    BlockBenchmark(**options, divisor=2, recipes=("rowwise",)).prepare()

"""Tests that each slow path is logged once and listed, or raises."""

import contextlib
import importlib
import logging
import os
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from quaver import (
    Float8LinearConfig,
    assert_float8_training,
    cast_weights_once,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    error_on_slow_path,
    float8_scaling_state,
    freeze_to_float8,
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)
from quaver.activations import apply_activation_checkpointing
from quaver.kernels import cast, cpu, operation
from quaver.optim import Float8AdamW
from quaver.runtime.devices import simulate_gpu
from quaver.runtime.slow_paths import clear_slow_paths, list_slow_paths, report_slow_path
from tests.isolated import isolated


def test_each_slow_path_is_logged_once_until_it_is_cleared(caplog):
    report_slow_path("matmul cuda:0", "slow on cuda:0: 100%")
    report_slow_path("matmul cuda:0", "slow on cuda:0: 100%")
    report_slow_path("matmul cuda:1", "slow on cuda:1")
    messages = ["slow on cuda:0: 100%", "slow on cuda:1"]
    assert caplog.record_tuples == [("quaver", logging.WARNING, message) for message in messages]
    assert list_slow_paths() == messages
    clear_slow_paths()
    assert list_slow_paths() == []
    report_slow_path("matmul cuda:0", "slow on cuda:0")
    assert len(caplog.records) == 3


def test_the_switch_raises_every_time():
    report_slow_path("key", "slow")
    with error_on_slow_path():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="^slow$"):
                report_slow_path("key", "slow")
        with error_on_slow_path(False):
            report_slow_path("key", "slow")
        with pytest.raises(RuntimeError, match="slow"):
            report_slow_path("key", "slow")
    with pytest.raises(TypeError, match="error: expected True or False, got 'no'"):
        error_on_slow_path("no")
    report_slow_path("key", "slow")
    scope = error_on_slow_path(True)  # as a function, it holds until it is called again
    try:
        with pytest.raises(RuntimeError, match="slow"):
            report_slow_path("key", "slow")
    finally:
        scope.__exit__(None, None, None)


def _report_with(value: str, raises: bool) -> None:
    os.environ["QUAVER_ERROR_ON_SLOW_PATH"] = value
    reloaded = importlib.reload(sys.modules["quaver.runtime.slow_paths"])
    with pytest.raises(RuntimeError, match="slow") if raises else contextlib.nullcontext():
        reloaded.report_slow_path("key", "slow")


@pytest.mark.parametrize(("value", "raises"), [("1", True), ("0", False), ("", False)])
def test_the_environment_variable_makes_slow_paths_raise(value, raises):
    isolated(_report_with, value, raises)


@pytest.fixture
def without_extension(monkeypatch):
    monkeypatch.setattr(cpu, "HAS_EXTENSION", False)
    monkeypatch.setattr(cpu, "UNAVAILABLE_REASON", "quaver._cpu was not built at install")
    monkeypatch.setattr(cpu, "PURE_PYTORCH", False)


NO_EXTENSION = "float8 casts on the CPU run in PyTorch, up to 10 times slower: quaver._cpu was not built at install"


def test_casts_without_the_extension_are_a_slow_path(without_extension, monkeypatch, caplog):
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    assert list_slow_paths() == []
    with FakeTensorMode(allow_non_fake_inputs=True):
        cast.cast_tensorwise(torch.ones(16, 16), torch.float8_e4m3fn, True, False, False, "")
    assert list_slow_paths() == []  # nothing was cast
    model(torch.randn(4, 16)).sum().backward()
    assert list_slow_paths() == [NO_EXTENSION]
    assert caplog.text.count(NO_EXTENSION) == 1
    with error_on_slow_path(), pytest.raises(RuntimeError, match="not built at install"):
        model(torch.randn(4, 16))
    monkeypatch.setattr(cpu, "PURE_PYTORCH", True)  # the user asked for it
    clear_slow_paths()
    with error_on_slow_path():
        model(torch.randn(4, 16))


@pytest.mark.skipif(not cpu.HAS_EXTENSION, reason="the C extension is off")
def test_public_calls_on_an_ordinary_model_are_no_slow_path(caplog):
    for config in ("rowwise", "delayed", Float8LinearConfig(enable_fsdp_float8_all_gather=True)):
        with error_on_slow_path():
            model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), config=config)
            apply_activation_checkpointing(model)
            optimizer = Float8AdamW(model.parameters())
            with cast_weights_once(model):
                model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            sync_float8_amax_and_scale_history(model)
            precompute_float8_dynamic_scale_for_fsdp(model)
            assert_float8_training(model)
            float8_scaling_state(model).load_state_dict(float8_scaling_state(model).state_dict())
            freeze_to_float8(convert_to_high_precision(model))(torch.randn(4, 16))
        assert conversion_report(model).notes == list_slow_paths() == []
    assert ["so FSDP2 gathers its weights in high precision" in message for message in caplog.messages] == [True] * 2


def test_casts_on_a_gpu_without_triton_are_a_slow_path(monkeypatch, caplog):
    for name in ("triton_cast", "triton_blocks", "triton_amax"):
        monkeypatch.delitem(sys.modules, f"quaver.kernels.{name}", raising=False)
        monkeypatch.delattr(f"quaver.kernels.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with simulate_gpu((9, 0)):
        for _ in range(2):
            assert operation.find_triton_kernels(torch.ones(4, 4)) is None
        assert len(caplog.records) == len(list_slow_paths()) == 1
        assert "casts on cpu run in PyTorch" in list_slow_paths()[0]
        assert "import of triton halted" in list_slow_paths()[0]
        with error_on_slow_path(), pytest.raises(RuntimeError, match="Triton cannot be imported"):
            operation.find_triton_kernels(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("capability", "hip", "because"), [((8, 9), None, "this is sm_89"), ((9, 4), "6.4", "for NVIDIA GPUs")]
)
def test_casts_on_gpus_without_kernels_are_a_slow_path(capability, hip, because, monkeypatch):
    triton_blocks = pytest.importorskip("quaver.kernels.triton_blocks")
    monkeypatch.setattr(triton_blocks, "UNAVAILABLE_REASON", None)
    monkeypatch.setattr(torch.version, "hip", hip)
    with simulate_gpu(capability):
        assert operation.find_triton_kernels(torch.ones(4, 4)) is None
    (slow_path,) = list_slow_paths()
    assert because in slow_path


def make_frozen():
    return freeze_to_float8(nn.Linear(16, 32, bias=False))


def test_an_op_that_dequantizes_a_frozen_weight_is_a_slow_path(caplog):
    linear, input = make_frozen(), torch.randn(4, 16)
    expected = input @ linear.weight.to_high_precision().t()
    for _ in range(2):
        assert torch.mm(torch.randn(2, 32), linear.weight).shape == (2, 16)
        assert (linear.weight + torch.zeros(32, 16)).equal(linear.weight.to_high_precision())
    assert [message.partition(":")[0] for message in list_slow_paths()] == [
        "aten.mm.default dequantizes a whole frozen float8 weight, [32, 16], to torch.float32",
        "aten.add.Tensor dequantizes a whole frozen float8 weight, [32, 16], to torch.float32",
    ]
    assert len(caplog.records) == 2
    with error_on_slow_path(), pytest.raises(RuntimeError, match=r"aten\.mul\.Tensor dequantizes a whole"):
        linear.weight * 2
    assert torch.nn.functional.cosine_similarity(linear(input).flatten(), expected.flatten(), 0) > 0.99


def test_ordinary_reads_and_writes_of_a_frozen_weight_are_no_slow_path():
    linear = make_frozen()
    with error_on_slow_path():
        linear(torch.randn(4, 16, requires_grad=True)).sum().backward()
        weight = linear.weight
        values = weight.to_high_precision()
        assert torch.isfinite(weight).all()
        assert not torch.isnan(weight).any()
        assert torch.equal(weight, values)
        assert torch.empty(32, 16).copy_(weight).equal(values)
        weight.view(-1)  # as DistributedDataParallel
        weight.data += torch.ones(32, 16)  # a merge
        weight.data = values
        linear.load_state_dict(linear.state_dict())
        linear.to(torch.bfloat16)
    assert list_slow_paths() == []

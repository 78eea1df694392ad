"""Tests `assert_float8_training` and the report on what ran; tests/library/third_party/ has more."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from quaver import (
    Float8Linear,
    assert_float8_training,
    cast_weights_once,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    set_high_precision_matmuls,
    sync_float8_amax_and_scale_history,
)
from quaver.experts.grouped_mm_method import to_float8_grouped_mm
from quaver.kernels.native_mm import ScaleKind
from quaver.linear import last_run
from quaver.linear.backends import replace_trial_results
from quaver.recipes.config import resolve_config
from quaver.recipes.linear_casts import MATMULS
from quaver.runtime.slow_paths import report_slow_path
from tests.mixture import GroupedExperts


def record_run(linear, device, backend):
    """Record a forward as on a device that this machine may lack."""
    with mock.patch.object(Float8Linear, "_describe_backends", return_value=backend):
        last_run.record_run(linear, torch.device(device))


def assert_refused(model, message, optimizer=None, **options):
    with pytest.raises(RuntimeError, match=message):
        assert_float8_training(model, optimizer, **options)


def step(model):
    model(torch.ones(4, 16)).sum().backward()


def get_backend(model):
    return conversion_report(model).layers[0].backend


def test_training_may_be_required_to_multiply_natively():
    model = nn.Sequential(*(Float8Linear(16, 16, device="meta") for _ in range(2)))  # no device is needed to tell
    assert_float8_training(model)
    for ran_on in (None, "cpu"):  # a smoke test before it moved
        for linear in model if ran_on else ():
            record_run(linear, ran_on, "exact")
        assert_refused(model, "have not run yet, so the backends .* are unknown: 0, 1; call it", require_native=True)
    for linear in model:
        record_run(linear, "cuda:0", "native")
    assert_float8_training(model, require_native=True)
    report_slow_path("key", "no native matmul on cuda:0")
    for ran_on, backend in (("cuda:1", "exact"), ("cuda:2", "native and exact")):
        record_run(model[1], ran_on, backend)
        assert_float8_training(model)
        assert_refused(model, "multiply exactly, not on float8 units: 1; no native matmul", require_native=True)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_cpu_has_no_float8_units(how):
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    assert get_backend(model) == "not run yet"
    with torch.compiler.set_stance("force_eager" if how == "eager" else "default"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 16)).sum().backward()
    assert get_backend(model) == "exact"
    assert_refused(model, "multiply exactly, because a CPU has no float8 units: 0$", require_native=True)


def test_compiled_code_multiplies_natively_where_its_device_does():
    model = nn.Sequential(Float8Linear(16, 16, device="meta"))
    record_run(model[0], "cpu", "exact")  # a smoke test, before it moved
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        last_run.record_run(model[0], torch.device("cuda:0"))
    with replace_trial_results({ScaleKind.TENSORWISE: None}):
        assert get_backend(model) == "native"
        assert_float8_training(model, require_native=True)
    with replace_trial_results({ScaleKind.TENSORWISE: "missing"}):
        assert_refused(model, "multiply exactly, not on float8 units: 0", require_native=True)


def test_code_compiled_for_a_block_runs_the_other_blocks_of_its_model_and_no_other_model():
    blocks, teacher = (
        convert_to_float8_training(nn.Sequential(*(nn.Sequential(nn.Linear(16, 40)) for _ in range(2))))
        for _ in range(2)
    )
    for block in blocks:
        block.compile(backend="eager", fullgraph=True)
        block(torch.ones(2, 16))
    assert not last_run.find_traces(blocks[1])  # it runs the code of the first
    assert [layer.backend for layer in conversion_report(blocks).layers] == ["exact", "exact"]
    assert_refused(blocks, "multiply exactly, because a CPU has no float8 units: 0.0, 1.0$", require_native=True)
    assert {layer.backend for layer in conversion_report(teacher).layers} == {"not run yet"}
    assert_refused(teacher, "have not run yet, so the backends .* are unknown: 0.0, 1.0; call", require_native=True)


class Attention(nn.Module):
    """Reads the weight of qkv without calling it, as BEiT of timm does."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, input):
        return self.proj(self.project(input))

    def project(self, input):
        return F.linear(input, weight=self.qkv.weight, bias=self.qkv.bias)[..., :16]


def test_a_linear_whose_weight_its_parent_reads_is_no_float8():
    model = convert_to_float8_training(nn.Sequential(Attention(), Attention(), nn.Linear(16, 16)))
    with torch.no_grad():
        model(torch.ones(4, 16))
    assert conversion_report(model).float8_flops_fraction == 1  # it is no step
    assert_float8_training(model)
    step(model)
    report = conversion_report(model)
    reason = "it did not run while others trained: nothing called it; its parent may read its weight instead"
    assert [layer.name for layer in report.skipped] == ["0.qkv", "1.qkv"]
    assert all(layer.reason.startswith(f"converted, but {reason}") for layer in report.skipped)
    assert report.float8_flops_fraction == pytest.approx(1 / 3)
    assert_refused(model, f"0.qkv, 1.qkv: converted, but {reason}.*; leave it out")
    for attention in model[:2]:
        attention.project = lambda input: attention.qkv(input)[..., :16]  # noqa: B023 - the last one for both
    step(model)
    assert_refused(model, "  0.qkv: converted, but")
    model[0].qkv(torch.ones(1, 16))
    assert_float8_training(model)


def test_a_model_that_reads_all_its_weights_without_calls_is_no_float8(caplog):
    trained = nn.Sequential(nn.Linear(16, 16))
    step(trained)
    assert_float8_training(convert_to_float8_training(trained))  # its gradient is older than the conversion
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        F.linear(torch.ones(4, 16), model[0].weight).sum().backward()
        optimizer.step()
    reason = "converted, but it did not run while its parameters trained: nothing called it"
    assert conversion_report(model).skipped[0].reason.startswith(reason)
    assert_refused(model, f"0: {reason}", optimizer=optimizer)
    assert_float8_training(copy.deepcopy(model))
    optimizer.zero_grad()
    assert_float8_training(model, optimizer)  # after a load it has not run either
    assert "the optimizer has a state for 0, and no float8 layer has run" in caplog.text


def test_a_linear_is_idle_once_others_train_without_it():
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    step(model)
    for renew in (lambda old: nn.Linear(16, 16), copy.deepcopy, Float8Linear.from_float):
        model[1] = convert_to_float8_training(renew(model[1]))
        assert conversion_report(model).layers[1].backend == "not run yet"
        assert_float8_training(model)
        model[0](torch.ones(1, 16))
        assert_refused(model, "1: converted, but it did not run while others trained: nothing called it")


def test_an_expert_without_tokens_and_a_compiled_linear_may_run_later():
    experts = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), "head": nn.Linear(16, 32)})
    convert_to_float8_training(experts)
    experts["experts"][1](torch.ones(1, 16))
    assert_refused(experts, "  head: converted, but it did not run")
    torch.compile(experts["head"], backend="eager", fullgraph=True)(torch.ones(1, 16))
    experts["experts"][1](torch.ones(1, 16))
    assert_float8_training(experts)
    experts["head"] = convert_to_float8_training(nn.Linear(16, 32))  # no such linear was compiled since
    experts["experts"][1](torch.ones(1, 16))
    assert_refused(experts, "  head: converted, but it did not run")


def wrap_forward(module):
    """Return a forward that calls the original, as hooks of Accelerate, diffusers and LyCORIS do."""
    return functools.update_wrapper(functools.partial(type(module).forward, module), module.forward)


@pytest.mark.parametrize("replaced_at", ["before a step", "after a step"])
def test_a_wrapper_is_judged_by_what_ran(replaced_at, caplog):
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    if replaced_at == "after a step":
        step(model)
    model[0].forward = wrap_forward(model[0])
    replaced = "its forward was replaced on the instance"
    if replaced_at == "after a step":
        assert_refused(model, f"0: {replaced}, and it has not run since")
    else:
        assert_float8_training(model)
        assert f"0: {replaced}: it runs in float8 only if the replacement calls the original forward" in caplog.text
    assert replaced in conversion_report(model).layers[0].reason
    step(model)
    assert_float8_training(model)
    assert conversion_report(model).layers[0].reason == ""
    model[1].forward = lambda input: F.linear(input, model[1].weight)
    step(model)
    assert_refused(model, f"1: {replaced}, and it has not run since")
    model[1] = convert_to_float8_training(nn.Linear(16, 16))
    model[1].forward = lambda input: F.linear(input, model[1].weight)
    step(model)
    assert_refused(model, "1: converted, .*: the forward that replaced its own does not call the original")


def test_experts_are_judged_by_what_ran():
    experts = to_float8_grouped_mm(GroupedExperts(), resolve_config("rowwise"))
    model = nn.Sequential(convert_to_float8_training(nn.Linear(16, 16)), experts)
    experts.forward = lambda input: input
    step(model)
    assert [layer.converted for layer in conversion_report(model).layers] == [True, False]
    assert_refused(model, "1: converted, .*: the forward that replaced its own does not call the original")
    experts.forward = wrap_forward(experts)
    step(model)
    assert_float8_training(model)
    assert conversion_report(model.to(torch.float64).float()).layers[1].backend == "exact"


def test_a_backend_is_that_of_the_last_config():
    experts = to_float8_grouped_mm(GroupedExperts(), resolve_config("rowwise"))
    model = nn.Sequential(convert_to_float8_training(nn.Linear(16, 16)), experts)
    for matmuls, backend in ((), "exact"), (MATMULS, "high precision"), ((), "exact"):
        set_high_precision_matmuls(model, matmuls)
        step(model)
        assert {layer.backend for layer in conversion_report(model).layers} == {backend}


def test_a_layer_without_a_float8_matmul_is_no_float8():
    experts = to_float8_grouped_mm(GroupedExperts(), resolve_config("rowwise"))
    model = nn.Sequential(convert_to_float8_training(nn.Linear(16, 16)), experts)
    set_high_precision_matmuls(model, lambda name: MATMULS if name == "0" else ())
    report = conversion_report(model)
    assert [layer.converted for layer in report.layers[:2]] == [False, True]
    assert report.layers[0].reason == "its config computes all matmuls in high precision"
    assert_refused(model, "  0: its config computes all matmuls in high precision; call set_high_precision_matmuls")
    set_high_precision_matmuls(model, MATMULS)
    assert conversion_report(model).float8_flops_fraction == 0
    assert_refused(model, "  0, 1: its config computes all matmuls in high precision; call")
    convert_to_high_precision(model[0])
    set_high_precision_matmuls(model, [])
    assert_float8_training(model)


def test_weights_of_experts_are_checked():
    model = nn.Sequential(nn.Linear(16, 16), to_float8_grouped_mm(GroupedExperts(), resolve_config("rowwise")))
    convert_to_float8_training(model)
    weights = [name for name, parameter in model[1].named_parameters(prefix="1") if parameter.dim() == 3]
    step(model)
    exact = "multiply exactly, because a CPU has no float8 units: 0, 1$"
    with pytest.raises(RuntimeError, match=exact):
        assert_float8_training(model, require_native=True)
    with pytest.raises(RuntimeError, match=f"the optimizer does not hold: {', '.join(weights)}; make"):
        assert_float8_training(model, torch.optim.SGD(model[0].parameters()))
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    assert_refused(model, f"weights that require no gradient: {', '.join(weights)}$")
    assert_float8_training(model, torch.optim.SGD(model[0].parameters()), allow_frozen=True)


def test_a_linear_remembers_what_it_ran_on_wherever_it_moves():
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    step(model)
    assert {get_backend(move(model)) for move in (nn.Module.bfloat16, nn.Module.float, nn.Module.cpu)} == {"exact"}
    assert get_backend(model.to("meta")) == "exact"
    assert {get_backend(duplicate(model[0])) for duplicate in (copy.copy, copy.deepcopy)} == {"not run yet"}


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("name", "sizes", "idle"),
    [
        pytest.param("Mamba", {**SIZES, "vocab_size": 32}, {"dt_proj"}, marks=pytest.mark.nightly),
        (
            "WavLM",
            {**SIZES, "conv_dim": (16,), "conv_kernel": (10,), "conv_stride": (5,), "layerdrop": 0.0},
            {"q_proj", "k_proj", "v_proj", "out_proj"},
        ),
    ],
)
def test_linears_whose_parents_read_weights_are_found_in_transformers_models(name, sizes, idle):
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = convert_to_float8_training(transformers.AutoModel.from_config(config).train())
    model(torch.ones(1, 8, dtype=torch.long) if name == "Mamba" else torch.randn(1, 100))
    skipped = [layer for layer in conversion_report(model).skipped if "did not run" in layer.reason]
    assert {layer.name.rpartition(".")[2] for layer in skipped} == idle
    assert_refused(model, "nothing called it; its parent may read its weight instead")


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_linear_whose_weight_was_deleted_is_no_float8(recipe, caplog):
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), config=recipe)
    del model[0].weight  # as LyCORIS' `full` does, which multiplies in its place
    report = conversion_report(model)
    assert [layer.converted for layer in report.layers] == [False, True]
    assert report.layers[0].reason.startswith("converted, but its weight was deleted")
    assert_refused(model, "0: converted, but its weight was deleted")
    convert_to_float8_training(model.bfloat16().float(), config=recipe)
    assert "1 layer stays in high precision (0): converted, but its weight was deleted" in caplog.text
    with cast_weights_once(model):
        step(model[1])
    assert [type(linear) for linear in convert_to_high_precision(model)] == [nn.Linear, nn.Linear]


@pytest.mark.parametrize("syncs", ["before the step", "after the step", "never"])
def test_a_forgotten_sync_of_delayed_scales_is_refused(syncs):
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), config="delayed")
    changed = model[:1] if syncs == "never" else model  # the last weight does not hide that another changed
    optimizer = torch.optim.SGD(changed.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):  # microbatches
            model(torch.randn(4, 16)).square().sum().backward()
        if syncs == "before the step":
            sync_float8_amax_and_scale_history(model)
        optimizer.step()
        if syncs == "after the step":
            sync_float8_amax_and_scale_history(model)
    if syncs != "never":
        assert_float8_training(model, optimizer)
        return
    copied = copy.deepcopy(model)
    assert copied[0].scale_slots.conversion_slots.forwards.count == 0  # it may move to another device
    for same in (model, copied):
        assert_refused(same, r"without a sync, .* call sync_float8_amax_and_scale_history\(model\)")
    sync_float8_amax_and_scale_history(model)
    assert_float8_training(model)


def test_a_model_without_float8_or_gradients_is_refused():
    frozen = convert_to_float8_training(nn.Linear(16, 16)).requires_grad_(False)
    assert_refused(frozen, "weights that require no gradient: the module\n")
    assert_refused(nn.Linear(16, 16), "no linear is in float8: call convert_to_float8_training")
    filtered = nn.Linear(16, 16)
    with pytest.warns(UserWarning, match="nothing to convert"):
        convert_to_float8_training(filtered, module_filter_fn=lambda module, name: False)
    assert_refused(filtered, r"no linear is in float8 \(nothing to convert: .*\(the module: filter\)")

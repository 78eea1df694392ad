"""Tests torchao's module paths and names of quaver.compat, used as torchao's users use them."""

import copy
import importlib
import re
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from torch import nn

import quaver
from quaver.fsdp.all_gather_weight import Float8AllGatherWeight
from quaver.recipes.scaling import dynamic_cast
from tests.steps import compute_results

FILTER, SYNC = "_auto_filter_for_recipe convert_to_float8_training", "sync_float8_amax_and_scale_history"
PRECOMPUTE = "precompute_float8_dynamic_scale_for_fsdp"
PATHS = {
    "float8": f"{FILTER} {SYNC} {PRECOMPUTE} linear_requires_sync Float8Tensor FP8Granularity ScalingType "
    "ScalingGranularity CastConfig DelayedScalingConfig Float8GemmConfig Float8LinearConfig Float8LinearRecipeName",
    "float8.config": "CastConfig Float8LinearConfig Float8LinearRecipeName ScalingType e4m3_dtype e5m2_dtype",
    "float8.distributed_utils": "tensor_already_casted_to_fp8",
    "float8.float8_linear": "Float8Linear",
    "float8.float8_linear_utils": f"{FILTER} {SYNC} get_float8_layers linear_requires_sync swap_linear_layers",
    "float8.float8_tensor": "Float8Tensor",
    "float8.float8_tensor_parallel": "Float8ColwiseParallel Float8RowwiseParallel PrepareFloat8ModuleInput",
    "float8.float8_training_tensor": "Float8TrainingTensor",
    "float8.float8_utils": "EPS amax_to_scale compute_error config_has_stateful_scaling to_fp8_saturated",
    "float8.fsdp_utils": f"{PRECOMPUTE} WeightWithDelayedFloat8CastTensor WeightWithDynamicFloat8CastTensor "
    "WeightWithStaticFloat8CastTensor",
    "float8.inductor_utils": "_prototype_register_float8_delayed_scaling_inductor_passes",
    "float8.stateful_float8_linear": "StatefulFloat8Linear",
    "float8.types": "FP8Granularity",
}


@pytest.mark.parametrize("path", PATHS)
def test_every_path_has_torchaos_names(path):
    modules = [importlib.import_module(f"quaver.compat.{path}")]
    if path != "float8":
        modules.append(importlib.import_module(f"quaver.compat.{path.removeprefix('float8.')}"))
    for module in modules:
        for name in PATHS[path].split():
            assert name in module.__all__
            if isinstance(getattr(module, name), type) or name in quaver.__all__:
                assert getattr(module, name) is getattr(modules[0], name)
            if name in quaver.__all__:
                assert getattr(module, name) is getattr(quaver, name)


def test_a_program_of_torchao_runs_with_another_import():
    from quaver.compat.float8 import Float8LinearConfig, convert_to_float8_training, linear_requires_sync
    from quaver.compat.float8.float8_linear import Float8Linear
    from quaver.compat.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, fqn: fqn != "2")
    assert [type(module) for module in model] == [Float8Linear, nn.ReLU, nn.Linear]
    assert "cast_configs=i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2" in repr(model[0])
    model(torch.randn(16, 32)).sum().backward()
    assert WeightWithDynamicFloat8CastTensor is Float8AllGatherWeight
    assert not linear_requires_sync(config)
    assert linear_requires_sync(Float8LinearConfig.from_recipe_name("delayed"))


def test_swap_linear_layers_works_as_in_torchao():
    from quaver.compat import float8_linear_utils as utils  # type: ignore[attr-defined]  # through __path__

    swap = utils.swap_linear_layers

    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(16, 16)), "head": nn.Linear(16, 16)})
    parameters = [id(parameter) for parameter in model.parameters()]

    def from_float(linear):
        return utils.Float8Linear.from_float(linear, config=replace(quaver.Float8LinearConfig(), emulate=True))

    assert swap(model, from_float, module_filter_fn=lambda module, fqn: fqn != "head") is model
    assert type(shared) is nn.Linear
    assert model["a"] is model["b"][0]
    assert utils.get_float8_layers(model) == [model["a"], model["b"][1]]
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert isinstance(swap(shared, from_float), utils.Float8Linear)
    assert swap(shared, from_float, module_filter_fn=lambda module, fqn: False) is shared


TOO_SMALL = [("tensorwise", 4096, 1024), ("rowwise", 8192, 2048), ("rowwise", 1024, 8192), ("rowwise", 2048, 4096)]
NO_MULTIPLES_OF_16 = [("tensorwise", 8190, 8192), ("rowwise", 8192, 8200)]
ADMITTED = [("tensorwise", 4112, 1024), ("tensorwise", 4096, 1040), ("rowwise", 8192, 2064), ("rowwise", 1040, 8192)]
ADMITTED += [("rowwise", 2064, 4096), ("rowwise", 2048, 4112)]


@pytest.mark.parametrize(("recipe", "k", "n"), [*TOO_SMALL, *NO_MULTIPLES_OF_16, *ADMITTED])
def test_the_filter_has_the_thresholds_of_torchao(recipe, k, n):
    from quaver.compat.float8 import _auto_filter_for_recipe

    with torch.device("meta"):
        linear = nn.Linear(k, n)
    admits = _auto_filter_for_recipe(recipe, filter_fqns=["head"])
    assert admits(linear, "layers.0.w1") is ((recipe, k, n) in ADMITTED)
    assert admits(linear, "lm_head") is False
    assert admits(nn.ReLU(), "act") is False


def test_torchao_has_no_thresholds_for_other_recipes():
    from quaver.compat.float8 import _auto_filter_for_recipe

    with pytest.raises(NotImplementedError, match="got rowwise_with_gw_hp; use quaver.auto_filter_for_recipe"):
        _auto_filter_for_recipe("rowwise_with_gw_hp", filter_fqns=[])
    with pytest.raises(ValueError, match="unknown recipe 'rowise'"):
        _auto_filter_for_recipe("rowise", filter_fqns=[])
    with pytest.raises(ValueError, match="filter_fqns: expected a list of names, got 'head'"):
        _auto_filter_for_recipe("rowwise", filter_fqns="head")


def test_helpers_of_float8_utils_compute_what_torchaos_do():
    from quaver.compat.float8.distributed_utils import tensor_already_casted_to_fp8
    from quaver.compat.float8.float8_utils import amax_to_scale, compute_error, to_fp8_saturated

    x = torch.tensor([1.0, -2.0, 1000.0])
    assert to_fp8_saturated(x, torch.float8_e4m3fn).float().tolist() == [1.0, -2.0, 448.0]
    assert amax_to_scale(torch.tensor(3.5), torch.float8_e4m3fn).item() == 128
    assert amax_to_scale(torch.tensor(3.0), torch.float8_e4m3fn, round_scales_to_power_of_2=True).item() == 128
    assert compute_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])).item() == pytest.approx(20)
    assert not tensor_already_casted_to_fp8(x)


def test_names_on_the_page_exist_in_both_libraries():
    pytest.importorskip("torchao")
    page = (Path(quaver.__file__).parents[1] / "docs" / "from-torchao.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \|", page, re.MULTILINE)
    assert len(rows) > 10
    for theirs, ours in rows:
        assert resolve_name(f"torchao.float8.{theirs}")
        assert resolve_name(ours) is resolve_name(f"quaver.compat.float8.{theirs}")
    named = {theirs.rpartition(".")[2] for theirs, _ in rows}
    assert {*importlib.import_module("torchao.float8").__all__} & {*PATHS["float8"].split()} <= named


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dim", [None, 1])
def test_codes_and_scales_are_torchaos(dim, power_of_2):
    pytest.importorskip("torchao")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    torch.manual_seed(0)
    hp = (torch.randn(64, 256) * 10 ** torch.randn(64, 1)).bfloat16()
    granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
    options = {"scaling_granularity": granularity, "axiswise_dim": -1, "round_scales_to_power_of_2": power_of_2}
    theirs = hp_tensor_to_float8_dynamic(hp, torch.float8_e4m3fn, LinearMMConfig(), **options)
    codes, quant_scale, _ = dynamic_cast(hp, torch.float8_e4m3fn, dim, power_of_2=power_of_2)
    assert torch.equal(theirs._scale, quant_scale)
    assert torch.equal(theirs._data.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize(("bias", "output_db"), [(False, 80), (True, 45)])
def test_products_are_torchaos_but_for_the_order_of_sums(recipe, bias, output_db):
    """80 dB: the order, which depends on the CPU, rounds less than one of a thousand results to its neighbour."""
    theirs = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    linear = nn.Linear(256, 512, bias=bias).bfloat16()
    config = replace(theirs.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    other = theirs.convert_to_float8_training(copy.deepcopy(linear), config=config)
    quaver.convert_to_float8_training(linear, config=recipe)
    input, grad_output = torch.randn(128, 256).bfloat16(), torch.randn(128, 512).bfloat16()
    results, expected = (compute_results(module, input, grad_output=grad_output)[:3] for module in (linear, other))
    for result, same, least_db in zip(results, expected, (output_db, 80, 80), strict=True):
        noise = (result.double() - same.double()).norm()
        assert noise <= same.double().norm() * 10 ** (-least_db / 20)


def test_documented_differences_from_torchao_hold():
    theirs = pytest.importorskip("torchao.float8")
    for library, keeps in ((theirs, False), (quaver, True)):
        model, called = nn.Sequential(nn.Linear(32, 32)), []
        linear, keys = model[0], list(model.state_dict())
        linear.register_forward_hook(lambda *_, called=called: called.append(1))
        library.convert_to_float8_training(model)
        model(torch.randn(16, 32))
        assert (model[0] is linear, bool(called)) == (keeps, keeps)
        assert list(model.state_dict()) == keys
    for library, error in ((theirs, AssertionError), (quaver, ValueError)):
        with pytest.raises(error):
            library.Float8LinearConfig.from_recipe_name("rowise")
    rowwise = {library: library.Float8LinearConfig.from_recipe_name("rowwise") for library in (theirs, quaver)}
    with pytest.raises(AssertionError, match="only supports tensorwise"):
        replace(rowwise[theirs], enable_fsdp_float8_all_gather=True)
    assert replace(rowwise[quaver], enable_fsdp_float8_all_gather=True).enable_fsdp_float8_all_gather

    class Linear(nn.Linear):
        pass

    subclass = quaver.convert_to_float8_training(nn.Sequential(Linear(16, 16)))[0]
    assert isinstance(subclass, quaver.Float8Linear)
    assert isinstance(subclass, Linear)
    assert quaver.ScalingGranularity.AXISWISE is quaver.ScalingGranularity.ROWWISE
    assert {*quaver.ScalingType.__members__} - {*theirs.ScalingType.__members__} == {"DELAYED", "STATIC"}
    with pytest.warns(UserWarning, match="nothing to convert"):
        quaver.convert_to_float8_training(nn.ReLU())

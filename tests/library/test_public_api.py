"""Tests that the public names of `quaver.__all__` are documented, and where the version stands."""

import enum
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import quaver
from quaver.activations import store_activations_in_float8
from quaver.export import save_float8
from quaver.optim import CombinedOptimizer, Float8AdamW, Float8Muon

ROOT = Path(__file__).parents[2]

PUBLIC = """
CastConfig ConversionReport DelayedScalingConfig FilterDecision Float8ColwiseParallel Float8GemmConfig Float8Linear
Float8LinearConfig Float8LinearRecipeName Float8RowwiseParallel Float8ScalingState FrozenFloat8Experts
FrozenFloat8Linear LayerRecipes PrepareFloat8ModuleInput ScaleCalculationMode ScalingGranularity ScalingType
TensorScaleReport assert_float8_training auto_filter_for_recipe calibrate_float8_static_scales cast_weights_once
conversion_report convert_to_float8_training convert_to_high_precision error_on_slow_path float8_grouped_mm
float8_linear float8_scaling_state freeze_to_float8 monitor precompute_float8_dynamic_scale_for_fsdp
reduce_gradients_in_float8 serving_config set_high_precision_matmuls sync_float8_amax_and_scale_history
use_float8_primary_weights
"""
"""A name leaves this list in a major version only, after a release that warned of it (CONTRIBUTING.md)."""

NAMES = PUBLIC.split()


def test_all_lists_the_public_names():
    assert quaver.__all__ == sorted(NAMES)
    assert {*NAMES, "__version__"} <= {*dir(quaver)}
    assert not {"Any", "TYPE_CHECKING"} & {*dir(quaver)}


@pytest.mark.parametrize("name", NAMES)
def test_each_public_name_has_a_docstring_of_its_own(name):
    value = getattr(quaver, name)
    documented = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert documented
    assert not documented.startswith(f"{name}("), "the signature that dataclasses write is no docstring"
    if isinstance(value, enum.EnumMeta):
        assert documented != enum.Enum.__doc__


def test_another_name_is_an_error():
    with pytest.raises(AttributeError, match="no attribute 'Float8Lineal'"):
        _ = quaver.Float8Lineal


TAKES_A_MODEL = {
    "assert_float8_training": lambda: quaver.assert_float8_training(None),
    "calibrate_float8_static_scales": lambda: quaver.calibrate_float8_static_scales(None).__enter__(),
    "cast_weights_once": lambda: quaver.cast_weights_once(None).__enter__(),
    "conversion_report": lambda: quaver.conversion_report(None),
    "convert_to_float8_training": lambda: quaver.convert_to_float8_training(None),
    "convert_to_high_precision": lambda: quaver.convert_to_high_precision(None),
    "float8_scaling_state": lambda: quaver.float8_scaling_state(None),
    "freeze_to_float8": lambda: quaver.freeze_to_float8(None),
    "monitor": lambda: quaver.monitor(None),
    "precompute_float8_dynamic_scale_for_fsdp": lambda: quaver.precompute_float8_dynamic_scale_for_fsdp(None),
    "reduce_gradients_in_float8": lambda: quaver.reduce_gradients_in_float8(None),
    "set_high_precision_matmuls": lambda: quaver.set_high_precision_matmuls(None, ["output"]),
    "store_activations_in_float8": lambda: store_activations_in_float8(None),
    "sync_float8_amax_and_scale_history": lambda: quaver.sync_float8_amax_and_scale_history(None),
    "use_float8_primary_weights": lambda: quaver.use_float8_primary_weights(None, None),
}


@pytest.mark.parametrize("name", TAKES_A_MODEL)
def test_none_is_refused_as_a_model(name):
    with pytest.raises(TypeError, match="^(model|module): expected an nn.Module, got NoneType$"):
        TAKES_A_MODEL[name]()


def make_adamw():
    return Float8AdamW([nn.Parameter(torch.ones(2, 2))])


def build_converted():
    return quaver.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))


GROUP = {"params": [0], "state_version": 1}
BAD_ARGUMENTS = [
    (quaver.assert_float8_training, {"optimizer": nn.Linear(2, 2)}, "optimizer: expected a torch.optim.Optimizer"),
    (quaver.auto_filter_for_recipe, {"min_speedup": "a"}, "min_speedup: expected a number"),
    (quaver.auto_filter_for_recipe, {"skip": 5}, "skip: expected a tuple of names, got 5"),
    (quaver.auto_filter_for_recipe, {"skip": (5,)}, "skip: expected a tuple of names, got"),
    (quaver.auto_filter_for_recipe, {"device": 5}, "device: expected a name or a torch.device, got 5"),
    (quaver.auto_filter_for_recipe, {"tokens": "a"}, "tokens: expected 1 or more, got 'a'"),
    (quaver.float8_linear, {"weight": torch.ones(2, 2).double()}, "expected a weight of torch.float32, .* got"),
    (store_activations_in_float8, {"modules": 5}, "modules: expected patterns of names, got 5"),
    (save_float8, {"files": ["nope"]}, "files: 'nope' is not a file"),
    (save_float8, {"files": "nope"}, "files: expected a list of paths, got 'nope'"),
    (save_float8, {"files": [5]}, r"files: expected a list of paths, got \[5\]"),
    (save_float8, {"origin": 5}, "origin: expected a mapping, got a int"),
    (save_float8, {"weights": [5]}, "weights: expected tensors by name, got a list"),
    (save_float8, {"make_hp_model": nn.Linear(2, 2)}, "make_hp_model: expected a function that returns"),
    (save_float8, {"make_hp_model": lambda: 5}, "the result of make_hp_model: expected an nn.Module"),
    (Float8AdamW, {"compile": "x"}, "compile: expected True or False, got 'x'"),
    (Float8Muon, {"ns_coefficients": "abc"}, "expected three ns_coefficients"),
    *(
        (load, {"state_dict": state_dict}, message)
        for load in (
            make_adamw().load_state_dict,
            make_adamw().load_adamw_state_dict,
            CombinedOptimizer(make_adamw()).load_state_dict,
        )
        for state_dict, message in [
            (None, "expected a state dict of .*, got None"),
            ({"state": {}}, r"expected a state dict of .* with 'state' and 'param_groups', got \['state'\]"),
            ({"state": {}, "param_groups": 5}, "expected param_groups of .*, got 5"),
            ({"state": {}, "param_groups": [5]}, r"expected param_groups of .*, got \[5\]"),
            (
                {"state": {}, "param_groups": [{"params": 5}]},
                "expected param_groups of .* with a list of 'params', got",
            ),
            ({"state": 5, "param_groups": [GROUP]}, "expected a 'state' of .*, got 5"),
            (
                {"state": {0: 5}, "param_groups": [GROUP]},
                "expected a 'state' of .* with a dict for each parameter, got",
            ),
        ]
    ),
]
"""A function, an argument for it, and the message of its error."""


@pytest.mark.parametrize(("function", "bad", "message"), BAD_ARGUMENTS)
def test_a_bad_argument_ends_in_one_line(function, bad, message, tmp_path):
    good = {
        quaver.assert_float8_training: {"model": build_converted()},
        quaver.auto_filter_for_recipe: {"recipe": "rowwise"},
        quaver.float8_linear: {"input": torch.ones(2, 2)},
        store_activations_in_float8: {"model": nn.Sequential(nn.Linear(2, 2))},
        save_float8: {"model": build_converted(), "folder": tmp_path / "out", "config": {}},
    }
    is_optimizer = function in (Float8AdamW, Float8Muon)
    arguments = {"params": [nn.Parameter(torch.ones(2, 2))]} if is_optimizer else good.get(function, {})
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=f"^{message}"):
        function(**arguments, **bad)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("file", "line"), [("CITATION.cff", "version: {}"), ("CHANGELOG.md", "## {}")])
def test_the_version_stands_where_readers_look(file, line):
    assert re.search(rf"^{re.escape(line.format(quaver.__version__))}\b", (ROOT / file).read_text(), re.M)

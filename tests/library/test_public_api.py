"""Tests that the public names of `quaver.__all__` are documented, and where the version stands."""

import enum
import inspect
import re
from pathlib import Path

import pytest

import quaver

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


def test_the_public_names():
    assert quaver.__all__ == sorted(NAMES)


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
    "sync_float8_amax_and_scale_history": lambda: quaver.sync_float8_amax_and_scale_history(None),
    "use_float8_primary_weights": lambda: quaver.use_float8_primary_weights(None, None),
}


@pytest.mark.parametrize("name", TAKES_A_MODEL)
def test_none_is_no_model(name):
    with pytest.raises(TypeError, match="^(model|module): expected an nn.Module, got NoneType$"):
        TAKES_A_MODEL[name]()


@pytest.mark.parametrize(("file", "line"), [("CITATION.cff", "version: {}"), ("CHANGELOG.md", "## {}")])
def test_the_version_stands_where_readers_look(file, line):
    assert re.search(rf"^{re.escape(line.format(quaver.__version__))}\b", (ROOT / file).read_text(), re.M)

"""Tests torchao's configs, enums and quantized weights, given to quaver without the shim."""

import dataclasses
import pickle

import pytest
import torch
from torch import nn

import quaver
from quaver import Float8Linear, assert_float8_training, conversion_report, convert_to_float8_training
from quaver.compat.float8.float8_linear_utils import linear_requires_sync
from quaver.compat.float8.float8_utils import config_has_stateful_scaling
from quaver.integrations.transformers import prepare_model_for_float8
from quaver.recipes.config import resolve_config

pytest.importorskip("torchao")

from torchao.float8 import config as theirs
from torchao.prototype.moe_training import config as ops
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False))


@pytest.mark.parametrize("recipe", theirs.Float8LinearRecipeName, ids=lambda recipe: recipe.value)
def test_a_recipe_is_the_recipe_of_that_name(recipe):
    expected = quaver.Float8LinearConfig.from_recipe_name(recipe.value)
    config = theirs.Float8LinearConfig.from_recipe_name(recipe)
    for given in (recipe, config, pickle.loads(pickle.dumps(config))):
        assert resolve_config(given) == expected
        assert resolve_config(given).casts == expected.casts
    assert quaver.Float8LinearConfig.from_recipe_name(recipe) == expected
    assert not linear_requires_sync(config)
    assert not config_has_stateful_scaling(config)


def test_every_option_of_torchao_is_taken_over():
    options = {"pad_inner_dim": True, "emulate": True, "enable_fsdp_float8_all_gather": True}
    gemm = {"gemm_config_output": False, "gemm_config_grad_input": True, "gemm_config_grad_weight": True}
    given, expected = (
        module.Float8LinearConfig(**options, **{n: module.Float8GemmConfig(use_fast_accum=f) for n, f in gemm.items()})
        for module in (theirs, quaver)
    )
    assert resolve_config(given) == expected
    off = theirs.CastConfig(scaling_type=theirs.ScalingType.DISABLED)
    in_bfloat16 = off, dataclasses.replace(off, target_dtype=torch.float8_e5m2)
    names = ("cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight")
    config = resolve_config(theirs.Float8LinearConfig(**dict(zip(names, in_bfloat16, strict=True))))
    assert [cast.is_disabled for cast in config.casts.list_casts()] == [False, True, False, False, False, True]


def test_configs_of_training_ops_are_taken_by_value():
    for name in ("rowwise", "tensorwise", "rowwise_with_gw_hp"):
        given = ops.Float8TrainingOpConfig(float8_linear_recipe=name, pad_token_groups_for_grouped_mm=True)
        assert resolve_config(given) == quaver.Float8LinearConfig.from_recipe_name(name)
    for recipe in ops.MXFP8TrainingRecipe:
        config = resolve_config(ops.MXFP8TrainingOpConfig.from_recipe(recipe))
        assert {cast.block_size for cast in config.casts.list_casts() if not cast.is_disabled} == {(1, 32)}
        assert config.emulate is ("emulated" in recipe.value)
        assert config.casts.input.column.is_disabled is ("wgrad_with_hp" in recipe.value)
        assert config.casts.weight.row.scale_calculation_mode.value == "rceil"
        converted = convert_to_float8_training(build_model(), config=ops.MXFP8TrainingOpConfig.from_recipe(recipe))
        converted(torch.randn(32, 32)).sum().backward()
    floor = ops.MXFP8TrainingOpConfig(scale_calculation_mode=ops.ScaleCalculationMode.FLOOR)
    assert resolve_config(floor).casts.weight.row.scale_calculation_mode.value == "floor"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Float8", {"float8_dtype": torch.float8_e4m3fnuz}, r"float8_dtype: expected torch.float8_e4m3fn, got"),
        ("Float8", {"out_dtype": torch.float32}, r"out_dtype: expected torch.bfloat16, .* got torch.float32"),
        ("MXFP8", {"kernel_preference": "TORCH"}, "kernel_preference: expected AUTO or EMULATED, got TORCH"),
        ("MXFP8", {"scale_calculation_mode": "EVEN"}, "scale_calculation_mode: expected RCEIL or FLOOR, got EVEN"),
    ],
)
def test_a_training_op_of_other_numbers_is_one_line(kind, options, message):
    enums = {"kernel_preference": ops.KernelPreference, "scale_calculation_mode": ops.ScaleCalculationMode}
    options = {name: enums[name][value] if name in enums else value for name, value in options.items()}
    with pytest.raises(ValueError, match=f"{kind}TrainingOpConfig.{message}"):
        convert_to_float8_training(build_model(), config=getattr(ops, f"{kind}TrainingOpConfig")(**options))


@pytest.mark.parametrize("saves", [None, True, False])
def test_torchaos_flag_has_no_effect_in_torchaos_config(saves):
    options = {} if saves is None else {"force_recompute_fp8_weight_in_bwd": saves}
    assert not resolve_config(theirs.Float8LinearConfig(**options)).keep_float8_weight_for_backward


def test_fields_take_torchaos_members_and_configs():
    axiswise = {"scaling_granularity": theirs.ScalingGranularity.AXISWISE}
    rows = quaver.CastConfig(scaling_type=theirs.ScalingType.DYNAMIC, **axiswise)
    assert rows == quaver.CastConfig(scaling_granularity=quaver.ScalingGranularity.ROWWISE)
    assert rows.is_rowwise
    assert quaver.CastConfig(scaling_type=theirs.ScalingType.DISABLED).is_disabled
    config, expected = (
        quaver.Float8LinearConfig(cast_config_input=cast, gemm_config_grad_input=module.Float8GemmConfig(True))
        for module, cast in ((theirs, theirs.CastConfig(**axiswise)), (quaver, rows))
    )
    assert config == expected


def test_everything_that_takes_a_config_takes_torchaos():
    config = theirs.Float8LinearConfig.from_recipe_name("rowwise")
    expected = quaver.Float8LinearConfig.from_recipe_name("rowwise")
    input, plain = torch.randn(16, 32), nn.Linear(32, 32)
    assert convert_to_float8_training(build_model(), config=config)[0].config == expected
    assert prepare_model_for_float8(build_model(), theirs.Float8LinearRecipeName.ROWWISE)[0].config == expected
    assert Float8Linear(32, 32, config=config).config == expected
    assert Float8Linear.from_float(plain, config).config == expected
    result = quaver.float8_linear(input, plain.weight, config=config)
    assert torch.equal(result, quaver.float8_linear(input, plain.weight, config="rowwise"))


def test_a_subclass_of_torchaos_config_is_one():
    @dataclasses.dataclass(frozen=True)
    class WithName(theirs.Float8LinearConfig):
        name: str = "mine"

    assert resolve_config(WithName(emulate=True)) == quaver.Float8LinearConfig(emulate=True)


def a_later_torchaos(name, base=object, **contents):
    return type(base)(name, (base,), {**contents, "__module__": "torchao.float8.config"})


def test_an_option_of_a_later_torchao_is_left_out_only_while_it_is_off():
    later = a_later_torchaos("Float8GemmConfig", use_split_k=False, __annotations__={"use_split_k": bool})
    later = dataclasses.dataclass(later)
    config = quaver.Float8LinearConfig(gemm_config_output=later())
    assert config.gemm_config_output == quaver.Float8GemmConfig()
    with pytest.raises(TypeError, match="use_split_k"):
        quaver.Float8LinearConfig(gemm_config_output=later(use_split_k=True))


def test_torchao_values_in_wrong_places_are_refused():
    with pytest.raises(ValueError, match="scaling_type: expected ScalingType, got <ScalingGranularity.TENSORWISE"):
        quaver.CastConfig(scaling_type=theirs.ScalingGranularity.TENSORWISE)
    with pytest.raises(TypeError, match="expected a Float8LinearConfig, a recipe's name such as 'rowwise' or None"):
        resolve_config(theirs.CastConfig())


def test_linear_mm_config_says_as_torchaos_how_matmuls_run():
    from torchao.float8 import float8_training_tensor
    from torchao.float8.float8_linear import Float8Linear as TorchaoLinear

    assert quaver.Float8LinearConfig().linear_mm_config == float8_training_tensor.LinearMMConfig()
    config = theirs.Float8LinearConfig(
        emulate=True, pad_inner_dim=True, gemm_config_grad_weight=theirs.Float8GemmConfig(use_fast_accum=True)
    )
    ours = convert_to_float8_training(build_model(), config=config)[0].linear_mm_config
    assert ours == TorchaoLinear.from_float(nn.Linear(32, 32), config).linear_mm_config
    assert ours.output.emulate


@pytest.mark.parametrize("make", [Float8WeightOnlyConfig, Int8WeightOnlyConfig])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_quantize_for_inference_computes_what_it_computes_on_a_plain_model(make, recipe):
    plain, trained, input = build_model(), convert_to_float8_training(build_model(), config=recipe), torch.randn(8, 32)
    quantize_(plain, make())
    quantize_(trained, make())
    with torch.no_grad():
        expected = plain(input)
        assert torch.equal(trained(input), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(trained(input), plain(input))
        assert torch.equal(quaver.convert_to_high_precision(trained)(input), expected)
    assert type(trained[0]) is nn.Linear


def test_a_quantized_weight_is_reported_as_no_float8_training():
    trained = convert_to_float8_training(build_model())
    quantize_(trained, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name == "0")
    first, second = conversion_report(trained).layers
    assert not first.converted
    assert first.reason == "its weight is torchao's Int8Tensor, which is quantized for inference"
    assert second.converted
    with pytest.raises(RuntimeError, match="0: its weight is torchao's Int8Tensor"):
        assert_float8_training(trained)


def test_a_weight_of_torchao_that_trains_is_refused():
    weight_type = type("TrainingWeight", (torch.Tensor,), {"__module__": "torchao.prototype.quantized_training"})
    linear = Float8Linear(16, 16)
    linear.weight = nn.Parameter(torch.randn(16, 16).as_subclass(weight_type))
    message = r"is a TrainingWeight of torchao.*convert_to_high_precision\(model\) before"
    with pytest.raises(RuntimeError, match=message):
        linear(torch.randn(4, 16))

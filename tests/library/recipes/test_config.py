"""Tests what configs accept and refuse, and what the recipes mean."""

import copy
import dataclasses
import pickle
import re
from dataclasses import asdict, fields, replace

import pytest
import torch

from quaver import (
    CastConfig,
    DelayedScalingConfig,
    Float8GemmConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScaleCalculationMode,
    ScalingGranularity,
    ScalingType,
    convert_to_float8_training,
    float8_linear,
)
from quaver.conversion.layer_recipes import LayerRecipes
from quaver.recipes.config import resolve_config
from tests.recipes import DYNAMIC_RECIPES, E4M3, E5M2

ROW, BLOCKWISE = ScalingGranularity.ROWWISE, ScalingGranularity.BLOCKWISE
HP = CastConfig(scaling_type=ScalingType.DISABLED)
BLOCKS = CastConfig(scaling_granularity=BLOCKWISE)


@pytest.mark.parametrize(
    ("name", "casts", "powers_of_2"),
    [
        ("tensorwise", "i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2", False),
        ("rowwise", "i:dyn_axs_e4m3,w:dyn_axs_e4m3,go:dyn_axs_e4m3", True),
        (
            "rowwise_with_gw_hp",
            "i:dyn_axs_e4m3,w:dyn_axs_e4m3,go:dyn_axs_e4m3,i_gw:dis_ten_e4m3,w_gi:dyn_ten_e4m3,go_gw:dis_ten_e4m3",
            True,
        ),
        ("blockwise", "i:dyn_blk1x128_e4m3,w:dyn_blk_e4m3,go:dyn_blk1x128_e4m3", True),
        ("rowwise_with_tensorwise_weight", "i:dyn_axs_e4m3,w:dyn_ten_e4m3,go:dyn_axs_e4m3", True),
    ],
)
def test_recipes_match_the_published_table_in_torchaos_short_form(name, casts, powers_of_2):
    config = Float8LinearConfig.from_recipe_name(name)
    assert config.short_str() == casts
    assert casts in repr(Float8Linear(16, 16, config=config))
    assert config.round_scales_to_power_of_2 is powers_of_2
    assert config.gemm_config_output.use_fast_accum
    assert not config.gemm_config_grad_input.use_fast_accum
    assert not config.gemm_config_grad_weight.use_fast_accum
    assert config == Float8LinearConfig.from_recipe_name(Float8LinearRecipeName(name))
    assert config.recipe_name is replace(config, emulate=True).recipe_name is Float8LinearRecipeName(name)
    assert replace(config, round_scales_to_power_of_2=not powers_of_2).recipe_name is None


@pytest.mark.parametrize(
    ("alias", "recipe"),
    [("fp8_blockwise", "blockwise"), ("mxfp8_rceil", "mxfp8"), ("mxfp8_rceil_wgrad_with_hp", "mxfp8_with_gw_hp")],
)
def test_torchaos_and_megatrons_names_are_those_of_block_recipes(alias, recipe):
    config = Float8LinearConfig.from_recipe_name(alias)
    assert config == Float8LinearConfig.from_recipe_name(recipe)
    assert config.recipe_name.value == recipe
    assert config.round_scales_to_power_of_2


def test_mxfp8_casts_weights_once_and_inputs_by_direction():
    config = Float8LinearConfig.from_recipe_name("mxfp8")
    assert config.short_str() == "i:dyn_blk1x32_e4m3,w:dyn_blk32x32_e4m3,go:dyn_blk1x32_e4m3"
    assert {cast.scale_calculation_mode for cast in config.casts.list_casts()} == {ScaleCalculationMode.RCEIL}
    assert not config.casts.weight.row.depends_on_direction
    assert config.casts.input.row.depends_on_direction
    one_dimensional = replace(config.cast_config_weight, block_size=(1, 32))  # torchao's weights, cast twice
    assert replace(config, cast_config_weight=one_dimensional).casts.weight.column.block_size == (1, 32)
    assert CastConfig(scaling_granularity=BLOCKWISE, block_size=[1, 32]).block_size == (1, 32)


def test_the_short_form_names_each_part_of_a_cast():
    assert [kind.short_str() for kind in ScalingType] == ["dyn", "del", "sta", "dis"]
    assert [granularity.short_str() for granularity in ScalingGranularity] == ["ten", "axs", "blk"]
    assert CastConfig().short_str() == "dyn_ten_default"
    modes = {"_floor": ScaleCalculationMode.FLOOR, "": ScaleCalculationMode.RCEIL, "_float32": None}
    for suffix, mode in modes.items():
        cast = replace(BLOCKS, block_size=(1, 32), scale_calculation_mode=mode)
        assert cast.short_str() == f"dyn_blk1x32_default{suffix}"
    assert replace(BLOCKS, scale_calculation_mode=ScaleCalculationMode.RCEIL).short_str() == "dyn_blk_default_rceil"


def test_a_recipes_config_is_a_new_object():
    """torchao's users turn on emulate in a frozen config with object.__setattr__."""
    object.__setattr__(Float8LinearConfig.from_recipe_name("tensorwise"), "emulate", True)
    assert not Float8LinearConfig.from_recipe_name("tensorwise").emulate
    assert not resolve_config("tensorwise").emulate


def test_older_names_are_accepted():
    names = {"all_tensorwise": "tensorwise", "axiswise": "rowwise", "all_axiswise": "rowwise"}
    names |= {"lw_axiswise_with_gw_hp": "rowwise_with_gw_hp"}
    for old, new in names.items():
        assert Float8LinearConfig.from_recipe_name(old) == Float8LinearConfig.from_recipe_name(new)
    assert ScalingGranularity("axiswise") is ScalingGranularity.AXISWISE is ScalingGranularity.ROWWISE
    assert ScalingGranularity("rowwise") is ScalingGranularity["ROWWISE"] is ScalingGranularity["AXISWISE"]
    assert ScalingGranularity.AXISWISE.value == "axiswise"
    assert pickle.loads(pickle.dumps(ScalingGranularity.ROWWISE)) is ScalingGranularity.ROWWISE


def test_a_recipe_or_its_name_stands_for_its_config():
    rowwise = Float8LinearConfig.from_recipe_name("rowwise")
    assert resolve_config("rowwise") == resolve_config(Float8LinearRecipeName.ROWWISE) == rowwise
    assert resolve_config(rowwise) is rowwise
    assert resolve_config(None) == Float8LinearConfig()
    for unknown in ("rowise", "ROWWISE"):
        with pytest.raises(ValueError, match=f"recipe '{unknown}': expected one of tensorwise, .*; did you mean 'row"):
            resolve_config(unknown)
    for wrong in (7, CastConfig(), Float8LinearConfig):
        with pytest.raises(TypeError, match="config: expected a Float8LinearConfig, a recipe's name such as 'rowwise'"):
            resolve_config(wrong)


def test_recipes_of_layers_are_no_config():
    with pytest.raises(TypeError, match=r"got LayerRecipes\(.*; for several, pass LayerRecipes to prep"):
        convert_to_float8_training(torch.nn.Linear(16, 16), config=LayerRecipes("rowwise"))


def test_a_linear_and_the_function_take_a_recipes_name():
    input, linear = torch.randn(4, 32), Float8Linear(32, 16, config="rowwise")
    assert linear.config == Float8LinearConfig.from_recipe_name("rowwise")
    for recipe in ("rowwise", Float8LinearRecipeName.ROWWISE):
        assert float8_linear(input, linear.weight, linear.bias, config=recipe).equal(linear(input))
    with pytest.raises(ValueError, match="unknown recipe 'rowise'"):
        Float8Linear(32, 16, config="rowise")
    with pytest.raises(TypeError, match="got 7"):
        float8_linear(input, linear.weight, config=7)
    compiled = torch.compile(lambda x, w: float8_linear(x, w, config="rowwise"), fullgraph=True, backend="aot_eager")
    assert compiled(input, linear.weight).equal(float8_linear(input, linear.weight, config="rowwise"))


def test_every_field_is_filled_in_and_the_arguments_stay_unchanged():
    cast = CastConfig()
    config = Float8LinearConfig(cast_config_input=cast, cast_config_weight=cast, cast_config_grad_output=cast)
    assert cast.target_dtype is None
    assert config.cast_config_input.target_dtype is E4M3
    assert config.cast_config_weight.target_dtype is E4M3
    assert config.cast_config_grad_output.target_dtype is E5M2
    for name in ("input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight"):
        operand = name.partition("_for_")[0]
        assert getattr(config, f"cast_config_{name}") == getattr(config, f"cast_config_{operand}")
        assert getattr(config, f"cast_config_{name}") == getattr(config.casts, operand).column
    assert Float8LinearConfig(cast_config_weight=BLOCKS).casts.weight.column.is_blockwise


@pytest.mark.parametrize("name", [*DYNAMIC_RECIPES, "delayed", "delayed_with_dynamic_weight"])
def test_configs_are_rebuilt_from_their_fields(name):
    config = Float8LinearConfig.from_recipe_name(name)
    for options in (asdict(config), {field.name: getattr(config, field.name) for field in fields(config)}):
        rebuilt = Float8LinearConfig(**options)
        assert rebuilt == config
        assert rebuilt.casts == config.casts
        assert fields(rebuilt) == fields(config)  # without those that the constructor filled in
    for cast in config.casts.list_casts():
        assert CastConfig(**asdict(cast)) == cast
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_rowwise'"):
        Float8LinearConfig(cast_config_input={"is_rowwise": True})


def test_replace_derives_default_fields_anew_and_keeps_explicit_ones():
    row, tensor = CastConfig(scaling_granularity=ROW, target_dtype=E4M3), CastConfig(target_dtype=E4M3)
    config = Float8LinearConfig()
    for copied in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config, emulate=True)):
        changed = replace(copied, cast_config_input=row)
        assert (changed.cast_config_input, changed.cast_config_input_for_grad_weight) == (row, row)
        assert replace(changed, cast_config_input=tensor).cast_config_input_for_grad_weight == tensor
    explicit = replace(config, cast_config_input_for_grad_weight=tensor)
    assert replace(explicit, cast_config_input=row).cast_config_input_for_grad_weight == tensor
    assert replace(explicit, cast_config_input_for_grad_weight=None, cast_config_input=row).casts.input.column == row
    default = config.cast_config_weight_for_grad_input
    for column in (default, copy.copy(default)):
        explicit = replace(config, cast_config_weight=row, cast_config_weight_for_grad_input=column)
        assert (explicit.casts.weight.row, explicit.casts.weight.column) == (row, tensor)
        assert replace(explicit, cast_config_weight=tensor, emulate=True).casts.weight.column == tensor
    reused = Float8LinearConfig(
        cast_config_input=row, cast_config_input_for_grad_weight=config.cast_config_input_for_grad_weight
    )
    assert reused.cast_config_input_for_grad_weight == tensor
    assert reused == Float8LinearConfig(cast_config_input=row, cast_config_input_for_grad_weight=tensor)


def test_torchaos_flag_saves_the_float8_weight_or_not():
    assert not Float8LinearConfig().keep_float8_weight_for_backward
    assert not Float8LinearConfig(force_recompute_fp8_weight_in_bwd=True).keep_float8_weight_for_backward
    keeping = Float8LinearConfig(force_recompute_fp8_weight_in_bwd=False)
    assert keeping.keep_float8_weight_for_backward
    assert not keeping.force_recompute_fp8_weight_in_bwd
    assert replace(keeping, emulate=True).keep_float8_weight_for_backward
    assert replace(Float8LinearConfig(), keep_float8_weight_for_backward=True) == keeping


def test_configs_are_frozen_and_hashable():
    config = Float8LinearConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.emulate = True
    assert hash(config) == hash(Float8LinearConfig())


def linear(**options):
    """Return a function that makes a config; the name of an operand is short for its `cast_config_`."""
    prefix = lambda name: "cast_config_" if name.startswith(("input", "weight", "grad_output")) else ""  # noqa: E731
    options = {prefix(name) + name: value for name, value in options.items()}
    return lambda: Float8LinearConfig(**options)


def cast(*args, **options):
    return lambda: CastConfig(*args, **options)


def delayed(**options):
    return lambda: DelayedScalingConfig(**options)


STATIC, FLOOR = ScalingType.STATIC, ScaleCalculationMode.FLOOR
E2M1_BLOCKS = {"scaling_granularity": BLOCKWISE, "target_dtype": torch.float4_e2m1fn_x2}
BAD = {
    "output: expected two operands in float8, or two in high precision, got weight in float8 and input": linear(
        input=HP
    ),
    "grad_input: expected two operands in float8, or two in high precision, got grad_output in float8": linear(
        weight_for_grad_input=HP
    ),
    "grad_weight: expected two operands in float8, or two in high precision, got grad_output_for_grad_weight": linear(
        input_for_grad_weight=HP
    ),
    "weight: expected one dtype for both of its matmuls, got e4m3 and e5m2": linear(
        weight=CastConfig(target_dtype=E4M3), weight_for_grad_input=CastConfig(target_dtype=E5M2)
    ),
    "grad_input: expected grad_output or weight_for_grad_input in e4m3, got two in e5m2": linear(
        weight=CastConfig(target_dtype=E5M2)
    ),
    "input: expected one dtype for both of its matmuls, got e2m1 and e4m3": linear(
        input=CastConfig(block_size=(1, 16), **E2M1_BLOCKS), input_for_grad_weight=CastConfig(target_dtype=E4M3)
    ),
    "scale_calculation_mode: expected None with e2m1": cast(
        block_size=(1, 16), scale_calculation_mode=ScaleCalculationMode.RCEIL, **E2M1_BLOCKS
    ),
    "high_precision_matmuls: expected names of output, grad_input, grad_weight, got None": linear(
        high_precision_matmuls=None
    ),
    "high_precision_matmuls: expected names of output, grad_input, grad_weight, got 3": linear(
        high_precision_matmuls=3
    ),
    "high_precision_matmuls: expected names of output, grad_input, grad_weight, got 'output'": linear(
        high_precision_matmuls="output"
    ),
    "scale_rule: expected None or one of": cast(scale_rule=["vllm"]),
    "target_dtype: expected a float8 dtype (torch.float8_e4m3fn": cast(target_dtype=["e4m3"]),
    "target_dtype: expected a float8 dtype": cast(target_dtype=torch.bfloat16),
    "scaling_type: expected ScalingType, got 'dynamic'": cast(scaling_type="dynamic"),
    "scaling_granularity: expected ScalingGranularity, got 16": cast(scaling_granularity=16),
    "cast_config_input: expected CastConfig, got 'e4m3'": linear(input="e4m3"),
    "cast_config_input: expected CastConfig, got None": linear(input=None),
    "enable_fsdp_float8_all_gather: expected the weight in float8 in both of its matmuls, got output high": linear(
        weight=HP,
        input=HP,
        weight_for_grad_input=CastConfig(),
        input_for_grad_weight=CastConfig(),
        enable_fsdp_float8_all_gather=True,
    ),
    "emulate: expected bool, got 1": linear(emulate=1),
    "force_recompute_fp8_weight_in_bwd: expected a bool, and not True with keep_float8_weight_for_backward": linear(
        force_recompute_fp8_weight_in_bwd=True, keep_float8_weight_for_backward=True
    ),
    "expected a bool, and not True with keep": linear(force_recompute_fp8_weight_in_bwd="no"),
    "gemm_config_output: expected Float8GemmConfig": linear(gemm_config_output=True),
    "use_fast_accum: expected bool, got 'yes'": lambda: Float8GemmConfig(use_fast_accum="yes"),
    "delayed scaling keeps one scale per tensor: expected tensorwise, got rowwise": cast(ScalingType.DELAYED, ROW),
    "expected None unless scaling_type is static, got '2.0 with dyn": cast(static_quant_scale=2.0),
    "a number from 2**-126 to 2**126, got 0.0": cast(STATIC, static_quant_scale=0.0),
    "a number from 2**-126 to 2**126, got nan": cast(STATIC, static_quant_scale=float("nan")),
    "static_quant_scale: expected a number, got '2'": cast(STATIC, static_quant_scale="2"),
    "static_quant_scale: expected a number, got True": cast(STATIC, static_quant_scale=True),
    "static_scale: expected None next to static_quant_scale, got 2.0": cast(
        STATIC, static_quant_scale=2.0, static_scale=2.0
    ),
    "history_len: expected 1 to 65536 steps, got 0": delayed(history_len=0),
    "history_len: expected int, got 2.0": delayed(history_len=2.0),
    "scale_fn_name: expected one of max, most_recent": delayed(scale_fn_name="mean"),
    "margin: expected 0 to 16 powers of two, got -1": delayed(margin=-1),
    "headroom: expected a factor of 1 to 65536, got 0.5": delayed(headroom=0.5),
    "nonfinite_amax: expected one of skip, keep_scale, got 'x'": delayed(nonfinite_amax="x"),
    "delayed_scaling_config: expected DelayedScalingConf": linear(delayed_scaling_config=None),
    "shared_inputs: expected a tuple of tuples of names": linear(shared_inputs=("q", "k")),
    "input has one persistent scale, which serves both of its matmuls": linear(
        input=CastConfig(ScalingType.DELAYED), input_for_grad_weight=CastConfig()
    ),
    "input: square blocks are for weights": linear(input=BLOCKS),
    "grad_output: square blocks are for weights": linear(grad_output=BLOCKS),
    "expected blocks of one size for both of its matmuls, got dynamic blockwise": linear(
        weight=BLOCKS, weight_for_grad_input=CastConfig(scaling_granularity=ROW)
    ),
    "expected blocks of one size for both of its matmuls, got dynamic tensorwise": linear(
        weight=CastConfig(), weight_for_grad_input=BLOCKS
    ),
    "block_size: expected one of (128, 128), (1, 128), (32, 32), (1, 32), got (16, 16)": cast(
        scaling_granularity=BLOCKWISE, block_size=(16, 16)
    ),
    "block_size: expected None unless scaling_granularity is ScalingGranularity.BLOCKWISE, got (1, 128)": cast(
        scaling_granularity=ROW, block_size=(1, 128)
    ),
    "scale_calculation_mode: expected None unless scaling_granularity is": cast(scale_calculation_mode=FLOOR),
    "scaling_granularity: expected ScalingGranularity, got 'rowwise'; write ScalingGranularity.ROWWISE": cast(
        scaling_granularity="rowwise"
    ),
    "scaling_type: expected ScalingType, got 'delayed'; write ScalingType.DELAYED": cast(scaling_type="delayed"),
    "scale_calculation_mode: expected ScaleCalculationMode, got 'even'": cast(
        scaling_granularity=BLOCKWISE, scale_calculation_mode="even"
    ),
    "delayed scaling keeps one scale per tensor: expected tensorwise, got blockwise 128 x 128": cast(
        ScalingType.DELAYED, BLOCKWISE
    ),
    "E8M0 scales are powers of two; expected round_scales_to_power_of_2=True": lambda: replace(
        Float8LinearConfig.from_recipe_name("mxfp8"), round_scales_to_power_of_2=False
    ),
    "expected a static_quant_scale that is a power of two": linear(
        weight=CastConfig(STATIC, static_quant_scale=3.0), round_scales_to_power_of_2=True
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_combinations_are_refused_when_a_config_is_made(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BAD[message]()


@pytest.mark.parametrize("granularity", ScalingGranularity)
def test_one_matmul_of_an_operand_with_a_persistent_scale_may_be_in_high_precision(granularity):
    delayed, hp = CastConfig(ScalingType.DELAYED), CastConfig(ScalingType.DISABLED, granularity)
    config = linear(input=delayed, input_for_grad_weight=hp, grad_output=delayed, grad_output_for_grad_weight=hp)()
    assert config.casts.input.row.is_persistent
    assert config.casts.input.column.is_disabled


def test_the_blocks_of_a_disabled_cast_are_ignored():
    hp_blocks = CastConfig(ScalingType.DISABLED, BLOCKWISE, scale_calculation_mode=FLOOR, block_size=(128, 128))
    disabled = ("input_for_grad_weight", "grad_output_for_grad_weight")
    for cast in (CastConfig(), CastConfig(block_size=(1, 16), **E2M1_BLOCKS)):
        enabled = dict.fromkeys(("input", "weight", "grad_output"), cast)
        config = linear(**enabled, **dict.fromkeys(disabled, hp_blocks))()
        assert config.casts.input.column.is_disabled
        assert config == linear(**enabled, **dict.fromkeys(disabled, HP))()
        assert replace(config, high_precision_matmuls=("output",)).casts.input.row.is_disabled


def test_a_static_scale_may_be_a_tensor_of_one_element():
    cast = CastConfig(ScalingType.STATIC, static_quant_scale=torch.tensor([2.0]))
    assert cast == CastConfig(ScalingType.STATIC, static_quant_scale=2.0)
    by_alias = CastConfig(ScalingType.STATIC, static_scale=torch.tensor(2.0))
    assert by_alias == cast
    assert by_alias.static_scale == cast.static_scale == replace(by_alias, target_dtype=E4M3).static_quant_scale == 2.0
    assert replace(by_alias, static_quant_scale=3.0).static_scale == 3.0
    assert str(cast) == "static tensorwise default format quant_scale 2.0"


def test_delayed_recipes_ignore_options_of_older_configs():
    delayed = Float8LinearConfig.from_recipe_name("delayed")
    assert all(cast.scaling_type is ScalingType.DELAYED for cast in delayed.casts.list_casts())
    mixed = Float8LinearConfig.from_recipe_name("delayed_with_dynamic_weight")
    assert [cast.is_persistent for cast in mixed.casts.list_casts()] == [True, True, False, False, True, True]
    assert "DelayedScalingConfig(history_len=16" in str(mixed)
    old = dataclasses.replace(delayed, enable_amax_init=False, enable_pre_and_post_forward=False)
    assert old.casts == delayed.casts


def test_printing_a_config_names_every_cast():
    text = str(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"))
    assert "grad_input: grad_output dynamic rowwise e4m3 x weight_for_grad_input dynamic tensorwise e4m3" in text
    assert "input_for_grad_weight high precision" in text
    assert text.endswith("scales power of two")

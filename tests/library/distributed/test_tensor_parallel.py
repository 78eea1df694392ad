"""Tests tensor and sequence parallelism: operands of sharded matrices, and results of one device."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.torch_version import TorchVersion

from quaver import cast_weights_once, convert_to_float8_training, convert_to_high_precision
from quaver.distributed import Float8ColwiseParallel, Float8RowwiseParallel
from quaver.linear.module import Float8Linear
from quaver.linear.tensor import Float8Tensor
from quaver.parallel.input_all_gather import InputAllGather, is_all_gathered_in_float8
from quaver.recipes.scaling import NO_PERSISTENT_SCALES
from tests.library.distributed import parallel_models
from tests.library.distributed.models import get_mesh, quantize
from tests.library.distributed.parallel_models import (
    Arrangement,
    OneLinear,
    TwoLinears,
    check_results,
    list_arrangements,
    take_part,
)
from tests.ranks import on_ranks, run
from tests.recipes import BLOCK_RECIPES, DYNAMIC_RECIPES, NON_BLOCK_RECIPES, make_recipe_config
from tests.reference import assert_same_bits
from tests.steps import assert_same, to_plain
from tests.thinned import at_night

RECIPE = pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)
FLOAT32_SUMS = {"rtol": 1e-5, "atol": 1e-5}
"""Of sums of n = 32 products of numbers about 1. Their partial sums reach about sqrt(n), and each of the n roundings is
of at most 2^-24 of one, so two orders differ by sqrt(2 n / 3) * 2^-24 * sqrt(n) = 1.6e-6 on average; 6 times that."""


def draw_uneven(*shape):
    """Return normal numbers with another magnitude in each row and column, and an outlier on the last rank only."""
    rows = torch.logspace(-3, 1, shape[-2]).view(-1, 1)
    matrix = torch.randn(shape) * rows * torch.logspace(1, -1, shape[-1])
    matrix[..., -1, -1] = 90.0
    return matrix


def assert_part_of(operand, whole, dim):
    """Assert that an operand has the bits of this rank's part of `whole` along `dim`, or of all for None."""
    data, scale = (tensor if tensor is None else take_part(tensor, dim) for tensor in whole[:2])
    if scale is None:
        assert operand.dequant_scale is None
        torch.testing.assert_close(operand.data, data, rtol=0, atol=0)
    else:
        assert_same_bits(operand.data, data, nan_bits=True)
        assert_same_bits(operand.dequant_scale, scale, nan_bits=True)


DIRECTIONS = [("row", "column"), ("row",), ("column",)]
STYLES = [
    (Float8ColwiseParallel(), {"weight": (0, 0), "input": (None, None), "grad_output": (2, 1)}),
    (Float8RowwiseParallel(), {"weight": (1, 1), "input": (2, 1), "grad_output": (None, None)}),
    (Float8RowwiseParallel(output_layouts=Shard(1)), {"weight": (1, 1), "input": (2, 1), "grad_output": (1, None)}),
]
"""For each operand, the dim that a rank has a part of: in the tensor, and in the matrix that is multiplied."""
SCALES = [0.0, -3.0, 0.7, 40.0]
"""quant_scale: unknown, negative as in older checkpoints, one that fits the outliers, one that makes them saturate."""
EVERY = (*DYNAMIC_RECIPES, "delayed")
HP_DTYPES = (torch.float32, torch.bfloat16)
CAST_CASES = [(2, recipe, {}, HP_DTYPES[index % 2]) for index, recipe in enumerate(EVERY)]
CAST_CASES += [(4, "delayed", {}, torch.float32)]
CAST_CASES += [(2, "vllm-per-token-kernel", {}, torch.bfloat16), (2, "compressed-tensors", {}, torch.bfloat16)]
CAST_CASES += [(2, "tensorwise", {"round_scales_to_power_of_2": True}, torch.float32)]
CAST_CASES += at_night((2, recipe, {}, HP_DTYPES[1 - index % 2]) for index, recipe in enumerate(EVERY))
CAST_CASES += at_night([(4, "mxfp8", {}, torch.float32), (4, "blockwise", {}, torch.bfloat16)])


def _build_linear(config, quant_scale, style=None, features=(48, 40)):
    """Return a linear, and its persistent scales with this value, as if a sync had set it."""
    model = nn.Sequential(nn.Linear(*features, bias=False))
    convert_to_float8_training(model, config=config)
    if style is not None:
        parallelize_module(model, get_mesh(), {"0": style})
    linear = model[0]
    if quant_scale is None:
        return linear, NO_PERSISTENT_SCALES._asdict()
    linear.scale_slots.conversion_slots.quant_scale.fill_(quant_scale)
    linear.scale_slots.conversion_slots.refresh_after_load()
    scales = linear.begin_forward_and_get_scales(torch.device("cpu"))
    return linear, scales._asdict()


@pytest.mark.parametrize(("ranks", "recipe", "options", "hp_dtype"), CAST_CASES)
@on_ranks()
def test_operands_are_quantized_as_on_one_device(ranks, recipe, options, hp_dtype):
    """Codes and scales have the same bits, for either matmul and for both.

    Persistent scales are known and unknown; what they observe is that of one device, too.
    """
    config = make_recipe_config(recipe, **options)
    # Features, in and out; batches and sequences. Each rank has one block of 128 or two; the first tokens cut blocks.
    one, two = 128 * ranks, 256 * ranks
    block_shapes = [((two, one), (3, 16)), ((one, two), (2, one))]
    for features, tokens in block_shapes if recipe in BLOCK_RECIPES else [((48, 40), (3, 16))]:
        _check_operands(config, recipe == "delayed", features, tokens, hp_dtype)


def _check_operands(config, is_delayed, features, tokens, hp_dtype):
    k, n = features
    whole = {
        "weight": draw_uneven(n, k).to(hp_dtype),
        "input": draw_uneven(*tokens, k).to(hp_dtype),
        "grad_output": draw_uneven(*tokens, n).to(hp_dtype),
    }
    for quant_scale, (style, dims) in itertools.product(SCALES if is_delayed else [None], STYLES):
        linear, scales = _build_linear(config, quant_scale, style, features)
        reference, reference_scales = _build_linear(config, quant_scale, features=features)
        for operand, hp in whole.items():
            dim, dim_of_matrix = dims[operand]
            local = take_part(hp, dim)
            options = {"casts": getattr(config.casts, operand), "hp_dtype": hp_dtype, "scale": scales[operand]}
            options |= {"input": local, "linear_id": None} if operand == "input" else {}
            expected = quantize(hp, config, operand, reference_scales[operand])
            for directions in DIRECTIONS:
                quantizer = getattr(linear.sharding, f"make_{operand}_quantizer")(**options)
                operands = quantizer(local, row="row" in directions, column="column" in directions)
                for direction in directions:
                    assert_part_of(getattr(operands, direction), getattr(expected, direction), dim_of_matrix)
        if quant_scale is not None:
            _check_observed(
                linear.scale_slots.conversion_slots.amax_buffer,
                reference.scale_slots.conversion_slots.amax_buffer,
                quant_scale,
            )
    if not is_delayed and is_all_gathered_in_float8(config):
        _check_all_gathered_input(config, whole["input"], quantize(whole["input"], config, "input"))


def _check_observed(parts, whole, quant_scale):
    """Assert that the ranks' largest amax is that of the whole, and that some part saturates where the whole does."""
    largest = parts.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert torch.equal(largest[:, 0], whole[:, 0])
    assert torch.equal(largest[:, 1] > 0, whole[:, 1] > 0)
    assert bool((whole[:2, 1] > 0).all()) == (quant_scale == 40.0)


def _check_all_gathered_input(config, input, expected):
    for as_dtensor in (False, True):
        linear = Float8Linear(input.shape[-1], 16, config=config)
        all_gather = InputAllGather(Shard(1), get_mesh(), linear, as_dtensor=as_dtensor)
        whole = all_gather(take_part(input, 1).requires_grad_(), for_grad_weight=True)
        assert (whole.shape, whole.dtype, whole.requires_grad) == (input.shape, input.dtype, True)
        whole = whole.to_local() if as_dtensor else whole
        assert isinstance(whole, Float8Tensor)
        for tensor in (whole, whole.view(-1, input.shape[-1]), whole.view(-1, *input.shape)):
            for operand, whole_operand in zip(tensor.get_operands(), expected, strict=True):
                assert_part_of(operand, whole_operand, None)


KINDS = [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)]
"""dtype, and whether the input needs a gradient, which that of a model's first linear does not."""


@pytest.mark.parametrize("name", parallel_models.ARRANGEMENTS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["pairs", "all"])
@on_ranks(2)
def test_ranks_equal_one_device(name, every):
    """Each rank's part of the output, grad_input and gradients equals one device's; `assert_close` has the bound.

    Every run takes a quarter of the pairs of arrangements and recipes, with one kind each, and the night takes all.
    """
    for index, recipe in enumerate(DYNAMIC_RECIPES, start=parallel_models.ARRANGEMENTS.index(name)):
        if not every and index % 4:
            continue
        for hp_dtype, input_grad in KINDS if every else [KINDS[index % len(KINDS)]]:
            check_results(name, recipe, hp_dtype, None, input_grad)


@pytest.mark.parametrize("weight", [Shard(0), Shard(1), Replicate()])
@on_ranks(2)
def test_placements_are_those_of_nn_linear(weight):
    """The weight was distributed without a style, as torchtitan's sharding configs do."""
    # PyTorch 2.11's nn.Linear flattens no tokens that are sharded along dim 1.
    whole, tokens = torch.randn(2, 5, 16), Shard(0 if TorchVersion(torch.__version__) < "2.13" else 1)
    for input in [Replicate(), Shard(2)] if weight == Shard(1) else [Replicate(), tokens]:
        outputs = []
        for linear in (nn.Linear(16, 32), Float8Linear(16, 32)):
            for name, layout in (("weight", weight), ("bias", weight if weight == Shard(0) else Replicate())):
                distributed = distribute_tensor(getattr(linear, name).detach(), get_mesh(), [layout])
                setattr(linear, name, nn.Parameter(distributed))
            outputs.append(linear(distribute_tensor(whole, get_mesh(), [input])))
        assert outputs[0].shape == outputs[1].shape
        if weight != Shard(0) or input == Replicate():  # nn.Linear may keep tokens apart
            assert outputs[1].placements == outputs[0].placements


@on_ranks(2)
def test_a_weight_on_a_mesh_of_two_dimensions_is_refused():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear = Float8Linear(16, 32, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Replicate(), Shard(0)]))
    with pytest.raises(RuntimeError, match=r"on 2 mesh dims.* on a mesh with one dim"):
        linear(distribute_tensor(torch.randn(4, 16), mesh, [Replicate(), Replicate()]))


COMPILED = [
    ("rowwise by sequence", "tensorwise", torch.float32, "aot_eager"),
    ("prepared", "rowwise_with_gw_hp", torch.float32, "aot_eager"),
    ("torch's rowwise by sequence", "rowwise", torch.float32, "aot_eager"),
    ("prepared", "blockwise", torch.float32, "aot_eager"),
    ("rowwise by sequence", "mxfp8_with_gw_hp", torch.float32, "aot_eager"),
    *itertools.product(parallel_models.ARRANGEMENTS, NON_BLOCK_RECIPES, (torch.float32, torch.bfloat16), ["inductor"]),
]
"""Each kind of collective around a compiled linear. In each run test_tensor_parallel_steps.py compiles delayed blocks
with prepared inputs, and test_train_distributed.py the tensorwise blocks of the trainer."""


@pytest.mark.parametrize(("name", "recipe", "hp_dtype", "backend"), at_night(COMPILED))
def test_compiled_ranks_equal_one_device(name, recipe, hp_dtype, backend):
    """There is one graph; aot_eager traces as Inductor does and generates no code."""
    run(2, check_results, name, recipe, hp_dtype, backend)


@RECIPE
@pytest.mark.parametrize("layouts", [{}, {"output_layouts": Replicate()}], ids=["parts", "whole"])
@on_ranks(2)
def test_ranks_may_share_features_unevenly(recipe, layouts):
    """2 ranks have 7 and 6 of 13 features."""
    config = make_recipe_config(recipe)
    arrangement = Arrangement(OneLinear, {"a": Float8ColwiseParallel(**layouts)}, None, None if layouts else 2)
    reference, down = OneLinear(32, 13, torch.float32, config), Float8Linear(13, 32, config=config)
    module, rowwise = copy.deepcopy(reference), copy.deepcopy(down)
    parallelize_module(module, get_mesh(), arrangement.styles)
    parallelize_module(rowwise, get_mesh(), Float8RowwiseParallel())
    input, grad_output = torch.randn(2, 16, 32), torch.randn(2, 16, 13)
    expected = parallel_models.select_parts(
        arrangement, parallel_models.step(reference, input.clone().requires_grad_(), [grad_output])
    )
    results = parallel_models.step_on_parts(arrangement, module, input, [grad_output])
    torch.testing.assert_close(results, expected, **FLOAT32_SUMS)
    torch.testing.assert_close(rowwise(take_part(grad_output, 2)), down(grad_output), **FLOAT32_SUMS)
    with pytest.raises(ValueError, match="tensor parallelism expects parts of whole blocks"):
        rowwise.config = "blockwise"


@pytest.mark.parametrize("where", ["weight", "input", "grad_output"])
@on_ranks(2)
def test_what_is_not_finite_on_one_rank_reaches_all_that_it_reaches_on_one_device(where):
    """NaN equals NaN; other elements differ by the rounding of float32 sums in another order."""
    for (recipe, value), name in itertools.product(
        [("tensorwise", torch.nan), ("rowwise", -torch.inf)], ["prepared", "colwise", "rowwise", "rowwise by sequence"]
    ):
        arrangement = list_arrangements()[name]
        reference = arrangement.module(32, 16, torch.float32, make_recipe_config(recipe))
        input = torch.randn(2, 8, 32)
        grad_outputs = [torch.randn(2, 8, 16) for _ in range(2 if arrangement.module is TwoLinears else 1)]
        if where == "weight":
            reference.a.weight.data[-1, -1] = value
        else:
            {"input": input, "grad_output": grad_outputs[0]}[where][-1, -1, -1] = value
        module = copy.deepcopy(reference)
        parallelize_module(module, get_mesh(), arrangement.styles)
        expected = parallel_models.step(reference, input.clone().requires_grad_(), grad_outputs)
        assert any(grad.isnan().any() for grad in (*expected[0], expected[1], *expected[2].values()))
        results = parallel_models.step_on_parts(arrangement, module, input, grad_outputs)
        expected = parallel_models.select_parts(arrangement, expected)
        torch.testing.assert_close(results, expected, **FLOAT32_SUMS, equal_nan=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_a_model_is_copied_saved_and_scoped_as_any_other(recipe):
    config = make_recipe_config(recipe)
    plain, model = (
        parallel_models.build_model(config),
        parallel_models.spread(parallel_models.build_model(config), get_mesh()),
    )
    batch = torch.randn(2, 8, 32)

    def compute_gradients(model):
        model.zero_grad()
        model(take_part(batch, 1)).square().mean().backward()
        return {name: to_plain(parameter.grad) for name, parameter in model.named_parameters()}

    def set_to_zero(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

    state = model.state_dict()
    assert_same(state, plain.state_dict())
    expected = compute_gradients(model)
    twin = copy.deepcopy(model)
    assert_same(compute_gradients(twin), expected)
    set_to_zero(twin)
    assert_same(compute_gradients(model), expected)
    twin.load_state_dict(state)
    with cast_weights_once(twin):
        assert_same(compute_gradients(twin), expected)
        assert_same(compute_gradients(twin), expected)
    set_to_zero(twin)
    gradients = compute_gradients(twin)  # none passes zero weights, unless casts of the scope are left
    assert not any(gradients[f"0.{name}.weight"].any() for name in ("attention.q", "mlp.up"))


@on_ranks(2)
def test_one_style_serves_several_modules():
    """A style may be applied many times, to modules of other configs."""
    module = nn.Sequential(
        TwoLinears(32, 32, torch.float32, make_recipe_config("rowwise")),
        TwoLinears(32, 32, torch.float32, make_recipe_config("tensorwise")),
    )
    reference, style = copy.deepcopy(module), parallel_models.prepare(False)
    pair = {"a": Float8ColwiseParallel(), "b": Float8ColwiseParallel()}
    for child in module:
        parallelize_module(child, get_mesh(), {"": style, **pair})
    input = torch.randn(2, 8, 32)
    for child, expected in zip(module, reference, strict=True):
        for output, whole in zip(child(take_part(input, 1)), expected(input), strict=True):
            torch.testing.assert_close(output, take_part(whole, 2), **FLOAT32_SUMS)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
@on_ranks(2)
def test_a_gathered_input_follows_the_config_of_its_linear(prepared, compiled):
    module = TwoLinears(32, 32, torch.float32, make_recipe_config("tensorwise"))
    reference = copy.deepcopy(module)
    styles = {name: Float8ColwiseParallel(input_layouts=Shard(1)) for name in "ab"}
    parallelize_module(module, get_mesh(), styles | ({"": parallel_models.prepare(False)} if prepared else {}))
    copied = copy.deepcopy(module)  # has its own configs
    call = torch.compile(nn.Sequential(module), fullgraph=True, backend="aot_eager") if compiled else module
    input = torch.randn(2, 8, 32)
    for recipe in ("tensorwise", "rowwise", "tensorwise"):
        for linear in (module.a, module.b, reference.a, reference.b):
            linear.float8_config = make_recipe_config(recipe)
        copied.a.float8_config = copied.b.float8_config = make_recipe_config("rowwise_with_gw_hp")
        for output, whole in zip(call(take_part(input, 1)), reference(input), strict=True):
            torch.testing.assert_close(to_plain(output), take_part(whole, 2), **FLOAT32_SUMS)


@on_ranks(2)
def test_a_gathered_input_follows_a_second_conversion():
    module = convert_to_high_precision(TwoLinears(32, 32, torch.float32, make_recipe_config("tensorwise")))
    convert_to_float8_training(module, config="tensorwise")
    reference = copy.deepcopy(module)
    styles = {name: ColwiseParallel(use_local_output=False) for name in "ab"}
    parallelize_module(module, get_mesh(), styles | {"": parallel_models.prepare(False)})
    for model in (module, reference):
        convert_to_float8_training(convert_to_high_precision(model), config="rowwise")
    input = torch.randn(2, 8, 32)
    for output, whole in zip(module(take_part(input, 1)), reference(input), strict=True):
        torch.testing.assert_close(to_plain(output), whole, **FLOAT32_SUMS)


@RECIPE
@on_ranks(2)
def test_a_float8_weight_saved_for_backward_changes_no_bit(recipe):
    """The saved float8 weight has the scales of the whole one."""
    weight = draw_uneven(48, 64)
    for name in ("prepared", "rowwise"):
        results = []
        for keep in (False, True):
            torch.manual_seed(0)
            arrangement = list_arrangements()[name]
            module = arrangement.module(
                64, 48, torch.float32, make_recipe_config(recipe, keep_float8_weight_for_backward=keep)
            )
            module.a.weight.data.copy_(weight)
            parallelize_module(module, get_mesh(), arrangement.styles)
            grad_outputs = [torch.randn(2, 8, 48)] * (2 if arrangement.module is TwoLinears else 1)
            results.append(parallel_models.step_on_parts(arrangement, module, torch.randn(2, 8, 64), grad_outputs))
        assert_same(*results)

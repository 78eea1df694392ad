"""Tests the collectives of tensor and sequence parallelism: how many there are, what they send, and what is refused."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from quaver.distributed import Float8ColwiseParallel, Float8RowwiseParallel
from quaver.experts.grouped_module import Float8GroupedModule
from quaver.linear.module import Float8Linear
from tests.counting import CollectiveCounter
from tests.library.distributed.models import get_mesh
from tests.library.distributed.parallel_models import TwoLinears, list_arrangements, prepare, take_part
from tests.ranks import get_cached_mesh, on_ranks, refusal
from tests.recipes import E4M3, E5M2, NON_BLOCK_RECIPES, make_recipe_config
from tests.reference import assert_same_bits

RECIPE = pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)
M, K, N = 2 * 16, 64, 48
U8, I32, F32 = torch.uint8, torch.int32, torch.float32


def count_collectives(module, input):
    """Count the collectives of a forward and of its backward."""
    with CollectiveCounter() as forward:
        output = module(input)
    with CollectiveCounter() as backward:
        output.sum().backward()
    return forward, backward


def list_payloads(recipe, rows, columns, casts_first_dim=True):
    """Return what is gathered of a matrix whose rows are spread over the ranks."""
    codes, scales = (U8, rows * columns), (F32, rows * 4)
    if recipe == "rowwise_with_gw_hp":
        return [(F32, rows * columns * 4)]
    if recipe == "tensorwise":
        return [codes]
    return [codes, scales, codes] if casts_first_dim else [codes, scales]


def list_amaxes(recipe, rows, columns, casts_first_dim=True):
    """Return the amaxes that are reduced for such a matrix."""
    length = {"tensorwise": 1, "rowwise_with_gw_hp": 0}.get(recipe, columns if casts_first_dim else 0)
    return [(I32, 4 * length)] if length else []


@pytest.mark.parametrize(
    ("recipe", "use_local_output"),  # a linear reads from a DTensor, and not from a local one, that grad_input is a sum
    [case for case in itertools.product(NON_BLOCK_RECIPES, [False, True]) if case != ("rowwise_with_gw_hp", True)],
)
@on_ranks(2)
def test_one_gather_serves_all_linears_that_share_an_input(recipe, use_local_output):
    """The input is gathered once and grad_input is scattered once; amaxes, of 4 bytes each, are reduced per linear."""
    config = make_recipe_config(recipe)
    module = TwoLinears(K, N, F32, config)
    arrangement = list_arrangements()["prepared, local" if use_local_output else "prepared"]
    parallelize_module(module, get_mesh(), arrangement.styles)
    input = torch.randn(2, 8, K, requires_grad=True)
    forward, backward = count_collectives(lambda input: torch.stack(module(input)), input)
    weights = [(I32, 4)] * 2 if config.casts.weight.row.is_tensorwise else []
    assert forward.of("all_gather") == list_payloads(recipe, M, K)
    assert forward.of("all_reduce") == list_amaxes(recipe, M, K) + weights
    assert forward.of("reduce_scatter") == []
    grad_output = (I32, 4) if recipe == "tensorwise" else (I32, 4 * M)
    weight = {"rowwise": [(I32, 4 * K)], "rowwise_with_gw_hp": [(I32, 4)]}.get(recipe, [])
    assert backward.of("all_gather") == []
    assert backward.of("all_reduce") == [grad_output, *weight] * 2
    assert backward.of("reduce_scatter") == [(F32, M * K * 4)]
    with CollectiveCounter() as forward, torch.no_grad():
        module(input)
    assert forward.of("all_gather") == list_payloads(recipe, M, K, casts_first_dim=False)


@pytest.mark.parametrize("trained", ["", "a", "b"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_a_shared_input_is_gathered_for_grad_weight_if_a_linear_trains(recipe, trained):
    module = TwoLinears(K, N, F32, make_recipe_config(recipe))
    parallelize_module(module, get_mesh(), list_arrangements()["prepared"].styles)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name == f"{trained}.weight")
    copied = copy.deepcopy(module).requires_grad_(False)
    for linears, trains in ((module, bool(trained)), (copied, False)):
        input = torch.randn(2, 8, K, requires_grad=True)
        forward, _ = count_collectives(lambda input, linears=linears: torch.stack(linears(input)), input)
        assert forward.of("all_gather") == list_payloads(recipe, M, K, casts_first_dim=trains)


def count_collectives_of_linear(recipe, style, trains, *shape):
    linear = Float8Linear(K, N, bias=False, config=make_recipe_config(recipe))
    linear.weight.requires_grad_(trains)
    parallelize_module(linear, get_mesh(), style)
    return count_collectives(linear, torch.randn(*shape, requires_grad=True))


@RECIPE
@pytest.mark.parametrize("trains", [True, False])
@on_ranks(2)
def test_a_colwise_linear_gathers_its_own_input_as_codes(recipe, trains):
    style = Float8ColwiseParallel(input_layouts=Shard(1))
    forward, backward = count_collectives_of_linear(recipe, style, trains, 2, 8, K)
    assert forward.of("all_gather") == list_payloads(recipe, M, K, casts_first_dim=trains)
    assert backward.of("all_gather") == []
    assert backward.of("reduce_scatter") == [(F32, M * K * 4)]


@RECIPE
@pytest.mark.parametrize("trains", [True, False])
@on_ranks(2)
def test_a_rowwise_linear_gathers_its_grad_output_as_codes(recipe, trains):
    style = Float8RowwiseParallel(output_layouts=Shard(1))
    forward, backward = count_collectives_of_linear(recipe, style, trains, 2, 16, K // 2)
    assert forward.of("all_gather") == []
    input = (I32, 4) if recipe == "tensorwise" else (I32, 4 * M)
    weight = (I32, 4) if recipe in ("tensorwise", "rowwise_with_tensorwise_weight") else (I32, 4 * N)
    assert forward.of("all_reduce") == [input, weight]
    assert forward.of("reduce_scatter") == [(F32, M * N * 4)]
    if recipe == "rowwise_with_gw_hp":
        # In high precision only if grad_weight, which reads it so, is computed.
        assert backward.of("all_gather") == ([(F32, M * N * 4)] if trains else [(U8, M * N), (F32, 4 * M)])
        assert backward.of("all_reduce") == [(I32, 4)]  # of the weight as grad_input reads it
    else:
        assert backward.of("all_gather") == list_payloads(recipe, M, N, casts_first_dim=trains)
        assert backward.of("all_reduce") == list_amaxes(recipe, M, N, casts_first_dim=trains)
    assert backward.of("reduce_scatter") == []


@contextlib.contextmanager
def raises(kind, *words):
    """Assert that the block raises an error with all `words`, and that no rank waits for another."""
    with pytest.raises(kind) as error:
        yield
    message = str(error.value)
    assert all(word in message for word in words), message


@on_ranks(2)
def test_a_style_refuses_modules_meshes_and_layouts():
    mesh, mesh_2d = get_mesh(), get_cached_mesh((1, 2), ("dp", "tp"))
    for style in (Float8ColwiseParallel(), Float8RowwiseParallel()):
        name = type(style).__name__
        with raises(ValueError, name, "expects a Float8Linear, got Linear", "convert_to_float8_training"):
            parallelize_module(nn.Linear(16, 16), mesh, style)
        with raises(ValueError, name, "got the experts Float8GroupedModule", "Float8ExpertParallel"):
            parallelize_module(Float8GroupedModule(), mesh, style)
        with raises(ValueError, "one mesh axis", "mesh['tp']"):
            style._apply(Float8Linear(16, 16), mesh_2d)  # parallelize_module itself refuses it, in its own words
        cut = Float8Linear(200, 200, config="blockwise")
        with raises(ValueError, "a multiple of 128 features", "got 100", "features 200 on 2 ranks", "256 in all"):
            parallelize_module(cut, mesh, style)
        assert not isinstance(cut.weight, DTensor)
    with raises(ValueError, "output_layouts", "got S(-1)"):
        parallelize_module(Float8Linear(16, 16), mesh, Float8RowwiseParallel(output_layouts=Shard(-1)))
    with raises(ValueError, "features"):
        parallelize_module(Float8Linear(16, 16), mesh, Float8ColwiseParallel(input_layouts=Shard(-1)))
    with raises(ValueError, "no Float8Linear", "PrepareModuleInput"):
        parallelize_module(nn.Sequential(nn.Linear(16, 16)), mesh, prepare(False))
    several = nn.Sequential(Float8Linear(16, 16), Float8Linear(16, 16, config=make_recipe_config("rowwise")))
    with raises(ValueError, "several configs", "fwd_config_submodule_fqn"):
        parallelize_module(several, mesh, prepare(False))
    parallelize_module(several, mesh, prepare(False, fwd_config_submodule_fqn="1"))
    with raises(ValueError, "float8_e5m2", "float8_e4m3fn"):
        parallelize_module(TwoLinears(16, 16, F32, None), mesh, prepare(False, float8_dtype=E5M2))
    parallelize_module(TwoLinears(16, 16, F32, None), mesh, prepare(False, float8_dtype=E4M3))


class UsesItsInput(TwoLinears):
    def forward(self, input):
        return self.a(input * 2)


class ReadsItsInput(TwoLinears):
    def forward(self, input):
        return self.a(input.to_high_precision()), self.a(input)


@on_ranks(2)
def test_a_parallel_linear_refuses_inputs_of_another_layout():
    mesh = get_mesh()
    by_sequence = parallelize_module(Float8Linear(16, 16), mesh, Float8ColwiseParallel(input_layouts=Shard(1)))
    with raises(ValueError, "sharded along its features"):
        by_sequence(torch.randn(4, 16))
    rowwise = parallelize_module(Float8Linear(16, 16), mesh, Float8RowwiseParallel(output_layouts=Shard(1)))
    with raises(ValueError, "dim 1 of [2, 5, 16]", "multiple of the 2 ranks", "pad the sequence"):
        rowwise(torch.randn(2, 5, 8))
    with raises(ValueError, "sharded along its tokens", "got S(1) (features)"):
        rowwise(torch.randn(4, 8))
    replicated = distribute_module(Float8Linear(16, 16), mesh)
    with raises(RuntimeError, "is sharded", "(Float8)ColwiseParallel"):
        replicated(torch.randn(2, 4, 16))
    for style in (ColwiseParallel(), RowwiseParallel()):
        cut = parallelize_module(Float8Linear(16, 16, config="mxfp8"), mesh, style)
        with raises(ValueError, "a multiple of 32 features", "got 8", "features 16 on 2 ranks", "64 in all"):
            cut(torch.randn(2, 4, 8 if isinstance(style, RowwiseParallel) else 16))
    for use_local_output in (True, False):
        module = UsesItsInput(16, 16, F32, None)
        styles = {"": prepare(use_local_output), "a": Float8ColwiseParallel(), "b": Float8ColwiseParallel()}
        parallelize_module(module, mesh, styles)
        with raises(NotImplementedError, "aten.mul.Tensor", "Float8Tensor", "to_high_precision"):
            module(torch.randn(2, 4, 16))
    with raises(ValueError, "expected an input of shape [..., 16]", "got [2, 8, 12]"):
        parallelize_module(TwoLinears(16, 16, F32, None), mesh, {**styles, "": prepare(False)})(torch.randn(2, 4, 12))
    several = nn.Sequential(Float8Linear(16, 16), Float8Linear(16, 16, config=make_recipe_config("rowwise")))
    styles_of_several = {"": prepare(False, fwd_config_submodule_fqn="1"), "0": Float8ColwiseParallel()}
    parallelize_module(several, mesh, styles_of_several)
    with raises(RuntimeError, "is stored as rowwise", "casts it as dynamic tensorwise"):
        several(torch.randn(2, 4, 16))
    whole = torch.randn(2, 8, 16)
    module = parallelize_module(ReadsItsInput(16, 16, F32, None), mesh, {**styles, "": prepare(True)})
    from_values, from_codes = module(take_part(whole, 1))
    assert_same_bits(from_values, from_codes)  # values lie on the codes, so a second cast changes nothing


@on_ranks(2)
def test_a_graph_that_ends_after_the_gathering_is_an_error_that_says_so():
    module = parallelize_module(TwoLinears(16, 16, F32, None), get_mesh(), list_arrangements()["prepared"].styles)
    message = refusal(torch.compile(module, backend="aot_eager"), torch.randn(2, 4, 16, requires_grad=True))
    assert "Compile a module around the one that PrepareFloat8ModuleInput" in message

"""Tests tensor and sequence parallelism: operands of sharded matrices, results of one device, and bytes sent."""

import contextlib
import copy
import dataclasses
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.torch_version import TorchVersion

from quaver import cast_weights_once, convert_to_float8_training
from quaver.distributed import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
from quaver.experts.base import Float8Grouped
from quaver.linear.module import Float8Linear
from quaver.linear.tensor import Float8Tensor
from quaver.parallel.gathered_input import AllGatherInput, is_all_gathered_in_float8
from quaver.recipes.scaling import NO_PERSISTENT_SCALES
from tests.counting import CollectiveCounter
from tests.library.distributed.models import config_of, quantize, world_mesh
from tests.ranks import mesh_of, on_ranks, refusal, run
from tests.reference import BLOCK_RECIPES, RECIPES, assert_same_bits
from tests.steps import assert_same, full
from tests.thinned import at_night

RECIPE = pytest.mark.parametrize("recipe", RECIPES)


def part(whole, dim):
    """Return this rank's part of `whole` along `dim`; a scale that spans the dim belongs to every rank."""
    if whole.dim() == 0 or whole.shape[dim] == 1:
        return whole
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def draw_uneven(*shape):
    """Return normal numbers with another magnitude in each row and column, and an outlier on the last rank only."""
    rows = torch.logspace(-3, 1, shape[-2]).view(-1, 1)
    matrix = torch.randn(shape) * rows * torch.logspace(1, -1, shape[-1])
    matrix[..., -1, -1] = 90.0
    return matrix


def assert_part_of(operand, whole, dim):
    """Assert that an operand has the bits of this rank's part of `whole` along `dim`, or of all for None."""
    data, scale = (tensor if tensor is None else part_or_whole(tensor, dim) for tensor in whole[:2])
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
EVERY = (*RECIPES, *BLOCK_RECIPES, "delayed")
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
        parallelize_module(model, world_mesh(), {"0": style})
    linear = model[0]
    if quant_scale is None:
        return linear, NO_PERSISTENT_SCALES._asdict()
    linear.scaling.state.quant_scale.fill_(quant_scale)
    linear.scaling.state.refresh_after_load()
    scales = linear.get_persistent_scales(torch.device("cpu"), recording=True)
    return linear, scales._asdict()


@pytest.mark.parametrize(("ranks", "recipe", "options", "hp_dtype"), CAST_CASES)
@on_ranks()
def test_operands_are_quantized_as_on_one_device(ranks, recipe, options, hp_dtype):
    """Codes and scales have the same bits, for either matmul and for both.

    Persistent scales are known and unknown; what they observe is that of one device, too.
    """
    config = config_of(recipe, **options)
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
            local = part_or_whole(hp, dim)
            options = {"casts": getattr(config.casts, operand), "hp_dtype": hp_dtype, "scale": scales[operand]}
            options |= {"input": local, "reader": 0} if operand == "input" else {}
            expected = quantize(hp, config, operand, reference_scales[operand])
            for directions in DIRECTIONS:
                quantizer = getattr(linear.sharding, f"{operand}_quantizer")(**options)
                operands = quantizer(local, row="row" in directions, column="column" in directions)
                for direction in directions:
                    assert_part_of(getattr(operands, direction), getattr(expected, direction), dim_of_matrix)
        if quant_scale is not None:
            _check_observed(linear.scaling.state.amax_buffer, reference.scaling.state.amax_buffer, quant_scale)
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
        all_gather = AllGatherInput(Shard(1), world_mesh(), linear, as_dtensor=as_dtensor)
        whole = all_gather(part(input, 1).requires_grad_())
        assert (whole.shape, whole.dtype, whole.requires_grad) == (input.shape, input.dtype, True)
        whole = whole.to_local() if as_dtensor else whole
        assert isinstance(whole, Float8Tensor)
        for tensor in (whole, whole.view(-1, input.shape[-1]), whole.view(-1, *input.shape)):
            for operand, whole_operand in zip(tensor.get_operands(), expected, strict=True):
                assert_part_of(operand, whole_operand, None)


class One(nn.Module):
    def __init__(self, k, n, dtype, config):
        super().__init__()
        self.a = Float8Linear(k, n, dtype=dtype, config=config)

    def forward(self, input):
        return (self.a(input),)


class Pair(One):
    """Two linears that share an input, as gate and up do."""

    def __init__(self, k, n, dtype, config):
        super().__init__(k, n, dtype, config)
        self.b = Float8Linear(k, n, bias=False, dtype=dtype, config=config)

    def forward(self, input):
        return self.a(input), self.b(input)


def prepare(use_local_output, layout=None, **options):
    layouts = {"input_layouts": layout or Shard(1), "desired_input_layouts": Replicate()}
    return PrepareFloat8ModuleInput(**layouts, use_local_output=use_local_output, **options)


class WholeWeight(ParallelStyle):
    """Keeps the weight on every rank, as a DTensor, with the input in a layout, and the output as nn.Linear's."""

    def __init__(self, layout):
        self.layout = layout

    def _apply(self, module, mesh):
        def distribute(module, inputs, mesh):
            return DTensor.from_local(inputs[0], mesh, [self.layout], run_check=False)

        return distribute_module(module, mesh, None, distribute, lambda module, output, mesh: output.to_local())


@dataclasses.dataclass
class Arrangement:
    """A way to spread a module: its styles, and the dims of input and output that this rank has a part of."""

    module: type
    styles: dict
    input_dim: int | None
    output_dim: int | None
    dtensor: bool = False


def arrangements():
    colwise, rowwise = Float8ColwiseParallel, Float8RowwiseParallel
    whole_output = {"output_layouts": Replicate(), "use_local_output": False}
    pair = {"a": colwise(), "b": colwise()}
    by_sequence = {"input_layouts": Shard(1)}
    torch_pair = {"a": ColwiseParallel(), "b": ColwiseParallel()}
    torch_prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "prepared": Arrangement(Pair, {"": prepare(False), **pair}, 1, 2),
        "prepared, local": Arrangement(Pair, {"": prepare(True), **pair}, 1, 2),
        "colwise by sequence": Arrangement(Pair, {"a": colwise(**by_sequence), "b": colwise(**by_sequence)}, 1, 2),
        "colwise": Arrangement(Pair, pair, None, 2),
        "prepared whole": Arrangement(Pair, {"": prepare(False, Replicate()), **pair}, None, 2),
        "prepared whole, local": Arrangement(Pair, {"": prepare(True, Replicate()), **pair}, None, 2),
        "colwise, whole output": Arrangement(One, {"a": colwise(**by_sequence, **whole_output)}, 1, None, True),
        "colwise, output by sequence": Arrangement(One, {"a": colwise(output_layouts=Shard(1))}, None, 1),
        "rowwise": Arrangement(One, {"a": rowwise()}, 2, None),
        "rowwise by sequence": Arrangement(One, {"a": rowwise(output_layouts=Shard(1))}, 2, 1),
        "rowwise, whole input": Arrangement(One, {"a": rowwise(input_layouts=Replicate())}, None, None),
        "rowwise, input by sequence": Arrangement(One, {"a": rowwise(**by_sequence, output_layouts=Shard(1))}, 1, 1),
        "torch's prepared": Arrangement(Pair, {"": torch_prepare, **torch_pair}, 1, 2),
        "torch's colwise, whole output": Arrangement(One, {"a": ColwiseParallel(**whole_output)}, None, None, True),
        "torch's rowwise": Arrangement(One, {"a": RowwiseParallel()}, 2, None),
        "torch's rowwise by sequence": Arrangement(One, {"a": RowwiseParallel(output_layouts=Shard(1))}, 2, 1),
        "whole weight": Arrangement(One, {"a": WholeWeight(Replicate())}, None, None),
        "whole weight by sequence": Arrangement(One, {"a": WholeWeight(Shard(1))}, 1, 1),
    }


ARRANGEMENTS = tuple(arrangements())


def part_or_whole(whole, dim):
    return whole if dim is None else part(whole, dim)


def step(module, input, grad_outputs, dtensor=False):
    """Return outputs, grad_input and the gradients of the parameters by name."""
    outputs = module(input)
    outputs = [output.to_local() for output in outputs] if dtensor else outputs
    torch.autograd.backward(outputs, grad_outputs)
    return (
        [output.detach() for output in outputs],
        input.grad,
        {name: full(parameter.grad) for name, parameter in module.named_parameters()},
    )


def step_on_parts(arrangement, module, input, grad_outputs, input_grad=True):
    """Run `step` on this rank's parts of the input and of the gradients."""
    parts = [part_or_whole(grad_output, arrangement.output_dim) for grad_output in grad_outputs]
    local_input = part_or_whole(input, arrangement.input_dim).clone().requires_grad_(input_grad)
    return step(module, local_input, parts, arrangement.dtensor)


def select_parts(arrangement, results):
    """Return this rank's parts of what `step` returned on one device; gradients of parameters are whole."""
    outputs, grad_input, gradients = results
    outputs = [part_or_whole(output, arrangement.output_dim) for output in outputs]
    return outputs, grad_input if grad_input is None else part_or_whole(grad_input, arrangement.input_dim), gradients


def assert_close(actual, expected, size, what, terms=64):
    """Assert that tensors differ by the rounding of sums in another order.

    Args:
        size: the sums over the absolute values of what is added.
        terms: how many are added, at most.

    The codes are those of one device, so only sums differ. float32: a sum of n terms, each order of which is within
    n * 2^-24 * size of the exact one. bfloat16: the sums of a rank, those over ranks and those over linears that share
    an input are each rounded to 8 bits, independently; a rounding has a norm of at most 2^-9 of its result's, and at
    most 8 of them meet here. The factor 4: a subnormal code can stand for twice its value, in both operands.
    """
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    error = (actual.double() - expected.double()).abs()
    if actual.dtype is torch.float32:
        excess = (error - 4 * 2 * terms * 2.0**-24 * size).max()
        assert excess <= 0, f"{what}: {excess:.3g} over the bound"
    else:
        relative = error.norm() / expected.double().norm()
        assert relative < 2**-7, f"{what}: off by {relative:.3g}"


def _check_results(name, recipe, hp_dtype, compiled, input_grad=True):
    arrangement = arrangements()[name]
    config = config_of(recipe)
    k, n, tokens = (256, 512, 256) if recipe in BLOCK_RECIPES else (64, 48, 32)
    close = functools.partial(assert_close, terms=max(k, n, 2 * tokens))
    reference = arrangement.module(k, n, hp_dtype, config)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn(parameter.shape) * torch.logspace(-1, 0, parameter.shape[-1]))
    module = copy.deepcopy(reference)
    parallelize_module(module, world_mesh(), arrangement.styles)
    input = (torch.randn(2, tokens, k) * torch.logspace(-1, 0, k)).to(hp_dtype)
    linears = [child for child in reference.modules() if isinstance(child, Float8Linear)]
    grad_outputs = [(torch.randn(2, tokens, n) * torch.logspace(0, -1, n)).to(hp_dtype) for _ in linears]
    whole_results = step(reference, input.clone().requires_grad_(input_grad), grad_outputs)
    expected_outputs, expected_grad_input, expected = select_parts(arrangement, whole_results)
    # A hook of the compiled module itself would be a graph of its own, and a Float8Tensor cannot leave a graph.
    call = torch.compile(nn.Sequential(module), fullgraph=True, backend=compiled) if compiled else module
    outputs, grad_input, gradients = step_on_parts(arrangement, call, input, grad_outputs, input_grad)
    gradients = {name.removeprefix("_orig_mod.0."): gradient for name, gradient in gradients.items()}

    sizes = [input.double().abs() @ linear.weight.double().abs().t() for linear in linears]
    if linears[0].bias is not None:
        sizes[0] = sizes[0] + linears[0].bias.double().abs()
    for output, expected_output, size in zip(outputs, expected_outputs, sizes, strict=True):
        close(output, expected_output, part_or_whole(size, arrangement.output_dim), "output")
    pairs = list(zip(grad_outputs, linears, strict=True))
    size = sum(grad_output.double().abs() @ linear.weight.double().abs() for grad_output, linear in pairs)
    if input_grad:
        close(grad_input, expected_grad_input, part_or_whole(size, arrangement.input_dim), "grad_input")
    else:
        assert grad_input is expected_grad_input is None
    assert gradients.keys() == expected.keys()
    rows = input.double().abs().flatten(0, 1)
    for key, grad_output in zip("ab", grad_outputs, strict=False):
        columns = grad_output.double().abs().flatten(0, 1)
        for parameter, size in ((f"{key}.weight", columns.t() @ rows), (f"{key}.bias", columns.sum(0))):
            if parameter in expected:
                close(gradients[parameter], expected[parameter], size, f"gradient of {parameter}")


KINDS = [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)]
"""dtype, and whether the input needs a gradient, which that of a model's first linear does not."""


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["pairs", "all"])
@on_ranks(2)
def test_equals_one_device(name, every):
    """Each rank's part of the output, grad_input and gradients equals one device's; `assert_close` has the bound.

    Every run takes a quarter of the pairs of arrangements and recipes, with one kind each, and the night takes all.
    """
    for index, recipe in enumerate((*RECIPES, *BLOCK_RECIPES), start=ARRANGEMENTS.index(name)):
        if not every and index % 4:
            continue
        for hp_dtype, input_grad in KINDS if every else [KINDS[index % len(KINDS)]]:
            _check_results(name, recipe, hp_dtype, None, input_grad)


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
                distributed = distribute_tensor(getattr(linear, name).detach(), world_mesh(), [layout])
                setattr(linear, name, nn.Parameter(distributed))
            outputs.append(linear(distribute_tensor(whole, world_mesh(), [input])))
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
    *itertools.product(ARRANGEMENTS, RECIPES, (torch.float32, torch.bfloat16), ["inductor"]),
]
"""Each kind of collective around a compiled linear. In each run test_tensor_parallel_steps.py compiles delayed blocks
with prepared inputs, and test_train_distributed.py the tensorwise blocks of the trainer."""


@pytest.mark.parametrize(("name", "recipe", "hp_dtype", "backend"), at_night(COMPILED))
def test_compiled_equals_one_device(name, recipe, hp_dtype, backend):
    """There is one graph; aot_eager traces as Inductor does and generates no code."""
    run(2, _check_results, name, recipe, hp_dtype, backend)


@RECIPE
@pytest.mark.parametrize("layouts", [{}, {"output_layouts": Replicate()}], ids=["parts", "whole"])
@on_ranks(2)
def test_features_that_ranks_do_not_divide(recipe, layouts):
    """2 ranks have 7 and 6 of 13 features. The tolerance is for float32 sums of numbers about 1 in another order."""
    config = config_of(recipe)
    arrangement = Arrangement(One, {"a": Float8ColwiseParallel(**layouts)}, None, None if layouts else 2)
    reference, down = One(32, 13, torch.float32, config), Float8Linear(13, 32, config=config)
    module, rowwise = copy.deepcopy(reference), copy.deepcopy(down)
    parallelize_module(module, world_mesh(), arrangement.styles)
    parallelize_module(rowwise, world_mesh(), Float8RowwiseParallel())
    input, grad_output = torch.randn(2, 16, 32), torch.randn(2, 16, 13)
    expected = select_parts(arrangement, step(reference, input.clone().requires_grad_(), [grad_output]))
    results = step_on_parts(arrangement, module, input, [grad_output])
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rowwise(part(grad_output, 2)), down(grad_output), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["weight", "input", "grad_output"])
@on_ranks(2)
def test_what_is_not_finite_on_one_rank_reaches_all_that_it_reaches_on_one_device(where):
    """NaN equals NaN; other elements differ by the rounding of float32 sums in another order."""
    for (recipe, value), name in itertools.product(
        [("tensorwise", torch.nan), ("rowwise", -torch.inf)], ["prepared", "colwise", "rowwise", "rowwise by sequence"]
    ):
        arrangement = arrangements()[name]
        reference = arrangement.module(32, 16, torch.float32, config_of(recipe))
        input = torch.randn(2, 8, 32)
        grad_outputs = [torch.randn(2, 8, 16) for _ in range(2 if arrangement.module is Pair else 1)]
        if where == "weight":
            reference.a.weight.data[-1, -1] = value
        else:
            {"input": input, "grad_output": grad_outputs[0]}[where][-1, -1, -1] = value
        module = copy.deepcopy(reference)
        parallelize_module(module, world_mesh(), arrangement.styles)
        expected = step(reference, input.clone().requires_grad_(), grad_outputs)
        assert any(grad.isnan().any() for grad in (*expected[0], expected[1], *expected[2].values()))
        results = step_on_parts(arrangement, module, input, grad_outputs)
        torch.testing.assert_close(results, select_parts(arrangement, expected), rtol=1e-5, atol=1e-5, equal_nan=True)


class Block(nn.Module):
    """Attention-like and feed-forward, residual, on [batch, sequence, dim]."""

    def __init__(self, dim, attends):
        super().__init__()
        self.attention = Attention(dim) if attends else None
        self.mlp = MLP(dim)

    def forward(self, x):
        if self.attention is not None:
            x = x + self.attention(x)
        return x + self.mlp(x)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (projected.unflatten(-1, (-1, 8)).transpose(1, 2) for projected in (self.q(x), self.k(x), self.v(x)))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def model_of(config, dim=32, attends=True):
    torch.manual_seed(1)
    return convert_to_float8_training(nn.Sequential(Block(dim, attends)), config=config)


def spread_by(model, mesh, colwise, rowwise, whole):
    """Spread each block with these styles."""
    styles = {"attention": whole, "mlp": whole, "mlp.down": rowwise, "mlp.gate": colwise, "mlp.up": colwise}
    styles |= {f"attention.{name}": colwise for name in "qkv"} | {"attention.o": rowwise}
    for block in model:
        names = {name for name, _ in block.named_modules()}
        parallelize_module(block, mesh, {name: style for name, style in styles.items() if name in names})
    return model


def spread_by_torch(model, mesh):
    """Spread each block with torch's own styles."""
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return spread_by(model, mesh, ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1)), whole)


def spread(model, mesh, use_local_output=False):
    rowwise = Float8RowwiseParallel(output_layouts=Shard(1))
    return spread_by(model, mesh, Float8ColwiseParallel(), rowwise, prepare(use_local_output))


M, K, N = 2 * 16, 64, 48
U8, I32, F32 = torch.uint8, torch.int32, torch.float32


def count_collectives(module, input):
    """Count the collectives of a forward and of its backward."""
    with CollectiveCounter() as forward:
        output = module(input)
    with CollectiveCounter() as backward:
        output.sum().backward()
    return forward, backward


def payloads(recipe, rows, columns, first_too=True):
    """Return what is gathered of a matrix whose rows are spread over the ranks."""
    codes, scales = (U8, rows * columns), (F32, rows * 4)
    if recipe == "rowwise_with_gw_hp":
        return [(F32, rows * columns * 4)]
    if recipe == "tensorwise":
        return [codes]
    return [codes, scales, codes] if first_too else [codes, scales]


def amaxes(recipe, rows, columns, first_too=True):
    """Return the amaxes that are reduced for such a matrix."""
    length = {"tensorwise": 1, "rowwise_with_gw_hp": 0}.get(recipe, columns if first_too else 0)
    return [(I32, 4 * length)] if length else []


@pytest.mark.parametrize(
    ("recipe", "use_local_output"),  # a linear reads from a DTensor, and not from a local one, that grad_input is a sum
    [case for case in itertools.product(RECIPES, [False, True]) if case != ("rowwise_with_gw_hp", True)],
)
@on_ranks(2)
def test_one_gather_serves_all_linears_that_share_an_input(recipe, use_local_output):
    """The input is gathered once and grad_input is scattered once; amaxes, of 4 bytes each, are reduced per linear."""
    config = config_of(recipe)
    module = Pair(K, N, F32, config)
    arrangement = arrangements()["prepared, local" if use_local_output else "prepared"]
    parallelize_module(module, world_mesh(), arrangement.styles)
    input = torch.randn(2, 8, K, requires_grad=True)
    forward, backward = count_collectives(lambda input: torch.stack(module(input)), input)
    weights = [(I32, 4)] * 2 if config.casts.weight.row.is_tensorwise else []
    assert forward.of("all_gather") == payloads(recipe, M, K)
    assert forward.of("all_reduce") == amaxes(recipe, M, K) + weights
    assert forward.of("reduce_scatter") == []
    grad_output = (I32, 4) if recipe == "tensorwise" else (I32, 4 * M)
    weight = {"rowwise": [(I32, 4 * K)], "rowwise_with_gw_hp": [(I32, 4)]}.get(recipe, [])
    assert backward.of("all_gather") == []
    assert backward.of("all_reduce") == [grad_output, *weight] * 2
    assert backward.of("reduce_scatter") == [(F32, M * K * 4)]
    with CollectiveCounter() as forward, torch.no_grad():
        module(input)
    assert forward.of("all_gather") == payloads(recipe, M, K, first_too=False)


@pytest.mark.parametrize("trained", ["", "a", "b"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_a_shared_input_is_gathered_for_grad_weight_if_a_linear_trains(recipe, trained):
    module = Pair(K, N, F32, config_of(recipe))
    parallelize_module(module, world_mesh(), arrangements()["prepared"].styles)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name == f"{trained}.weight")
    copied = copy.deepcopy(module).requires_grad_(False)
    for linears, trains in ((module, bool(trained)), (copied, False)):
        input = torch.randn(2, 8, K, requires_grad=True)
        forward, _ = count_collectives(lambda input, linears=linears: torch.stack(linears(input)), input)
        assert forward.of("all_gather") == payloads(recipe, M, K, first_too=trains)


def count_collectives_of_linear(recipe, style, trains, *shape):
    linear = Float8Linear(K, N, bias=False, config=config_of(recipe))
    parallelize_module(linear, world_mesh(), style)
    linear.weight.requires_grad_(trains)
    return count_collectives(linear, torch.randn(*shape, requires_grad=True))


@RECIPE
@pytest.mark.parametrize("trains", [True, False])
@on_ranks(2)
def test_a_colwise_linear_gathers_its_own_input_as_codes(recipe, trains):
    style = Float8ColwiseParallel(input_layouts=Shard(1))
    forward, backward = count_collectives_of_linear(recipe, style, trains, 2, 8, K)
    assert forward.of("all_gather") == payloads(recipe, M, K, first_too=trains)
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
        assert backward.of("all_gather") == payloads(recipe, M, N, first_too=trains)
        assert backward.of("all_reduce") == amaxes(recipe, M, N, first_too=trains)
    assert backward.of("reduce_scatter") == []


@contextlib.contextmanager
def raises(kind, *words):
    """Assert that the block raises an error with all `words`, and that no rank waits for another."""
    with pytest.raises(kind) as error:
        yield
    message = str(error.value)
    assert all(word in message for word in words), message


@on_ranks(2)
def test_errors_when_a_style_is_applied():
    mesh, mesh_2d = world_mesh(), mesh_of((1, 2), ("dp", "tp"))
    for style in (Float8ColwiseParallel(), Float8RowwiseParallel()):
        name = type(style).__name__
        with raises(ValueError, name, "expects a Float8Linear, got Linear", "convert_to_float8_training"):
            parallelize_module(nn.Linear(16, 16), mesh, style)
        with raises(ValueError, name, "got the experts Float8Grouped", "Float8ExpertParallel"):
            parallelize_module(Float8Grouped(), mesh, style)
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
    several = nn.Sequential(Float8Linear(16, 16), Float8Linear(16, 16, config=config_of("rowwise")))
    with raises(ValueError, "several configs", "fwd_config_submodule_fqn"):
        parallelize_module(several, mesh, prepare(False))
    parallelize_module(several, mesh, prepare(False, fwd_config_submodule_fqn="1"))
    with raises(ValueError, "float8_e5m2", "float8_e4m3fn"):
        parallelize_module(Pair(16, 16, F32, None), mesh, prepare(False, float8_dtype=E5M2))
    parallelize_module(Pair(16, 16, F32, None), mesh, prepare(False, float8_dtype=E4M3))


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class UsesItsInput(Pair):
    def forward(self, input):
        return self.a(input * 2)


class ReadsItsInput(Pair):
    def forward(self, input):
        return self.a(input.to_high_precision()), self.a(input)


@on_ranks(2)
def test_errors_when_a_module_is_called():
    mesh = world_mesh()
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
        parallelize_module(Pair(16, 16, F32, None), mesh, {**styles, "": prepare(False)})(torch.randn(2, 4, 12))
    several = nn.Sequential(Float8Linear(16, 16), Float8Linear(16, 16, config=config_of("rowwise")))
    styles_of_several = {"": prepare(False, fwd_config_submodule_fqn="1"), "0": Float8ColwiseParallel()}
    parallelize_module(several, mesh, styles_of_several)
    with raises(RuntimeError, "is stored as rowwise", "casts it as dynamic tensorwise"):
        several(torch.randn(2, 4, 16))
    whole = torch.randn(2, 8, 16)
    module = parallelize_module(ReadsItsInput(16, 16, F32, None), mesh, {**styles, "": prepare(True)})
    from_values, from_codes = module(part(whole, 1))
    torch.testing.assert_close(from_values, from_codes)  # values lie on the codes, so a second cast changes nothing


@on_ranks(2)
def test_a_graph_that_ends_after_the_gathering_is_an_error_that_says_so():
    module = parallelize_module(Pair(16, 16, F32, None), world_mesh(), arrangements()["prepared"].styles)
    message = refusal(torch.compile(module, backend="aot_eager"), torch.randn(2, 4, 16, requires_grad=True))
    assert "Compile a module around the one that PrepareFloat8ModuleInput" in message


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_a_model_is_copied_saved_and_scoped_as_any_other(recipe):
    config = config_of(recipe)
    plain, model = model_of(config), spread(model_of(config), world_mesh())
    batch = torch.randn(2, 8, 32)

    def compute_gradients(model):
        model.zero_grad()
        model(part(batch, 1)).square().mean().backward()
        return {name: full(parameter.grad) for name, parameter in model.named_parameters()}

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
def test_one_style_for_several_modules():
    """A style may be applied many times, to modules of other configs."""
    module = nn.Sequential(Pair(32, 32, F32, config_of("rowwise")), Pair(32, 32, F32, config_of("tensorwise")))
    reference, style = copy.deepcopy(module), prepare(False)
    pair = {"a": Float8ColwiseParallel(), "b": Float8ColwiseParallel()}
    for child in module:
        parallelize_module(child, world_mesh(), {"": style, **pair})
    input = torch.randn(2, 8, 32)
    for child, expected in zip(module, reference, strict=True):
        for output, whole in zip(child(part(input, 1)), expected(input), strict=True):
            torch.testing.assert_close(output, part(whole, 2), rtol=1e-5, atol=1e-5)


@RECIPE
@on_ranks(2)
def test_a_float8_weight_saved_for_backward_changes_no_bit(recipe):
    """The saved float8 weight has the scales of the whole one."""
    weight = draw_uneven(48, 64)
    for name in ("prepared", "rowwise"):
        results = []
        for keep in (False, True):
            torch.manual_seed(0)
            arrangement = arrangements()[name]
            module = arrangement.module(64, 48, F32, config_of(recipe, keep_float8_weight_for_backward=keep))
            module.a.weight.data.copy_(weight)
            parallelize_module(module, world_mesh(), arrangement.styles)
            grad_outputs = [torch.randn(2, 8, 48)] * (2 if arrangement.module is Pair else 1)
            results.append(step_on_parts(arrangement, module, torch.randn(2, 8, 64), grad_outputs))
        assert_same(*results)

"""Spreads linears and blocks over ranks by tensor and sequence parallelism, and compares them with one device."""

import copy
import dataclasses
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, parallel
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from quaver import convert_to_float8_training
from quaver.distributed import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
from quaver.linear.module import Float8Linear
from tests.library.distributed.models import get_mesh
from tests.recipes import BLOCK_RECIPES, make_recipe_config
from tests.steps import draw, to_plain


def take_part(whole, dim):
    """Return this rank's part of `whole` along `dim`, or all for None; every rank has a scale that spans the dim."""
    if dim is None or whole.dim() == 0 or whole.shape[dim] == 1:
        return whole
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


class OneLinear(nn.Module):
    def __init__(self, k, n, dtype, config):
        super().__init__()
        self.a = Float8Linear(k, n, dtype=dtype, config=config)

    def forward(self, input):
        return (self.a(input),)


class TwoLinears(OneLinear):
    """Two linears that share an input, as gate and up do."""

    def __init__(self, k, n, dtype, config):
        super().__init__(k, n, dtype, config)
        self.b = Float8Linear(k, n, bias=False, dtype=dtype, config=config)

    def forward(self, input):
        return self.a(input), self.b(input)


def prepare(use_local_output, layout=None, **options):
    layouts = {"input_layouts": layout or Shard(1), "desired_input_layouts": Replicate()}
    return PrepareFloat8ModuleInput(**layouts, use_local_output=use_local_output, **options)


class WholeWeight(parallel.ParallelStyle):
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


def list_arrangements():
    colwise, rowwise = Float8ColwiseParallel, Float8RowwiseParallel
    whole_output = {"output_layouts": Replicate(), "use_local_output": False}
    pair = {"a": colwise(), "b": colwise()}
    by_sequence = {"input_layouts": Shard(1)}
    torch_pair = {"a": ColwiseParallel(), "b": ColwiseParallel()}
    torch_prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "prepared": Arrangement(TwoLinears, {"": prepare(False), **pair}, 1, 2),
        "prepared, local": Arrangement(TwoLinears, {"": prepare(True), **pair}, 1, 2),
        "colwise by sequence": Arrangement(
            TwoLinears, {"a": colwise(**by_sequence), "b": colwise(**by_sequence)}, 1, 2
        ),
        "colwise": Arrangement(TwoLinears, pair, None, 2),
        "prepared whole": Arrangement(TwoLinears, {"": prepare(False, Replicate()), **pair}, None, 2),
        "prepared whole, local": Arrangement(TwoLinears, {"": prepare(True, Replicate()), **pair}, None, 2),
        "colwise, whole output": Arrangement(OneLinear, {"a": colwise(**by_sequence, **whole_output)}, 1, None, True),
        "colwise, output by sequence": Arrangement(OneLinear, {"a": colwise(output_layouts=Shard(1))}, None, 1),
        "rowwise": Arrangement(OneLinear, {"a": rowwise()}, 2, None),
        "rowwise by sequence": Arrangement(OneLinear, {"a": rowwise(output_layouts=Shard(1))}, 2, 1),
        "rowwise, whole input": Arrangement(OneLinear, {"a": rowwise(input_layouts=Replicate())}, None, None),
        "rowwise, input by sequence": Arrangement(
            OneLinear, {"a": rowwise(**by_sequence, output_layouts=Shard(1))}, 1, 1
        ),
        "torch's prepared": Arrangement(TwoLinears, {"": torch_prepare, **torch_pair}, 1, 2),
        "torch's colwise, whole output": Arrangement(
            OneLinear, {"a": ColwiseParallel(**whole_output)}, None, None, True
        ),
        "torch's rowwise": Arrangement(OneLinear, {"a": RowwiseParallel()}, 2, None),
        "torch's rowwise by sequence": Arrangement(OneLinear, {"a": RowwiseParallel(output_layouts=Shard(1))}, 2, 1),
        "whole weight": Arrangement(OneLinear, {"a": WholeWeight(Replicate())}, None, None),
        "whole weight by sequence": Arrangement(OneLinear, {"a": WholeWeight(Shard(1))}, 1, 1),
    }


ARRANGEMENTS = tuple(list_arrangements())


def step(module, input, grad_outputs, dtensor=False):
    """Return outputs, grad_input and the gradients of the parameters by name."""
    outputs = module(input)
    outputs = [output.to_local() for output in outputs] if dtensor else outputs
    torch.autograd.backward(outputs, grad_outputs)
    return (
        [output.detach() for output in outputs],
        input.grad,
        {name: to_plain(parameter.grad) for name, parameter in module.named_parameters()},
    )


def step_on_parts(arrangement, module, input, grad_outputs, input_grad=True):
    """Run `step` on this rank's parts of the input and of the gradients."""
    parts = [take_part(grad_output, arrangement.output_dim) for grad_output in grad_outputs]
    local_input = take_part(input, arrangement.input_dim).clone().requires_grad_(input_grad)
    return step(module, local_input, parts, arrangement.dtensor)


def select_parts(arrangement, results):
    """Return this rank's parts of what `step` returned on one device; gradients of parameters are whole."""
    outputs, grad_input, gradients = results
    outputs = [take_part(output, arrangement.output_dim) for output in outputs]
    return outputs, grad_input if grad_input is None else take_part(grad_input, arrangement.input_dim), gradients


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


def build_model(config, dim=32, attends=True):
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


STEPS = 2
DIMS = {"blockwise": 256, "blockwise_with_gw_hp": 256, "mxfp8": 64}
"""Of recipes that scale blocks: each of two ranks has whole ones; FSDP2 cuts them again."""


def make_batches(recipe):
    return [draw(4, 16, DIMS.get(recipe, 32), seed=step) for step in range(STEPS)]


def make_sharing_config(recipe, **options):
    """Return a config in which gate and up share an input scale, as PrepareFloat8ModuleInput casts their input once."""
    return make_recipe_config(recipe, shared_inputs=(("q", "k", "v"), ("gate", "up")), **options)


def assert_same_losses(losses, expected):
    """Assert that losses are near: within 1e-5 after the first step, and within 5e-4 later.

    A float32 sum in another order moves a result by about 2^-24 of it, and the losses by 2e-7 in most cases here. At
    times such a difference moves a code of a later cast by one step, 2^-3 of an element, and the losses by up to 3e-4
    (blockwise_with_gw_hp on CPUs without AMX).
    With each rank's own scales in place of the whole matrix's, losses are off by 8e-4 to 2e-2.
    """
    torch.testing.assert_close(losses[:1], expected[:1], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses, expected, rtol=5e-4, atol=0)


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


def check_results(name, recipe, hp_dtype, compiled, input_grad=True):
    arrangement = list_arrangements()[name]
    config = make_recipe_config(recipe)
    k, n, tokens = (256, 512, 256) if recipe in BLOCK_RECIPES else (64, 48, 32)
    close = functools.partial(assert_close, terms=max(k, n, 2 * tokens))
    reference = arrangement.module(k, n, hp_dtype, config)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn(parameter.shape) * torch.logspace(-1, 0, parameter.shape[-1]))
    module = copy.deepcopy(reference)
    parallelize_module(module, get_mesh(), arrangement.styles)
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
        close(output, expected_output, take_part(size, arrangement.output_dim), "output")
    pairs = list(zip(grad_outputs, linears, strict=True))
    size = sum(grad_output.double().abs() @ linear.weight.double().abs() for grad_output, linear in pairs)
    if input_grad:
        close(grad_input, expected_grad_input, take_part(size, arrangement.input_dim), "grad_input")
    else:
        assert grad_input is expected_grad_input is None
    assert gradients.keys() == expected.keys()
    rows = input.double().abs().flatten(0, 1)
    for key, grad_output in zip("ab", grad_outputs, strict=False):
        columns = grad_output.double().abs().flatten(0, 1)
        for parameter, size in ((f"{key}.weight", columns.t() @ rows), (f"{key}.bias", columns.sum(0))):
            if parameter in expected:
                close(gradients[parameter], expected[parameter], size, f"gradient of {parameter}")

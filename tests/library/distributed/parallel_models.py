"""Spreads linears and blocks over ranks by tensor and sequence parallelism, for the tests of both."""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, parallel
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from quaver import convert_to_float8_training
from quaver.distributed import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
from quaver.linear.module import Float8Linear
from tests.steps import full


def part(whole, dim):
    """Return this rank's part of `whole` along `dim`; a scale that spans the dim belongs to every rank."""
    if whole.dim() == 0 or whole.shape[dim] == 1:
        return whole
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def part_or_whole(whole, dim):
    return whole if dim is None else part(whole, dim)


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

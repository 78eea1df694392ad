"""The small model of the distributed tests, and one process that computes what the ranks together must."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from quaver import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.linear.quantize import Quantizer
from quaver.linear.tensor import Float8Tensor
from quaver.recipes.serving import SERVING, serving_config

DIM = 18  # neither it nor HIDDEN divides by 4: the last rank's shards are smaller
HIDDEN = 42
TOKENS = 6
LEARNING_RATE = 2e-3


class Block(nn.Module):
    """Residual feed-forward."""

    def __init__(self, dim=DIM, hidden=HIDDEN):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, hidden):
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


def make_model(layers=2, dim=DIM, hidden=HIDDEN):
    """The same weights on every call, with rows and columns of unlike size: no part has the scale of another."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(dim, hidden) for _ in range(layers)], nn.Linear(dim, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(torch.linspace(0.3, 2.0, parameter.shape[0])[:, None])
                parameter.mul_(torch.linspace(1.5, 0.5, parameter.shape[1]))
    return model


def batches(steps, ranks, dim=DIM):
    """One global batch [ranks * TOKENS, dim] for each step; rank r takes the r-th part of it."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ranks * TOKENS, dim, generator=generator) for _ in range(steps)]


def loss_of(output):
    return output.float().square().mean()


def config_of(recipe, **options):
    """The config of a recipe or a serving engine, either with a ":backward"; "tensorwise_power_of_2" rounds scales."""
    engine, colon, backward = recipe.partition(":")
    if engine in SERVING:
        base = f"{SERVING[engine].recipe}:{backward}" if colon else None
        return replace(serving_config(engine, base), **options)
    if recipe == "tensorwise_power_of_2":
        return Float8LinearConfig(round_scales_to_power_of_2=True, **options)
    return replace(Float8LinearConfig.from_recipe_name(recipe), **options)


def quantized(hp, config, operand="weight", scale=None):
    """Both operands of a whole matrix, as one process quantizes it."""
    return Quantizer(getattr(config.casts, operand), hp.dtype, scale)(hp.detach(), row=True, column=True)


def scaling_snapshot(model):
    """Copies of all persistent scales and histories, by name."""
    return {name: value.clone() for name, value in float8_scaling_state(model).state_dict().items()}


def scale_states_of(model):
    """The persistent scales of each conversion."""
    linears = [module for module in model.modules() if isinstance(module, Float8Linear)]
    return list(dict.fromkeys(linear.scaling.state for linear in linears if linear.scaling is not None))


def assert_same_scaling_on_all_ranks(model):
    """Persistent scales, histories and what the last sync found, to the bit."""
    state = float8_scaling_state(model)
    if not state:
        return
    observed = [of_model.last_step for of_model in scale_states_of(model)]
    mine = torch.cat([value.flatten() for value in (*state.state_dict().values(), *observed)]).view(torch.int32)
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    assert torch.equal(low, high), [n for n, v in enumerate(low != high) if v]


def single_process_losses(config, steps, ranks, **options):
    """The losses of `single_process`."""
    return single_process(config, steps, ranks, **options)[0]


def single_process(config, steps, ranks, *, layers=2, param_dtype=None, float8_gather=False, compiled=None):
    """The losses of one process that takes the ranks' parts of each global batch one after another.

    With `param_dtype` it computes as MixedPrecisionPolicy(param_dtype) does: with parameters rounded to it, save for
    the weights that are all-gathered in float8, which are quantized from the master.

    Returns:
        The losses, and `scaling_snapshot` after each step's sync. The loss of a part is divided by the ranks before
        its backward, so the history of a grad_output is 1 / ranks of what the ranks keep.
    """
    model = make_model(layers)
    convert_to_float8_training(model, config=config)
    if compiled:
        for block in model:
            block.compile(fullgraph=True, backend=compiled)

    def backward(part):
        used = _used_parameters(model, config, param_dtype or torch.float32, float8_gather)
        output = torch.func.functional_call(model, used, part if param_dtype is None else part.to(param_dtype))
        loss = loss_of(output) / ranks
        loss.backward()
        for name, parameter in model.named_parameters():
            grad = used[name].grad.float()
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return train_in_parts(model, optimizer, batches(steps, ranks), ranks, backward)


def train_in_parts(model, optimizer, batches, parts, backward=None):
    """The losses, and `scaling_snapshot` after each step's sync, of one process that takes parts one after another.

    Args:
        backward: of a part; returns its loss, divided by the parts.
    """

    def plain(part):
        loss = loss_of(model(part)) / parts
        loss.backward()
        return loss

    losses, snapshots = [], []
    for batch in batches:
        losses.append(sum((backward or plain)(part).item() for part in batch.chunk(parts)))
        optimizer.step()
        optimizer.zero_grad()
        sync_float8_amax_and_scale_history(model)
        snapshots.append(scaling_snapshot(model))
    return losses, snapshots


def assert_same_snapshots(snapshots, expected, rtol_of_step, what, grad_outputs=1):
    """After each step: histories and scales, each recorded once a step.

    Args:
        grad_outputs: by what the ranks' amaxes are larger, where a rank does not divide its loss by the ranks.
    """
    for step, (snapshot, of_one) in enumerate(zip(snapshots, expected, strict=True)):
        assert snapshot.keys() == of_one.keys()
        for name, value in snapshot.items():
            factor, message = 1.0, f"{what} {step} {name}"
            if "grad_output" in name:
                factor = grad_outputs if name.endswith("history") else 1 / grad_outputs
            torch.testing.assert_close(value, of_one[name] * factor, rtol=rtol_of_step(step), atol=0, msg=message)
            assert value.count_nonzero() == (step + 1 if value.dim() else 1), message


def _used_parameters(model, config, dtype, float8_gather):
    linears = {name + ".weight": module for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    used = {}
    for name, parameter in model.named_parameters():
        if float8_gather and name in linears:
            scale = linears[name].persistent_scales(parameter.device).weight
            value = Float8Tensor.from_operands(*quantized(parameter, config, scale=scale), dtype)
        else:
            value = parameter.detach().to(dtype, copy=True)
        used[name] = value.requires_grad_()
    return used

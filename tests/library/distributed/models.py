"""Defines the small model of the distributed tests, its shards, and one process that computes what the ranks must."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from quaver import (
    Float8Linear,
    convert_to_float8_training,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.linear.quantize import Quantizer
from quaver.linear.tensor import Float8Tensor
from tests.ranks import get_cached_mesh

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
    """Return the same weights on every call, in rows and columns of unlike size: no part has the scale of another."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(dim, hidden) for _ in range(layers)], nn.Linear(dim, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(torch.linspace(0.3, 2.0, parameter.shape[0])[:, None])
                parameter.mul_(torch.linspace(1.5, 0.5, parameter.shape[1]))
    return model


def get_batches(steps, ranks, dim=DIM):
    """Return a global batch [ranks * TOKENS, dim] for each step. Rank r takes the r-th part of it."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ranks * TOKENS, dim, generator=generator) for _ in range(steps)]


def compute_loss(output):
    return output.float().square().mean()


def quantize(hp, config, operand="weight", scale=None):
    """Return both operands of a whole matrix, as one process quantizes it."""
    return Quantizer(getattr(config.casts, operand), hp.dtype, scale)(hp.detach(), row=True, column=True)


def copy_scaling(model):
    """Return copies of all persistent scales and histories, by name."""
    return {name: value.clone() for name, value in float8_scaling_state(model).state_dict().items()}


def get_conversion_slots(model):
    """Return the persistent scales of each conversion."""
    linears = [module for module in model.modules() if isinstance(module, Float8Linear)]
    return list(
        dict.fromkeys(linear.scale_slots.conversion_slots for linear in linears if linear.scale_slots is not None)
    )


def assert_same_scaling_on_all_ranks(model):
    """Assert that persistent scales, histories and the amaxes of the last sync have the same bits on all ranks."""
    state = float8_scaling_state(model)
    if not state:
        return
    values = [*state.state_dict().values(), *(slots.last_step for slots in get_conversion_slots(model))]
    low = torch.cat([value.flatten() for value in values]).view(torch.int32)
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    assert torch.equal(low, high), (low != high).nonzero()


def get_mesh():
    return get_cached_mesh((dist.get_world_size(),))


def shard_model(config, *, mesh=None, compiled=None, model=None, **options):
    """Convert the small model, and give it to fully_shard block by block; `compiled` is a backend."""
    mesh = mesh or get_mesh()
    model = model or make_model()
    if config is not None:
        convert_to_float8_training(model, config=config)
    for block in model:
        if compiled:
            block.compile(fullgraph=True, backend=compiled)
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def get_rank_part(batch):
    """Return this rank's part of a global batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def train_step(model, optimizer, batch):
    """Train a step on this rank's part, and return the mean loss over ranks."""
    loss = compute_loss(model(get_rank_part(batch)))
    loss.backward()
    return finish_step(loss, optimizer)


def finish_step(loss, optimizer):
    """Update the weights, and return the mean loss over ranks."""
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach().clone())
    return mean.item() / dist.get_world_size()


def compute_single_process_losses(config, steps, ranks, **options):
    """Return the losses of `train_single_process`."""
    return train_single_process(config, steps, ranks, **options)[0]


def train_single_process(config, steps, ranks, *, layers=2, param_dtype=None, float8_all_gather=False, compiled=None):
    """Train one process on the ranks' parts of each global batch, one after another.

    With `param_dtype` it computes as MixedPrecisionPolicy(param_dtype) does: with parameters rounded to it, save for
    the weights that are all-gathered in float8, which are quantized from the master.

    Returns:
        The losses, and `copy_scaling` after each step's sync. The loss of a part is divided by the ranks before
        its backward, so the history of a grad_output is 1 / ranks of what the ranks keep.
    """
    model = make_model(layers)
    convert_to_float8_training(model, config=config)
    if compiled:
        for block in model:
            block.compile(fullgraph=True, backend=compiled)

    def backward(part):
        used = _used_parameters(model, config, param_dtype or torch.float32, float8_all_gather)
        output = torch.func.functional_call(model, used, part if param_dtype is None else part.to(param_dtype))
        loss = compute_loss(output) / ranks
        loss.backward()
        for name, parameter in model.named_parameters():
            grad = used[name].grad.float()
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return train_in_parts(model, optimizer, get_batches(steps, ranks), ranks, backward)


def train_in_parts(model, optimizer, batches, parts, backward=None):
    """Train one process on parts, one after another; return losses, and `copy_scaling` after each step's sync.

    Args:
        backward: runs a part, and returns its loss, divided by the parts; None for the mean square of the output.
    """

    def run_part(part):
        loss = compute_loss(model(part)) / parts
        loss.backward()
        return loss

    losses, snapshots = [], []
    for batch in batches:
        losses.append(sum((backward or run_part)(part).item() for part in batch.chunk(parts)))
        optimizer.step()
        optimizer.zero_grad()
        sync_float8_amax_and_scale_history(model)
        snapshots.append(copy_scaling(model))
    return losses, snapshots


def assert_same_snapshots(snapshots, expected, rtol_of_step, what, grad_outputs=1):
    """Assert that histories and scales are near after each step, and that each step recorded them once.

    Args:
        grad_outputs: the factor of the ranks' amaxes, where a rank does not divide its loss by the ranks.
    """
    for step, (snapshot, reference) in enumerate(zip(snapshots, expected, strict=True)):
        assert snapshot.keys() == reference.keys()
        for name, value in snapshot.items():
            factor, message = 1.0, f"{what} {step} {name}"
            if "grad_output" in name:
                factor = grad_outputs if name.endswith("history") else 1 / grad_outputs
            torch.testing.assert_close(value, reference[name] * factor, rtol=rtol_of_step(step), atol=0, msg=message)
            assert value.count_nonzero() == (step + 1 if value.dim() else 1), message


def _used_parameters(model, config, dtype, float8_all_gather):
    linears = {name + ".weight": module for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    used = {}
    for name, parameter in model.named_parameters():
        if float8_all_gather and name in linears:
            scale = linears[name].begin_forward_and_get_scales(parameter.device).weight
            value = Float8Tensor.from_operands(*quantize(parameter, config, scale=scale), dtype=dtype)
        else:
            value = parameter.detach().to(dtype, copy=True)
        used[name] = value.requires_grad_()
    return used

"""The gradients of a model that may be split over ranks: laid out like the parameters, measured and clipped."""

from collections import defaultdict
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.trainer.tensors import plain_tensors


def sum_partial_gradients(model: nn.Module) -> None:
    """Lay out each gradient like its parameter; those of norms are partial sums where FSDP2 does not reduce them."""
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def squared_norm_share(model: nn.Module) -> Tensor:
    """Return what this rank adds to the squared norm of all gradients: a float32 scalar; the sum over ranks is it.

    A gradient that several ranks hold counts on each as its share. Every parameter must be on the mesh of all ranks.
    """
    groups: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            groups[_copies(parameter.grad)] += plain_tensors(parameter.grad)
    shares = [torch.nn.utils.get_total_norm(grads).float().square() / copies for copies, grads in groups.items()]
    return torch.stack(shares).sum()


def clip_gradients(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scale every gradient down so that a whole of norm `norm` has at most `max_norm`, as torch's clip_grad_norm_."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([plain for grad in grads for plain in plain_tensors(grad)], factor)


def _copies(grad: Tensor) -> int:
    """How many ranks hold the same part of `grad`."""
    if not isinstance(grad, DTensor):
        return 1
    sizes = [grad.device_mesh.size(axis) for axis, place in enumerate(grad.placements) if place.is_replicate()]
    return prod(sizes)

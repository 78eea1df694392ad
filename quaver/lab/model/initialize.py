"""Initial weights that depend on the seed and the parameter's name, but not on the parallel dims.

Each parameter is drawn whole, on the CPU in float32, from its own generator. A rank copies its shard and frees the rest
before the next parameter. So no rank holds more than one whole parameter, and any number of ranks starts from weights
that are bit-identical to a single process's.
"""

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.lab.model.llama import Llama, choose_init_std
from quaver.lab.model.mixture import Router


def allocate(model: Llama, device: torch.device) -> None:
    """Give `model`, which is on the meta device, uninitialized storage on `device`."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    router_buffers = {id(buffer) for router in routers for buffer in router.buffers()}
    buffers = [name for name, buffer in model.named_buffers() if id(buffer) not in router_buffers]
    if buffers:
        raise NotImplementedError(f"buffers have no initial values here: {', '.join(buffers)}")
    model.to_empty(device=device)
    for router in routers:
        router.reset_balance()
    model.tie_weights()  # to_empty gives each module its own parameter


def initialize(model: Llama, seed: int) -> None:
    """Initialize `model`: ones for vectors, N(0, `choose_init_std`**2) for matrices."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = make_initial_value(name, parameter.shape, choose_init_std(name, model.config), seed)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(take_local_shard(value, parameter))
            else:
                parameter.copy_(value)


def make_initial_value(name: str, shape: torch.Size, std: float, seed: int) -> Tensor:
    """Return the whole parameter `name`: float32, on the CPU."""
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(shape).normal_(std=std, generator=generator)


def take_local_shard(value: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's shard of `value`, a whole parameter, with the placements of `parameter`; a view.

    Tensor parallelism splits first and FSDP2 splits the result, although FSDP's dim comes first in the mesh. So a dim
    that both split is split by the last mesh dim first.
    """
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError("this rank is not in the parameter's mesh")
    shard = value
    for axis in reversed(range(parameter.device_mesh.ndim)):
        dim = getattr(parameter.placements[axis], "dim", None)  # of Shard and of FSDP2's strided Shard
        if dim is not None:
            chunks = shard.chunk(parameter.device_mesh.size(axis), dim)
            index = coordinate[axis]
            shard = chunks[index] if index < len(chunks) else shard.narrow(dim, 0, 0)
    return shard

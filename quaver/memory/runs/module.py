"""What one module of a run's model would take of memory in a training step, alone, with the settings of the run.

The module is that of the model, converted with it; it is checkpointed as a block is (if it is one, or in one), sharded
and trained for two steps, with fake tensors. Its inputs look like those that the model's forward gives it.

[Note: a module alone] An input that needs a gradient is made in the step from a resident tensor, by a multiplication
with a number, which keeps nothing; and a sum of multiples, which keeps nothing either, makes a loss of the output. So
nothing but the module's own graph holds the input, as in a network, where the layer before may free what only it
needed. Inputs without a gradient, such as tokens or rotary tables, are resident.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map, tree_map_only

from quaver import cast_weights_once, float8_scaling_state, sync_float8_amax_and_scale_history
from quaver.activation_checkpointing import apply_activation_checkpointing, selected_every
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.memory.faking.fakes import Fakes, fake_copies, fake_tensors
from quaver.memory.predict import Prediction, forget_gradients, predict_step
from quaver.trainer.autocast import autocast_of
from quaver.trainer.config import TrainConfig
from quaver.trainer.dry_run import pretended_mesh
from quaver.memory.runs.predict import RunMemory, check_ranks
from quaver.trainer.initialize import allocate
from quaver.trainer.layout import Layout, resolve
from quaver.trainer.model import Block, Llama
from quaver.trainer.optimizer import build_optimizer
from quaver.trainer.parallelize import group_options
from quaver.trainer.plan import make_models
from quaver.trainer.profiling.steps import kept_scales

_CPU = torch.device("cpu")
_BLOCK = re.compile(r"model\.layers\.(\d+)(?:\.|$)")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def predict_module(config: TrainConfig, name: str, ranks: int = 1) -> RunMemory:
    """Predict the memory of a training step of one module of the model, on the first of `ranks` processes.

    Args:
        name: of a module with parameters that the model's forward calls, such as "model.layers.0.mlp".
    Raises:
        ValueError: there is no such module; or what the run itself would refuse.
        NotImplementedError: tensor parallelism, or what cannot be predicted.
    """
    check_ranks(ranks)
    config, layout = resolve(config, rank=0, world_size=ranks)
    if layout.tensor > 1:
        raise NotImplementedError(
            f"expected parallelism.tensor_parallel_degree 1, got {layout.tensor}: a module that is split is not "
            "predicted alone; predict the whole model"
        )
    precision, model = next(iter(make_models(config, _CPU).by_name.items()))
    module = _find(model, name)
    arguments = module_inputs(config, name)
    alone = Alone(name, module)
    parameters = sum(parameter.numel() for parameter in alone.parameters())
    with pretended_mesh(layout) as mesh:
        compiled = _parallelize(alone, config, mesh)  # where ranks stand in a mesh is computed with numbers
        with fake_tensors(compiled=compiled) as fakes, _no_view_warning():
            alone.to_empty(device=_CPU)
            prediction = _predict(alone, config, layout, arguments, fakes)
    return RunMemory(config, layout, precision, parameters, 1, prediction, compiled=config.training.compile)


def module_inputs(config: TrainConfig, name: str) -> Arguments:
    """The arguments that the model's forward calls its module `name` with, as tensors on the meta device.

    Raises:
        ValueError: it does not call it.
    """
    model = next(iter(make_models(config, _CPU).by_name.values()))
    shape = (config.training.local_batch_size, config.training.seq_len)
    given: list[Arguments] = []

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append((args, kwargs))
        raise _Taken

    _find(model, name).register_forward_pre_hook(take, with_kwargs=True)
    with fake_tensors():
        allocate(model, _CPU)
        tokens = torch.empty(shape, dtype=torch.int64)
        try:
            with autocast_of(config.training, _CPU):
                model(tokens, torch.empty_like(tokens) if config.data.document_mask else None)
        except _Taken:
            pass
    if not given:
        raise ValueError(f"expected a module that the model's forward calls, got {name!r}; name one in it")
    args, kwargs = tree_map(_looks, given[0])
    return args, kwargs


def names_inside(config: TrainConfig, name: str) -> list[str]:
    """The next modules below `name` in the model that can be predicted alone: with parameters, and with a forward."""
    module = _find(next(iter(make_models(config, _CPU).by_name.values())), name)
    return [
        f"{name}.{child}"
        for child, each in module.named_children()
        if not isinstance(each, nn.ModuleList) and any(True for _ in each.parameters())
    ]


class Alone(nn.Module):
    """A module of a model without the rest of it, under the name that it has there."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.path = name
        *parents, last = name.split(".")
        place: nn.Module = self
        for parent in parents:
            place.add_module(parent, nn.Module())
            place = place.get_submodule(parent)
        place.add_module(last, module)

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self.get_submodule(self.path)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.module(*args, **kwargs)


class _Taken(Exception):
    """Ends a forward that has come far enough."""


def _find(model: Llama, name: str) -> nn.Module:
    """The block, the part of one, or the part of the model that holds no block, of this name."""
    names = [each for each, module in model.named_modules() if each and any(True for _ in module.parameters())]
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "quaver memory prints the names of modules"
        raise ValueError(f"expected the name of a module of the model that has parameters, got {name!r}; {hint}")
    module = model.get_submodule(name)
    if not isinstance(module, Block) and any(isinstance(each, Block) for each in module.modules()):
        raise ValueError(f"expected a block of the model, a part of one or a part that holds none, got {name!r}")
    return module


class _TracedLinear(nn.Linear):
    """The same linear; torch.compile takes no frame of torch's own modules."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


def _parallelize(alone: Alone, config: TrainConfig, mesh: DeviceMesh | None) -> bool:
    """Checkpoint, compile and shard it, as `quaver.trainer.parallelize` does with the whole model.

    Returns:
        Whether it is compiled, as what is in a block may be.
    """
    block = _BLOCK.match(f"{alone.path}.")
    compiled = block is not None and config.training.compile
    if block is not None:
        _checkpoint(alone.module, config, int(block[1]))
    if compiled:
        if type(alone.module) is nn.Linear:
            alone.module.__class__ = _TracedLinear
        alone.module.compile(fullgraph=True)
    if mesh is not None:
        _shard(alone, config, mesh, in_block=block is not None)
    return compiled


def _shard(alone: Alone, config: TrainConfig, mesh: DeviceMesh, *, in_block: bool) -> None:
    is_own_group = in_block or (alone.path == "lm_head" and not config.model.tie_word_embeddings)
    if is_own_group:
        fully_shard(alone.module, **group_options(config, mesh))
    fully_shard(alone, **group_options(config, mesh, as_stored=True))


def _checkpoint(module: nn.Module, config: TrainConfig, block: int) -> None:
    checkpoint = config.activation_checkpoint
    every = selected_every(checkpoint.selective_ac_option)
    mode, option = checkpoint.mode, checkpoint.selective_ac_option
    if mode == "selective" and every is not None:
        mode, option = ("full" if (block + 1) % every == 0 else "none"), "op"
    apply_activation_checkpointing(
        [module],
        mode=mode,
        selective_ac_option=option,
        memory_budget=checkpoint.memory_budget,
        preserve_rng_state=False,  # the model has no dropout
        also_keep=checkpoint.selective_ac_also_keep,
        never_keep=checkpoint.selective_ac_never_keep,
    )


def _predict(alone: Alone, config: TrainConfig, layout: Layout, arguments: Arguments, fakes: Fakes) -> Prediction:
    optimizer = build_optimizer(alone, config.optimizer)
    scaling = float8_scaling_state(alone)
    args, kwargs = fake_copies(arguments, fakes, _CPU)
    gathers_float8 = config.float8.precompute_float8_dynamic_scale_for_fsdp

    def step() -> None:
        _forward_backward(alone, config, layout, (args, kwargs))
        if scaling:
            sync_float8_amax_and_scale_history(alone)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        forget_gradients((args, kwargs))
        if gathers_float8:
            precompute_float8_dynamic_scale_for_fsdp(alone)

    return predict_step(step, alone, optimizer, fakes, kept_scales=kept_scales(alone))


def _forward_backward(alone: Alone, config: TrainConfig, layout: Layout, arguments: Arguments) -> None:
    """[Note: a module alone]"""
    # A weight that is gathered has no cast to keep.
    once = cast_weights_once(alone) if layout.world_size == 1 else nullcontext()
    with once:
        with autocast_of(config.training, _CPU):
            loss = _loss(alone, arguments)
        loss.backward()


def _loss(alone: Alone, arguments: Arguments) -> Tensor:
    output = _call(alone, arguments)
    if not isinstance(output, Tensor):
        raise NotImplementedError(f"expected a module that returns a tensor, got {type(output).__name__}")
    return output.mul(1 / output.numel()).sum()


def _call(alone: Alone, arguments: Arguments) -> Any:
    args, kwargs = tree_map_only(Tensor, _made_in_step, arguments)
    return alone(*args, **kwargs)


def _made_in_step(source: Tensor) -> Tensor:
    return source * 1.5 if source.requires_grad else source


def _looks(value: Any) -> Any:
    """For a tensor, one on the meta device with the same shape, strides and dtype; anything else is left as it is."""
    if not isinstance(value, Tensor):
        return value
    look = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return look.requires_grad_(value.requires_grad)


@contextmanager
def _no_view_warning() -> Iterator[None]:
    """Silence FSDP2's warning that a module returns a view, as a linear does: nothing here writes into one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")
        yield

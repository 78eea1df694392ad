"""Applies tensor and expert parallelism, activation checkpointing, compilation and FSDP2 to the Llama, in this order.

Tensor parallelism is Megatron's with sequence parallelism: between linears each rank holds 1/tp of the sequence;
q, k, v, gate and up gather it and split their outputs, o and down split their inputs and scatter the sequence again.

[Note: mesh of experts] Expert parallelism splits experts over neighboring ranks of a shard group. FSDP2 shards the
experts of a rank over the other ranks of the group, on the mesh [dp_replicate,] dp_shard / ep, ep. All other parameters
are on the mesh of the run. FSDP2 averages the gradients of experts over its dims of that mesh. They are already sums
over "ep", by which `average_expert_gradients` (mixture.py) divides.

[Note: precision under FSDP2] Autocast defines the numerics, as on one rank: a linear reads its weight in
`training.mixed_precision_param`. Blocks and the output projection are therefore gathered in that dtype. Autocast would
cast them to it anyway. It halves the bytes of the all-gather. The embedding and the last norm, which autocast does not
cast, are gathered in the dtype of the residual stream, to which the model rounds embeddings (and a norm its weight)
anyway. Gradients are reduced in float32. A bfloat16 embedding's gradient is rounded before, like a linear's.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from quaver import Float8Linear, reduce_gradients_in_float8
from quaver.activations import apply_activation_checkpointing, store_activations_in_float8
from quaver.distributed import (
    Float8ColwiseParallel,
    Float8ExpertParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from quaver.lab.model.llama import SPLIT_DIMS, Block, FeedForward, Llama
from quaver.lab.model.mixture import Experts, list_modules
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.linear.sharding import check_can_be_sharded
from quaver.runtime.errors import reraise_as_input_error
from quaver.torch_private.fake_ranks import FakeStore


def make_mesh(dims: ParallelDims, device_type: str) -> DeviceMesh | None:
    """Return the mesh of a run on devices of this type, or None for one process. A collective."""
    sizes = dims.mesh
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None


@contextmanager
def open_fake_mesh(dims: ParallelDims) -> Iterator[DeviceMesh | None]:
    """Yield a mesh of `dims` in which this process is the first rank and the others do not exist."""
    if not dims.mesh:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dims.world_size)
    try:
        yield make_mesh(dims, "cpu")
    finally:
        dist.destroy_process_group()


def parallelize(model: Llama, config: TrainConfig, mesh: DeviceMesh | None) -> None:
    """Parallelize `model`, which is converted to float8 and on the meta device, over `mesh` (None: one process).

    Args:
        mesh: from `make_mesh`.
    Raises:
        InputError: a rank has too few gradients of a group to reduce them in float8.
    """
    dims = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is not None and "tp" in dims:
        _split_linears(model, mesh["tp"])
    degree = config.parallelism.expert_parallel_degree
    expert_mesh = _split_experts(model, config, mesh) if mesh is not None and degree > 1 else None
    if config.activation_checkpoint.store_in_float8:
        store_activations_in_float8(model)
    _checkpoint_blocks(model, config)
    if config.training.compile:
        for block in model.iter_blocks():
            block.compile(fullgraph=expert_mesh is None)
        if "tp" in dims:
            model.model.embed_tokens.register_forward_hook(_finish_collective)
    data_parallel = tuple(name for name in dims if name != "tp")
    if mesh is not None and data_parallel:
        _shard(model, config, mesh[data_parallel], expert_mesh)


def _checkpoint_blocks(model: Llama, config: TrainConfig) -> None:
    checkpoint = config.activation_checkpoint
    if config.training.compile:
        _reset_memory_budget()
    apply_activation_checkpointing(
        model.iter_blocks(),
        mode=checkpoint.mode,
        selective_ac_option=checkpoint.selective_ac_option if checkpoint.mode == "selective" else None,
        memory_budget=checkpoint.memory_budget if checkpoint.mode == "memory_budget" else None,
        preserve_rng_state=False,  # the model has no dropout
        also_save=checkpoint.selective_ac_also_save,
        never_save=checkpoint.selective_ac_never_save,
    )


def _reset_memory_budget() -> None:
    """Let the compiler save all activations: the budget is the process's, and an earlier run may have set it."""
    from quaver.torch_private.compiler import set_activation_memory_budget  # imports the compiler

    set_activation_memory_budget(1.0)


def _split_experts(model: Llama, config: TrainConfig, mesh: DeviceMesh) -> DeviceMesh:
    """Split the experts over the dim "ep" of a new mesh, and return that mesh; see [Note: mesh of experts]."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    degree = config.parallelism.expert_parallel_degree
    sizes = {**sizes, "dp_shard": sizes["dp_shard"] // degree, "ep": degree}
    expert_mesh = init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    style = Float8ExpertParallel(grad_weight_from_codes=config.float8.grad_weight_from_codes)
    for experts in list_modules(model, Experts):
        parallelize_module(experts, expert_mesh["ep"], style)
    return expert_mesh


def _shard(model: Llama, config: TrainConfig, mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> None:
    """Shard with one FSDP2 group per block, one for the output projection, and the root for the rest.

    Split experts have a separate group on `expert_mesh`.
    """
    if expert_mesh is not None:
        fsdp_mesh = expert_mesh[tuple(name for name in expert_mesh.mesh_dim_names or () if name != "ep")]
        for experts in list_modules(model, Experts):
            fully_shard(experts, **make_fsdp_options(config, fsdp_mesh))
    groups: list[nn.Module] = list(model.iter_blocks())
    if not config.model.tie_word_embeddings:  # a tied projection is in the embedding's group
        groups.append(model.lm_head)
    for group in groups:
        fully_shard(group, **make_fsdp_options(config, mesh))
    fully_shard(model, **make_fsdp_options(config, mesh, dtype=config.training.residual_stream_dtype))
    if config.comm.float8_gradients:
        with reraise_as_input_error("comm.float8_gradients: "):
            reduce_gradients_in_float8(model)


def make_fsdp_options(config: TrainConfig, mesh: DeviceMesh, *, dtype: str = "") -> dict[str, Any]:
    """Return the arguments of `fully_shard` for a group of parameters; see [Note: precision under FSDP2].

    Args:
        dtype: the dtype in which they are gathered; "" for the dtype of the computation.
    """
    param_dtype = getattr(torch, dtype or config.training.mixed_precision_param)
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = {"default": None, "always": True, "never": False}[config.parallelism.fsdp_reshard_after_forward]
    return {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": policy}


def _finish_collective(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Copy `output` of the embedding, as a forward hook, and so wait for the collective that computes it.

    The embedding returns an AsyncCollectiveTensor. As an input of a block that torch 2.13 compiled it gets no gradient:
    an error in backward, or under FSDP2 a silently wrong gradient. torch 2.11 is right. Remove this when the gradients
    of `compile` and `tp` in tests/lab/integration/test_train_distributed.py agree without it.
    """
    return output.clone()


@contextmanager
def ignore_view_warning() -> Iterator[None]:
    """Silence, in the block, FSDP2's warning that a module returns a view: an in-place operation would drop its hooks.

    A tensor parallel module returns the local tensor of a DTensor, which is a view; no code here writes into one.
    Remove this when torch no longer warns about `to_local`, as 2.13 does.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")
        yield


def _split_linears(model: Llama, mesh: DeviceMesh) -> None:
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": _make_colwise(model.lm_head, input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, styles)
    for block in model.iter_blocks():
        parallelize_module(block, mesh, _make_block_styles(block))


def _make_block_styles(block: Block) -> dict[str, ParallelStyle]:
    attention, mlp = block.self_attn, block.mlp
    if not isinstance(mlp, FeedForward):
        raise NotImplementedError("tensor parallelism does not split experts")  # the config was checked
    # The other inputs of attention (cos, sin, and the mask or None) are replicated.
    return {
        "input_layernorm": SequenceParallel(),
        "self_attn": _make_sequence_gather([attention.q_proj, attention.k_proj, attention.v_proj], other_inputs=3),
        "self_attn.q_proj": _make_colwise(attention.q_proj),
        "self_attn.k_proj": _make_colwise(attention.k_proj),
        "self_attn.v_proj": _make_colwise(attention.v_proj),
        "self_attn.o_proj": _make_rowwise(attention.o_proj, output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": _make_sequence_gather([mlp.gate_proj, mlp.up_proj]),
        "mlp.gate_proj": _make_colwise(mlp.gate_proj),
        "mlp.up_proj": _make_colwise(mlp.up_proj),
        "mlp.down_proj": _make_rowwise(mlp.down_proj, output_layouts=Shard(1)),
    }


def check_tensor_parallel(model: Llama, degree: int) -> None:
    """Raise InputError for a Float8Linear whose blocks tensor parallelism over `degree` ranks would cut."""
    if degree == 1:
        return
    split_dims = SPLIT_DIMS | {"lm_head": 0}
    for name, linear in model.named_modules():
        if isinstance(linear, Float8Linear):
            with reraise_as_input_error(f"parallelism.tensor_parallel_degree = {degree}: {name}: "):
                check_can_be_sharded(linear, split_dims[name.rpartition(".")[2]], degree)


def _make_sequence_gather(readers: list[nn.Linear], other_inputs: int = 0) -> ParallelStyle:
    """Gather a module's first input along the sequence, in float8 if all of its `readers` compute in float8."""
    layouts: dict[str, Any] = {
        "input_layouts": (Shard(1), *[None] * other_inputs),
        "desired_input_layouts": (Replicate(), *[None] * other_inputs),
    }
    if all(isinstance(reader, Float8Linear) for reader in readers):
        return PrepareFloat8ModuleInput(**layouts)
    return PrepareModuleInput(**layouts)


def _make_colwise(linear: nn.Linear, **layouts: Any) -> ParallelStyle:
    return (Float8ColwiseParallel if isinstance(linear, Float8Linear) else ColwiseParallel)(**layouts)


def _make_rowwise(linear: nn.Linear, **layouts: Any) -> ParallelStyle:
    return (Float8RowwiseParallel if isinstance(linear, Float8Linear) else RowwiseParallel)(**layouts)

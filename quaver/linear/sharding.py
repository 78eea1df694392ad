"""The shardings of a tensor-parallel linear over T ranks.

    ColwiseSharding      weight [N/T, K]    input replicated              output and grad_output [.., N/T]
    RowwiseSharding      weight [N, K/T]    input [.., K/T]               output reduced, or reduced and scattered
    PartialSumSharding   weight [N, K/T]    input [.., K/T]               output Partial()
    ReplicatedSharding   weight [N, K]      input replicated or by token  output as the input

A linear calls them on plain tensors, inside its one autograd function. Only an input that several linears share is
all-gathered outside (parallel/input_all_gather.py).
"""

from __future__ import annotations

import itertools
import typing
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from quaver.linear.quantize import Quantizer
from quaver.linear.scale_state import LinearScaleSlots
from quaver.linear.shared_input import choose_quantizer
from quaver.linear.tensor_parallel_quantizer import GatheringQuantizer, TensorParallelQuantizer
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scaling import PersistentScale
from quaver.runtime.agreement import check_ranks_agree_once
from quaver.runtime.collectives import all_reduce, reduce_scatter


def to_local(parameter: Tensor) -> Tensor:
    """Return `to_local()` of a DTensor, which is differentiable, and other tensors unchanged."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def resolve_sequence_dim(tensor: Tensor, dim: int, group: ProcessGroup) -> int:
    """Return `dim` counted from the first one. Raises ValueError if the ranks cannot share it evenly."""
    dim %= tensor.dim()
    if tensor.shape[dim] % group.size():
        raise ValueError(
            f"sequence parallel: expected dim {dim} of {list(tensor.shape)} to be a multiple of the {group.size()} "
            "ranks of tensor parallelism; pad the sequence"
        )
    return dim


class ShardedLinear(Protocol):
    """The members of Float8Linear that a `LinearSharding` uses. The file of Float8Linear imports this one."""

    in_features: int
    out_features: int
    weight: Tensor
    scale_slots: LinearScaleSlots | None

    @property
    def float8_config(self) -> Float8LinearConfig:
        """The config of the linear."""

    def forward_local(self, input: Tensor, sharding: LinearSharding | None) -> Tensor:
        """Run the linear on this rank's tensors."""


class LinearSharding:
    """How tensor parallelism shards a linear: its quantizers, its local parameters and the reduction of its output.

    The input of `forward` is a DTensor, which is redistributed in high precision as the sharding needs it; a plain
    tensor, which is this rank's part; or an all-gathered `Float8Tensor`.
    """

    weight_dim: int | None = None
    """The dim of the weight that the ranks shard, or None if each rank has the whole weight."""
    input_dim: int | None = None
    """The dim of the input [M, K] that the ranks shard, or None if each rank has the whole input."""
    grad_output_dim: int | None = None
    """The dim of grad_output [M, N] that the ranks shard, or None if each rank has the whole grad_output."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()

    def forward(self, linear: ShardedLinear, input: Tensor) -> Tensor:
        """Run the forward of a sharded linear, after `check_ranks_agree_on_linear`."""
        check_ranks_agree_on_linear(linear, self.group)
        return self._forward(linear, input)

    def _forward(self, linear: ShardedLinear, input: Tensor) -> Tensor:
        """Run the forward by the linear's `forward_local` on local tensors."""
        raise NotImplementedError

    def get_local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return this rank's part of weight and bias, differentiably, and a bias to add to the reduced output."""
        raise NotImplementedError

    def make_weight_quantizer(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None
    ) -> Quantizer:
        """Return the quantizer of this rank's part of the weight."""
        return self._make_quantizer(casts, hp_dtype, scale, self.weight_dim)

    def make_input_quantizer(
        self,
        input: Tensor,
        casts: OperandCasts,
        hp_dtype: torch.dtype,
        scale: PersistentScale | None,
        linear_id: int | None,
    ) -> Quantizer:
        """Return the quantizer of this rank's part of the input; `linear_id` as in `choose_quantizer`."""
        if self.input_dim is None:
            return choose_quantizer(input, casts, hp_dtype, scale, linear_id)
        return self._make_quantizer(casts, hp_dtype, scale, self.input_dim)

    def make_grad_output_quantizer(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None
    ) -> Quantizer:
        """Return the quantizer of this rank's part of grad_output."""
        return self._make_quantizer(casts, hp_dtype, scale, self.grad_output_dim)

    def check_config(self, linear: ShardedLinear, config: Float8LinearConfig) -> None:
        """Raise ValueError if the parts of the weight would split blocks of `config`."""
        if self.weight_dim is not None:
            check_can_be_sharded(linear, self.weight_dim, self.group.size(), config)

    def _make_quantizer(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, sharded_dim: int | None
    ) -> Quantizer:
        if sharded_dim is None:
            return Quantizer(casts, hp_dtype, scale)
        return TensorParallelQuantizer(casts, hp_dtype, scale, self.group, sharded_dim)

    def reduce_output(self, output: Tensor, leading: torch.Size) -> Tensor:
        """Reduce the ranks' `output` [M, N] of an input [*leading, K], to [M, N] or a sharded [*leading, N]."""
        return output

    def _wrap_output(self, output: Tensor, shape: Sequence[int], placement: Placement) -> DTensor:
        """Wrap this rank's part of an output. `shape` is explicit, since parts may have different lengths."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            output, self.mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def __deepcopy__(self, memo: object) -> LinearSharding:
        return self  # groups cannot be copied


class ColwiseSharding(LinearSharding):
    """weight [N/T, K], input replicated, output and grad_output [.., N/T]."""

    weight_dim = 0
    grad_output_dim = 1

    def get_local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return to_local(weight), None if bias is None else to_local(bias), None

    def _forward(self, linear: ShardedLinear, input: Tensor) -> Tensor:
        """See `LinearSharding`. Returns a DTensor, Shard(-1)."""
        if isinstance(input, DTensor):
            # redistribute() on a replicated input would reduce the gradient once for each linear that reads the input.
            replicated = input if input.placements[0] == Replicate() else input.redistribute(placements=[Replicate()])
            input = typing.cast(Tensor, PartialGrad.apply(replicated))
        output = linear.forward_local(input, self)
        return self._wrap_output(output, [*output.shape[:-1], linear.out_features], Shard(output.dim() - 1))


class RowwiseSharding(LinearSharding):
    """weight [N, K/T], input [.., K/T], output summed over the ranks: replicated, or scattered along `sequence_dim`."""

    weight_dim = 1
    input_dim = 1

    def __init__(self, mesh: DeviceMesh, sequence_dim: int | None = None) -> None:
        super().__init__(mesh)
        self.sequence_dim = sequence_dim

    def get_local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if bias is None:
            return to_local(weight), None, None
        # The bias is added once, after the reduction. If ranks then hold different tokens, its gradient is partial.
        partial = None if self.sequence_dim is None else [Partial()]
        return to_local(weight), None, typing.cast(DTensor, bias).to_local(grad_placements=partial)

    def make_grad_output_quantizer(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None
    ) -> Quantizer:
        if self.sequence_dim is None:
            return super().make_grad_output_quantizer(casts, hp_dtype, scale)
        return GatheringQuantizer(casts, hp_dtype, scale, self.group, self.sequence_dim)

    def _forward(self, linear: ShardedLinear, input: Tensor) -> Tensor:
        """See `LinearSharding`. Returns a DTensor, Replicate() or Shard(sequence_dim)."""
        if isinstance(input, DTensor):
            input = input.redistribute(placements=[Shard(input.dim() - 1)]).to_local()
        output = linear.forward_local(input, self)
        placement = Replicate() if self.sequence_dim is None else Shard(self.sequence_dim)
        return DTensor.from_local(output, self.mesh, [placement], run_check=False)

    def reduce_output(self, output: Tensor, leading: torch.Size) -> Tensor:
        if self.sequence_dim is None:
            return all_reduce(output, self.group)
        if self.sequence_dim % (len(leading) + 1) == len(leading):
            raise ValueError(
                f"expected an output that is sharded along its tokens, got S({self.sequence_dim}) (features)"
            )
        output = output.view(*leading, output.shape[-1])
        return reduce_scatter(output, resolve_sequence_dim(output, self.sequence_dim, self.group), self.group)


class PartialSumSharding(RowwiseSharding):
    """weight [N, K/T], input [.., K/T]; the output is Partial(), and its caller redistributes it."""

    def get_local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `LinearSharding`. The bias is zero on all ranks but the first, with the whole gradient on every rank."""
        weight, _, local_bias = super().get_local_parameters(weight, bias)
        if local_bias is not None and self.mesh.get_local_rank() > 0:
            local_bias = local_bias - local_bias.detach()
        return weight, None, local_bias

    def _forward(self, linear: ShardedLinear, input: Tensor) -> Tensor:
        """See `LinearSharding`. Returns a DTensor, Partial()."""
        input = typing.cast(DTensor, input).redistribute(placements=[Shard(input.dim() - 1)]).to_local()
        return DTensor.from_local(linear.forward_local(input, self), self.mesh, [Partial()], run_check=False)

    def reduce_output(self, output: Tensor, leading: torch.Size) -> Tensor:
        return output


class ReplicatedSharding(LinearSharding):
    """weight [N, K] on every rank; the input is replicated or sharded by token, and the output has its placement."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        """`placement`: the input's, Replicate() or Shard of a dim before the last."""
        super().__init__(mesh)
        self.placement = placement
        self.input_dim = self.grad_output_dim = None if placement == Replicate() else 0  # tokens

    def get_local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        placements = [Replicate() if self.placement == Replicate() else Partial()]  # of the gradients
        local_bias = None if bias is None else typing.cast(DTensor, bias).to_local(grad_placements=placements)
        return typing.cast(DTensor, weight).to_local(grad_placements=placements), local_bias, None

    def _forward(self, linear: ShardedLinear, input: Tensor) -> Tensor:
        """See `LinearSharding`. Returns a DTensor in `placement`."""
        local = typing.cast(DTensor, input).redistribute(placements=[self.placement]).to_local()
        output = linear.forward_local(local, self)
        return self._wrap_output(output, [*input.shape[:-1], linear.out_features], self.placement)


_linear_counters: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""By name of the group: counts the linears that it compared."""
_linear_numbers: WeakKeyDictionary[ShardedLinear, int] = WeakKeyDictionary()
"""The number of each linear in the order of the first comparisons, which all ranks of a group run alike."""


def check_ranks_agree_on_linear(linear: ShardedLinear, group: ProcessGroup) -> None:
    """Check, the first time and after a change, that the ranks of `group` run the collectives of `linear` alike.

    A change is another config, a load of persistent scales, or a weight that is frozen or trained. Compiled code does
    not check, so the ranks of a group must all be compiled, or none.

    Raises:
        RuntimeError: on every rank, if they differ; on this rank, if only this one changed.
    """
    if torch.compiler.is_compiling():
        return
    config, scale_slots, trains = linear.float8_config, linear.scale_slots, linear.weight.requires_grad

    def describe() -> list[str]:
        slots = [] if scale_slots is None else scale_slots.list_named_slots()
        loaded = [
            f"{name} loaded quant_scale {conversion_slots.loaded_scales[slot]}"
            for name, conversion_slots, slot in slots
        ]
        if linear not in _linear_numbers:
            _linear_numbers[linear] = next(_linear_counters[group.group_name])
        title = f"linear {_linear_numbers[linear]} ({linear.in_features} -> {linear.out_features})"
        return [f"{title}, trains: {trains}", *(f"{title}, {part}" for part in str(config).split("; ")), *loaded]

    fingerprint = [config, trains, 0 if scale_slots is None else scale_slots.conversion_slots.loads]
    check_ranks_agree_once(linear, fingerprint, describe, lambda: [group], subject="tensor-parallel linears")


def check_can_be_sharded(
    linear: ShardedLinear, weight_dim: int, num_ranks: int, config: Float8LinearConfig | None = None
) -> None:
    """Raise ValueError if sharding the weight's `weight_dim` over `num_ranks` would split blocks that share a scale.

    `config`: instead of the linear's.
    """
    casts = (config or linear.float8_config).casts
    sharded_operands = ((casts.weight, weight_dim), (casts.grad_output if weight_dim == 0 else casts.input, 1))
    # Configs give the layout of row codes; in column codes blocks are transposed.
    cast_dims = [(operand.row, dim) for operand, dim in sharded_operands]
    cast_dims += [(operand.column, 1 - dim) for operand, dim in sharded_operands]
    lengths = [cast.require_layout("tensor parallelism")[dim] for cast, dim in cast_dims if not cast.is_disabled]
    block = max([1, *lengths])
    name, features = (("out", linear.out_features), ("in", linear.in_features))[weight_dim]
    rank_features = -(-features // num_ranks)
    if num_ranks > 1 and rank_features % block:
        fitting_features = num_ranks * block * -(-rank_features // block)
        raise ValueError(
            f"tensor parallelism expects parts of whole blocks, a multiple of {block} features on each rank, got "
            f"{rank_features} ({name}_features {features} on {num_ranks} ranks); {fitting_features} in all "
            "would fit, and rowwise recipes take any number"
        )


def derive_sharding(linear: ShardedLinear, input: Tensor) -> LinearSharding:
    """Derive the sharding of a linear whose weight other code made a DTensor, for example torch's ColwiseParallel.

    The output has the placement that nn.Linear gives it: Shard(-1), Partial(), or the input's for a replicated weight.
    """
    weight = typing.cast(DTensor, linear.weight)
    placement = weight.placements[0] if weight.device_mesh.ndim == 1 else None
    if not isinstance(input, DTensor) or placement not in (Shard(0), Shard(1), Replicate()):
        raise RuntimeError(
            f"the weight of this Float8Linear is sharded ({weight.placements} on {weight.device_mesh.ndim} mesh dims) "
            "when its forward runs. If fully_shard did that, call the module that was given to it; if tensor "
            "parallelism, use (Float8)ColwiseParallel or (Float8)RowwiseParallel on a mesh with one dim"
        )
    if linear.scale_slots is not None:
        linear.scale_slots.conversion_slots.ranks_read_is_known = True
    if not isinstance(placement, Shard):
        input_placement = input.placements[0]
        is_by_token = isinstance(input_placement, Shard) and input_placement.dim % input.dim() < input.dim() - 1
        return ReplicatedSharding(weight.device_mesh, input_placement if is_by_token else Replicate())
    check_can_be_sharded(linear, placement.dim, weight.device_mesh.size())
    return ColwiseSharding(weight.device_mesh) if placement == Shard(0) else PartialSumSharding(weight.device_mesh)


class PartialGrad(torch.autograd.Function):
    """The local tensor of a replicated DTensor. Its gradient is a DTensor in Partial(), which is reduced once, later.

    With `to_local(grad_placements=[Partial()])` torch would reduce it here, once for each linear that reads the input.
    """

    @staticmethod
    def forward(ctx: Any, replicated: DTensor) -> Tensor:
        ctx.mesh = replicated.device_mesh
        return replicated.to_local()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return DTensor.from_local(grad, ctx.mesh, [Partial()], run_check=False)

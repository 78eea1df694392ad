"""Expert parallelism of float8 experts, for `parallelize_module`: tokens travel to their experts as float8 codes.

Rank r of R holds experts r * E / R and on, and its own tokens. A forward sends each pair of a token and one of its
experts to the expert's rank (dispatch), and its result back (combine), where the routing weights sum it:

    forward     dispatch    input of the first matmul         codes or high precision
                combine     output of the last matmul         high precision
    backward    dispatch    grad_output of the last matmul    codes or high precision
                combine     grad_input of the first matmul    high precision

A row's codes depend on that row alone, so casting rows commutes with sending them. [Note: what travels as codes] A
matrix travels as codes only where they give all its readers here the operands of one process:

    row and column casts are one (tensorwise)    always: the ranks agree on each expert's amax before they cast
    scales of rows, or of blocks along rows      where only the row operand is read: no weight is trained, or
                                                 gradients are those of backward="dequantized"
    all others                                   never: the column operand (grad_weight) is a cast of the
                                                 high-precision rows of all ranks, or those rows themselves

With `grad_weight_from_codes` the second kind travels as codes in training too, and the column operand is made of the
dequantized rows. docs/experts.md counts the bytes.

Rows arrive sorted by expert, then rank, then position, which is how one process with the tokens of all ranks sorts
them. So each rank has the results of that process, and each weight its gradient, to the bit; nothing is summed over
ranks.
"""

from __future__ import annotations

import typing
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from quaver.experts.cast import amax_of_scale_rows, cast_groups
from quaver.experts.grouped_mm import quantize_groups
from quaver.experts.groups import group_of_rows
from quaver.experts.module import RoutedExperts, weights_of
from quaver.kernels.cast import cast_with_scale
from quaver.kernels.operands import Operand, Operands, present
from quaver.linear.tensor import Float8Tensor
from quaver.parallel.linear_sharding import local_part
from quaver.recipes import scaling
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scale_layout import ALL
from quaver.runtime.agreement import check_ranks_agree
from quaver.runtime.collectives import all_to_all, max_over_ranks


class TokenDispatch:
    """The exchange of one routing: see `Dispatch` (experts/dispatch.py), and the top of the file."""

    def __init__(
        self,
        pairs: int,
        ends: Tensor,
        counts: Tensor,
        sent: list[int],
        received: list[int],
        group: ProcessGroup,
        grad_weight_from_codes: bool,
    ) -> None:
        """Keep what says where each row goes.

        Args:
            pairs, ends: of this rank, as `Dispatcher` takes them.
            counts: int64 [R, E / R], how many rows come from each rank for each expert here.
            sent, received: how many rows go to each rank, and come from it.
        """
        self._pairs, self._all_ends, self._group = pairs, ends, group
        self._sent, self._received = sent, received
        self._grad_weight_from_codes = grad_weight_from_codes
        numbers = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
        arrived = numbers.repeat_interleave(counts.flatten(), output_size=sum(received))
        self.experts, self._by_expert = torch.sort(arrived, stable=True)
        self.ends = counts.sum(0).cumsum(0).to(torch.int32)

    def dispatch(self, rows: Tensor) -> Tensor:
        """Rows sorted by expert, [pairs, columns] -> [rows here, columns]. Rows past the last end stay."""
        return all_to_all(rows[: sum(self._sent)], self._received, self._sent, self._group)[self._by_expert]

    def combine(self, rows: Tensor) -> Tensor:
        """[rows here, columns] -> [pairs, columns], 0 past the last end."""
        arrived = torch.empty_like(rows)
        arrived[self._by_expert] = rows
        back = all_to_all(arrived, self._sent, self._received, self._group)
        missing = self._pairs - back.shape[0]
        return F.pad(back, (0, 0, 0, missing)) if missing else back

    def quantize(self, hp: Tensor, casts: OperandCasts, row: bool, column: bool) -> Operands:
        """The operands of `dispatch(hp)`; see [Note: what travels as codes]."""
        if not _travels_as_codes(casts, row, column, self._grad_weight_from_codes):
            return quantize_groups(self.dispatch(hp), casts, self.ends, self.ends.shape[0], row, column)
        cast = casts.row if row else casts.of_column
        if not cast.is_tensorwise:
            return self._quantize_rows(hp, casts, column)
        operand = self._quantize_tensorwise(hp, cast, casts.power_of_2)
        return Operands(operand if row else None, operand if column else None)

    def _quantize_tensorwise(self, hp: Tensor, cast: CastConfig, power_of_2: bool) -> Operand:
        """One scale for each expert, of its tokens on all ranks."""
        experts = self._all_ends.shape[0]
        expert = group_of_rows(self._all_ends, experts, hp.shape[0], hp.device)[0]
        amax = max_over_ranks(amax_of_scale_rows(hp, expert, experts, ALL), self._group)
        scales = scaling.scales_of(amax.to(hp.dtype), cast.float8_dtype, power_of_2, cast.scales_mode)
        factor, divisor_of = scaling.factor_of(scales, cast.mode)
        codes = cast_with_scale(hp, cast.float8_dtype, factor[expert], None, divisor_of)[0]
        here = self.ends.shape[0]
        return Operand(self.dispatch(codes), scales.dequant[:, 0].narrow(0, self._group.rank() * here, here))

    def _quantize_rows(self, hp: Tensor, casts: OperandCasts, column: bool) -> Operands:
        """Codes with the scales of their rows, in one message."""
        made = present(cast_groups(hp, casts.row, None, 1, True, False, casts.power_of_2).row)
        scale_dtype = torch.float8_e8m0fnu if casts.row.scale_calculation_mode else torch.float32
        parts = made.data, typing.cast(Tensor, made.dequant_scale).to(scale_dtype).contiguous()
        arrived = self.dispatch(torch.cat([part.view(torch.uint8) for part in parts], 1))
        codes, scale = (
            bytes_of.contiguous().view(part.dtype)
            for bytes_of, part in zip(arrived.tensor_split([hp.shape[1]], 1), parts, strict=True)
        )
        operand = Operand(codes, scale.float(), made.layout)
        if casts.is_dequantized or not column:
            return Operands(operand, operand if column else None)
        rounded = scaling.dequantize(codes, scale.float(), hp.dtype, made.layout)
        return quantize_groups(rounded, casts, self.ends, self.ends.shape[0], False, True)._replace(row=operand)


def _travels_as_codes(casts: OperandCasts, row: bool, column: bool, grad_weight_from_codes: bool) -> bool:
    """Whether a matrix that is read by `row` and by `column` travels in float8: [Note: what travels as codes]."""
    if casts.is_dequantized:
        row, column = True, False
    cast = casts.row if row else casts.column
    if cast.is_tensorwise:
        return casts.is_one or not (row and column)
    return row and not cast.is_disabled and cast.has_two_casts and (grad_weight_from_codes or not column)


class ExpertDispatcher:
    """Sends tokens to the ranks of their experts; see `Dispatcher` (experts/dispatch.py).

    Args:
        mesh: one axis, over whose ranks the experts are split in order, each with as many.
        experts: how many all ranks have.
        grad_weight_from_codes: see `Float8ExpertParallel`.
    """

    def __init__(self, mesh: DeviceMesh, experts: int, *, grad_weight_from_codes: bool = False) -> None:
        self.mesh, self.ranks, self.experts = mesh, mesh.size(), experts
        self.grad_weight_from_codes = grad_weight_from_codes

    def __call__(self, pairs: int, ends: Tensor, call: str) -> TokenDispatch:
        """See `Dispatcher`. Raises RuntimeError on every rank where ranks disagree about `call`."""
        group, ranks = self.mesh.get_group(), self.mesh.size()
        own = ends.diff(prepend=ends.new_zeros(1)).long().view(ranks, -1)
        digest = zlib.crc32(call.encode())
        announced = torch.cat([own, own.new_full((ranks, 1), digest)], 1)
        arrived = all_to_all(announced, [1] * ranks, [1] * ranks, group)
        counts = arrived[:, :-1]
        sent, received, unlike = self._read(torch.stack([own.sum(1), counts.sum(1), arrived[:, -1] - digest]), pairs)
        if any(unlike):
            check_ranks_agree([call], group, ends.device, what="the tokens that they send to experts")
        return TokenDispatch(pairs, ends, counts, sent, received, group, self.grad_weight_from_codes)

    def _read(self, numbers: Tensor, pairs: int) -> list[list[int]]:
        """`numbers` [3, R] on the host: the rows to send and to receive, and 0 from ranks that agree."""
        lists: list[list[int]] = numbers.tolist()
        return lists

    def note(self, experts: nn.Module) -> str:
        """See `Dispatcher`."""
        config: Float8LinearConfig | None = getattr(experts, "float8_config", None)
        first, last = (each.requires_grad for each in weights_of(experts).values())
        are_codes = [False, False]
        if config is not None:
            is_read = getattr(experts, "has_bias", False) or getattr(experts, "has_post_expert_norm", False)
            readers = ((config.casts.input, first), (config.casts.grad_output, last))
            are_codes = [_travels_as_codes(casts, True, each, self.grad_weight_from_codes) for casts, each in readers]
            are_codes[1] = are_codes[1] and not is_read
        tokens, gradients = ("float8 codes" if each else "high precision" for each in are_codes)
        return (
            f"expert parallelism over {self.ranks} ranks: tokens travel to experts in {tokens}, and gradients of their "
            f"results in {gradients}"
        )

    def local_part(self, parameter: Tensor) -> Tensor:
        """See `Dispatcher`."""
        return local_part(parameter)

    def __deepcopy__(self, memo: object) -> ExpertDispatcher:
        return self  # groups cannot be copied


class Float8ExpertParallel(ParallelStyle):
    """Splits the experts of a `Float8Experts` over a mesh, whose ranks have tokens of their own.

    The trainer's experts in high precision are split, too. Parameters become DTensors, `Shard(0)`, and a state_dict has
    all experts. Every rank calls the experts and goes backward in each step, also one without tokens. Results and
    gradients are those of one process with the tokens of all ranks, to the bit: gradients of a sum of the ranks'
    losses. A norm after the experts stays whole, and has this rank's part of its gradient.

    Args:
        grad_weight_from_codes: let tokens and gradients travel as codes, one byte an element, also where a weight's
            gradient reads another cast of them than the codes (row-wise and block-wise recipes). That cast is then made
            of the dequantized codes. With scales that are powers of two, gradients of weights then differ from those of
            one process by elements below 2^-13 of the largest in their row, column or block (subnormal e4m3); where
            grad_weight is in high precision, by the rounding of both its operands.
    Raises:
        ValueError: no Float8Experts, experts that are split already, or as many as are no multiple of the ranks.
        NotImplementedError: the backend cannot exchange bytes by all_to_all_single, or weights are stored in float8.
        RuntimeError: ranks with other experts or another config.
    """

    def __init__(self, *, grad_weight_from_codes: bool = False) -> None:
        self.grad_weight_from_codes = grad_weight_from_codes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module, device_mesh)
        experts = typing.cast(RoutedExperts, module)
        shapes = {name: list(each.shape) for name, each in experts.named_parameters(recurse=False)}
        precision = getattr(experts, "float8_config", "high precision")
        line = f"{precision}, {shapes}, grad_weight_from_codes={self.grad_weight_from_codes}"
        device = torch.device(device_mesh.device_type)
        check_ranks_agree([line], device_mesh.get_group(), device, what="experts")
        check_backend(device_mesh, device)
        for name, each in list(experts.named_parameters(recurse=False)):
            shard = distribute_tensor(each.detach(), device_mesh, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(shard, requires_grad=each.requires_grad))
        experts.dispatcher = ExpertDispatcher(
            device_mesh, shapes["down_proj"][0], grad_weight_from_codes=self.grad_weight_from_codes
        )
        return experts


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(module, RoutedExperts):
        raise ValueError(
            f"Float8ExpertParallel expects a Float8Experts, got {type(module).__name__}; call "
            "convert_to_float8_training first"
        )
    for name, weight in weights_of(module).items():
        if isinstance(weight, Float8Tensor):
            raise NotImplementedError(
                f"Float8ExpertParallel: expected weights in high precision, got {name} stored in float8; split the "
                "experts of a model that is neither frozen nor has float8 primary weights"
            )
    count = next(iter(weights_of(module).values())).shape[0]
    if count != module.num_experts:
        raise ValueError(
            f"expected whole experts, got a module of {module.num_experts} with weights of {count}; load the model "
            'without another expert parallelism, or with transformers\' ep_implementation="float8"'
        )
    if count % mesh.size():
        raise ValueError(f"expert parallelism expects as many experts on each rank, got {count} on {mesh.size()} ranks")


def check_backend(mesh: DeviceMesh, device: torch.device) -> None:
    """Exchange one byte with each rank, so that a backend that cannot says so before the first step.

    Raises NotImplementedError.
    """
    ones, group = [1] * mesh.size(), mesh.get_group()
    try:
        all_to_all(torch.zeros(mesh.size(), 1, dtype=torch.uint8, device=device), ones, ones, group)
    except RuntimeError as error:
        raise NotImplementedError(
            "expert parallelism sends codes by all_to_all_single of uint8, which the backend "
            f"{dist.get_backend(group)} cannot on {device.type} ({error}); use gloo or nccl"
        ) from error

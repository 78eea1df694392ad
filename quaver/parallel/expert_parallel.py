"""Expert parallelism of float8 experts, for `parallelize_module`: tokens are sent to their experts as float8 codes.

Rank r of R holds experts r * E / R to (r + 1) * E / R - 1, and its own tokens. A forward sends each pair of a token and
one of its experts to the expert's rank (dispatch) and the result back (combine), where the routing weights sum it:

    forward     dispatch    input of the first matmul         codes or high precision
                combine     output of the last matmul         high precision
    backward    dispatch    grad_output of the last matmul    codes or high precision
                combine     grad_input of the first matmul    high precision

[Note: what is sent as codes] A matrix is sent as codes only if all its readers on the receiving rank get the operands
of a single process from them. Casts of rows commute with sending rows, because a row's codes depend only on that row:

    row and column cast are one (tensorwise)     always: the ranks agree on each expert's amax before they cast
    scales of rows, or of blocks along rows      if only the row operand is read: no weight is trained, or gradients
                                                 follow backward="dequantized"
    all others                                   never: the column operand (grad_weight) is a cast of all ranks' rows
                                                 in high precision, or these rows themselves

With `grad_weight_from_codes` the second kind is sent as codes in training too, and the column operand is quantized from
the dequantized rows. docs/experts.md counts the bytes.

Rows arrive sorted by expert, then rank, then position, which is how one process with the tokens of all ranks sorts
them. So results and gradients are bit-identical to that process, and nothing is summed over ranks.
"""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from quaver.experts.cast import cast_groups, compute_scale_row_amax
from quaver.experts.function import quantize_groups
from quaver.experts.groups import find_groups
from quaver.experts.module import RoutedExperts, get_expert_weights
from quaver.kernels.cast import cast_with_scale
from quaver.kernels.operands import Operand, Operands, require
from quaver.linear.sharding import to_local
from quaver.linear.tensor import Float8Tensor
from quaver.recipes import scaling
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scale_layout import ALL
from quaver.runtime.agreement import check_ranks_agree, compute_digest
from quaver.runtime.collectives import all_gather, all_reduce_max, all_to_all, pad_rows
from quaver.runtime.warnings import warn_user


class AllToAllExchange:
    """The exchange of one routing; implements `TokenExchange` (experts/token_exchange.py)."""

    def __init__(
        self,
        num_pairs: int,
        ends: Tensor,
        counts: Tensor,
        sent_counts: list[int],
        received_counts: list[int],
        group: ProcessGroup,
        grad_weight_from_codes: bool,
    ) -> None:
        """Make the exchange.

        `counts` [R, E / R]: rows from each rank for each local expert; `sent_counts`, `received_counts`: rows per rank.
        """
        self._num_pairs, self._all_ends, self._group = num_pairs, ends, group
        self._sent_counts, self._received_counts = sent_counts, received_counts
        self._grad_weight_from_codes = grad_weight_from_codes
        local_experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
        received_experts = local_experts.repeat_interleave(counts.flatten(), output_size=sum(received_counts))
        self.row_experts, self._expert_order = torch.sort(received_experts, stable=True)
        self.ends = counts.sum(0).cumsum(0).to(torch.int32)

    def dispatch(self, rows: Tensor) -> Tensor:
        """Send rows sorted by expert, [pairs, columns] -> [local rows, columns], except rows past the last end."""
        sent = rows[: sum(self._sent_counts)]
        return all_to_all(sent, self._received_counts, self._sent_counts, self._group)[self._expert_order]

    def combine(self, rows: Tensor) -> Tensor:
        """Send rows back, [local rows, columns] -> [pairs, columns], 0 past the last end."""
        rows_by_rank = torch.empty_like(rows)
        rows_by_rank[self._expert_order] = rows
        returned = all_to_all(rows_by_rank, self._sent_counts, self._received_counts, self._group)
        return pad_rows(returned, self._num_pairs)

    def quantize(self, hp: Tensor, casts: OperandCasts, *, row: bool, column: bool) -> Operands:
        """Return the operands of `dispatch(hp)`; see [Note: what is sent as codes]."""
        if not sends_codes(casts, row=row, column=column, grad_weight_from_codes=self._grad_weight_from_codes):
            return quantize_groups(self.dispatch(hp), casts, self.ends, self.ends.shape[0], row=row, column=column)
        cast = casts.row if row else casts.column_source
        if not cast.is_tensorwise:
            return self._quantize_rows(hp, casts, column)
        operand = self._quantize_tensorwise(hp, cast, casts.power_of_2)
        return Operands(operand if row else None, operand if column else None)

    def _quantize_tensorwise(self, hp: Tensor, cast: CastConfig, power_of_2: bool) -> Operand:
        """Quantize with one scale for each expert, from the amax of its tokens on all ranks, and dispatch the codes."""
        num_experts = self._all_ends.shape[0]
        expert = find_groups(self._all_ends, num_experts, hp.shape[0], hp.device)[0]
        amax = all_reduce_max(compute_scale_row_amax(hp, expert, num_experts, ALL), self._group)
        scales = scaling.compute_scales(amax.to(hp.dtype), cast.float8_dtype, power_of_2, cast.rule)
        factor = scaling.choose_factor(scales, cast.rule)
        codes = cast_with_scale(hp, cast.float8_dtype, factor[expert], None, cast.rule)[0]
        num_local_experts = self.ends.shape[0]
        local_scales = scales.dequant[:, 0].narrow(0, self._group.rank() * num_local_experts, num_local_experts)
        return Operand(self.dispatch(codes), local_scales)

    def _quantize_rows(self, hp: Tensor, casts: OperandCasts, column: bool) -> Operands:
        """Quantize rows and dispatch their codes and scales in one all-to-all."""
        sent = require(
            cast_groups(hp, casts.row, None, 1, row=True, column=False, power_of_2=casts.power_of_2).row,
            "the row operand",
        )
        scale_dtype = torch.float8_e8m0fnu if casts.row.scale_calculation_mode else torch.float32
        parts = sent.data, typing.cast(Tensor, sent.dequant_scale).to(scale_dtype).contiguous()
        received = self.dispatch(torch.cat([part.view(torch.uint8) for part in parts], 1))
        codes, scale = (
            received_bytes.contiguous().view(part.dtype)
            for received_bytes, part in zip(received.tensor_split([hp.shape[1]], 1), parts, strict=True)
        )
        operand = Operand(codes, scale.float(), sent.layout)
        if casts.is_dequantized or not column:
            return Operands(operand, operand if column else None)
        rounded = scaling.dequantize(codes, scale.float(), hp.dtype, sent.layout)
        requantized = quantize_groups(rounded, casts, self.ends, self.ends.shape[0], row=False, column=True)
        return Operands(operand, requantized.column)


def sends_codes(casts: OperandCasts, *, row: bool, column: bool, grad_weight_from_codes: bool) -> bool:
    """Return whether a matrix is sent as codes if these operands of it are read; see [Note: what is sent as codes]."""
    if casts.is_dequantized:
        row, column = True, False
    cast = casts.row if row else casts.column
    if cast.is_tensorwise:
        return casts.has_equal_casts or not (row and column)
    return row and not cast.is_disabled and cast.depends_on_direction and (grad_weight_from_codes or not column)


class AllToAllDispatcher:
    """Sends tokens to the ranks of their experts; implements `TokenDispatcher` (experts/token_exchange.py).

    Args:
        mesh: one axis; its ranks hold equal numbers of experts, in order.
        num_experts: the number of experts on all ranks.
        grad_weight_from_codes: see `Float8ExpertParallel`.
    """

    def __init__(self, mesh: DeviceMesh, num_experts: int, *, grad_weight_from_codes: bool = False) -> None:
        self.mesh, self.num_ranks, self.num_experts = mesh, mesh.size(), num_experts
        self.grad_weight_from_codes = grad_weight_from_codes
        self._has_compared_tokens = False

    def __call__(self, tokens: Tensor, ends: Tensor, description: str) -> AllToAllExchange:
        """See `TokenDispatcher`. Raises RuntimeError on every rank if ranks disagree about `description`.

        The first call that records gradients warns if all ranks have the same tokens.
        """
        group = self.mesh.get_group()
        counts, counts_and_differences = self.exchange_counts(ends, description)
        sent_counts, received_counts, differences = counts_and_differences.tolist()
        if any(differences):
            check_ranks_agree([description], group, subject="the tokens that they send to experts")
        if torch.is_grad_enabled() and not self._has_compared_tokens and self.num_ranks > 1:
            self._has_compared_tokens = True
            self._warn_of_equal_tokens(tokens, group)
        return AllToAllExchange(
            len(tokens), ends, counts, sent_counts, received_counts, group, self.grad_weight_from_codes
        )

    def _warn_of_equal_tokens(self, tokens: Tensor, group: ProcessGroup) -> None:
        """Warn on the first rank if the tokens of all ranks have the same number and norm. A collective."""
        norm = torch.linalg.vector_norm(tokens.detach(), dtype=torch.float32)
        norms_and_counts = all_gather(torch.stack([norm, norm.new_tensor(len(tokens))]).view(1, 2), 0, group)
        are_equal = norms_and_counts.equal(norms_and_counts[:1].expand_as(norms_and_counts))
        if len(tokens) and are_equal and group.rank() == 0:
            warn_user(
                f"all {self.num_ranks} ranks of expert parallelism have the same tokens, so the gradients of the "
                f"experts' weights are {self.num_ranks} times those of one rank's loss. The ranks of tensor "
                "parallelism have the same tokens: give each rank its part of them (sequence parallelism), or leave "
                "the experts whole"
            )

    def exchange_counts(self, ends: Tensor, description: str) -> tuple[Tensor, Tensor]:
        """Tell each rank how many rows it gets for each of its experts.

        Returns:
            `counts` of an `AllToAllExchange`; and int64 [3, R]: the rows to send to each rank and to receive from it,
            and 0 for a rank that agrees about `description`.
        """
        num_ranks = self.num_ranks
        counts_to_send = ends.diff(prepend=ends.new_zeros(1)).long().view(num_ranks, -1)
        digest = compute_digest(description)
        sent_lines = torch.cat([counts_to_send, counts_to_send.new_full((num_ranks, 1), digest)], 1)
        received_lines = all_to_all(sent_lines, [1] * num_ranks, [1] * num_ranks, self.mesh.get_group())
        counts, differences = received_lines[:, :-1], received_lines[:, -1] - digest
        return counts, torch.stack([counts_to_send.sum(1), counts.sum(1), differences])

    def describe_precision(self, experts: nn.Module) -> str:
        """See `TokenDispatcher`."""
        config: Float8LinearConfig | None = getattr(experts, "float8_config", None)
        trains_first, trains_last = (weight.requires_grad for weight in get_expert_weights(experts).values())
        are_codes = [False, False]
        if config is not None:
            readers = ((config.casts.input, trains_first), (config.casts.grad_output, trains_last))
            options = {"row": True, "grad_weight_from_codes": self.grad_weight_from_codes}
            are_codes = [sends_codes(casts, column=trains, **options) for casts, trains in readers]
            # A bias or a norm after the experts reads grad_output in high precision.
            is_read = getattr(experts, "has_bias", False) or getattr(experts, "has_post_expert_norm", False)
            are_codes[1] = are_codes[1] and not is_read
        tokens, gradients = ("float8 codes" if is_codes else "high precision" for is_codes in are_codes)
        return (
            f"expert parallelism over {self.num_ranks} ranks: tokens travel to experts in {tokens}, and gradients of "
            f"their results in {gradients}"
        )

    def to_local(self, parameter: Tensor) -> Tensor:
        return to_local(parameter)

    def __deepcopy__(self, memo: object) -> AllToAllDispatcher:
        return self  # groups cannot be copied


class Float8ExpertParallel(ParallelStyle):
    """Splits the experts of a `Float8Experts` over a mesh whose ranks have different tokens.

    If all ranks have the same tokens, as under tensor parallelism without sequence parallelism, each expert computes a
    token once for each rank, and its gradient is their sum: the first step warns. It also splits
    `RoutedExperts` in high precision. Parameters become DTensors in `Shard(0)`, and a state_dict has all experts. Every
    rank must call the experts and run their backward in each step, even without tokens. Results and gradients are
    bit-identical to one process with the tokens of all ranks and the sum of the ranks' losses. A norm after the experts
    is replicated, and its gradient on a rank covers that rank's tokens.

    Args:
        grad_weight_from_codes: send tokens and gradients as codes, one byte per element, even if grad_weight reads
            another cast of them than the codes (rowwise and blockwise recipes). That cast is then quantized from the
            dequantized codes. With power-of-two scales, grad_weight then differs from one process in elements below
            2^-13 of the largest in their row, column or block (subnormal e4m3). If grad_weight is in high precision, it
            differs by the rounding of both its operands.
    Raises:
        ValueError: no Float8Experts, experts that are split already, or an uneven number of experts per rank.
        NotImplementedError: the backend has no all_to_all_single of bytes, or weights are stored in float8.
        RuntimeError: ranks with different experts or configs.
    """

    def __init__(self, *, grad_weight_from_codes: bool = False) -> None:
        self.grad_weight_from_codes = grad_weight_from_codes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_experts(module, device_mesh)
        experts = typing.cast(RoutedExperts, module)
        parameters = dict(experts.named_parameters(recurse=False))
        shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
        precision = getattr(experts, "float8_config", "high precision")
        line = f"{precision}, {shapes}, grad_weight_from_codes={self.grad_weight_from_codes}"
        check_ranks_agree([line], device_mesh.get_group(), subject="experts")
        check_backend(device_mesh, torch.device(device_mesh.device_type))
        for name, parameter in parameters.items():
            shard = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        experts.dispatcher = AllToAllDispatcher(
            device_mesh, shapes["down_proj"][0], grad_weight_from_codes=self.grad_weight_from_codes
        )
        return experts


def _check_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(module, RoutedExperts):
        raise ValueError(
            f"Float8ExpertParallel expects a Float8Experts, got {type(module).__name__}; call "
            "convert_to_float8_training first"
        )
    for name, weight in get_expert_weights(module).items():
        if isinstance(weight, Float8Tensor):
            raise NotImplementedError(
                f"Float8ExpertParallel: expected weights in high precision, got {name} stored in float8; split the "
                "experts of a model that is neither frozen nor has float8 primary weights"
            )
    count = next(iter(get_expert_weights(module).values())).shape[0]
    if count != module.num_experts:
        raise ValueError(
            f"expected a module with all its experts, got num_experts {module.num_experts} with weights of {count} "
            "experts; load the model without another expert parallelism, or with transformers' "
            'ep_implementation="float8"'
        )
    if count % mesh.size():
        raise ValueError(
            f"expert parallelism expects the same number of experts on each rank, got {count} on {mesh.size()} ranks"
        )


def check_backend(mesh: DeviceMesh, device: torch.device) -> None:
    """Exchange one byte with each rank. Raises NotImplementedError if the backend has no all_to_all_single of bytes.

    Other errors, such as those of a network, stay as they are, with a note that says what the backend must support.
    """
    split_sizes, group = [1] * mesh.size(), mesh.get_group()
    needed = f"expert parallelism sends codes by all_to_all_single of uint8 on {device.type}; use gloo or nccl"
    backends = dist.get_backend_config(group)
    if device.type not in [backend.partition(":")[0] for backend in backends.split(",")]:
        raise NotImplementedError(f"{needed}, got a process group of {backends}")
    try:
        all_to_all(torch.zeros(mesh.size(), 1, dtype=torch.uint8, device=device), split_sizes, split_sizes, group)
    except NotImplementedError as error:
        raise NotImplementedError(f"{needed}, got a process group of {backends} ({error})") from error
    except RuntimeError as error:
        error.add_note(needed)
        raise

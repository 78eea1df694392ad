"""Muon with momentum in float8: `Float8Muon`, a drop-in for torch.optim.Muon, for matrices of hidden layers.

    momentum  = lerp(momentum, grad, 1 - mu)             float32; stored with one byte per element
    update    = lerp(grad, momentum, mu)                 bfloat16; momentum if not nesterov
    parameter = parameter * (1 - lr * weight_decay) - adjusted_lr * newton_schulz(update)

Each rank gathers the update of the whole matrix in bfloat16 and orthogonalizes it. Parameters and momentum are
therefore bit-identical on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.kernels.stochastic_rounding import round_to_bfloat16
from quaver.optim.base import Float8Optimizer, ParameterStep, get_local_gradient
from quaver.optim.blocks import RowSpan, from_blocks, make_grid, number_blocks, to_blocks
from quaver.optim.buckets import select_rows, split_rows
from quaver.optim.cut_blocks import BlockAmaxes, reduce_amaxes, store_scales
from quaver.optim.options import check_shared_options, check_storages, is_number_below
from quaver.optim.rounding import draw_more_random_bits, draw_random_bits, make_block_keys, take_low16
from quaver.optim.state import get_layout, get_local_scales, get_row_scales, has_cut_blocks, wrap_local
from quaver.optim.update import load_moment, store_moment
from quaver.torch_private.dtensor import compute_local_shape_and_offset, get_local_tensor
from quaver.torch_private.muon import adjust_lr, zeropower_via_newtonschulz


class Float8Muon(Float8Optimizer):
    """Muon whose momentum is stored in float8 and rounded stochastically.

    Matrices with fewer than 4096 elements have momentum in float32. A step skips each matrix whose gradient is not
    finite, and `skipped_parameters` counts it.
    """

    torch_optimizer = torch.optim.Muon
    skipped_noun = "matrices"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        momentum_buffer: str = "float8",
        masters: str = "bfloat16",
        seed: int = 0,
    ) -> None:
        """Take torch.optim.Muon's arguments and the following. All may also be options of a param group.

        Args:
            params: matrices in float32 or bfloat16: parameters, named parameters or param groups.
            momentum_buffer: how the momentum is stored: float8, bfloat16 (rounded stochastically) or float32.
            masters: for bfloat16 parameters: "bfloat16" updates and stochastically rounds the parameters, "float32"
                updates a float32 copy of them.
            seed: the seed of the random bits, 0 to 2^63 - 1; the same on all ranks that have a parameter in whole. The
                first step compares it over mesh dims that replicate DTensors. DDP has no mesh, so nothing is compared.
        Raises:
            ValueError: an option is out of range, or a parameter is not a matrix or has another dtype.
        """
        options = {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        rates = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "eps": eps}
        super().__init__(
            params, {**rates, **options, "momentum_buffer": momentum_buffer, "masters": masters, "seed": seed}
        )

    @property
    def skipped_parameters(self) -> int:
        """How many steps of a matrix were skipped because its gradient was not finite. Synchronizes with a GPU."""
        return self._skipped_total

    def muon_state_dict(self) -> dict[str, Any]:
        """Return a state dict for torch.optim.Muon: float32 momentum, 4 bytes per parameter, and no step counts."""
        packed = self.make_torch_state_dict()
        for state in packed["state"].values():
            del state["step"]
        return packed

    def load_muon_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch.optim.Muon and round its momentum. Options that Muon lacks do not change.

        Steps are counted from 0 again, with the random bits of a new optimizer.

        Raises:
            ValueError: momentum is missing, or its shape differs from its parameter's.
        """
        self.load_torch_state_dict(state_dict)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_shared_options(group)
        check_storages(group, "momentum_buffer")
        if not is_number_below(1, group["momentum"]):
            raise ValueError(f"momentum: expected a number from 0 to below 1, got {group['momentum']!r}")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn: expected None, 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}"
            )
        coefficients, steps = group["ns_coefficients"], group["ns_steps"]
        are_numbers = isinstance(coefficients, Sequence) and all(isinstance(number, Real) for number in coefficients)
        if not are_numbers or len(coefficients) != 3 or type(steps) is not int or not 0 < steps < 100:
            raise ValueError(f"expected three ns_coefficients and 1 to 99 ns_steps, got {coefficients} and {steps}")
        for parameter in group["params"]:
            if parameter.dim() != 2:
                raise ValueError(f"expected matrices, got a parameter {list(parameter.shape)}; use Float8AdamW for it")

    def _step_group(self, group: dict[str, Any], steps: Sequence[ParameterStep]) -> None:
        for parameter, _, key in steps:
            self._step_matrix(parameter, group, key)

    def _step_matrix(self, parameter: Tensor, group: dict[str, Any], key: int) -> None:
        state, keys = self.state[parameter], get_layout(parameter, group).moments["momentum_buffer"]
        grad, spans = get_local_gradient(parameter), split_rows(make_grid(parameter), key)
        spans = spans if grad.numel() else []
        scale = None if keys.scale is None else get_local_scales(parameter, state[keys.scale])
        old = [get_local_tensor(state[keys.values]), scale]
        new = [None if tensor is None else torch.empty_like(tensor) for tensor in old]
        update = torch.empty(grad.shape, dtype=torch.bfloat16, device=grad.device)
        block_amaxes = _compute_amaxes(parameter, spans, grad, old, group) if has_cut_blocks(parameter, group) else None
        for span in spans:
            _advance_momentum(span, grad, old, new, update, group, block_amaxes)

        whole_update = wrap_local(parameter, update, tuple(parameter.shape))
        if isinstance(whole_update, DTensor):
            whole_update = whole_update.full_tensor()
        is_finite = whole_update.isfinite().all()
        self._get_skip_counter(grad.device).add_(~is_finite)
        for target, updated in zip(old, new, strict=True):
            if target is not None and updated is not None:
                target.copy_(torch.where(is_finite, updated, target))
        if block_amaxes is not None:
            store_scales(block_amaxes, get_row_scales(parameter, state, group), is_finite)
        change = zeropower_via_newtonschulz(whole_update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        change = torch.where(is_finite, _take_shard(change, parameter), 0)
        lr = float(group["lr"])
        decay = torch.where(is_finite, 1 - lr * group["weight_decay"], 1.0)
        _update_parameter(parameter, state, change, decay, adjust_lr(lr, group["adjust_lr_fn"], parameter.shape), spans)


def _advance_momentum(
    span: RowSpan,
    grad: Tensor,
    old: Sequence[Tensor | None],
    new: Sequence[Tensor | None],
    update: Tensor,
    group: dict[str, Any],
    block_amaxes: BlockAmaxes | None,
) -> None:
    """Write a span of the bfloat16 `update`, and of the `new` momentum from `old`, each (values, scales or None)."""
    grid, values = span.grid, _slice_rows(old[0], span)
    gradient, momentum = _compute_momentum(span, grad, old, group)
    direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    select_rows(update, span).copy_(from_blocks(direction, grid))
    bits16 = take_low16(_draw_bits(span, grad.device))
    amax = momentum.abs().amax(1) if block_amaxes is None else _slice_rows(block_amaxes.local[0], span).reshape(-1)
    codes, scales = store_moment(momentum, amax, bits16, values.dtype, is_root=False)
    _slice_rows(new[0], span).copy_(from_blocks(codes, grid))
    if scales is not None:
        _slice_rows(new[1], span).copy_(scales.view(-1, grid.blocks_per_row))


def _compute_momentum(
    span: RowSpan, grad: Tensor, old: Sequence[Tensor | None], group: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the gradient and the new momentum of a span, in float32 blocks."""
    values, scale = (_slice_rows(tensor, span) for tensor in old)
    gradient = to_blocks(select_rows(grad, span), span.grid).float()
    before = load_moment(to_blocks(values, span.grid), None if scale is None else scale.reshape(-1))
    return gradient, before.lerp(gradient, 1 - group["momentum"])


def _compute_amaxes(
    parameter: Tensor, spans: Sequence[RowSpan], grad: Tensor, old: Sequence[Tensor | None], group: dict[str, Any]
) -> BlockAmaxes:
    """Compute the amaxes of the momentum's blocks over the ranks that share them. A collective."""
    block_amaxes = BlockAmaxes.zeros(parameter, 1)
    for span in spans:
        amax = _compute_momentum(span, grad, old, group)[1].abs().amax(1)
        _slice_rows(block_amaxes.local[0], span).copy_(amax.view(-1, span.grid.blocks_per_row))
    return reduce_amaxes([block_amaxes])[0]


def _slice_rows(tensor: Tensor | None, span: RowSpan) -> Any:
    return None if tensor is None else tensor[span.start : span.end]


def _draw_bits(span: RowSpan, device: torch.device) -> Tensor:
    return draw_random_bits(make_block_keys(*number_blocks([span], device)))


def _take_shard(matrix: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a matrix of the parameter's shape."""
    if not isinstance(parameter, DTensor):
        return matrix
    (rows, columns), (row, column) = compute_local_shape_and_offset(parameter)
    return matrix[row : row + rows, column : column + columns]


def _update_parameter(
    parameter: Tensor, state: dict[str, Tensor], change: Tensor, decay: Tensor, lr: float, spans: Sequence[RowSpan]
) -> None:
    """Decay this rank's shard of a parameter, or of its master, and subtract `lr` times the change."""
    target = get_local_tensor(state.get("master", parameter)).detach()
    if target.dtype is torch.float32:
        target.mul_(decay).add_(change, alpha=-lr)
    else:
        for span in spans:
            rows = _slice_rows(target, span)
            values = to_blocks(rows.float() * decay - lr * _slice_rows(change, span).float(), span.grid)
            bits16 = take_low16(draw_more_random_bits(_draw_bits(span, target.device)))
            rows.copy_(from_blocks(round_to_bfloat16(values, bits16), span.grid))
    if "master" in state:
        get_local_tensor(parameter).detach().copy_(target)

"""AdamW with moments in float8: `Float8AdamW`, a drop-in for torch.optim.AdamW.

    optimizer = Float8AdamW(make_param_groups(model), lr=3e-4, weight_decay=0.1)

A moment takes one byte per element and a float32 scale per block of 256 elements. Blocks and random bits follow from
the position in the whole parameter, so states are bit-identical on any number of ranks. They can be saved, loaded and
resharded like the states of torch.optim.AdamW. docs/design/0014-optimizer-states.md gives the reasons for this design.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.optim.base import Float8Optimizer, ParameterStep, get_local_gradient
from quaver.optim.blocks import make_grid
from quaver.optim.buckets import ShardUpdate, run_cut_updates, run_updates
from quaver.optim.options import check_shared_options, check_storages, is_number_below
from quaver.optim.state import get_row_scales, has_cut_blocks, make_parameter_blocks
from quaver.optim.update import AdamWScalars
from quaver.torch_private.dtensor import get_local_tensor


class Float8AdamW(Float8Optimizer):
    """AdamW (decoupled weight decay) whose moments are stored in float8 and rounded stochastically.

    Parameters with fewer than 4096 elements or fewer than two dims (norms, biases) have moments in float32. An
    optimizer cannot recognize embeddings; use `make_param_groups(model)` to give them float32 moments. All arithmetic
    is float32. A step skips each block of 256 elements whose gradient is not finite: its parameters and moments do not
    change, and `skipped_blocks` counts it.
    """

    torch_optimizer = torch.optim.AdamW
    skipped_noun = "blocks of 256 elements"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exp_avg: str = "float8",
        exp_avg_sq: str = "float8",
        masters: str = "bfloat16",
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        """Take AdamW's arguments and the following. All but `compile` may also be options of a param group.

        Args:
            params: parameters, named parameters or param groups, in float32 or bfloat16.
            exp_avg, exp_avg_sq: how the moments are stored: float8, bfloat16 (rounded stochastically) or float32. If
                `exp_avg` is float8, `exp_avg_sq` must be float8; see `_check_moment_storages`.
            masters: for bfloat16 parameters: "bfloat16" updates and stochastically rounds the parameters, "float32"
                updates a float32 copy of them.
            seed: the seed of the random bits, 0 to 2^63 - 1; the same on all ranks that have a parameter in whole. The
                first step compares it over mesh dims that replicate DTensors. DDP has no mesh, so nothing is compared.
            compile: compile the arithmetic once for all parameters, unless the C extension does it.
        Raises:
            ValueError: an option is out of range, or a parameter has another dtype.
        """
        options = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "masters": masters, "seed": seed}
        if not isinstance(compile, bool):
            raise ValueError(f"compile: expected True or False, got {compile!r}")
        self.compile = compile
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options})

    @property
    def skipped_blocks(self) -> int:
        """How many blocks of 256 elements this rank has skipped so far. Synchronizes with a GPU."""
        return self._skipped_total

    def adamw_state_dict(self) -> dict[str, Any]:
        """Return a state dict for torch.optim.AdamW. Its float32 moments take 8 bytes per parameter."""
        return self.make_torch_state_dict()

    def load_adamw_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch.optim.AdamW and round its moments. Options that AdamW lacks do not change.

        Raises:
            ValueError: a moment is missing, or its shape differs from its parameter's.
        """
        self.load_torch_state_dict(state_dict)

    def _check_group(self, group: dict[str, Any]) -> None:
        betas = group["betas"]
        check_shared_options(group)
        is_pair = isinstance(betas, Sequence) and len(betas) == 2
        if not is_pair or not all(is_number_below(1, beta) for beta in betas):
            raise ValueError(f"betas: expected two numbers from 0 to below 1, got {betas}")
        check_storages(group, "exp_avg", "exp_avg_sq")
        _check_moment_storages(group)

    def _step_group(self, group: dict[str, Any], steps: Sequence[ParameterStep]) -> None:
        whole_updates: dict[int, list[ShardUpdate]] = defaultdict(list)
        cut_updates: dict[int, list[tuple[Tensor, ShardUpdate, list[Tensor | None]]]] = defaultdict(list)
        copies: list[tuple[Tensor, Tensor]] = []
        for parameter, step, key in steps:
            update = self._make_update(parameter, group, key, copies)
            if has_cut_blocks(parameter, group):
                cut_updates[step].append((parameter, update, get_row_scales(parameter, self.state[parameter], group)))
            elif update.grad.numel():
                whole_updates[step].append(update)
        for step, updates in whole_updates.items():
            run_updates(updates, AdamWScalars.from_group(group, step), self._get_skip_counter, compile=self.compile)
        for step, shared_updates in cut_updates.items():
            run_cut_updates(shared_updates, AdamWScalars.from_group(group, step), self._get_skip_counter)
        for target, source in copies:
            target.copy_(source)

    def _make_update(
        self, parameter: Tensor, group: dict[str, Any], key: int, copies: list[tuple[Tensor, Tensor]]
    ) -> ShardUpdate:
        """Make the update of one parameter. Appends to `copies` the (target, source) pairs to copy after the kernel."""
        grad = get_local_gradient(parameter)
        grid = make_grid(parameter)
        state = self.state[parameter]
        blocks = make_parameter_blocks(parameter, state, group)
        if not blocks.param.is_contiguous():
            blocks = blocks._replace(param=blocks.param.contiguous())
        target = get_local_tensor(parameter).detach()
        if blocks.param.dtype != target.dtype or not target.is_contiguous():
            copies.append((target, blocks.param))
        return ShardUpdate(blocks, grad, grid, key)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "compile": self.compile}


def _check_moment_storages(group: dict[str, Any]) -> None:
    """Raise ValueError for a float8 mean with a second moment in higher precision.

    A spike in a block makes the block's codes coarse. Stochastic rounding then sometimes rounds a small mean up, to
    many times its size. The root of the second moment in float8 is as coarse and never rounds to 0, which keeps such a
    step below 2.5 times the learning rate. An exact root is as small as the element's gradients: a step then reached
    4,550 times the learning rate.
    """
    if group["exp_avg"] == "float8" and group["exp_avg_sq"] != "float8":
        raise ValueError(
            f"exp_avg_sq: expected 'float8' with exp_avg='float8', got {group['exp_avg_sq']!r}: steps would be "
            "unbounded after a spike in a block; store exp_avg in bfloat16 or float32, too"
        )

"""AdamW with moments in float8: `Float8AdamW`, used as torch.optim.AdamW is.

    optimizer = Float8AdamW(float32_embeddings(model), lr=3e-4, weight_decay=0.1)

A moment has one byte per element and a float32 per 256 of them. Blocks and random bits are those of the whole
parameter, so states are the same to the bit on any number of ranks, and can be saved, loaded and resharded as those of
torch.optim.AdamW can. docs/design/0014-optimizer-states.md says why it is made so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.optim.base import Float8Optimizer, Stepped, gradient_here
from quaver.optim.blocks import grid_of
from quaver.optim.buckets import Update, run_cut_updates, run_updates
from quaver.optim.options import check_common, check_storages
from quaver.optim.state import blocks_of, scales_of_rows, shares_blocks
from quaver.optim.update import Scalars
from quaver.torch_private.dtensor import local_tensor


class Float8AdamW(Float8Optimizer):
    """AdamW (decoupled weight decay) whose moments are stored in float8 and rounded stochastically.

    Parameters with fewer than 4096 elements or fewer than two dims (norms, biases) have moments in float32; an
    optimizer cannot tell an embedding from another matrix, so `float32_embeddings(model)` names those. All arithmetic
    is float32. A block of 256 elements whose gradient is not finite stays as it is, with its parameters, and is counted
    in `skipped_blocks`.
    """

    torch_optimizer = torch.optim.AdamW
    skipped_things = "blocks of 256 elements"

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
        """Args are AdamW's and those below, all but `compile` also as options of a param group.

        Args:
            params: parameters, named parameters or param groups, in float32 or bfloat16.
            exp_avg, exp_avg_sq: how the moments are stored: float8, bfloat16 (rounded stochastically) or float32. With
                `exp_avg` in float8 `exp_avg_sq` is, too: see `_check_pair`.
            masters: of bfloat16 parameters: "bfloat16" rounds the parameters themselves stochastically, "float32"
                keeps a copy that is updated instead.
            seed: of the random bits, 0 to 2^63 - 1; the same on all ranks.
            compile: compile the arithmetic, once for all parameters, where the C extension does not do it.
        Raises:
            ValueError: an option out of its range, or a parameter of another dtype.
        """
        options = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "masters": masters, "seed": seed}
        self.compile = compile
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options})

    @property
    def skipped_blocks(self) -> int:
        """How many blocks of 256 elements this rank has left as they were so far; waits for a GPU."""
        return self._skips

    def adamw_state_dict(self) -> dict[str, Any]:
        """The state as torch.optim.AdamW's: moments in float32, 8 bytes per parameter more."""
        return self._torch_state_dict()

    def load_adamw_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch.optim.AdamW, whose moments are rounded; this optimizer's own options stay.

        Raises:
            ValueError: a moment is missing or has another shape than its parameter.
        """
        self._load_torch_state_dict(state_dict)

    def _check_group(self, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        check_common(group)
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"betas: expected two numbers from 0 to below 1, got {group['betas']}")
        check_storages(group, "exp_avg", "exp_avg_sq")
        _check_pair(group)

    def _check_options(self, groups: list[dict[str, Any]]) -> None:
        super()._check_options(groups)
        for group in groups:
            _check_pair(group)

    def _step_group(self, group: dict[str, Any], stepped: Sequence[Stepped]) -> None:
        alike: dict[int, list[Update]] = defaultdict(list)
        cut: dict[int, list[tuple[Tensor, Update, list[Tensor | None]]]] = defaultdict(list)
        copies: list[tuple[Tensor, Tensor]] = []
        for parameter, step, key in stepped:
            update = self._update_of(parameter, group, key, copies)
            if shares_blocks(parameter, group):
                cut[step].append((parameter, update, scales_of_rows(parameter, self.state[parameter], group)))
            elif update.grad.numel():
                alike[step].append(update)
        for step, updates in alike.items():
            run_updates(updates, Scalars.of(group, step), self._counter, self.compile)
        for step, shared in cut.items():
            run_cut_updates(shared, Scalars.of(group, step), self._counter)
        for target, source in copies:
            target.copy_(source)

    def _update_of(
        self, parameter: Tensor, group: dict[str, Any], key: int, copies: list[tuple[Tensor, Tensor]]
    ) -> Update:
        """The update of one parameter. Appends to `copies` the (to, from) pairs to copy after the kernel."""
        grad = gradient_here(parameter)
        grid = grid_of(parameter)
        state = self.state[parameter]
        blocks = blocks_of(parameter, state, group)
        if not blocks.param.is_contiguous():
            blocks = blocks._replace(param=blocks.param.contiguous())
        target = local_tensor(parameter).detach()
        if blocks.param.dtype != target.dtype or not target.is_contiguous():
            copies.append((target, blocks.param))
        return Update(blocks, grad, grid, key)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "compile": self.compile}


def _check_pair(group: dict[str, Any]) -> None:
    """Raise ValueError for a mean in float8 beside a second moment that is stored more exactly.

    A spike in a block makes the steps of the block's codes coarse. A mean between two codes is rounded up now and then,
    by far more than its own size. The root of the second moment, rounded alike and never to 0, keeps such a step below
    2.5 times the rate; an exact one, as small as the element's own gradients, let it become 4,550 times.
    """
    if group["exp_avg"] == "float8" and group["exp_avg_sq"] != "float8":
        raise ValueError(
            f"exp_avg_sq: expected 'float8' with exp_avg='float8', got {group['exp_avg_sq']!r}: steps would be "
            "unbounded after a spike in a block; store exp_avg in bfloat16 or float32, too"
        )

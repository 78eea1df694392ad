"""AdamW with moments in float8: `Float8AdamW`, used as torch.optim.AdamW is.

    optimizer = Float8AdamW(float32_embeddings(model), lr=3e-4, weight_decay=0.1)

A moment has one byte per element and a float32 per 256 of them. Blocks and random bits are those of the whole
parameter, so states are the same to the bit on any number of ranks, and can be saved, loaded and resharded as those of
torch.optim.AdamW can. docs/design/0014-optimizer-states.md says why it is made so.
"""

from __future__ import annotations

import logging
import math
import typing
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quaver.optim.blocks import grid_of, obstacle_of
from quaver.optim.buckets import Update, run_updates
from quaver.optim.rounding import step_key
from quaver.optim.state import STORAGES, blocks_of, layout_of, new_state, read_moments, write_moments
from quaver.optim.update import Scalars
from quaver.torch_private.collectives import AsyncCollectiveTensor
from quaver.torch_private.dispatch import fake_mode_is_on
from quaver.torch_private.dtensor import local_tensor

logger = logging.getLogger(__name__)

STATE_VERSION = 1
"""Of the state's names, shapes and random bits; every param group carries it."""


class Float8AdamW(Optimizer):
    """AdamW (decoupled weight decay) whose moments are stored in float8 and rounded stochastically.

    Parameters with fewer than 4096 elements or fewer than two dims (norms, biases) have moments in float32; an
    optimizer cannot tell an embedding from another matrix, so `float32_embeddings(model)` names those. All arithmetic
    is float32. A block of 256 elements whose gradient is not finite stays as it is, with its parameters, and is counted
    in `skipped_blocks`.
    """

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
            exp_avg, exp_avg_sq: how the moments are stored: float8, bfloat16 (rounded stochastically) or float32.
            masters: of bfloat16 parameters: "bfloat16" rounds the parameters themselves stochastically, "float32"
                keeps a copy that is updated instead.
            seed: of the random bits, 0 to 2^63 - 1; the same on all ranks.
            compile: compile the arithmetic, once for all parameters.
        Raises:
            ValueError: an option out of its range, or a parameter of another dtype.
        """
        options = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "masters": masters, "seed": seed}
        self.compile = compile
        self._skipped: dict[torch.device, Tensor] = {}
        self._warned = 0
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options}
        super().__init__(params, {**defaults, "state_version": STATE_VERSION})

    @property
    def skipped_blocks(self) -> int:
        """How many blocks of 256 elements this rank has left as they were so far; waits for a GPU."""
        return sum(int(count) for count in self._skipped.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Raises what the constructor raises."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @typing.no_type_check
    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of all parameters that have gradients.

        Raises:
            ValueError: a gradient that is sparse or has another layout than its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        position = 0
        for group in self.param_groups:
            alike: dict[int, list[Update]] = defaultdict(list)
            copies: list[tuple[Tensor, Tensor]] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    step = self._advance(parameter, group)
                    update = self._update_of(parameter, group, step, position, copies)
                    if update is not None:
                        alike[step].append(update)
                position += 1
            for step, updates in alike.items():
                run_updates(updates, Scalars.of(group, step), self._counter, self.compile)
            for target, source in copies:
                target.copy_(source)
        self._report_skipped()
        return loss

    def _advance(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """The number of the step that begins, and the parameter's state if it is the first."""
        if not self.state[parameter]:
            if parameter.numel() and group["exp_avg"] == "float8" and (obstacle := obstacle_of(parameter)):
                logger.warning("moments of a parameter %s are float32: %s", list(parameter.shape), obstacle)
            self.state[parameter].update(new_state(parameter, group))
        self.state[parameter]["step"] += 1
        return int(self.state[parameter]["step"].item())

    def _update_of(
        self, parameter: Tensor, group: dict[str, Any], step: int, position: int, copies: list[tuple[Tensor, Tensor]]
    ) -> Update | None:
        """What the step does; None for an empty part. `copies`: what to copy afterwards, (to, from)."""
        grad = _checked_gradient(parameter)
        grid = grid_of(parameter)
        if not grad.numel():
            return None
        state = self.state[parameter]
        blocks = blocks_of(parameter, state, group)
        if not blocks.param.is_contiguous():
            blocks = blocks._replace(param=blocks.param.contiguous())
        target = local_tensor(parameter).detach()
        if blocks.param.dtype != target.dtype or not target.is_contiguous():
            copies.append((target, blocks.param))
        return Update(blocks, grad, grid, step_key(group["seed"], step, position))

    def _counter(self, device: torch.device) -> Tensor:
        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._skipped[device]

    def _report_skipped(self) -> None:
        """Say how many blocks were left as they were; of a GPU only `skipped_blocks` does, because it waits."""
        counter = self._skipped.get(torch.device("cpu"))
        if counter is None or fake_mode_is_on() or int(counter) == self._warned:
            return
        count, self._warned = int(counter) - self._warned, int(counter)
        logger.warning(
            "gradients are not finite in %d blocks of 256 elements: their parameters and moments stay as they are",
            count,
        )

    # ---- state dicts -------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of a Float8AdamW, tensors as they are.

        Raises:
            ValueError: another version or another optimizer's, or a tensor of another shape or dtype; nothing is
                changed.
        """
        groups = state_dict["param_groups"]
        for group in groups:
            if group.get("state_version") != STATE_VERSION:
                raise ValueError(
                    f"expected a state dict of Float8AdamW with state_version {STATE_VERSION}, got "
                    f"{group.get('state_version', 'none')}; of torch.optim.AdamW's use load_adamw_state_dict"
                )
        parameters = [p for group in self.param_groups for p in group["params"]]
        loaded = [(index, group) for group in groups for index in group["params"]]
        for parameter, (index, group) in zip(parameters, loaded, strict=False):  # torch says what does not fit
            if index in state_dict["state"]:
                _check_state(parameter, state_dict["state"][index], group)
        # torch casts what it loads to the parameter's dtype, but for what is no tensor and no container.
        held = {i: {key: _Held(value) for key, value in each.items()} for i, each in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": held})
        for parameter, state in self.state.items():
            for name, value in state.items():
                state[name] = value.on(parameter.device)
            state["step"] = state["step"].to("cpu", copy=True)  # the optimizer that was saved may go on counting in it

    def adamw_state_dict(self) -> dict[str, Any]:
        """The state as torch.optim.AdamW's: moments in float32, 8 bytes per parameter more."""
        defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
        packed = super().state_dict()
        parameters = self._parameters(packed)
        state = {}
        for index in packed["state"]:
            parameter, group = parameters[index]
            moments = read_moments(parameter, self.state[parameter], group)
            state[index] = {"step": self.state[parameter]["step"].clone(), **moments}
        groups = []
        for group in packed["param_groups"]:
            kept = {name: value for name, value in group.items() if name in defaults or not _is_own(name)}
            groups.append({**defaults, **kept})
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_adamw_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch.optim.AdamW, whose moments are rounded; this optimizer's own options stay.

        Raises:
            ValueError: a moment is missing or has another shape than its parameter.
        """
        own = super().state_dict()
        if [len(group["params"]) for group in own["param_groups"]] != [
            len(group["params"]) for group in state_dict["param_groups"]
        ]:
            raise ValueError("expected an AdamW state dict with the param groups of this optimizer, got others")
        position = 0
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], loaded["params"], strict=True):
                if index in state_dict["state"]:
                    theirs = state_dict["state"][index]
                    _check_moments(parameter, theirs)
                    state = new_state(parameter, group)
                    state["step"].fill_(float(theirs["step"]))
                    write_moments(
                        parameter, state, group, theirs, step_key(group["seed"], int(state["step"]), position)
                    )
                    self.state[parameter] = state
                position += 1
            group.update({name: loaded[name] for name in ("lr", "betas", "eps", "weight_decay") if name in loaded})

    def _parameters(self, packed: dict[str, Any]) -> dict[int, tuple[Tensor, dict[str, Any]]]:
        """Parameters and their groups by their numbers in a state dict."""
        return {
            index: (parameter, group)
            for group, numbers in zip(self.param_groups, packed["param_groups"], strict=True)
            for parameter, index in zip(group["params"], numbers["params"], strict=True)
        }

    def __getstate__(self) -> dict[str, Any]:
        own = {"compile": self.compile, "_skipped": self._skipped, "_warned": self._warned}
        return {**super().__getstate__(), **own}


class _Held:
    """A tensor on its way through Optimizer.load_state_dict."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def on(self, device: torch.device | str) -> Any:
        return self.value.to(device) if isinstance(self.value, Tensor) else self.value


def _is_own(name: str) -> bool:
    return name in ("exp_avg", "exp_avg_sq", "masters", "seed", "state_version")


def _check_group(group: dict[str, Any]) -> None:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    for name, value in (("lr", lr), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}: expected a finite number, 0 or more, got {value}")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas: expected two numbers from 0 to below 1, got {group['betas']}")
    for name, known in (("exp_avg", STORAGES), ("exp_avg_sq", STORAGES), ("masters", STORAGES[1:])):
        if group[name] not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {group[name]!r}")
    if not (isinstance(group["seed"], int) and 0 <= group["seed"] < 2**63):
        raise ValueError(f"seed: expected a number from 0 to 2^63 - 1, got {group['seed']!r}")
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"expected parameters in float32 or bfloat16, got {parameter.dtype}")


def _checked_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, plain and contiguous."""
    grad = typing.cast(Tensor, parameter.grad)
    placements = [each.placements if isinstance(each, DTensor) else None for each in (parameter, grad)]
    if grad.is_sparse or placements[0] != placements[1]:
        raise ValueError(
            f"expected a dense gradient with its parameter's placements {placements[0]}, got {grad.layout} with "
            f"{placements[1]}; redistribute it before step()"
        )
    local = local_tensor(grad)
    if isinstance(local, AsyncCollectiveTensor):
        local = local.trigger_wait()
    return local.detach().contiguous()


def _check_state(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    expected = layout_of(parameter, group).tensors
    for name, (shape, dtype) in expected.items():
        got = state.get(name)
        if not isinstance(got, Tensor) or tuple(got.shape) != shape or got.dtype != dtype:
            found = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else f"only {sorted(state)}"
            raise ValueError(
                f"state of a parameter {list(parameter.shape)}: expected {name} in {dtype} {list(shape)}, got {found}; "
                "make the optimizer with the options and the parameters that saved it"
            )


def _check_moments(parameter: Tensor, state: dict[str, Any]) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        got = state.get(name)
        if (
            not isinstance(got, Tensor)
            or got.shape != parameter.shape
            or isinstance(got, DTensor) != isinstance(parameter, DTensor)
        ):
            found = f"{type(got).__name__} {list(got.shape)}" if isinstance(got, Tensor) else "none"
            raise ValueError(f"{name}: expected a {type(parameter).__name__} {list(parameter.shape)}, got {found}")

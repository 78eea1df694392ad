"""What a user calls for delayed and static scaling: sync, calibrate, save, load, report (of scale_state.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from quaver import scaling
from quaver.config import CastConfig, Float8LinearConfig
from quaver.distributed.agreement import check_ranks_agree
from quaver.linear import Float8Linear
from quaver.scale_state import LinearScales, ScaleState, largest_observed, next_scale

logger = logging.getLogger(__name__)

OPERANDS = ("input", "weight", "grad_output")

NamedLinears = Sequence[tuple[str, Float8Linear]]


# ---- making it, for a model ------------------------------------------------------------------------------------------


def keep_scales(model: nn.Module, named_linears: NamedLinears, config: Float8LinearConfig) -> None:
    """Give these linears of `model` a state for the scales that `config` keeps; called by the conversion."""
    if not config.has_persistent_scales or not named_linears:
        return
    owners = input_owners([(name, linear.in_features) for name, linear in named_linears], config)
    by_operand = {
        operand: next((cast for cast in casts if cast.is_persistent), None)
        for operand, casts in zip(OPERANDS, (config.casts[0:2], config.casts[2:4], config.casts[4:6]), strict=True)
    }
    casts: list[CastConfig] = []
    row_of: dict[tuple[str, str], int] = {}
    rows_of: list[list[int | None]] = []
    for name, _ in named_linears:
        rows: list[int | None] = []
        for operand, cast in by_operand.items():
            owner = owners.get(name, name) if operand == "input" else name
            if cast is not None and (owner, operand) not in row_of:
                row_of[owner, operand] = len(casts)
                casts.append(cast)
            rows.append(row_of.get((owner, operand)))
        rows_of.append(rows)
    device = named_linears[0][1].weight.device
    state = ScaleState(casts, config, torch.device("cpu") if device.type == "meta" else device)
    for (_, linear), (input, weight, grad_output) in zip(named_linears, rows_of, strict=True):
        linear.scaling = state.scaling_of((input, weight, grad_output))
    state.trained_modules.add(model)


def input_owners(named_sizes: Iterable[tuple[str, int]], config: Float8LinearConfig) -> dict[str, str]:
    """By the name of a linear, the name of the sibling whose kept input scale it uses; see `shared_inputs`.

    Args:
        named_sizes: fully qualified names, and in_features.
    """
    first: dict[tuple[str, int, int], str] = {}
    owners: dict[str, str] = {}
    for name, in_features in named_sizes:
        parent, _, leaf = name.rpartition(".")
        group = next((i for i, names in enumerate(config.shared_inputs) if leaf in names), None)
        if group is not None:
            owner = first.setdefault((parent, group, in_features), name)
            if owner != name:
                owners[name] = owner
    return owners


# ---- what the user calls ---------------------------------------------------------------------------------------------


def sync_float8_amax_and_scale_history(
    model: nn.Module, fp8_layers: Sequence[Float8Linear] | None = None, *, group: ProcessGroup | None = None
) -> None:
    """Compute the delayed scales of the next step from the amaxes of this one; call it once a step, after the backward.

    Before or after `optimizer.step()` makes no difference. Forgetting it is noticed at the second optimizer step, and
    said in a RuntimeWarning. A model without delayed scaling is left alone.

    Args:
        model: what `convert_to_float8_training` was given, or anything around or inside it.
        fp8_layers: the Float8Linears of `model`, if they are at hand; saves looking for them.
        group: the ranks that must have the same scales: all that train this model together. None for every rank, where
            there is a process group. With pipeline parallelism: the ranks of one stage.
    Raises:
        RuntimeError: on every rank, if ranks have different tensors or configs.

    One all-reduce of 8 bytes a tensor, and a number of kernels that does not depend on how many there are. The first
    call also checks, in a collective of 16 bytes, that the ranks agree.
    """
    states = _states(model if fp8_layers is None else fp8_layers)
    group = group or _every_rank()
    if group is not None:
        _check_once(model, states, group)
    with torch.no_grad():
        for state in states:
            state.sync(group)


@contextmanager
def calibrate_float8_static_scales(model: nn.Module, *, group: ProcessGroup | None = None) -> Iterator[None]:
    """Measure the static scales of `model` on the batches that are run inside the block.

    Run forward and backward (or the forward only, if grad_output is not static) as in training; inside, tensors whose
    scale is to be measured are scaled dynamically. At the exit each gets its scale from the largest amax seen, over all
    ranks, with the `headroom` and `margin` of `delayed_scaling_config`.

    Args:
        group: as for `sync_float8_amax_and_scale_history`.
    Raises:
        ValueError: the model has no static scale to measure.
        RuntimeError: on every rank, if ranks have different tensors or configs; at the exit, if a tensor was not seen,
            was all zeros, or was not finite; no scale is then changed.
    """
    states = _states(model)
    group = group or _every_rank()
    if group is not None:
        _check_once(model, states, group)
    named = [(name, row, state) for name, row, state in _named_rows(model) if row in state.calibrated_rows]
    if not named:
        raise ValueError("nothing to calibrate: the model has no ScalingType.STATIC cast without a static_quant_scale")
    before = [(state.quant_scale.clone(), state.observed.clone()) for state in states]
    try:
        for state in states:
            state.quant_scale[state.calibrated_rows] = 0
            state.forget_observed()
            state.look_from_host()
            state.calibrating = True
        yield
        seen = [state.observed if group is None else largest_observed(state.observed, group) for state in states]
        amax_of = {id(state): observed[:, 0] for state, observed in zip(states, seen, strict=True)}
        _check_all_seen([(name, float(amax_of[id(state)][row])) for name, row, state in named])
        for (scales, _), state in zip(before, states, strict=True):
            rows = state.calibrated_rows
            amax, largest = amax_of[id(state)][rows], state.format_max[rows]
            scales[rows] = next_scale(amax, largest, state.delayed_config, state.power_of_2)
            state.uncalibrated = False
    finally:
        for (scales, observed), state in zip(before, states, strict=True):
            state.quant_scale.copy_(scales)
            state.observed.copy_(observed)
            state.calibrating = False
            state.look_from_host()


def _every_rank() -> ProcessGroup | None:
    """The default group, None where there is none or one rank."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if several else None


def _check_all_seen(named_amaxes: Sequence[tuple[str, float]]) -> None:
    bad = [(name, amax) for name, amax in named_amaxes if not 0 < amax < float("inf")]
    if bad:
        name, amax = bad[0]
        what = f"had an amax of {amax}"
        if amax < 0:
            what = (
                "was not cast. Run its module, and the backward; siblings whose input tensor parallelism gathers for "
                "all of them must be named in Float8LinearConfig.shared_inputs"
            )
        more = f", and {len(bad) - 1} more have no amax to scale by either" if len(bad) > 1 else ""
        raise RuntimeError(f"calibration: {name} {what}{more}; no scale was changed")


class TensorScaling(NamedTuple):
    """How one tensor with a kept scale fared in the step before the last sync."""

    name: str
    quant_scale: float
    """What its casts multiplied with; for a tensor that was scaled dynamically, what its amax asks for. For one
    that was not cast, what it has: 0 if that is nothing."""
    is_dynamic: bool
    """Whether it was scaled dynamically: without a history, or after it had left its window."""
    amax: float
    """-1 if it was not cast."""
    used_over_ideal: float
    """The scale that was used over the one that would have brought amax to the format's largest number: above 1 the
    tensor saturates, 2**-n leaves n powers of two unused. 1 where it was scaled dynamically, inf or NaN if amax is;
    NaN if not cast."""
    saturated: int
    """The most elements that saturated in one cast, on one rank."""


class Float8ScalingState:
    """The kept scales of a model by name; a `Stateful` of torch.distributed.checkpoint. See `float8_scaling_state`."""

    def __init__(self, model: nn.Module) -> None:
        self._named = _named_rows(model)
        self._states = _states(model)

    def __len__(self) -> int:
        return len(self._named)

    def state_dict(self) -> dict[str, Tensor]:
        """`<linear>.<operand>.quant_scale` () and, with delayed scaling, `<linear>.<operand>.amax_history` [H].

        Views, float32: what is copied into them (as torch.distributed.checkpoint does) is loaded. Equal on every rank
        after a sync, so it loads into any number of ranks. A scale is negative while it is outside its window. Static
        scales that the config gives are not part of it, nor is what was observed since the last sync: save between a
        sync and the next forward.
        """
        entries: dict[str, Tensor] = {}
        for name, row, state in self._learned():
            entries[f"{name}.quant_scale"] = state.quant_scale[row]
            if state.delayed_rows[row]:
                entries[f"{name}.amax_history"] = state.history[row]
        return entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. Tensors that it does not have start as in a new model, and the log says so.

        A history of another length keeps its newest entries. Entries of tensors that the model does not have are left.

        Raises:
            ValueError: an entry that is not a tensor of the right number of dims; nothing is then loaded.
        """
        own = self.state_dict()
        for key, mine in own.items():
            given = state_dict.get(key)
            if given is not None and not (isinstance(given, Tensor) and given.dim() == mine.dim()):
                raise ValueError(f"{key}: expected a tensor of {mine.dim()} dims, got {_kind(given)}")
        missing, learned = 0, self._learned()
        with torch.no_grad():
            for name, row, state in learned:
                keys = [key for key in (f"{name}.quant_scale", f"{name}.amax_history") if key in own]
                if any(key not in state_dict for key in keys):
                    missing += 1
                    state.forget(row)
                    continue
                for key in keys:
                    _copy_newest(own[key], state_dict[key])
            for state in self._states:
                state.was_loaded()
        if missing:
            logger.warning(
                "%d of %d kept scales are not in the checkpoint: scaled dynamically until their first sync "
                "(static ones have to be calibrated)",
                missing,
                len(learned),
            )

    def _learned(self) -> list[tuple[str, int, ScaleState]]:
        """The rows whose scales come from what was seen, and not from the config."""
        return [(name, row, state) for name, row, state in self._named if state.is_learned(row)]

    def reset(self) -> None:
        """Forget every history and every measured scale, as for weights of another origin."""
        for _, row, state in self._learned():
            state.forget(row)
        for state in self._states:
            state.was_loaded()

    def forget_observed(self) -> None:
        """Forget what was seen since the last sync, as of a step that is skipped: no scale will follow from it."""
        for state in self._states:
            state.forget_observed()

    def report(self) -> list[TensorScaling]:
        """How each tensor fared in the last synced step. Waits for the device."""
        of_state = {
            id(state): torch.cat(
                [state.synced_scale.unsqueeze(1), state.synced_observed, state.format_max.unsqueeze(1)], 1
            ).tolist()
            for state in self._states
        }
        return [_fared(name, *of_state[id(state)][row]) for name, row, state in self._named]


def float8_scaling_state(model: nn.Module) -> Float8ScalingState:
    """The delayed and static scales of `model`, to save, load, and look at.

        torch.save({"model": model.state_dict(), "float8": float8_scaling_state(model).state_dict()}, path)
        dcp.save({"model": ..., "float8": float8_scaling_state(model)}, checkpoint_id=path)

    The model's own state_dict has none of it. Names are those of `model.named_modules()`, without what wrappers
    (torch.compile, DDP, FSDP1, checkpoint) put before them. A model without kept scales has an empty state.
    """
    return Float8ScalingState(model)


def _fared(name: str, scale: float, amax: float, saturated: float, format_max: float) -> TensorScaling:
    is_dynamic = not scale > 0
    if amax < 0:
        return TensorScaling(name, abs(scale), is_dynamic, amax, float("nan"), 0)
    used = format_max / max(amax, scaling.EPS) if is_dynamic else scale
    ratio = 1.0 if is_dynamic else scale * amax / format_max
    return TensorScaling(name, used, is_dynamic, amax, ratio, int(saturated))


def _kind(value: object) -> str:
    return f"{value.dim()} dims" if isinstance(value, Tensor) else type(value).__name__


def _copy_newest(to: Tensor, source: Tensor) -> None:
    if to.dim() == 0 or len(to) == len(source):
        to.copy_(source)
        return
    newest = source[-len(to) :]
    to.zero_()
    to[len(to) - len(newest) :].copy_(newest)


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def _named_rows(model: nn.Module) -> list[tuple[str, int, ScaleState]]:
    """Each row once, with the name of the first linear that has it."""
    found: dict[tuple[int, int], tuple[str, int, ScaleState]] = {}
    of_ddp = [
        f"{name}.module.".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.parallel.DistributedDataParallel)
    ]
    for fqn, linear in model.named_modules():
        if isinstance(linear, Float8Linear) and isinstance(linear.scaling, LinearScales):
            for wrapper in of_ddp:
                if fqn.startswith(wrapper):
                    fqn = wrapper.removesuffix("module.") + fqn.removeprefix(wrapper)
            for wrapper in _WRAPPERS:
                fqn = fqn.replace(wrapper, "")
            state = linear.scaling.state
            for operand, row in zip(OPERANDS, linear.scaling.rows, strict=True):
                if row is not None:
                    name = f"{fqn}.{operand}" if fqn else operand
                    found.setdefault((id(state), row), (name, row, state))
    return list(found.values())


def _states(modules: nn.Module | Iterable[nn.Module]) -> list[ScaleState]:
    found = {}
    for module in modules.modules() if isinstance(modules, nn.Module) else modules:
        if isinstance(module, Float8Linear) and isinstance(module.scaling, LinearScales):
            found[id(module.scaling.state)] = module.scaling.state
    return list(found.values())


def _check_once(model: nn.Module, states: Sequence[ScaleState], group: ProcessGroup) -> None:
    """Check that the ranks agree, on a rank whose model keeps no scales too."""
    checked = [id(state) for state in states]
    if getattr(model, "_float8_sync_checked", None) == checked:
        return
    lines = [f"{name} {state.descriptions[row]}" for name, row, state in _named_rows(model)]
    lines += [f"{state.delayed_config}, powers of two: {state.power_of_2}" for state in states]
    device = states[0].device if states else next((p.device for p in model.parameters()), torch.device("cpu"))
    check_ranks_agree(lines, group, device, what="the tensors whose scales are kept")
    model._float8_sync_checked = checked  # type: ignore[assignment]

"""Combines optimizers into one, such as Muon for matrices and AdamW for the rest: `CombinedOptimizer`.

    optimizer = CombinedOptimizer(Float8Muon(hidden, lr=3e-4), Float8AdamW(others, lr=3e-4))

`copy_states` converts states between torch's optimizers and the optimizers with float8 states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quaver.optim.base import Float8Optimizer
from quaver.optim.options import check_same_algorithm
from quaver.optim.param_groups import fill_options
from quaver.runtime.optimizer_states import StatesView, replace_states
from quaver.torch_private.optimizer import load_with_hooks, save_with_hooks


class CombinedOptimizer(Optimizer):
    """Steps optimizers of different parameters in turn. It has their param groups and states, in their order.

    `defaults` has the options that all optimizers share. A scheduler that cycles momentum needs one name for it:
    combine optimizers that all have `betas` or all have `momentum`, or pass `cycle_momentum=False`.
    """

    optimizers: tuple[Optimizer, ...] = ()
    """The combined optimizers. Groups that are added to one of them appear in `param_groups`."""

    def __init__(self, *optimizers: Optimizer) -> None:
        """Combine `optimizers`.

        Raises:
            ValueError: two optimizers have the same parameter, or no optimizer is given.
            TypeError: an argument is no optimizer.
        """
        if foreign := [type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, Optimizer)]:
            raise TypeError(f"expected optimizers, got {', '.join(foreign)}")
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        parameters = [{p for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
        if len(set.union(*parameters)) < sum(map(len, parameters)):
            raise ValueError("expected optimizers of different parameters, got a parameter in two of them")
        self.optimizers = optimizers
        shared = set.intersection(*(set(optimizer.defaults) for optimizer in optimizers))
        self.defaults = {name: value for name, value in optimizers[0].defaults.items() if name in shared}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The current param groups of all the optimizers, in their order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Iterable[dict[str, Any]]) -> None:
        groups = list(groups)
        if len(groups) != len(self.param_groups):
            raise ValueError(f"param_groups: expected {len(self.param_groups)} groups, got {len(groups)}")
        remaining = iter(groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = list(islice(remaining, len(optimizer.param_groups)))

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Tensor, Any]:
        """The states of all the optimizers, by parameter."""
        return StatesView(self.optimizers)

    @state.setter
    def state(self, states: Mapping[Tensor, Any]) -> None:
        replace_states(self.state, states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: a group has to be added to one of the optimizers."""
        if self.optimizers:  # else Optimizer.__init__ adds the groups of the optimizers
            raise ValueError("expected a param group for one of the combined optimizers; add it to that optimizer")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of all optimizers.

        Raises the errors of `check_step`, before anything changes. Other optimizers, such as torch's, check their
        gradients only in their own step, so an error there leaves the optimizers before them stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _check_steps(self.optimizers[1:])  # the first one checks its own step, before anything changes
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def check_step(self) -> None:
        """Call `check_step` of the optimizers with float8 states. Changes nothing."""
        _check_steps(self.optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return one state dict for all the optimizers, whose parameters are numbered in the order of their groups."""
        return save_with_hooks(self, self._make_state_dict)

    def _make_state_dict(self) -> dict[str, Any]:
        packed: dict[str, Any] = {}
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for optimizer in self.optimizers:
            own = optimizer.state_dict()
            state |= {first + number: value for number, value in own["state"].items()}
            groups += [
                {**group, "params": [first + number for number in group["params"]]} for group in own["param_groups"]
            ]
            first += sum(len(group["params"]) for group in optimizer.param_groups)
            packed |= own
        return {**packed, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of optimizers with the same param groups.

        Raises:
            ValueError: the number of param groups differs, or an optimizer refuses its part. No optimizer changes.
        """
        with load_with_hooks(self, state_dict) as state_dict, _restore_on_error(self.optimizers):
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        groups, first = state_dict["param_groups"], 0
        if len(groups) != len(self.param_groups):
            raise ValueError(f"expected a state dict with {len(self.param_groups)} param groups, got {len(groups)}")
        for optimizer in self.optimizers:
            own = fill_options(groups[first : first + len(optimizer.param_groups)], optimizer.param_groups)
            first += len(own)
            indices = {number: index for index, number in enumerate(chain(*(group["params"] for group in own)))}
            state = {indices[number]: value for number, value in state_dict["state"].items() if number in indices}
            own = [{**group, "params": [indices[number] for number in group["params"]]} for group in own]
            optimizer.load_state_dict({**state_dict, "state": state, "param_groups": own})

    def __getstate__(self) -> dict[str, Any]:
        fields = super().__getstate__()
        del fields["state"], fields["param_groups"]
        return {**fields, "optimizers": self.optimizers}


def _check_steps(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, Float8Optimizer | CombinedOptimizer):
            optimizer.check_step()


@contextmanager
def _restore_on_error(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Restore the states and options of all optimizers if a load in the block raises or is interrupted."""
    before = [
        (dict(optimizer.state), groups := optimizer.param_groups, [dict(group) for group in groups])
        for optimizer in optimizers
    ]
    try:
        yield
    except BaseException:  # also KeyboardInterrupt
        for optimizer, (states, groups, options) in zip(optimizers, before, strict=True):
            for group, saved_options in zip(groups, options, strict=True):
                group.clear()
                group.update(saved_options)
            optimizer.state, optimizer.param_groups = defaultdict(dict, states), groups
        raise


def list_optimizers(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """List the optimizers that this one combines, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def copy_states(target: Optimizer, source: Optimizer) -> None:
    """Give `target` the states of `source`, an optimizer of the same parameters, and the options that both have.

    Each is torch.optim.AdamW, torch.optim.Muon, Float8AdamW, Float8Muon or a combination. Moments are converted
    through float32, which temporarily takes 8 bytes per parameter. Param groups may differ, but the parameters of a
    group of `target` must have the same options in `source`. torch's Muon counts no steps, so Float8Muon starts again
    at step 0.

    Raises:
        ValueError: a parameter has Muon in one optimizer and AdamW in the other, is missing in `source`, or uses an
            option of torch's that `target` lacks; the parameters of a group have different options in `source`.
            `target` does not change.
    """
    states: dict[Tensor, tuple[Optimizer, dict[str, Any], Any]] = {}
    for optimizer in list_optimizers(source):
        packed = optimizer.make_torch_state_dict() if isinstance(optimizer, Float8Optimizer) else optimizer.state_dict()
        for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
            for parameter, number in zip(group["params"], packed_group["params"], strict=True):
                states[parameter] = optimizer, packed_group, packed["state"].get(number)
    with _restore_on_error(list_optimizers(target)):
        for optimizer in list_optimizers(target):
            load = (
                optimizer.load_torch_state_dict if isinstance(optimizer, Float8Optimizer) else optimizer.load_state_dict
            )
            load(_pack_torch_state_dict(optimizer, states))


def _pack_torch_state_dict(
    target: Optimizer, states: dict[Tensor, tuple[Optimizer, dict[str, Any], Any]]
) -> dict[str, Any]:
    """Pack the states of the parameters of `target` into a state dict of torch's optimizer."""
    state, groups = {}, []
    parameters: Iterable[Tensor] = chain.from_iterable(group["params"] for group in target.param_groups)
    parameter_by_number = dict(enumerate(parameters))
    packed = target.state_dict()["param_groups"]
    for group in packed:
        options: dict[str, Any] = {}
        for number in group["params"]:
            if parameter_by_number[number] not in states:
                raise ValueError(f"no state of a parameter {list(parameter_by_number[number].shape)}")
            source, packed_group, values = states[parameter_by_number[number]]
            source_algorithm, algorithm = _get_algorithm(source), _get_algorithm(target)
            if source_algorithm is not algorithm:
                raise ValueError(f"states of {source_algorithm.__name__} cannot become those of {algorithm.__name__}")
            if isinstance(target, Float8Optimizer):
                check_same_algorithm(packed_group)
            for name in source.defaults.keys() & target.defaults.keys() & packed_group.keys():
                first = options.setdefault(name, packed_group[name])
                if first != packed_group[name]:
                    both = f"{first} and {packed_group[name]}"
                    raise ValueError(f"{name}: expected one value for the parameters of a group, got {both}")
            if values and type(target) is torch.optim.Muon:  # a later load would read a step that Muon never advances
                values = {name: value for name, value in values.items() if name != "step"}
            if values:
                state[number] = values
        groups.append({**group, **options})
    return {"state": state, "param_groups": groups}


def _get_algorithm(optimizer: Optimizer) -> type[Optimizer]:
    return optimizer.torch_optimizer if isinstance(optimizer, Float8Optimizer) else type(optimizer)

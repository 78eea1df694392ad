"""Base class of optimizers with float8 states: the loop over parameters, state dicts and conversion from torch's.

A subclass names the optimizer of torch that it replaces, checks a param group and steps it. Loading bypasses the casts
of torch.optim.Optimizer; docs/design/0014-optimizer-states.md says why.
"""

from __future__ import annotations

import copy
import itertools
import logging
import typing
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quaver.optim.blocks import explain_block_obstacle
from quaver.optim.options import check_same_algorithm
from quaver.optim.param_groups import fill_options
from quaver.optim.rounding import make_step_key
from quaver.optim.state import (
    check_finite,
    check_state,
    convert_torch_state,
    get_layout,
    is_small,
    make_state,
    move_state,
    read_moments,
    update_master,
)
from quaver.runtime.agreement import check_ranks_agree, check_ranks_agree_after_change
from quaver.runtime.devices import is_capturing, is_cpu
from quaver.runtime.errors import check_is_module
from quaver.runtime.log_once import log_once
from quaver.runtime.process_group import has_process_group
from quaver.runtime.warnings import warn_user
from quaver.torch_private.dispatch import is_fake_mode_on
from quaver.torch_private.dtensor import get_local_tensor, wait_for_local_tensor
from quaver.torch_private.optimizer import check_state_dict, load_with_hooks
from quaver.torch_private.versions import get_version

logger = logging.getLogger(__name__)

_LARGE_VECTOR_ELEMENTS = 1 << 16
"""The log says that the moments of vectors with at least this many elements stay in float32."""

STATE_VERSION = 1
"""Version of the state's names, shapes and random bits; every param group carries it."""


class ParameterStep(NamedTuple):
    """A parameter with a gradient, the number of its step, from 1, and the key of its random bits."""

    parameter: Tensor
    step: int
    key: int


class Float8Optimizer(Optimizer):
    """An optimizer whose moments are stored in float8, bfloat16 or float32 and rounded stochastically."""

    torch_optimizer: ClassVar[type[Any]]
    """The optimizer of torch whose state dicts are converted. Options that it lacks are this optimizer's own."""
    skipped_noun: ClassVar[str]
    """The noun, in messages, for the parts of a step that are skipped because numbers are not finite."""
    _compared_seeds: list[int] | None = None
    """The seeds of the param groups in the last comparison with the ranks of replicas. Copies begin without."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._skipped: dict[torch.device, Tensor] = {}
        """The number of skipped parts by device, which the kernels of a step increment."""
        self._skipped_on_host: dict[torch.device, Tensor] = {}
        """Copies of `_skipped` in pinned memory, in which the last steps of a GPU may be missing."""
        self._warned_count = 0
        """How many skipped parts warnings have reported."""
        self._versions: dict[Tensor, int] = {}
        """The versions of parameters with a master after their last step. Copies of an optimizer begin without."""
        self._names: dict[Tensor, str] = {}
        """The names of parameters in the log. The keys are parameters, so that copies and pickles have names, too."""
        super().__init__(params, {**defaults, "state_version": STATE_VERSION})

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for invalid options or parameters."""
        raise NotImplementedError

    def _step_group(self, group: dict[str, Any], steps: Sequence[ParameterStep]) -> None:
        """Make a step of the parameters of a group. Their states exist."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Raises the same errors as the constructor."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise
        group = self.param_groups[-1]
        self._names |= zip(group["params"], group.get("param_names", ()), strict=False)

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of all parameters that have gradients.

        Raises the errors of `check_step`, before anything changes. A param group whose step fails, for example for lack
        of memory, is not counted. The first step, and one after another seed, also raises RuntimeError if the ranks of
        a mesh dim that replicates a parameter have different seeds: they would round it differently.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_step()
        self._check_replicas_have_equal_seeds()
        for group, steps in zip(self.param_groups, self._prepare_steps(), strict=True):
            self._step_group(group, steps)
            for parameter, _, _ in steps:
                self.state[parameter]["step"] += 1
                _write_to_empty_shard(parameter)
                if "master" in self.state[parameter]:
                    self._versions[parameter] = get_version(get_local_tensor(parameter))
        self._warn_of_skipped_without_waiting()
        return loss

    def check_step(self) -> None:
        """Check that a step with the present gradients is possible. Changes nothing and does not synchronize.

        Raises:
            ValueError: a param group has an invalid option or a parameter of another dtype, or asks for another state
                than its parameters have since their first step; a gradient is sparse, or its placements differ from
                its parameter's.
            RuntimeError: a CUDA graph is being captured.
        """
        if is_capturing():
            raise RuntimeError(
                f"{type(self).__name__} counts steps on the host, so a CUDA graph would repeat one step and its random "
                "bits: call step() outside of the graph"
            )
        for group in self.param_groups:
            is_readable = not isinstance(group["lr"], Tensor) or is_cpu(group["lr"])  # reading a GPU synchronizes
            self._check_group(group if is_readable else {**group, "lr": 0.0})
            for parameter in group["params"]:
                check_gradient(parameter)
                if parameter.grad is not None and (state := self.state.get(parameter)):
                    check_state(parameter, state, group)

    def _check_replicas_have_equal_seeds(self) -> None:
        seeds = [group["seed"] for group in self.param_groups]
        if seeds == self._compared_seeds:
            return
        replicas: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for parameter in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            if isinstance(parameter, DTensor):
                for axis, placement in enumerate(parameter.placements):
                    if placement.is_replicate():
                        process_group = parameter.device_mesh.get_group(axis)
                        replicas[tuple(dist.get_process_group_ranks(process_group))] = process_group
        check = check_ranks_agree if self._compared_seeds is None else check_ranks_agree_after_change
        check([f"seed {seed}" for seed in seeds], *replicas.values(), subject=f"the seeds of {type(self).__name__}")
        self._compared_seeds = seeds

    def name_parameters(self, model: nn.Module) -> None:
        """Name this optimizer's parameters in the log as in `model`. As with AdamW, state dicts have no names.

        Groups that are added later get no names, unless they have named parameters.
        """
        check_is_module(model, argument="model")
        parameters = {parameter for group in self.param_groups for parameter in group["params"]}
        self._names |= {parameter: name for name, parameter in model.named_parameters() if parameter in parameters}

    def _prepare_steps(self) -> list[list[ParameterStep]]:
        """Prepare the states of all parameters with gradients, and list their next steps by param group."""
        positions = itertools.count()  # also of parameters without a gradient, so that random bits depend on none
        steps: list[list[ParameterStep]] = []
        for group in self.param_groups:
            steps.append([])
            for parameter in group["params"]:
                position = next(positions)
                if parameter.grad is not None:
                    step = self._prepare_step(parameter, group)
                    steps[-1].append(ParameterStep(parameter, step, make_step_key(group["seed"], step, position)))
        return steps

    def _prepare_step(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """Return the number of a parameter's next step. The first step creates the parameter's state.

        A write to the parameter since the last step, such as `load_state_dict`, is copied into its master.
        """
        state = self.state[parameter]
        if not state:
            if "float8" in [group[moment] for moment in get_layout(parameter, group).moments]:
                self._log_float32(parameter)
            state.update(make_state(parameter, group))
        elif "master" in state and self._versions.get(parameter) != get_version(get_local_tensor(parameter)):
            update_master(parameter, state["master"])
        return int(state["step"].item()) + 1

    def _get_skip_counter(self, device: torch.device) -> Tensor:
        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._skipped[device]

    def _list_skip_counters(self) -> list[tuple[torch.device, Tensor]]:
        """List the counters of skipped parts with their devices. Fake and meta counters have no values."""
        return [] if is_fake_mode_on() else [pair for pair in self._skipped.items() if not pair[1].is_meta]

    @property
    def _skipped_total(self) -> int:
        return sum(int(counter) for _, counter in self._list_skip_counters())

    def _warn_of_skipped_without_waiting(self) -> None:
        """Warn of the parts that are known to be skipped. A GPU makes its copy later; the next step reads that."""
        for device, counter in self._list_skip_counters():
            if device not in self._skipped_on_host:
                pinned = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")
                self._skipped_on_host[device] = pinned
            self._skipped_on_host[device].copy_(counter, non_blocking=True)
        self._warn_of_skipped(sum(map(int, self._skipped_on_host.values())))

    def _warn_of_skipped(self, count: int) -> None:
        """Warn if more parts have been skipped since the last warning. `count`: all that have ever been skipped."""
        if count > self._warned_count:
            new, self._warned_count = count - self._warned_count, count
            warn_user(
                f"gradients or moments are not finite in {new} {self.skipped_noun}: their parameters and moments are "
                "unchanged",
                RuntimeWarning,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, and warn of all parts that steps have skipped. Synchronizes with a GPU."""
        self._warn_of_skipped(self._skipped_total)
        return super().state_dict()

    def _log_float32(self, parameter: Tensor) -> None:
        """Log why requested float8 moments are float32, unless float8 would save little."""
        if parameter.dim() < 2 and parameter.numel() >= _LARGE_VECTOR_ELEMENTS:
            log_once(
                logger,
                self,
                "vectors",
                "moments of vectors stay in float32, 4 bytes per element each, and this model has vectors of %d "
                "elements or more; FSDP1 flattens parameters: use fully_shard (FSDP2)",
                _LARGE_VECTOR_ELEMENTS,
            )
        elif not is_small(parameter) and (obstacle := explain_block_obstacle(parameter)):
            if has_process_group() and dist.get_rank():
                return  # the first rank says it for all
            name = self._names.get(parameter, "a parameter")
            logger.warning("moments of %s %s are float32: %s", name, list(parameter.shape), obstacle)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer bit-exactly, or one of torch's optimizer with its moments rounded.

        A run that used torch's optimizer may resume with this one. The log says that moments were rounded.

        Raises:
            ValueError: the state dict has another version or belongs to another optimizer, an option is invalid, a
                tensor has another shape or dtype, or has numbers that are not finite. Nothing changes.
        """
        with load_with_hooks(self, state_dict) as state_dict:
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        if any("state_version" in group for group in state_dict["param_groups"]):
            self._load_own_state_dict(state_dict)
            return
        self.load_torch_state_dict(state_dict)
        torch_name = self.torch_optimizer.__name__
        logger.warning("the moments of a state dict of torch.optim.%s were rounded to this optimizer's", torch_name)

    def _load_own_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer bit-exactly: check everything, then replace states and param groups."""
        groups = fill_options(state_dict["param_groups"], self.param_groups)
        self._check_options(groups)
        self._check_group_sizes(groups)
        states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        loaded_groups = []
        for own_group, group in zip(self.param_groups, groups, strict=True):
            names = {name: own_group[name] for name in ("param_names",) if name in own_group}
            loaded_groups.append({**names, **copy.deepcopy(group), "params": own_group["params"]})
            self._check_group(loaded_groups[-1])
            for parameter, index in zip(own_group["params"], group["params"], strict=True):
                if state := state_dict["state"].get(index):  # torch.distributed.checkpoint has {} for one without state
                    check_state(parameter, state, group)
                    check_finite(parameter, state)
                    states[parameter] = move_state(state, parameter.device)
        self._versions.clear()
        self.__setstate__({"state": states, "param_groups": loaded_groups})

    def _check_options(self, groups: list[dict[str, Any]]) -> None:
        torch_name, name = self.torch_optimizer.__name__, type(self).__name__
        for group in groups:
            if group.get("state_version") != STATE_VERSION:
                raise ValueError(
                    f"expected a state dict of {name} with state_version {STATE_VERSION}, or of "
                    f"torch.optim.{torch_name}, got state_version {group.get('state_version', 'none')}"
                )
            # torch's Optimizer.__setstate__ adds "differentiable" to defaults
            if missing := sorted(self.defaults.keys() - group.keys() - {"differentiable"}):
                raise ValueError(f"expected a state dict of {name}, got one without {', '.join(missing)}")

    def _check_group_sizes(self, groups: list[dict[str, Any]]) -> None:
        own_sizes = [len(group["params"]) for group in self.param_groups]
        loaded_sizes = [len(group["params"]) for group in groups]
        if own_sizes != loaded_sizes:
            raise ValueError(f"expected a state dict with param groups of {own_sizes} parameters, got {loaded_sizes}")

    def make_torch_state_dict(self) -> dict[str, Any]:
        """Return a state dict for torch's optimizer, with moments in float32."""
        packed = super().state_dict()
        state = {}
        for group, packed_group in zip(self.param_groups, packed["param_groups"], strict=True):
            for parameter, number in zip(group["params"], packed_group["params"], strict=True):
                if number in packed["state"]:
                    moments = read_moments(parameter, self.state[parameter], group)
                    state[number] = {"step": self.state[parameter]["step"].clone(), **moments}
        defaults = self._get_torch_defaults()
        own_options = self.defaults.keys() - defaults.keys()
        groups = [
            {**defaults, **{name: value for name, value in group.items() if name not in own_options}}
            for group in packed["param_groups"]
        ]
        return {"state": state, "param_groups": groups}

    def _get_torch_defaults(self) -> dict[str, Any]:
        return dict(self.torch_optimizer([torch.zeros(1, 1)]).defaults)

    @torch.no_grad()
    def load_torch_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch's optimizer and round its moments. Options that it lacks do not change.

        Raises:
            ValueError: the algorithm or the param groups differ, an option is missing or invalid, a moment is missing
                or not finite, or its shape differs from its parameter's. Nothing changes.
        """
        check_state_dict(state_dict, optimizer=self)
        self._check_group_sizes(state_dict["param_groups"])
        shared = self.defaults.keys() & self._get_torch_defaults().keys() - {"differentiable"}
        if missing := sorted(shared - {name for group in state_dict["param_groups"] for name in group}):
            expected = f"a state dict of {type(self).__name__} or of torch.optim.{self.torch_optimizer.__name__}"
            raise ValueError(f"expected {expected}, got one without {', '.join(missing)}")
        position, states = 0, defaultdict[Tensor, dict[str, Any]](dict)
        options = []
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            check_same_algorithm({**group, **loaded})
            options.append({name: loaded[name] for name in shared if name in loaded})
            self._check_group({**group, **options[-1]})
            for parameter, index in zip(group["params"], loaded["params"], strict=True):
                if state_dict["state"].get(index):
                    states[parameter] = convert_torch_state(parameter, group, state_dict["state"][index], position)
                position += 1
        self.state = states
        for group, loaded_options in zip(self.param_groups, options, strict=True):
            group.update(loaded_options)

    def __getstate__(self) -> dict[str, Any]:
        counts = {"_skipped": self._skipped, "_skipped_on_host": {}, "_warned_count": self._warned_count}
        return {**super().__getstate__(), **counts, "_versions": {}, "_names": self._names}


def _write_to_empty_shard(parameter: Tensor) -> None:
    """Write to a parameter whose shard is empty on this rank, as the step does on the other ranks.

    Writes have effects that must be the same on all ranks; see [Note: when scales are dropped].
    """
    local = get_local_tensor(parameter).detach()
    if not local.numel():
        local.zero_()


def get_local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's shard of the gradient as a plain contiguous tensor, in float32 if it is float64."""
    grad = wait_for_local_tensor(typing.cast(Tensor, parameter.grad)).detach().contiguous()
    return grad.float() if grad.dtype is torch.float64 else grad


def check_gradient(parameter: Tensor) -> None:
    """Raise ValueError for a gradient that is sparse, or whose placements differ from its parameter's."""
    grad = parameter.grad
    if grad is None:
        return
    if grad.is_sparse:
        raise ValueError(f"expected a dense gradient, got {grad.layout}; use an embedding with sparse=False")
    placements = [tensor.placements if isinstance(tensor, DTensor) else None for tensor in (parameter, grad)]
    if placements[0] != placements[1]:
        raise ValueError(
            f"expected a gradient with its parameter's placements {placements[0]}, got {placements[1]}; redistribute "
            "it before step()"
        )

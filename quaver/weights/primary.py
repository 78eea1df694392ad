"""`use_float8_primary_weights`: an optimizer that steps on the masters of float8 primary weights (primary_weight.py).

    model = convert_to_float8_training(model, config="tensorwise")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = use_float8_primary_weights(model, optimizer)

A primary weight stores one byte per element for each cast of the weight. It is quantized only after an optimizer step
or when a checkpoint is loaded: forward, backward and recomputation of all microbatches read its codes. The parameters
that the optimizer was made with stay in it and become the masters, so a step runs on plain tensors with the optimizer's
kernels (foreach, fused).

    backward                  autograd accumulates into `primary.grad`, in the master's dtype
    optimizer.step()          master.grad = primary.grad; the wrapped optimizer steps; codes = quantize(master)
    state_dict                the master, under the weight's name

[Note: bfloat16 masters] A bfloat16 has 8 bits of precision, so late in training most updates are smaller than half its
spacing, and rounding to nearest loses them. The step therefore runs on float32 copies, which are rounded up or down
with probabilities that preserve the expected value. The random bits depend on a count of the steps in the param groups,
which starts at a number drawn from torch's default generator. So `torch.manual_seed` determines the bits, and a resumed
run rounds as an uninterrupted one. All ranks start at rank 0's number and round equally, whatever their seeds.
"""

from __future__ import annotations

import hashlib
import typing
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quaver.experts.module_weight import ModuleWeight, iter_model_weights, iter_module_weights
from quaver.fsdp.all_gather_weight import Float8AllGatherWeight
from quaver.kernels.stochastic_rounding import round_to_bfloat16
from quaver.linear.weight_form import is_parameter
from quaver.runtime.agreement import run_on_every_rank
from quaver.runtime.errors import check_is_module
from quaver.runtime.module_names import find_parameter_names
from quaver.runtime.optimizer_states import StatesView, replace_states
from quaver.torch_private.optimizer import load_with_hooks, save_with_hooks
from quaver.weights.primary_weight import Float8PrimaryWeight

_ROUNDINGS_KEY = "stochastic_roundings"
"""The key in the first param group of the count of steps, which starts at random; see [Note: bfloat16 masters]."""


class WeightWithMaster(NamedTuple):
    """A primary weight, its module, and the master that the wrapped optimizer holds instead of the weight."""

    name: str
    module_weight: ModuleWeight
    weight: Float8PrimaryWeight
    master: nn.Parameter


class Float8PrimaryOptimizer(Optimizer):
    """Wraps an optimizer that steps on the masters of float8 primary weights; see `use_float8_primary_weights`.

    Its param groups hold the model's parameters. Changes to them, for example by a scheduler, reach the wrapped
    optimizer at its next step. State dicts are the wrapped optimizer's. The model's state dict holds the masters.

    Attributes:
        inner: the wrapped optimizer.
        primaries: the primary weights and their masters.
    """

    def __init__(self, inner: Optimizer, primaries: list[WeightWithMaster], *, rounds_masters: bool) -> None:
        """Use `use_float8_primary_weights`. `rounds_masters`: whether the masters are bfloat16."""
        self.inner, self.primaries, self._rounds_masters = inner, primaries, rounds_masters
        weights = {id(primary.master): primary.weight for primary in primaries}
        groups = [{**group, "params": [weights.get(id(p), p) for p in group["params"]]} for group in inner.param_groups]
        self._is_initialized = self._is_stepping = False
        super().__init__(groups, dict(inner.defaults))
        self._is_initialized = True
        self.load_state_dict(inner.state_dict())  # converts existing state to the masters' dtype
        inner.register_step_pre_hook(self._check_caller)

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Tensor, Any]:
        """The state of the wrapped optimizer, keyed by the model's parameters."""
        return StatesView([self.inner], {weight: master for _, _, weight, master in self.primaries})

    @state.setter
    def state(self, states: Mapping[Tensor, Any]) -> None:
        if self._is_initialized:  # else Optimizer.__init__ sets an empty state
            replace_states(self.state, states)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer on the masters, then quantize each primary weight once.

        Raises:
            RuntimeError: a primary weight of the model was replaced.
        """
        with self._update_masters():
            self._is_stepping = True
            if closure is None:
                self._set_master_gradients()
                result = self.inner.step()
            else:
                result = self.inner.step(lambda: self._run_closure(closure))
            if self._rounds_masters:
                self.inner.param_groups[0][_ROUNDINGS_KEY] += 1
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        _copy_options(self.param_groups, self.inner.param_groups)
        return save_with_hooks(self, self.inner.state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the wrapped optimizer, or of the same optimizer on ordinary parameters."""
        # Inside `_update_masters`, because torch converts the state to the dtype that the masters have there.
        with load_with_hooks(self, state_dict) as state_dict, self._update_masters():
            self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to both optimizers, or to neither. They do not become primary weights."""
        super().add_param_group(param_group)
        if self._is_initialized:
            try:
                self.inner.add_param_group({**param_group, "params": list(param_group["params"])})
            except BaseException:
                self.param_groups.pop()
                raise

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["state"]
        state |= {"inner": self.inner, "primaries": self.primaries, "_rounds_masters": self._rounds_masters}
        return {**state, "_is_initialized": True, "_is_stepping": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.inner.register_step_pre_hook(self._check_caller)

    def _check_caller(self, *step: Any) -> None:
        if not self._is_stepping:
            raise RuntimeError("step the optimizer that use_float8_primary_weights returned, not the wrapped one")

    @contextmanager
    def _update_masters(self) -> Iterator[None]:
        """Give the wrapped optimizer the current options and float32 masters, in the block.

        At the exit, bfloat16 masters are rounded and all primary weights are quantized.
        """
        self._check_weights()
        _copy_options(self.param_groups, self.inner.param_groups)
        if self._rounds_masters:
            for primary in self.primaries:
                primary.master.data = primary.master.data.float()
        try:
            yield
        finally:
            self._is_stepping = False
            _copy_options(self.inner.param_groups, self.param_groups)
            if self._rounds_masters:
                self._round_masters()
            for primary in self.primaries:
                primary.master.grad = None
                primary.weight.quantize()

    def _check_weights(self) -> None:
        if hasattr(self.inner.step, "_wrapped_by_lr_sched"):
            raise RuntimeError(
                "a scheduler was made for the wrapped optimizer; make it for the optimizer that "
                "use_float8_primary_weights returned"
            )
        for name, module_weight, weight, master in self.primaries:
            if typing.cast(Tensor, module_weight.parameter) is not weight:
                raise RuntimeError(
                    f"{name} was replaced after use_float8_primary_weights (by load_state_dict(assign=True) or "
                    "fully_shard), so the optimizer would not train it: load without assign, shard without "
                    "primary weights"
                )
            if weight.wrapped is not master:  # model.to() copied it
                master.data = weight.wrapped.detach()
                weight.wrapped = master
                weight.quantize()

    def _set_master_gradients(self) -> None:
        for primary in self.primaries:
            grad = primary.weight.grad
            primary.master.grad = None if grad is None else grad.to(primary.master.dtype)

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        """Run a closure with the current masters: LBFGS changes them between calls."""
        for primary in self.primaries:
            primary.weight.quantize()
        loss = closure()
        self._set_master_gradients()
        return loss

    def _round_masters(self) -> None:
        """Round float32 masters to bfloat16. Values that the step did not change are exact."""
        # Not the inner optimizer's, which may have loaded param groups without the count.
        roundings = self.param_groups[0][_ROUNDINGS_KEY]
        for index, primary in enumerate(self.primaries):
            seed = hashlib.blake2b(f"{roundings} {index}".encode(), digest_size=8).digest()
            generator = torch.Generator(primary.master.device).manual_seed(int.from_bytes(seed))
            primary.master.data = round_stochastically(primary.master.data, generator)


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for group, options in zip(target, source, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 `values` with random bits of `generator`; see `round_to_bfloat16`."""
    noise = torch.randint(2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return round_to_bfloat16(values, noise)


def use_float8_primary_weights(
    model: nn.Module, optimizer: Optimizer, *, master_dtype: torch.dtype = torch.float32
) -> Float8PrimaryOptimizer:
    """Store in float8 the weights of float8 linears and experts that `optimizer` trains; its parameters become masters.

    For one process and for DDP. Under FSDP2 the shards are the masters already, and `cast_weights_once` saves casts.
    Call it after the model has its weights, and before schedulers, DDP or Accelerate's `prepare`. Use the result
    instead of `optimizer`. Losses are bit-identical to training ordinary parameters of the master's dtype. An error
    leaves `model` and `optimizer` unchanged.

    Args:
        model: a converted model, changed in place: each such weight becomes a `Float8PrimaryWeight`, a new parameter.
        optimizer: an optimizer of the model's parameters. Weights that it does not hold are not converted.
        master_dtype: float32, or bfloat16 with stochastic rounding: the dtype of the parameters and their gradients.
            The state of the optimizer is float32 in both cases. bfloat16 draws a number from torch's default generator,
            which seeds all roundings. With a process group that is a collective: every rank must call this function,
            gets rank 0's number, and raises if one raises.
    Returns:
        The optimizer to use. It saves and loads as `optimizer` does; the model's state dict holds the masters.
    Raises:
        ValueError: `master_dtype` is another dtype.
        ValueError: `optimizer` trains no weight that can be converted.
        ValueError: a weight is sharded, tied, multiplied in high precision, converted with
            `enable_fsdp_float8_all_gather`, or has a delayed or static scale.
        ValueError: a scheduler or DDP was made before.
        TypeError: `optimizer` is not a torch.optim.Optimizer, or already has primary weights.
    """
    rounds_masters = master_dtype is torch.bfloat16
    weights: dict[str, ModuleWeight] = {}
    options = {}

    def find_weights_and_draw_seed() -> int:
        weights.update(_find_weights_to_convert(model, optimizer, master_dtype))
        return int(torch.randint(2**62, (), device="cpu"))

    if rounds_masters:  # all ranks draw, so that their generators advance alike, and take rank 0's number
        options[_ROUNDINGS_KEY] = run_on_every_rank(find_weights_and_draw_seed)[0]
    else:
        weights = _find_weights_to_convert(model, optimizer, master_dtype)
    with ExitStack() as undo:
        undo.callback(vars(optimizer).update, dict(vars(optimizer)))
        undo.callback(optimizer.param_groups[0].pop, _ROUNDINGS_KEY, None)
        optimizer.param_groups[0].update(options)
        primaries = [_replace_with_primary(name, weight, master_dtype, undo) for name, weight in weights.items()]
        primary_optimizer = Float8PrimaryOptimizer(optimizer, primaries, rounds_masters=rounds_masters)
        undo.pop_all()
    for module in {weight.module: None for weight in weights.values()}:
        module.register_state_dict_post_hook(_put_masters_in_state_dict)
    return primary_optimizer


def _find_weights_to_convert(
    model: nn.Module, optimizer: Optimizer, master_dtype: torch.dtype
) -> dict[str, ModuleWeight]:
    """Return the weights that become primary weights, by name. Raises as `use_float8_primary_weights`."""
    check_is_module(model, argument="model")
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, Float8PrimaryOptimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer of ordinary parameters, got {type(optimizer).__name__}"
        )
    if master_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"master_dtype: expected torch.float32 or torch.bfloat16, got {master_dtype}")
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "optimizer: expected one without a scheduler, got a wrapped step(); make the scheduler for the result"
        )
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "model: expected one outside of DistributedDataParallel, got one inside; wrap it after this call"
        )
    optimized_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, weight in iter_model_weights(model):
        if isinstance(weight.parameter, Float8PrimaryWeight) and id(weight.parameter.wrapped) in optimized_ids:
            raise ValueError(
                f"expected an optimizer of ordinary parameters, got the master of {name}, which is a float8 primary "
                "weight already; use the optimizer that the first use_float8_primary_weights returned"
            )
    trained = [(name, weight) for name, weight in iter_model_weights(model) if id(weight.parameter) in optimized_ids]
    if not trained:
        raise ValueError(
            "expected an optimizer that holds weights of float8 linears or experts of this model, got none; convert "
            "the model, then make the optimizer with model.parameters()"
        )
    weights = {f"{name}.weight".lstrip(".") if weight.name == "weight" else name: weight for name, weight in trained}
    parameter_names = find_parameter_names(model)
    for name, weight in weights.items():
        obstacle = _explain_primary_obstacle(weight, parameter_names)
        if obstacle:
            raise ValueError(f"{name} cannot be a float8 primary weight: {obstacle}")
    return weights


def _explain_primary_obstacle(weight: ModuleWeight, parameter_names: dict[int, list[str]]) -> str:
    parameter, casts = weight.parameter, weight.config.casts
    if isinstance(parameter, Float8AllGatherWeight):
        return "its config has enable_fsdp_float8_all_gather; convert without it, or under FSDP2 use cast_weights_once"
    if isinstance(parameter, Float8PrimaryWeight):
        return "it is one already"
    if type(parameter) is not nn.Parameter or not weight.is_whole:
        return f"it is a {type(parameter).__name__}; under FSDP2 use cast_weights_once"
    if not casts.weight.is_float8:
        return "one of its matmuls runs in high precision"
    if casts.weight.row.layout is None or casts.weight.column.layout is None:
        return f"which elements of a {casts.weight.row.granularity} cast share a scale is not known"
    if casts.weight.row.layout.is_packed:
        return "its codes have four bits"
    if casts.weight.row.is_persistent:
        return "its scale is delayed or static; the recipe delayed_with_dynamic_weight scales weights dynamically"
    names = parameter_names[id(parameter)]
    return f"it is tied: {', '.join(names)}" if len(names) > 1 else ""


def _replace_with_primary(
    name: str, module_weight: ModuleWeight, master_dtype: torch.dtype, undo: ExitStack
) -> WeightWithMaster:
    """Replace a weight with a primary weight; `undo` restores it."""
    master, module = module_weight.parameter, module_weight.module
    undo.callback(_restore_weight, module_weight, master, master.data, master.grad)
    grad, master.grad = master.grad, None
    master.data = master.data.to(master_dtype)
    quantized = Float8PrimaryWeight.from_master(master, module_weight.config, module_weight.is_transposed)
    weight = nn.Parameter(quantized, master.requires_grad)
    weight.grad = None if grad is None else grad.to(master_dtype)
    setattr(module, module_weight.name, weight)
    return WeightWithMaster(name, module_weight, typing.cast(Float8PrimaryWeight, weight), master)


def _restore_weight(module_weight: ModuleWeight, master: nn.Parameter, data: Tensor, grad: Tensor | None) -> None:
    master.data, master.grad = data, None
    master.grad = grad
    setattr(module_weight.module, module_weight.name, master)


def _put_masters_in_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    for module_weight in iter_module_weights(module):
        name = prefix + module_weight.name
        weight = state_dict.get(name)
        if isinstance(weight, Float8PrimaryWeight) and not is_parameter(weight):  # with keep_vars it is a parameter
            state_dict[name] = weight.wrapped.detach()

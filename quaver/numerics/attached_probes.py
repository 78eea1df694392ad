"""`AttachedProbes`: the probes of a model's float8 weights, and the tensors that a monitor records from them."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import ModuleWeight, iter_model_weights
from quaver.linear.module import Float8Linear
from quaver.numerics.extra_statistics import EXTRAS_WIDTH
from quaver.numerics.probe import Probe, ProbeSite, list_sites, make_site_entry
from quaver.numerics.sampling import Sampling
from quaver.recipes.config import Float8LinearConfig
from quaver.runtime.module_names import join_names, strip_wrappers

logger = logging.getLogger(__name__)


class MonitoredTensor(NamedTuple):
    """One tensor of the record."""

    name: str
    site: ProbeSite
    probe: Probe
    weight_numel: int | None
    """A weight's elements on all ranks, which count once although every rank and microbatch casts the weight."""


class AttachedProbes:
    """A probe for each weight of a model's float8 linears and experts, until `detach`."""

    configs: dict[str, Float8LinearConfig]
    """The configs of the modules by the name of the weight, as of the last `update_tensors`."""
    tensors: list[MonitoredTensor]
    """The tensors of the record, by these configs."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._weights: dict[str, ModuleWeight] = {}
        self._probes: dict[str, Probe] = {}
        self.configs, self.tensors = {}, []

    def attach(self, model: nn.Module, monitor: object) -> None:
        """Attach a probe to each weight of `model`. After an error, also an interrupt, call `detach`.

        Raises:
            ValueError: the model has no float8 linears.
            RuntimeError: it has probes of another monitor.
        """
        weights = {strip_wrappers(name): weight for name, weight in iter_model_weights(model)}
        if not weights:
            raise ValueError("expected a model with float8 linears, got none; call convert_to_float8_training")
        if any(_has_probe(weight) for weight in weights.values()):
            raise RuntimeError("another monitor watches this model; close it first: quaver.monitor.find(model).close()")
        self._weights = weights
        for name, weight in weights.items():
            number, device = self._sampling.assign_number(), weight.parameter.device
            self._probes[name] = Probe(number, weight, device, monitor)
            _attach_probe(weight, self._probes[name])
        self.update_tensors()

    def reattach_lost(self) -> None:
        """Attach the probes of modules that were converted to high precision and back, which removes them."""
        lost = [name for name, weight in self._weights.items() if _is_float8(weight) and not _has_probe(weight)]
        for name in lost:
            _attach_probe(self._weights[name], self._probes[name])
        if lost:
            logger.warning(
                "the monitor attached its probes again to layers that were converted while it is open: %s; what they "
                "ran since then is not in the samples",
                join_names(lost),
            )

    def detach(self) -> None:
        """Remove the probes from the model."""
        for weight in self._weights.values():
            vars(weight.module).pop("probes", None)

    def clear(self) -> None:
        """Empty the tallies of all probes."""
        for probe in self._probes.values():
            probe.clear()

    def is_any_training(self) -> bool:
        """Return whether a module with a probe is in training mode. In `eval()` mode it is not sampled."""
        return any(weight.module.training for weight in self._weights.values())

    def update_tensors(self) -> bool:
        """Set `configs` and `tensors` by the current configs of the modules. Returns whether a config has changed."""
        # A module that was converted back to high precision keeps its last config.
        configs = {
            name: weight.config if _is_float8(weight) else self.configs[name] for name, weight in self._weights.items()
        }
        if configs == self.configs:
            return False
        self.configs, self.tensors = configs, []
        for name, weight in self._weights.items():
            numel = weight.parameter.numel()
            for site in list_sites(self.configs[name], weight.parameter.requires_grad):
                weight_numel = numel if site.operand == "weight" else None
                self.tensors.append(MonitoredTensor(name, site, self._probes[name], weight_numel))
        return True

    def make_header_entries(self, *, with_sums: bool) -> list[dict[str, Any]]:
        """Return the entries of `tensors` in a header; `with_sums` for a record of a GPU's sums."""
        return [self._make_entry(tensor, with_sums) for tensor in self.tensors]

    def _make_entry(self, tensor: MonitoredTensor, with_sums: bool) -> dict[str, Any]:
        weight = self._weights[tensor.name]
        experts = weight.parameter.shape[0] if isinstance(weight.module, Float8Experts) else None
        config = self.configs[tensor.name]
        entry = {"layer": tensor.name, "experts": experts, **make_site_entry(tensor.site, config)}
        if with_sums and tensor.site.cast == "result":
            entry["use_fast_accum"] = getattr(config.matmuls, tensor.site.operand).use_fast_accum
        return entry

    def stack_tallies(self) -> Tensor:
        """Return the tallies of `tensors`, [rows, TALLY_WIDTH]."""
        return torch.stack([tensor.probe.get_tally(tensor.site) for tensor in self.tensors])

    def stack_extras(self, tallies: Tensor) -> Tensor | None:
        """Return the extras of `tensors` beside their `tallies`, [rows, EXTRAS_WIDTH]; None in a sample without any."""
        if not self._sampling.with_extras:
            return None
        zeros = tallies.new_zeros(EXTRAS_WIDTH)
        keys = ((tensor.probe.weight_number, tensor.site.name) for tensor in self.tensors)
        return torch.stack([self._sampling.extras.get(key, zeros) for key in keys])

    def list_whole_weight_positions(self) -> list[int]:
        """List the positions of weights that are not split over ranks, so that all ranks must have the same weight."""
        return [
            position
            for position, tensor in enumerate(self.tensors)
            if tensor.weight_numel is not None
            and self._sampling.weight_sizes.get(tensor.probe.weight_number) == tensor.weight_numel
            and not _is_split(self._weights[tensor.name])
        ]


def _is_float8(weight: ModuleWeight) -> bool:
    return isinstance(weight.module, Float8Linear | Float8Experts)


def _has_probe(weight: ModuleWeight) -> bool:
    return weight.module.probes is not None


def _is_split(weight: ModuleWeight) -> bool:
    """Return whether tensor or expert parallelism gives each rank another part of the weight."""
    module = weight.module
    return (module.sharding if isinstance(module, Float8Linear) else module.dispatcher) is not None


def _attach_probe(weight: ModuleWeight, probe: Probe) -> None:
    weight.module.probes = {**(weight.module.probes or {}), weight.name: probe}

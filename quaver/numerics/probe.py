"""`Probe` and `GroupedProbe` observe a linear, or one weight of experts, while a monitor is attached.

`LinearProbe` in linear/quantize.py and `ExpertsProbe` in experts/probe.py say what calls them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels.operands import Operand, Operands
from quaver.linear.tensor import Float8Tensor
from quaver.numerics import observe, observe_groups
from quaver.numerics.sites import BACKWARD, FORWARD, GRAD_INPUT, GRAD_WEIGHT, OPERANDS, OUTPUT, Site, is_shared
from quaver.numerics.statistics import clear, merge, new_slots
from quaver.recipes.config import Float8LinearConfig


class Slots:
    """The slots of one weight and its matmuls.

    Attributes:
        forward, backward: in the order of `sites.FORWARD` and `sites.BACKWARD`.
        number: int64 () on the CPU; which weight this is (`Sampling.take_number`).
    """

    def __init__(self, number: int, config: Float8LinearConfig, device: torch.device) -> None:
        self.forward, self.backward = (new_slots(len(sites), device) for sites in (FORWARD, BACKWARD))
        self.number = torch.tensor(number, device="cpu")
        self._key = number
        self._shared = {name: is_shared(getattr(config.casts, name)) for name in OPERANDS}

    def take(self, site: Site) -> Tensor:
        """The slot of a site, [WIDTH]; those of its passes merged."""
        passes = ((FORWARD, self.forward), (BACKWARD, self.backward))
        slot, *others = (slots[sites.index(site)] for sites, slots in passes if site in sites)
        for other in others:
            slot = slot.clone()
            merge(slot, other)
        return slot

    def clear(self) -> None:
        """Forget what was observed."""
        for slots in (self.forward, self.backward):
            clear(slots)

    def _observes(self) -> bool:
        # Compiled code always calls the operations, and is not to be guarded by the key.
        return torch.compiler.is_compiling() or observe.observes(self._key)

    def _is_forward(self, name: str, operands: Operands) -> bool:
        return name == "input" or (name == "weight" and operands.row is not None)


class Probe(Slots):
    """Hands what a linear computes with to the operations of observe.py."""

    def operands(self, name: str, hp: Tensor, operands: Operands) -> None:
        if not self._observes():
            return
        matrix = _in_high_precision(hp)
        is_forward = self._is_forward(name, operands)
        if not self._shared[name]:
            self._cast(name, "row", matrix, operands.row, is_forward)
            self._cast(name, "column", matrix, operands.column, is_forward)
        elif is_forward or name == "grad_output":  # backward casts such a weight as its forward did
            # The input's column codes are saved, and tell grad_weight which input it read; on a CPU both are one.
            both = operands.column or operands.row if name == "input" else operands.row or operands.column
            self._cast(name, "both", matrix, both, is_forward)

    def _cast(self, name: str, cast: str, hp: Tensor | None, operand: Operand | None, is_forward: bool) -> None:
        if operand is None or operand.dequant_scale is None:
            return
        sites, slots = (FORWARD, self.forward) if is_forward else (BACKWARD, self.backward)
        site, keeps_columns = Site(name, cast), name == "input" and cast != "row"
        of_cast = site.name, hp, *operand[:4], is_forward, keeps_columns
        observe.observe_operand(slots, sites.index(site), self.number, *of_cast)

    def output(self, output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        if not self._observes():
            return
        hps = _in_high_precision(input), _in_high_precision(weight)
        observe.observe_output(self.forward, FORWARD.index(OUTPUT), self.number, output, *hps, bias)

    def grad_weight(self, grad_weight: Tensor, grad_output: Tensor, input: Operand) -> None:
        if not self._observes():
            return
        saved = (input.data, None) if input.dequant_scale is None else (None, input.data)
        row = BACKWARD.index(GRAD_WEIGHT)
        observe.observe_grad_weight(self.backward, row, self.number, grad_weight, grad_output, *saved)

    def grad_input(self, grad_input: Tensor, grad_output: Tensor, weight: Tensor | None, operand: Operand) -> None:
        if not self._observes():
            return
        if operand.dequant_scale is None:
            weight = operand.data
        row = BACKWARD.index(GRAD_INPUT)
        observe.observe_grad_input(self.backward, row, self.number, grad_input, grad_output, weight)


class GroupedProbe(Slots):
    """Hands what a grouped matmul computes with to the operations of observe_groups.py."""

    def operands(
        self, name: str, hp: Tensor | None, operands: Operands, ends: Tensor | None, groups: int, *, moved: bool
    ) -> None:
        if not self._observes():
            return
        is_forward, casts = self._is_forward(name, operands), {"row": operands.row, "column": operands.column}
        if self._shared[name] and name == "weight" and not is_forward:
            return  # backward casts such a weight as its forward did
        if self._shared[name]:
            casts = {"both": operands.row or operands.column}
        for cast, operand in casts.items():
            self._cast(Site(name, cast), hp, operand, (ends, groups), is_forward, moved)

    def _cast(
        self,
        site: Site,
        hp: Tensor | None,
        operand: Operand | None,
        groups: tuple[Tensor | None, int],
        is_forward: bool,
        moved: bool,
    ) -> None:
        if operand is None or operand.dequant_scale is None:
            return
        sites, slots = (FORWARD, self.forward) if is_forward else (BACKWARD, self.backward)
        made = operand.data, operand.dequant_scale, *groups, operand.layout
        observe_groups.observe_groups(slots, sites.index(site), self.number, site.name, hp, *made, is_forward, moved)

    def result(self, name: str, result: Tensor, ends: Tensor | None) -> None:
        if not self._observes():
            return
        is_forward, site = name == "output", Site(name, "result")
        sites, slots = (FORWARD, self.forward) if is_forward else (BACKWARD, self.backward)
        observe_groups.observe_grouped_result(slots, sites.index(site), self.number, result, ends, is_forward)


def _in_high_precision(tensor: Tensor) -> Tensor | None:
    return None if isinstance(tensor, Float8Tensor) else tensor

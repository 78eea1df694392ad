"""`Probe` observes a linear, or one weight of experts, while a monitor is attached.

`MatmulProbe` in linear/quantize.py says what calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels.operands import Operand, Operands
from quaver.linear.quantize import Groups
from quaver.linear.tensor import Float8Tensor
from quaver.numerics import observe
from quaver.numerics.sites import BACKWARD, FORWARD, GRAD_INPUT, GRAD_WEIGHT, OPERANDS, OUTPUT, Site
from quaver.numerics.statistics import clear, merge, new_slots
from quaver.recipes.config import Float8LinearConfig

_ONE_MATRIX = Groups(0)


class Probe:
    """Hands what one weight and its matmuls compute with to the operations of observe.py, which fill its slots.

    Attributes:
        forward, backward: in the order of `sites.FORWARD` and `sites.BACKWARD`.
        number: int64 () on the CPU; which weight this is (`Sampling.take_number`).
    """

    def __init__(self, number: int, config: Float8LinearConfig, device: torch.device) -> None:
        self.forward, self.backward = (new_slots(len(sites), device) for sites in (FORWARD, BACKWARD))
        self.number = torch.tensor(number, device="cpu")
        self._key = number
        self._shared = {name: getattr(config.casts, name).has_one_set for name in OPERANDS}

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

    def operands(
        self, name: str, hp: Tensor | None, operands: Operands, groups: Groups = _ONE_MATRIX, *, moved: bool = False
    ) -> None:
        if not self._observes():
            return
        hp = _in_high_precision(hp)
        is_forward = name == "input" or (name == "weight" and operands.row is not None)
        casts = {"row": operands.row, "column": operands.column}
        if self._shared[name]:
            if name == "weight" and not is_forward:
                return  # backward casts such a weight as its forward did
            # The input's column codes are saved, and tell grad_weight which input it read; on a CPU both are one.
            both = operands.column or operands.row if name == "input" else operands.row or operands.column
            casts = {"both": both}
        sites, slots = (FORWARD, self.forward) if is_forward else (BACKWARD, self.backward)
        for cast, operand in casts.items():
            if operand is not None and operand.dequant_scale is not None:
                site = Site(name, cast)
                observe.observe_operand(
                    slots,
                    sites.index(site),
                    self.number,
                    site.name,
                    hp,
                    *operand[:4],
                    groups.ends,
                    groups.experts,
                    moved,
                    groups.transposed,
                    is_forward,
                )

    def output(
        self,
        output: Tensor,
        input: Tensor | None,
        weight: Tensor,
        bias: Tensor | None = None,
        groups: Groups = _ONE_MATRIX,
    ) -> None:
        if self._observes():
            hps = _in_high_precision(input), _of_stored(_in_high_precision(weight), groups)
            of_rows = groups.ends, groups.experts
            observe.observe_output(self.forward, FORWARD.index(OUTPUT), self.number, output, *hps, bias, *of_rows)

    def grad_weight(
        self, grad_weight: Tensor, grad_output: Tensor | None, input: Operand, groups: Groups = _ONE_MATRIX
    ) -> None:
        if self._observes():
            saved = (input.data, None) if input.dequant_scale is None else (None, input.data)
            made = _of_stored(grad_weight, groups), grad_output, *saved, groups.ends, groups.experts
            observe.observe_grad_weight(self.backward, BACKWARD.index(GRAD_WEIGHT), self.number, *made)

    def grad_input(
        self,
        grad_input: Tensor,
        grad_output: Tensor | None,
        weight: Tensor | None,
        operand: Operand,
        groups: Groups = _ONE_MATRIX,
    ) -> None:
        if self._observes():
            if operand.dequant_scale is None and not groups.experts:
                weight = operand.data
            made = grad_input, grad_output, _of_stored(weight, groups), groups.ends, groups.experts
            observe.observe_grad_input(self.backward, BACKWARD.index(GRAD_INPUT), self.number, *made)

    def _observes(self) -> bool:
        # Compiled code always calls the operations, and is not to be guarded by the key.
        return torch.compiler.is_compiling() or observe.observes(self._key)


def _in_high_precision(tensor: Tensor | None) -> Tensor | None:
    return None if isinstance(tensor, Float8Tensor) else tensor


def _of_stored(weight: Tensor | None, groups: Groups) -> Tensor | None:
    """A weight of experts, or its gradient, as [E, N, K]."""
    return weight.transpose(1, 2) if weight is not None and groups.transposed else weight

"""The operations that observe the grouped matmuls of experts: as those of observe.py, group by group.

Each group is observed as the matrix that it was cast as, and its slot merges into that of all groups. `ends` are read
on the host, in sampled steps only.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quaver.experts.groups import bounds_of, first_scale, of_group
from quaver.kernels.operands import Operand
from quaver.linear.quantize import as_matrix
from quaver.numerics.observe import QUANTIZED_BEFORE, Sampling, observing_operation
from quaver.numerics.statistics import SlotIndex, merge, new_slots, observe_matrix, observe_result, observe_scales
from quaver.recipes.scale_layout import ScaleLayout
from quaver.torch_private.autograd import runs_in_backward

_OF_OTHER_RANKS = "its codes are those of tokens of all ranks, and the high-precision matrix has this rank's tokens"


def _observe_groups(
    sampling: Sampling,
    slot: Tensor,
    number: int,
    site: str,
    hp: Tensor | None,
    codes: Tensor,
    dequant_scale: Tensor,
    ends: Tensor | None,
    groups: int,
    layout: Sequence[int],
    is_forward: bool,
    moved: bool,
) -> None:
    """A cast of [rows, columns] in groups; `hp` are other rows, uncast, if they `moved`."""
    if site.startswith("weight"):
        sampling.weight_sizes[number] = codes.numel()
    if is_forward and runs_in_backward():
        return
    if hp is None or moved:
        sampling.reasons[number, site] = QUANTIZED_BEFORE if hp is None else _OF_OTHER_RANKS
    if hp is not None and moved:
        merge(slot, observe_matrix(hp, None))
    matrix = None if moved else hp
    operand = Operand(codes, dequant_scale, ScaleLayout(*layout))
    for group, (start, stop) in enumerate(bounds_of(ends, groups, codes.shape[0])):
        if start < stop:
            merge(slot, _observe_group(operand, matrix, group, start, stop))


def _observe_group(operands: Operand, hp: Tensor | None, group: int, start: int, stop: int) -> Tensor:
    operand = of_group(operands, group, start, stop)
    scale = operand.dequant_scale
    if hp is None or scale is None:
        observed = new_slots(1, operand.data.device)[0]
        if scale is not None:
            observe_scales(observed, scale)
        return observed
    observed = observe_matrix(hp[start:stop], operand)
    first = first_scale(operand.layout.rows, group, start)
    observed[SlotIndex.WORST_INDEX] += first * (scale.shape[1] if scale.dim() == 2 else 1)
    return observed


def _observe_grouped_result(
    sampling: Sampling, slot: Tensor, number: int, result: Tensor, ends: Tensor | None, is_forward: bool
) -> None:
    """A result of all groups, which is not compared with high precision; rows of no group are left out."""
    if is_forward and runs_in_backward():
        return
    matrix = as_matrix(result)
    merge(slot, observe_result(matrix if ends is None else matrix[: int(ends[-1])], None, None))


observe_groups = observing_operation(
    "observe_groups",
    "str site, Tensor? hp, Tensor codes, Tensor dequant_scale, Tensor? ends, int groups, int[] layout, "
    "bool is_forward, bool moved",
    _observe_groups,
)
observe_grouped_result = observing_operation(
    "observe_grouped_result", "Tensor result, Tensor? ends, bool is_forward", _observe_grouped_result
)

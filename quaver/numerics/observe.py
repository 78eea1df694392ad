"""The operations that observe casts and matmuls, and whether they do: only in steps that are sampled.

    observe_operand(slots, row, number, hp, codes, ...)   a cast of one operand
    observe_result(slots, row, number, result, ...)       a matmul's result, compared with high precision

They write to the slots of a linear (statistics.py) and return nothing. In compiled code they are operations that stay
in the graph while a monitor is attached. Whether they observe is a decision of the host when they run, so that nothing
is compiled anew when sampling begins and ends. `number` says which linear it is, as an int64 tensor on the CPU: a
number in Python would compile each of many equal layers. Eager code calls the same functions, out of sight of dispatch
modes: a selective checkpoint must not count what they run.

[Note: recomputations] A forward that runs inside a backward repeats one that was observed. Its operands count once:
only the columns of the input are kept again, because grad_weight will multiply the codes of the recomputation.

[Note: high precision in backward] grad_weight reads the input, of which backward has the codes only. Its forward keeps
`COMPARED` columns in high precision, for the codes that are saved: by their address, which belongs to the last codes
that were made there. Codes that a hook moved are not found, and the result is not compared. To hand the columns from
forward to backward, a compiled graph would have to return and save them in every step: the host decides only when the
operations run whether they sample. The codes are what backward has of its own forward where a linear runs several
times before it, as with microbatches, or again under a checkpoint.

[Note: groups] An expert is a linear: with `groups`, each group of rows (experts/groups.py) is observed as a matrix of
its own, and merges into the slot of all. `ends` are read on the host. Results and extras are those of some experts.

[Note: sums] Where the sums of a GPU were asked for, casts leave a few rows of their codes for the matmuls that follow
them (matmul_sums.py), by number, group, operand and direction; those of the input's columns with the columns
themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.experts.groups import bounds_of, first_scale, of_group
from quaver.kernels.cpu import check_memory, has_memory
from quaver.kernels.operands import Operand, present
from quaver.kernels.operation import library
from quaver.linear.quantize import as_matrix
from quaver.numerics.accumulation import Accumulation
from quaver.numerics.extras import extras_of, extras_of_result
from quaver.numerics.matmul_sums import Rows, some_rows
from quaver.numerics.statistics import (
    Compared,
    SlotIndex,
    merge,
    new_slots,
    observe_matrix,
    observe_result,
    observe_scales,
    spread,
)
from quaver.recipes.linear_casts import MATMULS
from quaver.recipes.scale_layout import ScaleLayout
from quaver.runtime.devices import is_capturing, is_cpu
from quaver.torch_private.autograd import runs_in_backward
from quaver.torch_private.dispatch import without_dispatch_modes
from quaver.torch_private.tracing import FakeTensor

COMPARED = 16
"""Rows or columns of each result that are compared with high precision."""
_CHUNK = 1 << 22
"""Elements of a matrix that are widened at a time for that."""

QUANTIZED_BEFORE = "it was quantized before the linear ran, so that there is no high-precision matrix here"
_OTHER_ROWS = "its codes are those of all ranks, and the high-precision matrix is this rank's part"
_NO_OPERANDS = "one of its operands has no high-precision matrix here"


class KeptInput(NamedTuple):
    """The input of a forward, kept to compare grad_weight with; see [Note: high precision in backward]."""

    columns: Tensor
    rows: Rows | None
    """Some rows of the transposed input; see [Note: sums]."""


@dataclass
class Sampling:
    """The state of one monitor that its operations read and write. Numbers of weights are unique in the process."""

    hardware: Accumulation | None = None
    """The GPU whose sums the monitor was asked for."""
    on: bool = False
    with_extras: frozenset[int] = frozenset()
    """The numbers of the linears whose casts get histograms and their SQNR under other recipes (extras.py)."""
    with_sums: frozenset[int] = frozenset()
    """The numbers of the linears whose sums on `hardware` are computed now."""
    ran: bool = False
    """Whether a linear with a probe ran on this rank since the last step."""
    went_back: bool = False
    """Whether one ran in a backward."""
    inputs: dict[tuple[int, int], KeptInput] = field(default_factory=dict)
    """By number and the address of codes."""
    rows: dict[tuple[tuple[int, int], str, str], Rows] = field(default_factory=dict)
    """By number and group, operand and direction; see [Note: sums]."""
    weights: dict[int, Tensor] = field(default_factory=dict)
    """The weights of forwards of this step, for backwards that have their codes only; by number."""
    weight_sizes: dict[int, int] = field(default_factory=dict)
    """How many elements of its weight each linear or grouped matmul multiplies by on this rank; by number."""
    reasons: dict[tuple[int, str], str] = field(default_factory=dict)
    """Why a statistic does not exist, by number and name of the site."""
    extras: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """By number and name of the site, [extras.WIDTH]."""

    def end_step(
        self, on: bool, with_extras: frozenset[int] = frozenset(), with_sums: frozenset[int] = frozenset()
    ) -> None:
        """Forget the step, and sample the next if `on`."""
        self.on, self.with_extras, self.with_sums = on, with_extras, with_sums
        self.ran = self.went_back = False
        self.extras.clear()
        self.inputs.clear()
        self.rows.clear()
        self.weights.clear()
        self.weight_sizes.clear()

    def take_number(self) -> int:
        """The number of another weight that this observes, until `close`."""
        number = next(_numbers)
        _sampling_of[number] = self
        return number

    def close(self) -> None:
        """Observe no weight any more."""
        self.end_step(False)
        for number in [number for number, each in _sampling_of.items() if each is self]:
            del _sampling_of[number]


_numbers = itertools.count()
_sampling_of: dict[int, Sampling] = {}
"""By the number of a weight: an operation of a compiled graph takes no other argument that could say whose it is."""


def observes(number: int) -> bool:
    """Whether to call the operations here for a weight, in eager code: in a step that is sampled."""
    sampling = _running(number)
    return sampling is not None and sampling.on


def _running(number: int) -> Sampling | None:
    """The sampling of the weight that runs now; None after its monitor closed."""
    sampling = _sampling_of.get(number)
    if sampling is not None:
        sampling.ran = True
        sampling.went_back |= runs_in_backward()
    return sampling


@contextmanager
def _plainly(device: torch.device) -> Iterator[None]:
    """Without autograd, autocast and dispatch modes."""
    with torch.no_grad(), without_dispatch_modes(), torch.autocast(device.type, enabled=False):
        yield


def _observed(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap `run` so that it runs in sampled steps of an open monitor, and does nothing otherwise."""

    def observe(slots: Tensor, row: int, number: Tensor, *args: Any) -> None:
        sampling = _running(int(number))
        if sampling is not None and sampling.on:
            if is_capturing():
                raise RuntimeError(
                    "a monitor decides on the host which steps to sample, which a CUDA graph cannot repeat: compile "
                    "without mode='reduce-overhead', or close the monitor"
                )
            check_memory(*(each for each in args if isinstance(each, Tensor)))
            with _plainly(slots.device):
                run(sampling, slots[row], int(number), *args)

    return observe


# ---- groups ----------------------------------------------------------------------------------------------------------


def _bounds(ends: Tensor | None, groups: int, rows: int) -> list[tuple[int, int, int]]:
    """The number, first row and end of each group that has rows; a matrix without `groups` is one."""
    bounds = bounds_of(ends, groups, rows) if groups else [(0, rows)]
    return [(group, start, stop) for group, (start, stop) in enumerate(bounds) if start < stop or not groups]


def _of_groups(result: Tensor, bounds: Sequence[tuple[int, int, int]]) -> Tensor:
    """The rows of a result that belong to a group of `_bounds`, which are the first ones."""
    return result[: bounds[-1][2] if bounds else 0]


def _is_compared(group: int, groups: int) -> bool:
    """Whether to compare the results of a group with high precision: of many groups, `COMPARED` evenly spread."""
    return group % max(-(-groups // COMPARED), 1) == 0


# ---- casts -----------------------------------------------------------------------------------------------------------


def _observe_operand(
    sampling: Sampling,
    slot: Tensor,
    number: int,
    site: str,
    hp: Tensor | None,
    codes: Tensor,
    dequant_scale: Tensor,
    layout: Sequence[int],
    quant_scale: Tensor | None,
    ends: Tensor | None,
    groups: int,
    moved: bool,
    transposed: bool,
    is_forward: bool,
) -> None:
    """A cast of a matrix; with `groups`, of each as a matrix of its own. `hp` has other rows if they `moved`."""
    matrix, codes = None if hp is None else as_matrix(hp), codes.reshape(-1, codes.shape[-1])
    dequant_scale = dequant_scale.reshape(-1, dequant_scale.shape[-1]) if dequant_scale.dim() > 2 else dequant_scale
    made = Operand(codes, dequant_scale, ScaleLayout(*layout), quant_scale)
    if site.startswith("weight"):
        sampling.weight_sizes[number] = codes.numel()
    rows = matrix if matrix is not None and not moved and matrix.shape == codes.shape else None
    of_codes = made.layout.scale_shape(codes.shape[0], codes.shape[1])
    fits = rows is not None and (groups > 0 or dequant_scale.shape == of_codes)
    is_repeated = is_forward and runs_in_backward()
    if not fits and not is_repeated:
        sampling.reasons[number, site] = QUANTIZED_BEFORE if matrix is None else _OTHER_ROWS
        if matrix is not None:
            merge(slot, observe_matrix(matrix, None))
    for group, start, stop in _bounds(ends, groups, codes.shape[0]):
        of_rows = None if rows is None else rows[start:stop]
        operand = of_group(made, group, start, stop) if groups else made
        if of_rows is not None and _is_compared(group, groups):
            _keep(sampling, (number, group), site, of_rows, operand, fits, transposed, is_repeated)
        if is_repeated:
            continue
        if of_rows is None or not fits:
            observed = new_slots(1, slot.device)[0]
            observe_scales(observed, present(operand.dequant_scale))
        else:
            observed = observe_matrix(of_rows, operand)
        if groups:
            across = dequant_scale.shape[1] if dequant_scale.dim() == 2 else 1
            observed[SlotIndex.WORST_INDEX] += first_scale(made.layout.rows, group, start) * across
        merge(slot, observed)


def _keep(
    sampling: Sampling,
    key: tuple[int, int],
    site: str,
    hp: Tensor,
    made: Operand,
    fits: bool,
    transposed: bool,
    is_repeated: bool,
) -> None:
    """Keep what the results of a matmul are compared with, and add the extras of its cast."""
    (number, _), (operand, cast) = key, site.split(".")
    codes, sampled = made.data, None
    if transposed:
        hp, made = hp.t(), made.t()
    if fits and number in sampling.with_sums:
        sampled = hp, made
    if operand == "input" and cast != "row":
        columns = hp[:, spread(hp.shape[1], COMPARED, hp.device)]
        kept = None if sampled is None else some_rows(*sampled, "column")
        sampling.inputs[number, codes.data_ptr()] = KeptInput(columns, kept)
    if is_repeated:
        return
    for direction in ("row", "column") if cast == "both" else (cast,):
        if sampled is not None and (operand, direction) != ("input", "column"):
            sampling.rows[key, operand, direction] = some_rows(*sampled, direction)
    if fits and number in sampling.with_extras:
        extras = extras_of(hp, made, operand, "column" if cast == "column" else "row")
        sampling.extras[number, site] = extras + sampling.extras.get((number, site), 0)


def _wide(matrix: Tensor) -> Tensor:
    """float64, or on a CPU float32, whose products are rounded 2^16 times finer than float8's."""
    return matrix.float() if is_cpu(matrix) else matrix.double()


# ---- results ---------------------------------------------------------------------------------------------------------


def _observe_output(
    sampling: Sampling,
    slot: Tensor,
    number: int,
    output: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    ends: Tensor | None,
    groups: int,
) -> None:
    """output [M, N] = input [M, K] @ weight.t() [K, N] + bias [N], compared in some rows; weights [E, N, K]."""
    if weight is not None:
        sampling.weights[number] = weight
    if runs_in_backward():
        return
    matrix = None if input is None else as_matrix(input)
    compared: list[Compared] = []
    bounds = _bounds(ends, groups, output.shape[0])
    if weight is not None and matrix is not None and matrix.shape[0] == output.shape[0]:
        for group, start, stop in bounds:
            if _is_compared(group, groups):
                rows = start + spread(stop - start, COMPARED, output.device)
                left, of_group = _wide(matrix[rows]), weight[group] if groups else weight
                reference = torch.cat([left @ _wide(part).t() for part in _parts(of_group)], 1)
                compared.append((output[rows], reference if bias is None else reference + _wide(bias)))
    else:
        sampling.reasons[number, "output.result"] = _NO_OPERANDS
    for group, _, _ in bounds:
        _add_sums(sampling, (number, group), "output")
    merge(slot, observe_result(_of_groups(output, bounds), compared))


def _observe_grad_input(
    sampling: Sampling,
    slot: Tensor,
    number: int,
    grad_input: Tensor,
    grad_output: Tensor | None,
    weight: Tensor | None,
    ends: Tensor | None,
    groups: int,
) -> None:
    """grad_input [M, K] = grad_output [M, N] @ weight [N, K], compared in some rows; weights [E, N, K]."""
    if weight is None:
        weight = sampling.weights.get(number)
    matrix, result = None if grad_output is None else as_matrix(grad_output), as_matrix(grad_input)
    compared: list[Compared] = []
    bounds = _bounds(ends, groups, result.shape[0])
    if weight is not None and has_memory(weight) and matrix is not None and matrix.shape[0] == result.shape[0]:
        for group, start, stop in bounds:
            if _is_compared(group, groups):
                rows = start + spread(stop - start, COMPARED, result.device)
                left, parts = _wide(matrix[rows]), _parts(weight[group] if groups else weight)
                columns = left.split([len(part) for part in parts], 1)
                products = (a @ _wide(part) for a, part in zip(columns, parts, strict=True))
                compared.append((result[rows], sum(products, start=left.new_zeros(()))))
    else:
        sampling.reasons[number, "grad_input.result"] = _NO_OPERANDS
    for group, _, _ in bounds:
        _add_sums(sampling, (number, group), "grad_input")
    merge(slot, observe_result(_of_groups(result, bounds), compared))


def _observe_grad_weight(
    sampling: Sampling,
    slot: Tensor,
    number: int,
    grad_weight: Tensor,
    grad_output: Tensor | None,
    input_hp: Tensor | None,
    input_codes: Tensor | None,
    ends: Tensor | None,
    groups: int,
) -> None:
    """grad_weight [N, K] = grad_output.t() [N, M] @ input [M, K], compared in some columns; [E, N, K] of groups."""
    matrix = None if grad_output is None else as_matrix(grad_output)
    columns = spread(grad_weight.shape[-1], COMPARED, grad_weight.device)
    compared: list[Compared] = []
    read = input_hp if input_codes is None else input_codes
    for group, start, stop in _bounds(ends, groups, 0 if read is None else read.shape[0]):
        if not _is_compared(group, groups):
            continue
        kept = None
        if input_hp is not None:
            kept = input_hp[start:stop, columns]
        elif input_codes is not None:
            found = sampling.inputs.pop((number, input_codes[start:].data_ptr()), None)
            kept = None if found is None else found.columns
            if found is not None and found.rows is not None:
                sampling.rows[(number, group), "input", "column"] = found.rows
                _add_sums(sampling, (number, group), "grad_weight")
        grads = None if matrix is None else matrix[start:stop] if groups else matrix
        if kept is not None and grads is not None and kept.shape[0] == grads.shape[0]:
            actual, parts = (grad_weight[group] if groups else grad_weight)[:, columns], _parts(grads)
            of_rows = kept.split([len(part) for part in parts])
            products = (_wide(part).t() @ _wide(b) for part, b in zip(parts, of_rows, strict=True))
            compared.append((actual, sum(products, start=_wide(actual.new_zeros(())))))
    if not compared:
        sampling.reasons[number, "grad_weight.result"] = _NO_OPERANDS
    merge(slot, observe_result(as_matrix(grad_weight), compared))


def _add_sums(sampling: Sampling, key: tuple[int, int], result: str) -> None:
    """Note what the sums of a result would lose, if it was asked for and both operands are float8."""
    left, right = (sampling.rows.get((key, *read)) for read in MATMULS[result])
    if left is not None and right is not None and sampling.hardware is not None:
        site = key[0], f"{result}.result"
        sampling.extras[site] = extras_of_result(left, right, sampling.hardware) + sampling.extras.get(site, 0)


def _parts(matrix: Tensor) -> tuple[Tensor, ...]:
    """Some rows after the other, of about `_CHUNK` elements."""
    return matrix.split(max(_CHUNK // max(matrix.shape[1], 1), 1))


# ---- the operations --------------------------------------------------------------------------------------------------


def observing_operation(name: str, arguments: str, run: Callable[..., None]) -> Callable[..., None]:
    """Register `torch.ops.quaver.<name>`, and return the function that calls it or, in eager code, `run`.

    Its arguments are `slots`, `row`, `number` and the `arguments` of the schema; the device is that of `slots`. `run`
    takes the `Sampling`, the slot and the number in place of the first three.
    """
    observe = _observed(run)
    library.define(f"{name}(Tensor(a!) slots, int row, Tensor number, {arguments}) -> ()")
    library.impl(name, observe, "CompositeExplicitAutograd")
    torch.library.register_fake(f"quaver::{name}", lambda *_: None, lib=library)
    registered = getattr(torch.ops.quaver, name)

    def call(slots: Tensor, *args: Any) -> None:
        if torch.compiler.is_compiling():
            registered(slots, *args)
        elif not any(isinstance(each, FakeTensor) for each in args):
            observe(slots, *args)

    return call


observe_operand = observing_operation(
    "observe_operand",
    "str site, Tensor? hp, Tensor codes, Tensor dequant_scale, int[] layout, Tensor? quant_scale, Tensor? ends, "
    "int groups, bool moved, bool transposed, bool is_forward",
    _observe_operand,
)
observe_output = observing_operation(
    "observe_output",
    "Tensor output, Tensor? input, Tensor? weight, Tensor? bias, Tensor? ends, int groups",
    _observe_output,
)
observe_grad_input = observing_operation(
    "observe_grad_input",
    "Tensor grad_input, Tensor? grad_output, Tensor? weight, Tensor? ends, int groups",
    _observe_grad_input,
)
observe_grad_weight = observing_operation(
    "observe_grad_weight",
    "Tensor grad_weight, Tensor? grad_output, Tensor? input_hp, Tensor? input_codes, Tensor? ends, int groups",
    _observe_grad_weight,
)

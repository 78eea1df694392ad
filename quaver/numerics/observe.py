"""The operations that observe casts and matmuls in sampled steps.

    observe_operand(tallies, index, number, site, hp, codes, ...)  the cast of one operand
    observe_output(tallies, index, number, output, ...)            the result of a matmul, compared with high precision
    observe_grad_input, observe_grad_weight                        the same for the matmuls of backward

Each adds to one tally of a linear (statistics.py) and returns nothing. In compiled code they are registered operations,
which stay in the graph while a monitor is attached. The host decides when they run whether the step is sampled, so
nothing is recompiled when sampling begins or ends. `number` identifies the linear as an int64 tensor on the CPU: with a
Python number, torch.compile would compile each of many equal layers. Eager code calls the same functions outside
dispatch modes, because a selective checkpoint must not count their operations.

A forward that runs inside a backward repeats a forward that was observed. Its operands count once. Only the columns of
the input are kept again, because grad_weight multiplies the recomputed codes.

Experts are observed like linears. With `num_groups`, each group of rows (experts/groups.py) is observed as a separate
matrix, and all groups merge into one tally. `ends` is read on the host. Only some experts have results compared and
extras.

[Note: high precision in backward] grad_weight reads the input, but backward only has its codes. The forward therefore
keeps `COMPARED_ROWS` columns in high precision, under the address of the saved codes. If a hook moved the codes, the
lookup fails and the result is not compared. The address tells forwards apart when a linear runs several times before
its backward, as with microbatches, or again under a checkpoint. The graph does not carry the columns: it would have to
return and save them in every step, because the host decides only at run time whether to sample.

[Note: sums] If the monitor computes a GPU's sums, casts keep a few rows of their codes for the matmuls that follow
(matmul_sums.py), by number, group, operand and direction. The input's column rows are kept with its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.experts.groups import find_first_scale_row, find_group_bounds, select_group
from quaver.kernels.cpu import check_memory, has_memory
from quaver.kernels.operands import Operand, require
from quaver.kernels.operation import format_parameters, library
from quaver.linear.quantize import flatten_to_matrix
from quaver.numerics.extra_statistics import compute_extras, compute_result_extras
from quaver.numerics.matmul_sums import sample_rows
from quaver.numerics.sampling import SampledInput, Sampling, record_use_and_get_sampling
from quaver.numerics.statistics import (
    ComparedPair,
    TallyIndex,
    add_scales,
    make_tallies,
    merge_tallies,
    observe_matrix,
    observe_result,
    spread_indices,
)
from quaver.recipes.linear_casts import MATMULS
from quaver.recipes.scale_layout import ScaleLayout
from quaver.runtime.devices import is_capturing, is_cpu
from quaver.torch_private.autograd import runs_in_backward
from quaver.torch_private.dispatch import without_dispatch_modes
from quaver.torch_private.tracing import FakeTensor

COMPARED_ROWS = 16
"""Rows of each result that are compared with high precision; of grad_weight, columns."""
_CHUNK_ELEMENTS = 1 << 22
"""Elements of a matrix that are widened at a time for the comparison."""


def _run_if_sampled(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap `run` so that it runs in sampled steps only, without autograd, autocast and dispatch modes."""

    def observe(tallies: Tensor, index: int, number: Tensor, *args: Any) -> None:
        sampling = record_use_and_get_sampling(int(number))
        if sampling is None:
            return
        if is_capturing():
            raise RuntimeError(
                "a monitor decides on the host which steps to sample, which a CUDA graph cannot repeat: compile "
                "without mode='reduce-overhead', or close the monitor"
            )
        check_memory(*(arg for arg in args if isinstance(arg, Tensor)))
        with torch.no_grad(), without_dispatch_modes(), torch.autocast(tallies.device.type, enabled=False):
            run(sampling, tallies[index], int(number), *args)

    return observe


def _find_groups(ends: Tensor | None, num_groups: int, rows: int) -> list[tuple[int, int, int]]:
    """Return the number, first row and end of each group that has rows; a matrix without `num_groups` is one group."""
    bounds = find_group_bounds(ends, num_groups, rows) if num_groups else [(0, rows)]
    return [(group, start, stop) for group, (start, stop) in enumerate(bounds) if start < stop or not num_groups]


def _is_compared(group: int, num_groups: int) -> bool:
    """Return whether a group's results are compared with high precision. At most `COMPARED_ROWS` groups are."""
    return group % max(-(-num_groups // COMPARED_ROWS), 1) == 0


def _observe_operand(
    sampling: Sampling,
    tally: Tensor,
    number: int,
    site: str,
    hp: Tensor | None,
    codes: Tensor,
    dequant_scale: Tensor,
    layout: Sequence[int],
    quant_scale: Tensor | None,
    ends: Tensor | None,
    num_groups: int,
    exchanged: bool,
    transposed: bool,
    is_forward: bool,
) -> None:
    """Observe a cast of a matrix, or of each group. If `exchanged`, the codes are of other ranks' rows."""
    matrix, codes = None if hp is None else flatten_to_matrix(hp), codes.reshape(-1, codes.shape[-1])
    dequant_scale = dequant_scale.reshape(-1, dequant_scale.shape[-1]) if dequant_scale.dim() > 2 else dequant_scale
    cast = Operand(codes, dequant_scale, ScaleLayout(*layout), quant_scale)
    if site.startswith("weight"):
        sampling.weight_sizes[number] = codes.numel()
    matching_hp = matrix if matrix is not None and not exchanged and matrix.shape == codes.shape else None
    scale_shape = cast.layout.get_scale_shape(codes.shape[0], codes.shape[1])
    is_comparable = matching_hp is not None and (num_groups > 0 or dequant_scale.shape == scale_shape)
    is_repeated = is_forward and runs_in_backward()
    if matrix is not None and not is_comparable and not is_repeated:
        merge_tallies(tally, observe_matrix(matrix, None))
    for group, start, stop in _find_groups(ends, num_groups, codes.shape[0]):
        group_hp = None if matching_hp is None else matching_hp[start:stop]
        group_cast = select_group(cast, group, start, stop) if num_groups else cast
        if group_hp is not None and _is_compared(group, num_groups):
            _keep_for_matmuls(
                sampling, (number, group), site, group_hp, group_cast, is_comparable, transposed, is_repeated
            )
        if is_repeated:
            continue
        if group_hp is None or not is_comparable:
            observed = make_tallies(1, tally.device)[0]
            add_scales(observed, require(group_cast.dequant_scale, "the dequant_scale"))
        else:
            observed = observe_matrix(group_hp, group_cast)
        if num_groups:
            scales_per_row = dequant_scale.shape[1] if dequant_scale.dim() == 2 else 1
            observed[TallyIndex.WORST_INDEX] += find_first_scale_row(cast.layout.rows, group, start) * scales_per_row
        merge_tallies(tally, observed)


def _keep_for_matmuls(
    sampling: Sampling,
    key: tuple[int, int],
    site: str,
    hp: Tensor,
    cast: Operand,
    is_comparable: bool,
    transposed: bool,
    is_repeated: bool,
) -> None:
    """Keep what the results of matmuls are compared with, and add the extras of the cast."""
    (number, _), (operand, direction) = key, site.split(".")
    address = cast.data.data_ptr()
    if transposed:
        hp, cast = hp.t(), cast.t()
    keeps_rows = is_comparable and number in sampling.with_sums
    if operand == "input" and direction != "row":
        columns = hp[:, spread_indices(hp.shape[1], COMPARED_ROWS, hp.device)]
        rows = sample_rows(hp, cast, "column") if keeps_rows else None
        sampling.inputs[number, address] = SampledInput(columns, rows)
    if is_repeated:
        return
    for matmul_direction in ("row", "column") if direction == "both" else (direction,):
        if keeps_rows and (operand, matmul_direction) != ("input", "column"):
            sampling.rows[key, operand, matmul_direction] = sample_rows(hp, cast, matmul_direction)
    if is_comparable and number in sampling.with_extras:
        extras = compute_extras(hp, cast, operand, "column" if direction == "column" else "row")
        sampling.extras[number, site] = extras + sampling.extras.get((number, site), 0)


def _observe_output(
    sampling: Sampling,
    tally: Tensor,
    number: int,
    output: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    ends: Tensor | None,
    num_groups: int,
) -> None:
    """Observe output [M, N] = input [M, K] @ weight.t() [K, N] + bias [N], and compare some rows.

    Experts have weights [E, N, K].
    """
    if weight is not None:
        sampling.weights[number] = weight
    if runs_in_backward():
        return
    matrix = None if input is None else flatten_to_matrix(input)

    def compare(group: int, start: int, stop: int) -> ComparedPair | None:
        if weight is None or matrix is None or matrix.shape[0] != output.shape[0]:
            return None
        rows = start + spread_indices(stop - start, COMPARED_ROWS, output.device)
        left, chunks = _widen(matrix[rows]), _split_rows(weight[group] if num_groups else weight)
        reference = torch.cat([left @ _widen(chunk).t() for chunk in chunks], 1)
        return output[rows], reference if bias is None else reference + _widen(bias)

    bounds = _find_groups(ends, num_groups, output.shape[0])
    _observe_result(sampling, tally, (number, "output"), output, bounds, num_groups, compare)


def _observe_grad_input(
    sampling: Sampling,
    tally: Tensor,
    number: int,
    grad_input: Tensor,
    grad_output: Tensor | None,
    weight: Tensor | None,
    ends: Tensor | None,
    num_groups: int,
) -> None:
    """Observe grad_input [M, K] = grad_output [M, N] @ weight [N, K], and compare some rows.

    Experts have weights [E, N, K].
    """
    weight_hp = sampling.weights.get(number) if weight is None else weight
    matrix, result = None if grad_output is None else flatten_to_matrix(grad_output), flatten_to_matrix(grad_input)

    def compare(group: int, start: int, stop: int) -> ComparedPair | None:
        if weight_hp is None or not has_memory(weight_hp) or matrix is None or matrix.shape[0] != result.shape[0]:
            return None
        rows = start + spread_indices(stop - start, COMPARED_ROWS, result.device)
        chunks = _split_rows(weight_hp[group] if num_groups else weight_hp)
        grad_chunks = _widen(matrix[rows]).split([len(chunk) for chunk in chunks], 1)
        products = (grad @ _widen(chunk) for grad, chunk in zip(grad_chunks, chunks, strict=True))
        return result[rows], sum(products, start=grad_chunks[0].new_zeros(()))

    bounds = _find_groups(ends, num_groups, result.shape[0])
    _observe_result(sampling, tally, (number, "grad_input"), result, bounds, num_groups, compare)


def _observe_grad_weight(
    sampling: Sampling,
    tally: Tensor,
    number: int,
    grad_weight: Tensor,
    grad_output: Tensor | None,
    input_hp: Tensor | None,
    input_codes: Tensor | None,
    ends: Tensor | None,
    num_groups: int,
) -> None:
    """Observe grad_weight [N, K] = grad_output.t() [N, M] @ input [M, K], and compare some columns.

    With groups, grad_weight is [E, N, K].
    """
    matrix = None if grad_output is None else flatten_to_matrix(grad_output)
    columns = spread_indices(grad_weight.shape[-1], COMPARED_ROWS, grad_weight.device)

    def compare(group: int, start: int, stop: int) -> ComparedPair | None:
        sampled_columns = None if input_hp is None else input_hp[start:stop, columns]
        if input_hp is None and input_codes is not None:
            sampled = sampling.inputs.pop((number, input_codes[start:].data_ptr()), None)
            sampled_columns = None if sampled is None else sampled.columns
            sampled_rows = None if sampled is None else sampled.rows  # for the sums
            sampling.rows[(number, group), "input", "column"] = sampled_rows
        grads = None if matrix is None else matrix[start:stop] if num_groups else matrix
        if sampled_columns is None or grads is None or sampled_columns.shape[0] != grads.shape[0]:
            return None
        actual, chunks = (grad_weight[group] if num_groups else grad_weight)[:, columns], _split_rows(grads)
        inputs = sampled_columns.split([len(chunk) for chunk in chunks])
        products = (_widen(chunk).t() @ _widen(input) for chunk, input in zip(chunks, inputs, strict=True))
        return actual, sum(products, start=_widen(actual.new_zeros(())))

    input = input_hp if input_codes is None else input_codes
    bounds = _find_groups(ends, num_groups, 0 if input is None else input.shape[0])
    _observe_result(
        sampling, tally, (number, "grad_weight"), flatten_to_matrix(grad_weight), bounds, num_groups, compare
    )


def _observe_result(
    sampling: Sampling,
    tally: Tensor,
    key: tuple[int, str],
    result: Tensor,
    bounds: Sequence[tuple[int, int, int]],
    num_groups: int,
    compare: Callable[[int, int, int], ComparedPair | None],
) -> None:
    """Merge a result into the tally, compare some groups with high precision, and add the errors of a GPU's sums.

    `compare` takes a group's number, first row and end, and returns None if an operand has no high-precision matrix.
    """
    number, name = key
    if name != "grad_weight":
        result = result[: bounds[-1][2] if bounds else 0]  # later rows belong to no group
    pairs = [compare(*bound) for bound in bounds if _is_compared(bound[0], num_groups)]
    if sampling.accumulation is not None:
        for group, _, _ in bounds:
            left, right = (sampling.rows.get(((number, group), *operand)) for operand in MATMULS[name])
            if left is not None and right is not None:
                site = number, f"{name}.result"
                extras = compute_result_extras(left, right, sampling.accumulation)
                sampling.extras[site] = extras + sampling.extras.get(site, 0)
    merge_tallies(tally, observe_result(result, [pair for pair in pairs if pair is not None]))


def _widen(matrix: Tensor) -> Tensor:
    """Convert to float64, or on a CPU to float32, which rounds 2^16 times finer than bfloat16."""
    return matrix.float() if is_cpu(matrix) else matrix.double()


def _split_rows(matrix: Tensor) -> tuple[Tensor, ...]:
    """Split a matrix by rows into chunks of about `_CHUNK_ELEMENTS` elements."""
    return matrix.split(max(_CHUNK_ELEMENTS // max(matrix.shape[1], 1), 1))


def _register_observer(run: Callable[..., None]) -> Callable[..., None]:
    """Register the operation, and return a function that calls it in compiled code, else `run` directly.

    The operation is named like `run` without its underscore. Both take `tallies`, `index` and `number`, and then the
    arguments of `run` after its first three: the `Sampling`, the tally and the number.
    """
    name, observe = run.__name__.removeprefix("_"), _run_if_sampled(run)
    library.define(f"{name}(Tensor(a!) tallies, int index, Tensor number, {format_parameters(run, 3)}) -> ()")
    library.impl(name, observe, "CompositeExplicitAutograd")
    torch.library.register_fake(f"quaver::{name}", lambda *_: None, lib=library)
    registered = getattr(torch.ops.quaver, name)

    def call(tallies: Tensor, *args: Any) -> None:
        if torch.compiler.is_compiling():
            registered(tallies, *args)
        elif not any(isinstance(arg, FakeTensor) for arg in args):
            observe(tallies, *args)

    return call


observe_operand = _register_observer(_observe_operand)
observe_output = _register_observer(_observe_output)
observe_grad_input = _register_observer(_observe_grad_input)
observe_grad_weight = _register_observer(_observe_grad_weight)

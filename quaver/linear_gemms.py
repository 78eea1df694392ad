"""The float8 linear: three matmuls, what each reads, and what is kept between forward and backward.

    output      [M, N] = input       [M, K] @ weight.t() [K, N] (+ bias)      contracts K
    grad_input  [M, K] = grad_output [M, N] @ weight     [N, K]               contracts N
    grad_weight [N, K] = grad_output.t() [N, M] @ input  [M, K]               contracts M

Each matmul casts its own two operands (config.py says how). Tensorwise, the two casts of an operand are one; rowwise,
each has its scales along the dim that its matmul contracts.

Kept for backward, with M tokens:
    input    as grad_weight reads it: M * K bytes of float8 and its scale; in high precision only where the recipe
             computes grad_weight in high precision. Nothing if the weight is frozen; and the input itself, not cast,
             where a checkpoint keeps it anyway ([Note: an input that is kept anyway] in linear_surroundings.py).
    weight   the parameter itself, no copy, and its scale where that is tensorwise; backward casts it again. Inside
             `cast_weights_once`, or with `keep_float8_weight_for_backward`, its float8 cast. Nothing if the input
             needs no gradient.

Reads of an operand for its amax per step: one each tensorwise, two each rowwise (one per direction), and three in all
for rowwise_with_gw_hp, whose tensorwise weight amax is the largest of its row amaxes.

[Note: two functions] Eager code runs a large linear as two functions of autograd, the first of which saves and the
second multiplies. Between them is a stand-in of the output that takes no memory. What this is for:

    In the backward the second comes first, and has autograd release grad_output when it has been cast. One function
    would hold grad_output beside its float8 casts and grad_input, since whoever is called by autograd cannot release
    what he was called with; this is the largest moment of a linear's backward.

    A checkpoint ends its recomputation when all that the forward saved has been saved again. One function saves when
    it returns, so a recomputation would end with a matmul whose result nobody reads, and its memory.

Compiled code is one function, because a compiler releases what is not read again; and so is a small linear that no
checkpoint watches, where the second function's 30 us of host time would cost more than its bytes.

Everything here works on plain tensors, and tensor subclasses stay at the boundaries. A weight or an input that arrives
as a `Float8Tensor` has been cast where it was gathered, and a `CastInput` where it was computed; their operands are
taken out and used. Where the matrices of a linear are spread over ranks, a `LinearSharding` casts them with the scales
of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from quaver.casts import CastInput, MatrixCasts, Operand, Operands, Scales, casts_of_activation
from quaver.config import CastConfig, Float8GemmConfig, Float8LinearConfig
from quaver.double_backward import refuse_double_backward
from quaver.formats import HP_DTYPES
from quaver.gemm import along_contracted_after, unchecked_float8_mm
from quaver.linear_surroundings import LinearSharding, is_kept_by_checkpoint
from quaver.ordering import keep_stored, make_wait
from quaver.phases import phase
from quaver.saved_hooks import top_saved_tensors_hooks
from quaver.scaling import NO_PERSISTENT_SCALES, PersistentScale, PersistentScales
from quaver.tensor import Float8Tensor
from quaver.weight_casts import WeightCasts, cast_weight, casts_of_gathered, weight_casts_of

TWO_FUNCTIONS_FROM = 1 << 16
"""Elements of an output from which on its linear is two functions in eager code."""

_WRITTEN_TO = (
    "the input of a checkpointed module was written to after a Float8Linear had read it, so its grad_weight cannot be "
    "computed; write to a copy"
)


class _CastBefore:
    """The casts of an input that came cast, with the interface of `MatrixCasts.both`."""

    def __init__(self, operands: Callable[[int], Operand | None]) -> None:
        self._operands = operands

    def both(self, hp: Tensor, last: CastConfig, first: CastConfig | None) -> Operands:
        if last.is_disabled or (first is not None and first.is_disabled):
            raise RuntimeError("a linear that needs its input in high precision was given one that is cast to float8")
        return Operands(self._operands(1), None if first is None else self._operands(0))


@phase("quaver::gemm")
def _matmul(
    a: Operand,
    b: Operand,
    gemm: Float8GemmConfig,
    config: Float8LinearConfig,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """a [M, K] @ b [K, N] + bias [N] -> [M, N] in out_dtype."""
    if a.dequant_scale is None or b.dequant_scale is None:
        b_hp = b.data if b.data.dtype is out_dtype else b.data.to(out_dtype)  # cast_weights_once knows no out_dtype
        return torch.mm(a.data, b_hp) if bias is None else torch.addmm(bias.to(out_dtype), a.data, b_hp)
    return unchecked_float8_mm(
        a.data,
        b.data,
        a.dequant_scale,
        b.dequant_scale,
        out_dtype,
        bias,
        gemm.use_fast_accum,
        config.round_scales_to_power_of_2,
        config.emulate,
        config.pad_inner_dim,
    )


class _How(NamedTuple):
    """What a linear computes with, beside its tensors."""

    config: Float8LinearConfig
    hp_dtype: torch.dtype
    weight_casts: WeightCasts | None
    kept: PersistentScales
    sharding: LinearSharding | None
    input_operands: Operands | None = None


class _Float8Linear(torch.autograd.Function):
    """`output` forward, `grad_input` and `grad_weight` backward, in one function."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        return _output(input, weight, bias, how, *_save(ctx, input, weight, bias, how))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (*_differentiable_once(ctx, [_beginning_of_backward(ctx, grad_output)]), None)


class _SaveFirst(torch.autograd.Function):
    """[Note: two functions] The first: what a linear saves, and the end of its backward.

    The result stands for the output, with its shape and no memory. `halves` gets the context, and the operands of the
    output's matmul.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, how: _How, halves: _Halves) -> Tensor:
        operands = _save(ctx, input, weight, bias, how)
        ctx.set_materialize_grads(False)  # what arrives as the gradient of the stand-in is nothing
        ctx.begun = {}
        halves.ctx = ctx
        halves.output = partial(_output, input, weight, bias, how, *operands)
        stand_in = torch.empty((), dtype=how.hp_dtype, device=input.device)
        return stand_in.expand(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, nothing: None) -> tuple[Tensor | None, ...]:
        begun = [ctx.begun.pop(torch._C._current_graph_task_id())]
        return (*_differentiable_once(ctx, begun), None, None)


class _Halves:
    """What the first function of a linear leaves for the second."""

    __slots__ = ("ctx", "output")

    ctx: Any
    output: Callable[[], Tensor]


class _ThenMultiply(torch.autograd.Function):
    """The second: the matmul, and the beginning of the backward."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, halves: _Halves) -> Tensor:
        ctx.first = halves.ctx
        compute = halves.output
        del halves.output  # what it holds must not live as long as the graph does
        return compute()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None]:
        first = ctx.first
        first.begun[torch._C._current_graph_task_id()] = _beginning_of_backward(first, grad_output)
        return None, None


def _save(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> tuple[Operand, Operand]:
    """Cast the operands of `output`, which are returned, and save in `ctx` what backward reads."""
    config, hp_dtype, weight_casts, kept, sharding, _ = how
    ctx.weight_read = None if weight_casts is None else weight_casts.read
    needs_grad_input, needs_grad_weight = ctx.needs_input_grad[:2]
    saved: list[Tensor | None] = [None] * 6
    input_op, saved[0:3], input_version = _cast_input(input, how, needs_grad_weight)
    if weight_casts is None and config.keep_float8_weight_for_backward and needs_grad_input:
        weight_casts = cast_weight(weight, config, hp_dtype, kept.weight, sharding)
    if weight_casts is not None:
        weight_op = weight_casts.for_output
        if needs_grad_input:
            saved[3:5] = weight_casts.for_grad_input
    else:
        casts, weight_op = _cast_weight_for_output(weight, how)
        if needs_grad_input:
            saved[3] = weight
            other = config.casts.weight_for_grad_input
            scales = None if other.is_disabled or other.is_rowwise else casts.tensorwise_scales()
            if scales is not None:
                saved[4:6] = scales
    ctx.save_for_backward(*saved)
    bias_dtype = None if bias is None else bias.dtype
    ctx.kept = (config, hp_dtype, input_version, weight_casts is not None, input.shape, bias_dtype, kept, sharding)
    return input_op, weight_op


def _cast_weight_for_output(weight: Tensor, how: _How) -> tuple[MatrixCasts, Operand]:
    casts = weight_casts_of(how.config, how.hp_dtype, how.kept.weight, how.sharding)
    return casts, casts.cast(weight, how.config.casts.weight, 1)


def _without_gradients(input: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
    """The output alone, with no cast that only a backward reads."""
    input_op = _cast_input(input, how, False)[0]
    cast_before = how.weight_casts
    weight_op = _cast_weight_for_output(weight, how)[1] if cast_before is None else cast_before.for_output
    return _output(input, weight, bias, how, input_op, weight_op)


def _cast_input(input: Tensor, how: _How, for_grad_weight: bool) -> tuple[Operand, list[Tensor | None], int | None]:
    """The input as `output` reads it; three tensors to save of it; and its version where it is saved itself.

    Its cast is followed by its scale and None; the input itself by its quant_scale and dequant_scale where they are
    tensorwise and known. Without `for_grad_weight` all three are None.
    """
    config, hp_dtype, _, kept, sharding, operands = how
    last, first = config.casts.input, config.casts.input_for_grad_weight if for_grad_weight else None
    if operands is not None:
        inputs = _CastBefore((operands.first, operands.last).__getitem__).both(input, last, first)
    elif isinstance(input, Float8Tensor):
        inputs = _CastBefore(input.operand).both(input, last, first)
    elif sharding is not None:
        inputs = sharding.input_casts(input, config, hp_dtype, kept.input).both(_rows(input), last, first)
    else:
        casts = casts_of_activation(input, config, hp_dtype, kept.input)
        if first is not None and is_kept_by_checkpoint(input):
            input_op = casts.cast(_rows(input), last, 1)
            scales = None if first.is_disabled or first.is_rowwise else casts.tensorwise_scales()
            return input_op, [input, *(scales or (None, None))], input._version
        inputs = casts.both(_rows(input), last, first)
    return cast(Operand, inputs.last), [*(inputs.first or (None, None)), None], None


def _output(
    input: Tensor, weight: Tensor, bias: Tensor | None, how: _How, input_op: Operand, weight_op: Operand
) -> Tensor:
    config = how.config
    output = _matmul(input_op, weight_op.t(), config.gemm_config_output, config, how.hp_dtype, bias)
    if how.weight_casts is not None and how.weight_casts.read is not None:
        how.weight_casts.read.has_multiplied(weight_op.data)
    if input.dim() != 2:
        output = output.view(*input.shape[:-1], weight.shape[0])
    return output if how.sharding is None else how.sharding.reduce_output(output)


def _rows(tensor: Tensor) -> Tensor:
    """[..., features] as [rows, features]."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


class _Begun(NamedTuple):
    """A backward that has read grad_output for the last time: what is left to multiply."""

    grad_weight: Tensor | None
    left_of_grad_weight: Operand | None
    saved_input: list[Tensor | None]
    left_of_grad_input: Operand | None
    saved_weight: list[Tensor | None]
    grad_bias: Tensor | None


def _beginning_of_backward(ctx: Any, grad_output: Tensor) -> _Begun:
    """All that reads grad_output, without a history.

    Where its two casts are not one, and no kernel makes both at once, the first matmul comes before the second cast, so
    that one of them is alive at a time.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        with torch.no_grad():
            return _beginning_of_backward(ctx, grad_output)
    needs_grad_input, needs_grad_weight, needs_grad_bias = ctx.needs_input_grad[:3]
    saved_input, saved_weight = _take_saved(ctx)
    config, hp_dtype, _, _, _, bias_dtype, kept, sharding = ctx.kept
    rows = _rows(grad_output)
    for_grad_input = config.casts.grad_output if needs_grad_input else None
    for_grad_weight = config.casts.grad_output_for_grad_weight if needs_grad_weight else None
    grad_weight = column_sums = None
    if sharding is not None:
        left_of_grad_input, left_of_grad_weight = sharding.grad_output_operands(
            grad_output, config, hp_dtype, kept.grad_output, (needs_grad_input, needs_grad_weight)
        )
    else:
        casts = MatrixCasts(config, hp_dtype, kept.grad_output)
        if for_grad_input and for_grad_weight and _are_two(for_grad_weight) and not casts.lays_out(rows):
            grad_weight = _grad_weight(ctx, casts.cast(rows, for_grad_weight, 0), saved_input)
            for_grad_weight = None
            casts = MatrixCasts(config, hp_dtype, kept.grad_output)
        left_of_grad_input, left_of_grad_weight, column_sums = casts.both(
            rows, for_grad_input, for_grad_weight, column_sums=needs_grad_bias
        )
    if left_of_grad_input is not None and left_of_grad_input.dequant_scale is not None:
        keep_stored(rows, left_of_grad_input.dequant_scale)
    grad_bias = None
    if needs_grad_bias:
        grad_bias = (rows.sum(0, dtype=torch.float32) if column_sums is None else column_sums).to(bias_dtype)
    return _Begun(grad_weight, left_of_grad_weight, saved_input, left_of_grad_input, saved_weight, grad_bias)


def _take_saved(ctx: Any) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """What `_save` has saved of the input and of the weight.

    Unless the backward keeps its graph, autograd holds none of it any longer, nor does a checkpoint, which after the
    last linear of its region lets go of the input that it was given.
    """
    saved = list(ctx.saved_tensors)
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
        if ctx.weight_read is not None:
            ctx.weight_read.backward_begins()
    return saved[:3], saved[3:]


def _are_two(for_grad_weight: CastConfig) -> bool:
    """Whether grad_output's second cast is another than its first; if not it is the same codes, or has their scale."""
    return for_grad_weight.is_rowwise or for_grad_weight.is_disabled


def _end_of_backward(ctx: Any, begun: list[_Begun]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients, those of matrices in the dtype of the matmuls. Empties `begun`, a list of one.

    autograd converts them to the dtypes of what they are gradients of, when it has released what was saved; to do so
    here would hold both copies of both beside all that. For the same reason no operand outlives its matmul, and
    grad_weight comes first, in compiled code too (ordering.py).
    """
    grad_weight, left_of_grad_weight, saved_input, left_of_grad_input, saved_weight, grad_bias = begun.pop()
    grad_input = None
    if left_of_grad_weight is not None:
        grad_weight = _grad_weight(ctx, left_of_grad_weight, saved_input)
        del left_of_grad_weight
    if left_of_grad_input is not None:
        if grad_weight is not None and left_of_grad_input.dequant_scale is not None:
            make_wait(left_of_grad_input.dequant_scale, grad_weight)
        grad_input = _grad_input(ctx, left_of_grad_input, saved_weight)
    return grad_input, grad_weight, grad_bias


def _grad_weight(ctx: Any, grad_output: Operand, saved_input: list[Tensor | None]) -> Tensor:
    """`grad_weight`, as a matrix. Empties `saved_input`, so that nothing of the input outlives the matmul."""
    config, hp_dtype = ctx.kept[:2]
    input = _input_for_grad_weight(ctx, saved_input)
    return _matmul(grad_output.t(), input, config.gemm_config_grad_weight, config, hp_dtype)


def _input_for_grad_weight(ctx: Any, saved: list[Tensor | None]) -> Operand:
    """The input as `grad_weight` reads it, of what `_cast_input` saved: its cast, or itself and perhaps its scales."""
    config, hp_dtype, version, _, _, _, kept, _ = ctx.kept
    data, *scales = saved
    saved.clear()
    if data is None:
        raise RuntimeError("expected a saved input for grad_weight, got None")
    if version is None:
        return Operand(data, scales[0])
    if data._version > version:
        raise RuntimeError(_WRITTEN_TO)
    casts = MatrixCasts(config, hp_dtype, kept.input)
    if scales[0] is not None and scales[1] is not None:
        casts.know(Scales(scales[0], scales[1]))
    return casts.cast(_rows(data), config.casts.input_for_grad_weight, 0)


def _grad_input(ctx: Any, grad_output: Operand, saved_weight: list[Tensor | None]) -> Tensor:
    config, hp_dtype, _, weight_is_cast, input_shape, _, kept, sharding = ctx.kept
    weight = _weight_for_grad_input(saved_weight, weight_is_cast, config, hp_dtype, kept.weight, sharding)
    if weight_is_cast and weight.dequant_scale is not None:
        data = along_contracted_after(weight.data, grad_output.data, emulate=config.emulate)
        weight = weight._replace(data=data)
    grad_input = _matmul(grad_output, weight, config.gemm_config_grad_input, config, hp_dtype)
    return grad_input if len(input_shape) == 2 else grad_input.view(input_shape)


def _weight_for_grad_input(
    saved: list[Tensor | None],
    is_cast: bool,
    config: Float8LinearConfig,
    hp_dtype: torch.dtype,
    kept: PersistentScale | None,
    sharding: LinearSharding | None,
) -> Operand:
    """The weight as `grad_input` reads it, of what the forward saved: its cast, or itself and perhaps its scales."""
    data, *scales = saved
    if data is None:
        raise RuntimeError("expected a saved weight for grad_input, got None")
    if is_cast:
        return Operand(data, scales[0])
    casts = weight_casts_of(config, hp_dtype, kept, sharding)
    if scales[0] is not None and scales[1] is not None:
        casts.know(Scales(scales[0], scales[1]))
    return casts.cast(data, config.casts.weight_for_grad_input, 0)


def _differentiable_once(ctx: Any, begun: list[_Begun]) -> tuple[Tensor | None, ...]:
    """`_end_of_backward`, whose results say so where they are differentiated again."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _end_of_backward(ctx, begun)
    with torch.no_grad():
        grads = _end_of_backward(ctx, begun)
    return refuse_double_backward(grads)


def float8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: Float8LinearConfig | None = None,
    weight_casts: WeightCasts | None = None,
) -> Tensor:
    """`torch.nn.functional.linear` with its three matmuls in float8.

    Args:
        input: [..., K], float32, bfloat16 or float16, any strides.
        weight: [N, K], of input's dtype; under autocast of any high-precision dtype (it is cast to float8 from there).
            Either may be a `Float8Tensor`, cast before for the matmuls that read it.
        bias: [N] or None.
        config: what to cast and how; None for the tensorwise recipe. Dynamic scaling only: a function has no state that
            could keep a scale.
        weight_casts: the weight's casts, if they have been made (see `cast_weights_once`).
    Returns:
        [..., N] in input's dtype; under autocast in autocast's.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a config with delayed or static scaling.
    """
    config = config or Float8LinearConfig()
    if config.has_persistent_scales:
        raise ValueError("float8_linear scales dynamically, got a config with kept scales; use a Float8Linear for it")
    if weight_casts is None and isinstance(weight, Float8Tensor):
        weight_casts = casts_of_gathered(weight)
    return linear_with_casts(input, weight, bias, config, weight_casts, NO_PERSISTENT_SCALES, None)


def linear_with_casts(
    input: Tensor | CastInput,
    weight: Tensor,
    bias: Tensor | None,
    config: Float8LinearConfig,
    weight_casts: WeightCasts | None,
    kept: PersistentScales,
    sharding: LinearSharding | None,
) -> Tensor:
    """`float8_linear` with what a module knows beside: kept scales, and how its matrices are spread over ranks."""
    operands = None
    if isinstance(input, CastInput):
        operands = _operands_for(input, config, sharding)
        input = input.stand_in
    hp_dtype = compute_dtype("cpu" if input.is_cpu else input.device.type, input.dtype)
    _check_input(input, weight)
    how = _How(config, hp_dtype, weight_casts, kept, sharding, operands)
    if not torch.is_grad_enabled():
        return _without_gradients(input, weight, bias, how)
    is_small = input.shape[:-1].numel() * weight.shape[0] < TWO_FUNCTIONS_FROM
    if torch.compiler.is_compiling() or (is_small and top_saved_tensors_hooks(True) is None):
        return _Float8Linear.apply(input, weight, bias, how)
    halves = _Halves()
    stand_in = _SaveFirst.apply(input, weight, bias, how, halves)
    return _ThenMultiply.apply(stand_in, halves)


def _operands_for(input: CastInput, config: Float8LinearConfig, sharding: LinearSharding | None) -> Operands:
    if input.config is not config or sharding is not None:
        raise RuntimeError("this input was cast for linears of another config, or on one rank; give it to its readers")
    return input.operands


def compute_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a linear's results have for an input of `dtype`: autocast's where it is on."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype


def _check_input(input: Tensor, weight: Tensor) -> None:
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"expected an input of shape [..., {weight.shape[1]}] for a weight of {list(weight.shape)}, "
            f"got {list(input.shape)}"
        )
    if input.dtype not in HP_DTYPES:
        raise ValueError(f"expected an input of {', '.join(map(str, HP_DTYPES))}, got {input.dtype}")
    if weight.dtype is not input.dtype and not torch.is_autocast_enabled(input.device.type):
        raise ValueError(
            f"input is {input.dtype} but weight is {weight.dtype}: convert one of them, or run under torch.autocast"
        )

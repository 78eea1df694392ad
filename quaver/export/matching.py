"""`matches_serving`: compares the codes and logits of a trained model with a serving engine's."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.export.checkpoint_names import is_transformers_model
from quaver.export.files import StoredTensors
from quaver.export.frozen import load_frozen
from quaver.export.plan import get_linear_name
from quaver.export.save import save_float8
from quaver.export.weights import CheckpointTensors, get_input_scale, iter_float8_weights
from quaver.kernels.operands import Operand, require
from quaver.linear.module import Float8Linear
from quaver.linear.quantize import Quantizer, flatten_to_matrix
from quaver.recipes import scaling
from quaver.recipes.config import CastConfig
from quaver.recipes.serving import SERVING_CASTS, find_serving_name, get_serving_casts
from quaver.runtime.module_names import join_names, strip_wrappers


@dataclass(frozen=True)
class ServingMatch:
    """The result of `matches_serving`; true if all codes and scales are equal."""

    serving: str
    """The name of the engine."""
    weights: Mapping[str, float] = field(repr=False)
    """The share of the forward's codes that equal the folder's, or of its scales if that is smaller, by float8
    weight."""
    inputs: Mapping[str, float] = field(repr=False)
    """The share of the codes of a linear's input that equal those of the engine's equations, by linear."""
    engine_max_difference: float
    """The largest difference of a log probability from the model with the engine's equations as linears, in float64, on
    the codes of the folder. With equal codes only the order of sums differs."""
    transformers_max_difference: float | None
    """The largest difference of a log probability from the folder, loaded by transformers with its defaults, which may
    leave activations in high precision; None for a model of another library."""

    def __bool__(self) -> bool:
        return all(share == 1 for share in (*self.weights.values(), *self.inputs.values()))

    def __str__(self) -> str:
        lines = []
        for operand, shares in (("weights", self.weights), ("inputs", self.inputs)):
            unequal = [f"{name} {share:.4%}" for name, share in shares.items() if share < 1]
            lines.append(f"{operand}: {len(shares) - len(unequal)} of {len(shares)} with equal codes")
            lines += [f"    {join_names(unequal)}"] if unequal else []
        lines.append(
            f"largest difference of a log probability from {self.serving}'s equations: {self.engine_max_difference:.3g}"
        )
        if self.transformers_max_difference is not None:
            lines.append(f"from the folder in transformers: {self.transformers_max_difference:.3g}")
        return "\n".join(lines)


@torch.no_grad()
def matches_serving(
    model: nn.Module | Path | str,
    inputs: Tensor | Mapping[str, Any],
    *,
    folder: Path | str | None = None,
    serving: str | None = None,
) -> ServingMatch:
    """Compare the forward of a trained model with a serving engine's forward on its export.

    Computes three sets of logits on the same inputs: of `model`; of `model` with the engine's equations as linears and
    the folder's codes as weights; and of the folder in transformers. Experts keep their own forward.

    Args:
        model: converted to float8, such as by `convert_to_float8_training(model, serving=...)`, unsharded on one
            device; or a folder, which `load_frozen` loads into a model of transformers with `serving`.
        inputs: token ids, or the arguments of the model by name.
        folder: an export of `model` by `save_float8`; None for a temporary one in the format of the engine.
        serving: an engine of quaver/recipes/serving.py; None for the engine that the model was converted with.
    Raises:
        ValueError: `serving` is unknown, or None for a model with no engine or several; the folder lacks a weight, or
            is given beside a model that is a folder.
        NotImplementedError: the model is sharded, or in a wrapper with other names; or as `save_float8`.
    """
    if isinstance(model, Path | str):
        if folder is not None:
            raise ValueError(f"folder: expected None for a model that is a folder, got {str(folder)!r}")
        folder, model = model, _load_frozen_model(Path(model), serving)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    named = ((strip_wrappers(name), module) for name, module in model.named_modules())
    linears = {name: module for name, module in named if isinstance(module, Float8Linear)}
    name = serving or _find_common_engine(linears)
    casts = get_serving_casts(name)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise NotImplementedError("model: expected one without shards, got a sharded model; save and load it first")
    with ExitStack() as stack:
        stack.enter_context(_set_eval_mode(model))
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "served"
            save_float8(model, folder, format=casts.format, config=None if is_transformers_model(model) else {})
        stored = StoredTensors(Path(folder))
        tensors = iter_float8_weights(model, format=casts.format)
        weights = dict(_compare_weights(tensors, stored))
        with _record_inputs(linears) as first_inputs:
            with_codes = _compute_log_probabilities(model, inputs)
        shares = {linear: _compare_inputs(linears[linear], rows, casts.input) for linear, rows in first_inputs.items()}
        operands = {get_linear_name(weight): operand for weight, operand in _iter_stored_operands(tensors, stored)}
        if renamed := sorted(operands.keys() - linears.keys()):
            raise NotImplementedError(
                f"model: expected the linears under the names of the export, got no {join_names(renamed)}; give the "
                "model without wrappers, and with adapters of PEFT model.merge_and_unload()"
            )
        with _replace_linears(linears, operands, casts.input):
            with_equations = _compute_log_probabilities(model, inputs)
        difference = None
        if is_transformers_model(model):
            loaded = _load_in_transformers(Path(folder), model)
            difference = _compute_largest_difference(with_codes, _compute_log_probabilities(loaded, inputs))
    return ServingMatch(name, weights, shares, _compute_largest_difference(with_codes, with_equations), difference)


def _find_common_engine(linears: Mapping[str, Float8Linear]) -> str:
    engines = {find_serving_name(linear.float8_config) for linear in linears.values()}
    engine = engines.pop() if len(engines) == 1 else None
    if engine is None:
        raise ValueError(
            f"serving: expected one of {', '.join(SERVING_CASTS)} for a model that was not converted with one "
            "serving=, got None"
        )
    return engine


@contextmanager
def _set_eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _compare_weights(tensors: CheckpointTensors, stored: StoredTensors) -> Iterator[tuple[str, float]]:
    for name, part, codes, scale in _iter_expected_parts(tensors):
        names = part, tensors.plan.format.get_scale_name(part)
        missing = [stored_name for stored_name in names if stored_name not in stored]
        if missing:
            raise ValueError(f"folder: expected an export of this model, got one without {join_names(missing)}")
        shares = [_compute_equal_share(stored[names[0]], codes)]
        shares += [] if scale is None else [_compute_equal_share(stored[names[1]], scale)]
        yield (part if part != name else get_linear_name(name)), min(shares)


def _iter_expected_parts(tensors: CheckpointTensors) -> Iterator[tuple[str, str, Tensor, Tensor | None]]:
    """Yield the weight's name, the stored name, the codes in the forward and the stored scale of each float8 matrix.

    There is no scale if the blocks of the format and of the forward differ.
    """
    format = tensors.plan.format
    rows_per_block = (format.block_size or (1, 1))[0]
    for name, weight in tensors.plan.float8.items():
        for parts, _, operand in tensors.iter_forward_operands(name):
            stored_operand, count = format.convert_operand(operand, weight.config.casts.weight.row), len(parts)
            if count > 1 and operand.data.shape[0] // count % rows_per_block:  # gate and up share a block
                stored_operand = None
            scale = None if stored_operand is None else require(stored_operand.dequant_scale, "the dequant_scale")
            scales = scale.chunk(count) if scale is not None and scale.dim() else [scale] * count
            for part, codes, part_scale in zip(parts, operand.data.chunk(count), scales, strict=True):
                yield name, part, codes, None if part_scale is None else format.convert_scale(part_scale)


def _compute_equal_share(actual: Tensor, expected: Tensor) -> float:
    """Return the share of elements with equal bits; 0 if shapes or dtypes differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return 0.0
    if not expected.numel():
        return 1.0
    a, b = (x.cpu().contiguous().view(-1).view(torch.uint8).view(x.numel(), -1) for x in (actual, expected))
    return (a == b).all(1).double().mean().item()


def _iter_stored_operands(tensors: CheckpointTensors, stored: StoredTensors) -> Iterator[tuple[str, Operand]]:
    """Yield the stored operand of each linear's weight, by its name in the model."""
    format = tensors.plan.format
    for name, weight in tensors.plan.float8.items():
        if isinstance(weight.module, Float8Linear):
            part, device = tensors.plan.checkpoint_names.get_stored_names(name)[0], weight.parameter.device
            codes, scale = stored[part].to(device), stored[format.get_scale_name(part)].to(device)
            scale = scale.view(torch.float8_e8m0fnu).float() if scale.dtype is torch.uint8 else scale
            yield name, Operand(codes, scale.squeeze() if scale.numel() == 1 else scale)


@contextmanager
def _record_inputs(linears: Mapping[str, Float8Linear]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that fills with the rows of each linear's first input, by name."""
    first_inputs: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name, linear in linears.items():
            record = partial(_record_input, first_inputs, name)
            hooks.callback(linear.register_forward_pre_hook(record).remove)
        yield first_inputs


def _record_input(first_inputs: dict[str, Tensor], name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    first_inputs.setdefault(name, flatten_to_matrix(args[0].detach()))


def _compare_inputs(linear: Float8Linear, rows: Tensor, cast: CastConfig) -> float:
    persistent_scale = linear.get_persistent_scales(rows.device).input
    operand = require(
        Quantizer(linear.float8_config.casts.input, rows.dtype, persistent_scale)(rows, row=True, column=False).row,
        "the row operand",
    )
    codes, scale = quantize_by_equations(rows, cast, linear)
    return min(
        _compute_equal_share(operand.data, codes),
        _compute_equal_share(require(operand.dequant_scale, "the dequant_scale"), scale),
    )


def quantize_by_equations(rows: Tensor, cast: CastConfig, linear: Float8Linear) -> tuple[Tensor, Tensor]:
    """Return the codes of [tokens, K] and their dequant_scale, in plain PyTorch. `linear` has the static scale."""
    dtype = cast.float8_dtype
    if cast.is_persistent:
        scale = get_input_scale("a linear", linear)
        codes = scaling.cast_to_float8(rows, 1 / scale, dtype)
    elif cast.block_size is not None:
        codes, _, scale = scaling.dynamic_cast_blocks(rows, dtype, block_size=cast.block_size, rule=cast.rule)
    else:
        codes, _, scale = scaling.dynamic_cast(rows, dtype, 1 if cast.is_rowwise else None, rule=cast.rule)
    return codes, scale


@contextmanager
def _replace_linears(
    linears: Mapping[str, Float8Linear], weights: Mapping[str, Operand], cast: CastConfig
) -> Iterator[None]:
    """Run the linears of `weights` by the engine's equations, whose inputs get `cast`."""
    try:
        for name, weight in weights.items():
            vars(linears[name])["forward"] = partial(_run_linear_by_equations, linears[name], weight, cast)
        yield
    finally:
        for name in weights:
            vars(linears[name]).pop("forward", None)


def _run_linear_by_equations(linear: Float8Linear, weight: Operand, cast: CastConfig, input: Tensor) -> Tensor:
    """Return [..., N] for an input [..., K]: products of dequantized codes, summed in float64 and rounded once."""
    input_hp = _dequantize_exactly(*quantize_by_equations(flatten_to_matrix(input), cast, linear))
    weight_hp = _dequantize_exactly(weight.data, require(weight.dequant_scale, "the dequant_scale"))
    output = input_hp @ weight_hp.t()
    output = output if linear.bias is None else output + linear.bias.double()
    return output.to(input.dtype).view(*input.shape[:-1], -1)


def _dequantize_exactly(codes: Tensor, scale: Tensor) -> Tensor:
    ones = torch.ones(codes.shape, dtype=torch.float32, device=codes.device)
    return codes.double() * scaling.multiply_scale_(ones, scale).double()


def _load_frozen_model(folder: Path, serving: str | None) -> nn.Module:
    if serving is None:
        raise ValueError(f"serving: expected one of {', '.join(SERVING_CASTS)} for a folder, got None")
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    return load_frozen(model, folder, serving=serving)


def _load_in_transformers(folder: Path, model: nn.Module) -> nn.Module:
    transformers = importlib.import_module("transformers")
    model_class = getattr(transformers, (getattr(model.config, "architectures", None) or [""])[0], None)
    model_class = transformers.AutoModelForCausalLM if model_class is None else model_class
    loaded: nn.Module = model_class.from_pretrained(folder)
    return loaded.to(next(model.parameters()).device).eval()


def _compute_log_probabilities(model: Callable[..., Any], inputs: Tensor | Mapping[str, Any]) -> Tensor:
    output = model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    return getattr(output, "logits", output).double().log_softmax(-1)


def _compute_largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()

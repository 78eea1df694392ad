"""`matches_serving`: whether a trained model multiplies what a serving engine will, by layer and in its logits."""

from __future__ import annotations

import importlib
import tempfile
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.export.checkpoint_names import is_of_transformers
from quaver.export.files import StoredTensors
from quaver.export.frozen import load_frozen
from quaver.export.plan import linear_of
from quaver.export.save import save_float8
from quaver.export.weights import Float8Weights, input_scale, iter_float8_weights
from quaver.kernels.operands import Operand, present
from quaver.linear.module import Float8Linear
from quaver.linear.quantize import Quantizer, as_matrix
from quaver.recipes import scaling
from quaver.recipes.config import CastConfig
from quaver.recipes.serving import SERVING, Serving, serving_named, serving_of
from quaver.runtime.names import listed


@dataclass(frozen=True)
class ServingMatch:
    """What `matches_serving` found; true where all codes are equal.

    Attributes:
        serving: the engine.
        weights: by float8 weight, the share of its codes and scales that the folder has as the forward multiplies them.
        inputs: by linear, the share of the codes of its input that are those of the engine's equations.
        engine: the largest difference of a log probability from the model whose linears are the engine's equations in
            float64, on the codes of the folder. Equal codes leave the order of sums.
        transformers: that from the folder, loaded by transformers with its defaults, which may leave activations in
            high precision; None for a model that is not of transformers.
    """

    serving: str
    weights: Mapping[str, float] = field(repr=False)
    inputs: Mapping[str, float] = field(repr=False)
    engine: float
    transformers: float | None

    def __bool__(self) -> bool:
        return all(share == 1 for share in (*self.weights.values(), *self.inputs.values()))

    def __str__(self) -> str:
        lines = []
        for what, shares in (("weights", self.weights), ("inputs", self.inputs)):
            unequal = [f"{name} {share:.4%}" for name, share in shares.items() if share < 1]
            lines.append(f"{what}: {len(shares) - len(unequal)} of {len(shares)} with equal codes")
            lines += [f"    {listed(unequal)}"] if unequal else []
        lines.append(f"largest difference of a log probability from {self.serving}'s equations: {self.engine:.3g}")
        if self.transformers is not None:
            lines.append(f"from the folder in transformers: {self.transformers:.3g}")
        return "\n".join(lines)


@torch.no_grad()
def matches_serving(
    model: nn.Module | Path | str,
    inputs: Tensor | Mapping[str, Any],
    *,
    folder: Path | str | None = None,
    serving: str | None = None,
) -> ServingMatch:
    """Compare the forward of a trained model with what an engine computes from its export.

    Three sets of logits on the same inputs: of `model`; of `model` with the engine's equations for linears and the
    codes of the folder for weights; and of the folder in transformers. Experts keep their own forward.

    Args:
        model: converted to float8, whole on one device, such as by `convert_to_float8_training(model, serving=...)`; or
            a folder for transformers, whose codes and `serving` make the forward that is compared (`load_frozen`).
        inputs: what the model is called with: token ids, or the arguments by name.
        folder: an export of `model` by `save_float8`; None to write one for a moment, in the format of the engine.
        serving: the engine, a name of quaver/recipes/serving.py; None for that of the model.
    Raises:
        ValueError: no engine is named and the model has none, an unknown engine, linears of several, or a folder that
            lacks a weight.
        NotImplementedError: the model is sharded; or as `save_float8`.
    """
    if isinstance(model, Path | str):
        folder, model = model, _of_folder(Path(model), serving)
    linears = {name: each for name, each in model.named_modules() if isinstance(each, Float8Linear)}
    name = serving or _serving_of(linears)
    served = serving_named(name)
    if any(isinstance(each, DTensor) for each in model.parameters()):
        raise NotImplementedError("matches_serving: expected a whole model, got a sharded one; save and load it first")
    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "served"
            save_float8(model, folder, format=served.format, **_config_of(model))
        stored = StoredTensors(Path(folder))
        tensors = iter_float8_weights(model, format=served.format)
        weights = dict(_equal_weights(tensors, stored))
        called: dict[str, Tensor] = {}
        trained = _log_probabilities(_recording(model, linears, called), inputs)
        shares = {each: _equal_inputs(linears[each], rows, served.input) for each, rows in called.items()}
        operands = {linear_of(each): operand for each, operand in _stored_operands(tensors, stored)}
        engine = _log_probabilities(_with_equations(model, linears, operands, served), inputs)
        difference = None
        if is_of_transformers(model):
            loaded = _in_transformers(Path(folder), model)
            difference = _largest(trained, _log_probabilities(loaded, inputs))
    return ServingMatch(name, weights, shares, _largest(trained, engine), difference)


def _serving_of(linears: Mapping[str, Float8Linear]) -> str:
    found = {serving_of(each.config) for each in linears.values()}
    if len(found) != 1 or None in found:
        raise ValueError(
            f"serving: expected one of {', '.join(SERVING)} for a model that was not converted with one serving=, got "
            "None"
        )
    return typing.cast(str, found.pop())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [each for each in model.modules() if each.training]
    model.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True


def _config_of(model: nn.Module) -> dict[str, Any]:
    return {} if is_of_transformers(model) else {"config": {}}


def _equal_weights(tensors: Float8Weights, stored: StoredTensors) -> Iterator[tuple[str, float]]:
    """The share of codes and scales that are stored as the forward has them, by weight."""
    for name, part, codes, scale in _expected(tensors):
        names = part, tensors.plan.format.name_of_scale(part)
        missing = [each for each in names if each not in stored]
        if missing:
            raise ValueError(f"folder: expected an export of this model, got one without {listed(missing)}")
        equal = [_share(stored[names[0]], codes)] + ([] if scale is None else [_share(stored[names[1]], scale)])
        yield (part if part != name else linear_of(name)), min(equal)


def _expected(tensors: Float8Weights) -> Iterator[tuple[str, str, Tensor, Tensor | None]]:
    """Of each matrix of a float8 weight: the weight's name, its own, its codes in the forward, and its stored scale.

    None for the scale where the format has other blocks.
    """
    format = tensors.plan.format
    rows_of_block = (format.block_size or (1, 1))[0]
    for name, weight in tensors.plan.float8.items():
        for parts, _, operand in tensors.of_forward(name):
            held, count = format.held(operand, weight.config.casts.weight.row), len(parts)
            if count > 1 and operand.data.shape[0] // count % rows_of_block:  # as gate and up in blocks that they share
                held = None
            scale = None if held is None else present(held.dequant_scale)
            scales = scale.chunk(count) if scale is not None and scale.dim() else [scale] * count
            for part, codes, of_part in zip(parts, operand.data.chunk(count), scales, strict=True):
                yield name, part, codes, None if of_part is None else format.stored_scale(of_part)


def _share(actual: Tensor, expected: Tensor) -> float:
    """The share of elements with the same bits."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return 0.0
    if not expected.numel():
        return 1.0
    a, b = (each.cpu().contiguous().view(-1).view(torch.uint8).view(each.numel(), -1) for each in (actual, expected))
    return (a == b).all(1).double().mean().item()


def _stored_operands(tensors: Float8Weights, stored: StoredTensors) -> Iterator[tuple[str, Operand]]:
    """The weights of linears as the folder has them, by their names in the model."""
    format = tensors.plan.format
    for name, weight in tensors.plan.float8.items():
        if isinstance(weight.module, Float8Linear):
            part, device = tensors.plan.checkpoint.of(name)[0], weight.parameter.device
            codes, scale = stored[part].to(device), stored[format.name_of_scale(part)].to(device)
            scale = scale.view(torch.float8_e8m0fnu).float() if scale.dtype is torch.uint8 else scale
            yield name, Operand(codes, scale.squeeze() if scale.numel() == 1 else scale)


def _recording(model: nn.Module, linears: Mapping[str, Float8Linear], called: dict[str, Tensor]) -> Callable[..., Any]:
    """`model`, which keeps the first input of each linear."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for name, linear in linears.items():
                keep = partial(_keep, called, name)
                stack.callback(linear.register_forward_pre_hook(keep).remove)
            return model(*args, **kwargs)

    return call


def _keep(called: dict[str, Tensor], name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    called.setdefault(name, as_matrix(args[0].detach()))


def _equal_inputs(linear: Float8Linear, rows: Tensor, cast: CastConfig) -> float:
    own = linear.persistent_scales(rows.device, recording=False).input
    made = present(Quantizer(linear.config.casts.input, rows.dtype, own)(rows, row=True, column=False).row)
    codes, scale = quantize_by_equations(rows, cast, linear)
    return min(_share(made.data, codes), _share(present(made.dequant_scale), scale))


def quantize_by_equations(rows: Tensor, cast: CastConfig, linear: Float8Linear) -> tuple[Tensor, Tensor]:
    """The codes of [tokens, K] and their dequant_scale, in plain PyTorch; a static scale is as `linear` exports it."""
    dtype = cast.float8_dtype
    if cast.is_persistent:
        scale = input_scale("a linear", linear)
        codes = scaling.cast_to_float8(rows, 1 / scale, dtype)
    elif cast.block_size is not None:
        codes, _, scale = scaling.dynamic_cast_blocks(rows, dtype, block_size=cast.block_size, mode=cast.mode)
    else:
        codes, _, scale = scaling.dynamic_cast(rows, dtype, 1 if cast.is_rowwise else None, mode=cast.mode)
    return codes, scale


def _with_equations(
    model: nn.Module, linears: Mapping[str, Float8Linear], weights: Mapping[str, Operand], served: Serving
) -> Callable[..., Any]:
    """`model` with the engine's linears."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for name, linear in linears.items():
                if name in weights:
                    vars(linear)["forward"] = partial(_linear_by_equations, linear, weights[name], served.input)
                    stack.callback(vars(linear).pop, "forward")
            return model(*args, **kwargs)

    return call


def _linear_by_equations(linear: Float8Linear, weight: Operand, cast: CastConfig, input: Tensor) -> Tensor:
    """[..., K] -> [..., N]: the products of dequantized codes, summed in float64 and rounded once."""
    codes, scale = quantize_by_equations(as_matrix(input), cast, linear)
    output = _values(codes, scale) @ _values(weight.data, present(weight.dequant_scale)).t()
    output = output if linear.bias is None else output + linear.bias.double()
    return output.to(input.dtype).view(*input.shape[:-1], -1)


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    ones = torch.ones(codes.shape, dtype=torch.float32, device=codes.device)
    return codes.double() * scaling.multiply_scale_(ones, scale).double()


def _of_folder(folder: Path, serving: str | None) -> nn.Module:
    """The model of a folder, with its codes and activations by the rule of `serving`."""
    if serving is None:
        raise ValueError(f"serving: expected one of {', '.join(SERVING)} for a folder, got None")
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    return load_frozen(model, folder, serving=serving)


def _in_transformers(folder: Path, model: nn.Module) -> nn.Module:
    """The folder, loaded by transformers with its defaults, on the device of `model`."""
    transformers = importlib.import_module("transformers")
    of_class = getattr(transformers, (getattr(model.config, "architectures", None) or [""])[0], None)
    of_class = transformers.AutoModelForCausalLM if of_class is None else of_class
    loaded: nn.Module = of_class.from_pretrained(folder)
    return loaded.to(next(model.parameters()).device).eval()


def _log_probabilities(model: Callable[..., Any], inputs: Tensor | Mapping[str, Any]) -> Tensor:
    output = model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    return getattr(output, "logits", output).double().log_softmax(-1)


def _largest(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()

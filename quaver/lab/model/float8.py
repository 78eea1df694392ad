"""Converts the model as the [float8] section says, and switches its linears to high precision temporarily."""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from quaver import (
    FilterDecision,
    Float8GemmConfig,
    Float8Linear,
    Float8LinearConfig,
    auto_filter_for_recipe,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    set_high_precision_matmuls,
)
from quaver.conversion.convert import ModuleFilter
from quaver.conversion.high_precision import iter_float8_modules
from quaver.conversion.layer_recipes import HIGH_PRECISION, check_layer_names, convert_layers
from quaver.conversion.report import ConversionReport
from quaver.experts.module import Float8Experts
from quaver.lab.model.llama import Block, FeedForward, Llama
from quaver.lab.model.mixture import Experts
from quaver.lab.settings import Float8
from quaver.recipes.linear_casts import MATMULS
from quaver.recipes.serving import serving_config
from quaver.runtime.devices import is_cuda_device
from quaver.runtime.errors import InputError, reraise_as_input_error


def convert_model(model: Llama, config: Float8, *, tokens: int, device: torch.device) -> ConversionReport:
    """Convert the linears of `model` in place as `config` says, and return the report. Takes `make_filter`'s arguments.

    Raises:
        InputError: an entry of filter_fqns matches no linear, or no linear is left to convert.
    """
    convert_filtered(model, config, make_filter(model, config, tokens=tokens, device=device))
    report = conversion_report(model)
    if not report.converted:
        raise InputError(report.explain_no_conversion())
    model.fuses_producers = config.fused_producers
    if config.fused_producers:
        fuse_producers(model)
    return report


def make_filter(model: Llama, config: Float8, *, tokens: int, device: torch.device) -> ModuleFilter:
    """Return the filter of the linears and experts that `config` converts.

    Args:
        tokens: the rows of the linears' inputs in one forward, for the cost model of `auto_filter`.
        device: the device of the cost model; without a GPU, an H100.

    Raises:
        InputError: an entry of filter_fqns matches no linear.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Experts))]
    for entry in config.filter_fqns:
        if not any(entry in name for name in names):
            raise InputError(
                f"float8.filter_fqns entry {entry!r} is part of no linear's name; the linears are {', '.join(names)}"
            )
    auto_filter_fn = None
    if config.auto_filter:
        target = device if is_cuda_device(device) else None
        with reraise_as_input_error():
            auto_filter_fn = auto_filter_for_recipe(config.recipe, tokens=tokens, device=target)

    skipped_blocks = _find_skipped_blocks(model, config)

    def decide(module: nn.Module, fqn: str) -> FilterDecision | bool:
        for entry in config.filter_fqns:
            if entry in fqn:
                return FilterDecision(convert=False, reason=f"float8.filter_fqns has {entry!r}")
        if module in skipped_blocks:
            return FilterDecision(convert=False, reason=skipped_blocks[module])
        return auto_filter_fn(module, fqn) if auto_filter_fn else True

    return decide


def convert_filtered(model: nn.Module, config: Float8, decide: ModuleFilter) -> None:
    """Convert the modules that `decide` admits, each to the recipe that `config` has for it."""
    recipes = config.parse_layer_recipes()
    with reraise_as_input_error("float8."):
        check_layer_names(model, recipes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing to convert")
        convert_layers(
            model,
            recipes,
            get_config=partial(make_linear_config, config),
            serving=config.serving or None,
            module_filter_fn=decide,
        )


def make_linear_config(config: Float8, recipe: str | None = None) -> Float8LinearConfig:
    """Return the config of a run's float8 linears with `recipe`; None stands for the run's recipe.

    Raises InputError for settings that exclude each other.
    """
    recipe_config = Float8LinearConfig.from_recipe_name(config.append_backward(recipe or config.recipe_name))
    with reraise_as_input_error():
        return replace(
            serving_config(config.serving, recipe_config) if config.serving else recipe_config,
            emulate=config.emulate,
            gemm_config_output=Float8GemmConfig(config.use_fast_accum),
            enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
            delayed_scaling_config=config.make_delayed_scaling_config(),
        )


def fuse_producers(model: nn.Module) -> None:
    """Let the norms and SwiGLUs in front of float8 linears save only their inputs (functional.py)."""
    for module in model.modules():
        if isinstance(module, FeedForward):
            module.feeds_float8 = _are_float8(module.down_proj)
        elif isinstance(module, Experts):
            module.feeds_float8 = _are_float8(module)
        elif isinstance(module, Block):
            attention, mlp = module.self_attn, module.mlp
            module.input_layernorm.feeds_float8 = _are_float8(attention.q_proj, attention.k_proj, attention.v_proj)
            if isinstance(mlp, FeedForward):  # a router reads the norm of a mixture in high precision
                module.post_attention_layernorm.feeds_float8 = _are_float8(mlp.gate_proj, mlp.up_proj)


def _are_float8(*readers: nn.Module) -> bool:
    return all(
        isinstance(reader, Float8Linear | Float8Experts)
        and len(reader.float8_config.high_precision_matmuls) < len(MATMULS)
        for reader in readers
    )


def switch_high_precision_matmuls(model: Llama, matmuls: Callable[[str], Collection[str]]) -> None:
    """Call `set_high_precision_matmuls`, and update what norms and SwiGLUs save in front of the changed linears."""
    set_high_precision_matmuls(model, matmuls)
    if model.fuses_producers:
        fuse_producers(model)


@contextmanager
def in_high_precision(model: Llama) -> Iterator[None]:
    """Run the block with the float8 linears and experts of `model` in high precision, with the same weights.

    Forward and backward of a step must both be inside. Persistent scales are not updated.
    """
    configs = {name: module.float8_config for name, module in iter_float8_modules(model)}
    try:
        switch_high_precision_matmuls(model, lambda name: tuple(MATMULS))
        yield
    finally:
        switch_high_precision_matmuls(model, lambda name: configs[name].high_precision_matmuls)


def _find_skipped_blocks(model: Llama, config: Float8) -> dict[nn.Module, str]:
    """Return the modules of the first and last blocks that stay in high precision, with the reason."""
    blocks = list(model.iter_blocks())
    first, last = config.skip_first_layers, config.skip_last_layers
    skipped = [(block, f"float8.skip_last_layers = {last}") for block in blocks[len(blocks) - last :]]
    skipped += [(block, f"float8.skip_first_layers = {first}") for block in blocks[:first]]
    return {module: reason for block, reason in skipped for module in block.modules()}


def find_layer_name(model: nn.Module, name: str) -> str:
    """Return the name of the linear, or of the experts that own the weight `name`. Raises ValueError if none is."""
    modules = dict(model.named_modules())
    for module_name in (name, name.rpartition(".")[0]):
        if isinstance(modules.get(module_name), (nn.Linear, Experts)):
            return module_name
    raise ValueError(f"{name!r} is neither a linear nor an expert weight of this model")


def convert_layer(module: nn.Module, config: Float8, recipe: str) -> None:
    """Convert a linear or experts, in float8 or not, in place to `recipe` or high precision."""
    convert_to_high_precision(module)
    if recipe != HIGH_PRECISION:
        convert_to_float8_training(module, config=make_linear_config(config, recipe))

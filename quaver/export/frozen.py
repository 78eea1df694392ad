"""Loads a float8 checkpoint as a frozen base: the codes of the file are the codes that the linears multiply with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from quaver.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.convert import obstacle_of, owners_of_weights
from quaver.export.files import listed
from quaver.export.load import Float8Checkpoint, load_float8
from quaver.frozen import blockwise_config, frozen_config, store_float8_weight
from quaver.frozen_weight import has_power_of_2_scales
from quaver.linear import Float8Linear


def load_frozen(
    model: nn.Module,
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
) -> nn.Module:
    """Load a float8 checkpoint into `model`, in place, and freeze its float8 weights with the codes of the file.

    Nothing is quantized: an export of a model computes the logits of the exported model's forward, to the bit, if its
    activations are scaled alike. Adapters then train on top of it, as on `freeze_to_float8`'s base.

        with accelerate.init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        load_frozen(model, folder)

    Args:
        model: the architecture of the checkpoint, in high precision, with its names. Its weights may be on the meta
            device, and are then made on the CPU; buffers that no checkpoint holds must not be.
        folder: as for `load_float8`.
        dtype: of the tensors in high precision, and the one that the frozen weights present, where `model` is on the
            meta device; elsewhere tensors keep their dtype.
        config: how activations and gradients are cast. By default as the scales of the weights are: "rowwise",
            "tensorwise", "rowwise_with_tensorwise_weight" where tokens have scales, or blockwise; scales are powers of
            two if those of all weights are.
    Returns:
        `model`.
    Raises:
        As `load_float8`.
        ValueError: names or shapes of the checkpoint are not those of the model, a float8 weight is tied or belongs to
            no nn.Linear, or buffers are on the meta device. The model is then as it was.
    """
    checkpoint = load_float8(folder, dtype=dtype)
    linears = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    problem = next(_problems(model, linears, checkpoint), None)
    if problem is not None:
        raise ValueError(f"{str(folder)!r} does not fit the model: {problem}")
    stored = {name: checkpoint.codes(name) for name in checkpoint if name in checkpoint.float8_names}
    power_of_2 = all(has_power_of_2_scales(scale) for _, scale in stored.values())
    given = None if config is None else frozen_config(config)
    for name, (codes, scale) in stored.items():
        linear = linears[name.removesuffix(".weight")]
        made = given or _config_for(scale, checkpoint, power_of_2)
        presented = dtype if linear.weight.is_meta else linear.weight.dtype
        device = torch.device("cpu") if linear.weight.is_meta else linear.weight.device
        store_float8_weight(linear, codes.to(device), scale.to(device), config=made, dtype=presented)
    _load_others(model, checkpoint)
    return model


def _problems(model: nn.Module, linears: dict[str, nn.Linear], checkpoint: Float8Checkpoint) -> Iterator[str]:
    """Why the checkpoint cannot be loaded."""
    owners = owners_of_weights(model)
    for name in sorted(checkpoint.float8_names):
        linear = linears.get(name.removesuffix(".weight"))
        if linear is None:
            yield f"the float8 weight {name} belongs to no nn.Linear of the model; dequantize it (load_float8)"
            return
        if isinstance(linear, Float8Linear) or type(linear.weight) is not nn.Parameter:
            yield f"{name}: expected an nn.Linear in high precision, got {type(linear).__name__}"
        elif obstacle_of(linear, False):
            yield f"{name}: {obstacle_of(linear, False)}"
        if len(owners[id(linear.weight)]) > 1:
            yield f"the float8 weight {name} is tied to {', '.join(owners[id(linear.weight)])}; untie them"
    tensors, parameters = model.state_dict(keep_vars=True), dict(model.named_parameters())
    missing = sorted(set(tensors) - set(checkpoint) - _tied_to(model, set(checkpoint)))
    unknown = sorted(set(checkpoint) - set(tensors))
    if missing or unknown:
        yield f"tensors that it lacks: {listed(missing) or 'none'}; that the model lacks: {listed(unknown) or 'none'}"
    for name in sorted(set(checkpoint) & set(tensors)):
        if list(tensors[name].shape) != checkpoint.shape(name):
            yield f"{name}: expected {list(tensors[name].shape)}, got {checkpoint.shape(name)}"
    left = sorted(name for name, each in model.named_buffers() if each.is_meta and name not in checkpoint)
    if left:
        yield (
            f"it has no values for buffers on the meta device: {listed(left)}; make the model on the CPU, or with "
            "accelerate's init_empty_weights, which leaves buffers where they are"
        )
    if any(each.is_meta for each in parameters.values()) and not all(each.is_meta for each in parameters.values()):
        yield "some parameters are on the meta device and others are not"


def _tied_to(model: nn.Module, names: set[str]) -> set[str]:
    """The names of parameters that are those of `names` under another name."""
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)
    return {name for tied in owners.values() if tied & names for name in tied}


def _config_for(scale: Tensor, checkpoint: Float8Checkpoint, power_of_2: bool) -> Float8LinearConfig:
    """How activations are cast for a weight with this scale."""
    if scale.dim() and "block" in checkpoint.format.strategies:
        return blockwise_config(power_of_2=power_of_2)
    if scale.dim():
        recipe = "rowwise"
    else:
        recipe = "rowwise_with_tensorwise_weight" if checkpoint.format.scales_tokens else "tensorwise"
    config = frozen_config(recipe)
    return config if power_of_2 else replace(config, round_scales_to_power_of_2=False)


@torch.no_grad()
def _load_others(model: nn.Module, checkpoint: Float8Checkpoint) -> None:
    """The tensors in high precision; those on the meta device become tensors of the checkpoint."""
    others = [name for name in checkpoint if name not in checkpoint.float8_names]
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    tensors = model.state_dict(keep_vars=True)
    for name in others:
        tensor = tensors[name]
        if not tensor.is_meta:
            tensor.copy_(checkpoint.as_stored(name))
            continue
        made = checkpoint[name]
        made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        for owner in owners.get(id(tensor), [name]):  # tied parameters stay tied
            parent, _, leaf = owner.rpartition(".")
            setattr(model.get_submodule(parent), leaf, made)

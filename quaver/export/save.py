"""`save_float8`: writes a model with float8 weights as a Hugging Face folder, or as one file."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.conversion.convert import ModuleFilter
from quaver.export.bundle import GENERATION, HEADER_RECORD, write_bundle
from quaver.export.files import CONFIG, SINGLE, SafetensorsWriter, config_text, json_text
from quaver.export.folders import new_folder
from quaver.export.formats import COMPRESSED_TENSORS
from quaver.export.load import load_float8
from quaver.export.plan import Plan, frozen_weights
from quaver.export.unconverted import Recipe
from quaver.export.weights import Float8Weights, iter_float8_weights
from quaver.recipes.scaling import sqnr_db, without_inf
from quaver.runtime.agreement import on_first_rank
from quaver.runtime.names import listed

logger = logging.getLogger(__name__)


def save_float8(
    model: nn.Module,
    folder: Path | str,
    *,
    config: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    format: str = COMPRESSED_TENSORS,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    rounded_from: torch.dtype | str | None = None,
    share_fused_scales: bool = True,
    module_filter_fn: ModuleFilter | None = None,
    max_shard_bytes: int = 5 * 1000**3,
    about: Mapping[str, Any] | None = None,
    files: Sequence[Path] = (),
    high_precision_model: Callable[[], nn.Module] | None = None,
    measure_tokens: int = 128,
) -> Float8Weights:
    """Write `model` as the new Hugging Face folder `folder`, or the new file `folder`; an error leaves nothing there.

    The scales of a float8 KV cache are written too, if the model has them: from `calibrate_kv_cache`, `load_frozen` or
    `set_kv_scales`.

    Args:
        model, recipe, format, weights, dtype, rounded_from, share_fused_scales, module_filter_fn: as for
            `iter_float8_weights`. For a sharded model all ranks call this, and rank 0 writes; its errors are raised on
            all.
        folder: in the format comfyui a file, NAME.safetensors. It has no config, other files or model card: its
            header says under `quaver_export` what the record of a bundle says. Memory holds it whole.
        config: the config.json without its quantization_config; by default that of a transformers model, whose
            generation config is written too.
        max_shard_bytes: a file holds at most so much, or one tensor; memory holds one file. Not for comfyui.
        about: what the record of the bundle says about the origin: "source", "step".
        files: other files to copy, such as the tokenizer's.
        high_precision_model: makes the model in high precision, to measure how much the logits change; the model is
            then whole in memory. Without it they are not measured.
        measure_tokens: how many random tokens to measure on.
    Returns:
        The weights that were written, with what the format cost.
    Raises:
        FileExistsError: `folder` exists.
        NotWrittenError: the weights cannot be written.
        ValueError, NotImplementedError: as `iter_float8_weights`; `config` or `about` has what JSON does not hold.
        NotImplementedError: ComfyUI loses the scales of the model, because it renames its tensors.
    """
    tensors = iter_float8_weights(
        model,
        recipe=recipe,
        format=format,
        weights=weights,
        dtype=dtype,
        rounded_from=rounded_from,
        share_fused_scales=share_fused_scales,
        module_filter_fn=module_filter_fn,
    )
    folder, stored = Path(folder), tensors.plan.format
    stored.check_target(folder, tensors.plan.names, files=files, high_precision_model=high_precision_model)
    record = {"format": format, "recipe": tensors.plan.recipe, **(about or {})}
    if stored.is_file:
        target = _file(folder, model, tensors, record)
    else:
        measure = (
            None
            if high_precision_model is None
            else lambda path: _measured(high_precision_model(), path, measure_tokens)
        )
        of_model = _own_config(model) if config is None else config
        target = _folder(folder, model, tensors, record, of_model, dtype, max_shard_bytes, files, measure)
    is_sharded = any(isinstance(each, DTensor) for each in model.parameters())
    write: Callable[[Callable[[], None]], None] = on_first_rank if is_sharded else (lambda action: action())
    writers: list[SafetensorsWriter] = []
    with ExitStack() as stack:
        write(lambda: writers.append(stack.enter_context(target)))
        for name, tensor in tensors:
            write(lambda name=name, tensor=tensor: writers[0].add(name, tensor))  # type: ignore[misc]
        write(stack.close)
    return tensors


@contextmanager
def _file(path: Path, model: nn.Module, tensors: Float8Weights, record: dict[str, Any]) -> Iterator[SafetensorsWriter]:
    """A file with all tensors, and in its header the record."""
    json_text("about", record)  # raises before anything is written
    _warn(tensors.plan)
    with new_folder(path, file=SINGLE) as partial:
        writer = SafetensorsWriter(partial, None)
        yield writer
        writer.metadata[HEADER_RECORD] = json.dumps({"quaver": version("quaver"), **record, **_costs(model, tensors)})
        writer.close()


@contextmanager
def _folder(
    path: Path,
    model: nn.Module,
    tensors: Float8Weights,
    record: dict[str, Any],
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    files: Sequence[Path],
    measure: Callable[[Path], dict[str, Any]] | None,
) -> Iterator[SafetensorsWriter]:
    """A folder with the tensors, config.json, other files, the record and the model card."""
    json_text("about", record)  # raises before anything is written
    plan, text = tensors.plan, _text_of_config(config, model, tensors, dtype)
    _warn(plan)
    with new_folder(path) as partial:
        writer = SafetensorsWriter(partial, max_shard_bytes)
        yield writer
        writer.close()
        (partial / CONFIG).write_text(text, encoding="utf-8")
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.to_json_file(partial / GENERATION)
        for file in files:  # which may have another generation config
            shutil.copyfile(file, partial / file.name)
        logits = None if measure is None else measure(partial)
        record |= {**_costs(model, tensors), "ragged": plan.ragged, "whole_stacks": plan.whole_stacks, "logits": logits}
        write_bundle(partial, {**record, "bytes": writer.total_bytes}, plan.report)


def _costs(model: nn.Module, tensors: Float8Weights) -> dict[str, Any]:
    """What the format and writes to frozen weights cost, by weight."""
    requantized = {name: without_inf(each._asdict()) for name, each in tensors.requantized.items()}
    written = {name: each.requantized_sqnr_db for name, each in frozen_weights(model).items()}
    written = without_inf({name: each for name, each in written.items() if each is not None})
    return {"requantized": requantized, "written": written}


def _text_of_config(
    config: Mapping[str, Any], model: nn.Module, tensors: Float8Weights, dtype: torch.dtype | None
) -> str:
    """The config.json: `config` with how the weights are quantized, and the dtype of the others."""
    plan = tensors.plan
    quantization = plan.format.quantization_config(plan.ignore, plan.cut_inputs, has_kv_scales=bool(tensors.kv_scales))
    written = {**config, "quantization_config": quantization}
    key = "dtype" if "dtype" in config else "torch_dtype"
    stored = dtype if dtype is not None or config.get(key) else getattr(model, "dtype", None)
    if stored is not None:
        written[key] = str(stored).removeprefix("torch.")
    return config_text(written)


def _warn(plan: Plan) -> None:
    """Say what readers of the export cannot do, and what of the training it does not have."""
    for warning in plan.format.warnings(plan.ragged, plan.kept):
        logger.warning(warning)
    if plan.whole_stacks:
        logger.warning(
            "%s: these experts are float8 in training and in high precision in the export, because checkpoints of "
            "the model hold them as one tensor, which has no float8 form that servers load",
            listed(plan.whole_stacks),
        )


def _own_config(model: nn.Module) -> dict[str, Any]:
    to_dict: Callable[[], dict[str, Any]] | None = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is None:
        raise ValueError("config: expected the content of config.json for a model that is not of transformers")
    config = to_dict()
    if "architectures" in config and not config["architectures"]:  # save_pretrained fills it in, too; readers need it
        config["architectures"] = [type(getattr(model, "_orig_mod", model)).__name__.removeprefix("FSDP")]
    return config


@torch.no_grad()
def _measured(model: nn.Module, folder: Path, count: int) -> dict[str, Any]:
    """How the logits of `model` change on `count` random tokens when it gets the dequantized weights in `folder`."""
    model.eval()
    vocab_size = next((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), 1)
    tokens = torch.randint(vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    try:
        before = _logits(model, tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the logits cannot be measured: {type(model).__name__} does not take tokens alone ({error})"
        ) from error
    state = model.state_dict()
    for name, tensor in load_float8(folder, dtype=torch.float32, model=model).items():
        if tensor.numel():  # transformers has shared experts of no width where a mixture of quaver train has none
            state[name].copy_(tensor)
    after = _logits(model, tokens)
    return {
        "tokens": count,
        **without_inf({"sqnr_db": sqnr_db(before, after)}),
        "max_difference": (before - after).abs().max().item(),
        "same_argmax": (before.argmax(-1) == after.argmax(-1)).double().mean().item(),
    }


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    logits: Tensor = getattr(output, "logits", output)
    return logits.double()

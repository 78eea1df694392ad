"""`save_float8`: writes a model with float8 weights as a Hugging Face folder, or as one file."""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.conversion.convert import ModuleFilter
from quaver.export.companion_files import GENERATION_CONFIG_FILE, HEADER_KEY, check_copied_files, write_card_and_record
from quaver.export.converted_view import Recipe
from quaver.export.files import (
    CONFIG_JSON,
    SINGLE_FILE,
    SafetensorsWriter,
    check_positive_integer,
    copy_files,
    encode_config,
    encode_json,
)
from quaver.export.formats import COMPRESSED_TENSORS
from quaver.export.load import load_float8
from quaver.export.plan import ExportPlan, find_frozen_weights
from quaver.export.weights import CheckpointTensors, iter_float8_weights
from quaver.recipes.sqnr import compute_sqnr_db, replace_inf
from quaver.runtime.agreement import check_ranks_agree, run_on_every_rank, run_on_first_rank
from quaver.runtime.errors import InputError, check_is_module
from quaver.runtime.files import check_is_new, write_new_folder
from quaver.runtime.module_names import join_names

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
    forward_dtype: torch.dtype | str | None = None,
    share_fused_scales: bool = True,
    module_filter_fn: ModuleFilter | None = None,
    max_shard_bytes: int = 5 * 1000**3,
    origin: Mapping[str, Any] | None = None,
    files: Sequence[Path | str] = (),
    make_hp_model: Callable[[], nn.Module] | None = None,
    measure_tokens: int = 128,
) -> CheckpointTensors:
    """Write `model` as the new Hugging Face folder `folder`, or as a new file. An error leaves nothing there.

    Args:
        model, recipe, format, weights, dtype, forward_dtype, share_fused_scales, module_filter_fn: as for
            `iter_float8_weights`. Every rank of a sharded model calls this, and rank 0 writes. If one rank fails, every
            rank raises its error. Scales of a float8 KV cache are written, too (`calibrate_kv_cache`, `load_frozen`,
            `set_kv_scales`).
        folder: a new path. comfyui writes one file, NAME.safetensors, whose header has the record. All its tensors are
            in memory before it is written.
        config: the content of config.json without quantization_config; None for the model's config and generation
            config, and for comfyui. Its dtype becomes `dtype` if that is given. For MXFP8 it becomes bfloat16, the only
            dtype in which transformers runs MXFP8.
        max_shard_bytes: the most bytes in a file, unless one tensor has more. One file at a time is in memory.
        origin: where the model comes from ("source") and the step of its checkpoint ("step"), for the record.
        files: more files to copy, such as the tokenizer's. A generation_config.json replaces the model's.
        make_hp_model: returns an unsharded high-precision copy of the model, to measure how its logits change; None to
            measure nothing. It is called before the first file is written. The measurement replaces the copy's weights.
        measure_tokens: the number of random tokens on which to measure.
    Returns:
        The weights that were written, with the cost of the format.
    Raises:
        FileExistsError: `folder` exists.
        NotWrittenError: the weights cannot be written.
        FileNotFoundError: one of `files` is not a file.
        TypeError: an argument has a wrong type, or `make_hp_model` returns no model.
        RuntimeError: the ranks disagree about the tensors, the format or the recipe.
        ValueError, NotImplementedError: as `iter_float8_weights`.
        ValueError: a number is not an integer of 1 or more.
        ValueError: JSON cannot hold `config` or `origin`.
        ValueError: `files` has a name twice, or one that the export writes.
        ValueError: ComfyUI would rename tensors and lose their scales.
        ValueError: the high-precision model has no `nn.Embedding`, does not take tokens alone, or is `model`.
    """
    check_is_module(model, argument="model")
    if weights is not None and not isinstance(weights, Mapping):
        raise TypeError(f"weights: expected tensors by name, got a {type(weights).__name__}")

    make_tensors = functools.partial(
        iter_float8_weights,
        model,
        recipe=recipe,
        format=format,
        weights=weights,
        dtype=dtype,
        forward_dtype=forward_dtype,
        share_fused_scales=share_fused_scales,
        module_filter_fn=module_filter_fn,
    )
    read_tensors = itertools.chain(model.parameters(), (weights or {}).values())
    is_sharded = any(isinstance(tensor, DTensor) for tensor in read_tensors)
    tensors = _plan_on_every_rank(make_tensors, format) if is_sharded else make_tensors()
    target = _Target(
        folder=folder,
        format=format,
        config=config,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        origin=origin,
        files=files,
        make_hp_model=make_hp_model,
        measure_tokens=measure_tokens,
    )
    _write(tensors, functools.partial(target.open, model, tensors), is_sharded=is_sharded)
    return tensors


@dataclass(frozen=True)
class _Target:
    """The folder or file to write, with the arguments of `save_float8` that only the rank that writes needs."""

    folder: Path | str
    format: str
    config: Mapping[str, Any] | None
    dtype: torch.dtype | None
    max_shard_bytes: int
    origin: Mapping[str, Any] | None
    files: Sequence[Path | str]
    make_hp_model: Callable[[], nn.Module] | None
    measure_tokens: int

    def open(self, model: nn.Module, tensors: CheckpointTensors) -> AbstractContextManager[SafetensorsWriter]:
        """Check the arguments, measure the logits of the high-precision model, and return the writer's context."""
        path, files, plan = Path(self.folder), _parse_files(self.files), tensors.plan
        self._check(path, files, plan)
        record = {"format": self.format, "recipe": plan.recipe, **(self.origin or {})}
        encode_json("origin", record)
        if plan.format.is_file:
            return _create_file(path, model, tensors, record)
        config_json = _encode_quantized_config(self.config, model, tensors, self.dtype)
        logits = None
        if self.make_hp_model is not None:
            logits = _LogitsMeasurement(self.make_hp_model, self.measure_tokens, exported=model)
        return _create_folder(path, model, tensors, record, config_json, self.max_shard_bytes, files, logits)

    def _check(self, path: Path, files: list[Path], plan: ExportPlan) -> None:
        check_is_new(path)
        for name, content in (("config", "the content of config.json"), ("origin", "a mapping")):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise TypeError(f"{name}: expected {content}, got a {type(value).__name__}")
        make_model = self.make_hp_model
        if make_model is not None and (isinstance(make_model, nn.Module) or not callable(make_model)):
            got = type(make_model).__name__
            raise TypeError(f"make_hp_model: expected a function that returns the model, got a {got}")
        check_positive_integer("max_shard_bytes", self.max_shard_bytes)
        plan.format.check_target(path, plan.names, config=self.config, files=files, make_hp_model=make_model)
        check_copied_files(files)


def _parse_files(files: Any) -> list[Path]:
    is_list = isinstance(files, Iterable) and not isinstance(files, str | Path)
    if not is_list or not all(isinstance(file, str | Path) for file in files):
        raise TypeError(f"files: expected a list of paths, got {files!r}")
    return [Path(file) for file in files]


def _plan_on_every_rank(make_tensors: Callable[[], CheckpointTensors], format: str) -> CheckpointTensors:
    """Plan an export that every rank iterates. If one rank fails, or the plans differ, every rank raises an error."""
    planned: list[CheckpointTensors] = []
    run_on_every_rank(lambda: planned.append(make_tensors()))
    tensors = planned[0]
    lines = [f"the format {format}", f"the recipe {tensors.plan.recipe}", *tensors.plan.names]
    check_ranks_agree(lines, None, subject="the export")
    return tensors


def _write(
    tensors: CheckpointTensors,
    open_target: Callable[[], AbstractContextManager[SafetensorsWriter]],
    *,
    is_sharded: bool,
) -> None:
    """Write the tensors, on the first rank if they are sharded. Every rank iterates, because it gathers them.

    A tensor that is not sharded may be invalid on one rank only, so the ranks agree on every tensor.
    """
    writers: list[SafetensorsWriter] = []  # empty on all ranks but the first

    def write_next() -> bool:
        named = next(tensors, None)
        if named is not None and writers:
            writers[0].add(*named)
        return named is not None

    with ExitStack() as stack:
        if not is_sharded:
            writers.append(stack.enter_context(open_target()))
            while write_next():
                pass
            return
        run_on_first_rank(lambda: writers.append(stack.enter_context(open_target())))
        while all(run_on_every_rank(write_next)):
            pass
        run_on_first_rank(stack.close)


@contextmanager
def _create_file(
    path: Path, model: nn.Module, tensors: CheckpointTensors, record: dict[str, Any]
) -> Iterator[SafetensorsWriter]:
    _log_warnings(tensors.plan)
    with write_new_folder(path, file=SINGLE_FILE) as partial:
        writer = SafetensorsWriter(partial, None)
        yield writer
        writer.metadata[HEADER_KEY] = json.dumps(
            {"quaver": version("quaver"), **record, **_collect_sqnr(model, tensors)}
        )
        writer.close()


@contextmanager
def _create_folder(
    path: Path,
    model: nn.Module,
    tensors: CheckpointTensors,
    record: dict[str, Any],
    config_json: str,
    max_shard_bytes: int,
    files: Sequence[Path],
    logits: _LogitsMeasurement | None,
) -> Iterator[SafetensorsWriter]:
    """Yield the writer of a folder, which also gets config.json, other files, the record and the model card."""
    plan = tensors.plan
    _log_warnings(plan)
    with write_new_folder(path) as partial:
        writer = SafetensorsWriter(partial, max_shard_bytes)
        yield writer
        writer.close()
        (partial / CONFIG_JSON).write_text(config_json, encoding="utf-8")
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.to_json_file(partial / GENERATION_CONFIG_FILE)
        copy_files(files, partial)
        record |= {**_collect_sqnr(model, tensors), "ragged": plan.ragged, "whole_stacks": plan.whole_stacks}
        record |= {"logits": None if logits is None else logits.compare(partial)}
        write_card_and_record(partial, {**record, "bytes": writer.total_bytes}, plan.report)


def _collect_sqnr(model: nn.Module, tensors: CheckpointTensors) -> dict[str, Any]:
    """Return the SQNR of weights that the format, or a write to a frozen weight, quantized again."""
    requantized = {name: replace_inf(sqnr._asdict()) for name, sqnr in tensors.requantized.items()}
    written = {name: weight.requantized_sqnr_db for name, weight in find_frozen_weights(model).items()}
    written = replace_inf({name: decibels for name, decibels in written.items() if decibels is not None})
    return {"requantized": requantized, "written": written}


def _encode_quantized_config(
    config: Mapping[str, Any] | None, model: nn.Module, tensors: CheckpointTensors, dtype: torch.dtype | None
) -> str:
    plan, config = tensors.plan, _get_config(model) if config is None else config
    quantization = plan.format.make_quantization_config(
        plan.ignore, plan.ragged_inputs, has_kv_scales=bool(tensors.kv_scales)
    )
    written = {**config, "quantization_config": quantization}
    key = "dtype" if "dtype" in config else "torch_dtype"
    stored = dtype if dtype is not None or config.get(key) else getattr(model, "dtype", None)
    if plan.format.is_mx and (stored is not None or config.get(key)):
        stored = torch.bfloat16  # transformers dequantizes MXFP8 to it, and cannot multiply it with another dtype
    if stored is not None:
        written[key] = str(stored).removeprefix("torch.")
    return encode_config(written)


def _log_warnings(plan: ExportPlan) -> None:
    for warning in plan.format.iter_warnings(plan.ragged, plan.high_precision_linears):
        logger.warning(warning)
    if plan.whole_stacks:
        logger.warning(
            "%s: these experts are float8 in training and in high precision in the export, because checkpoints of "
            "the model hold them as one tensor, which has no float8 form that servers load",
            join_names(plan.whole_stacks),
        )


def _get_config(model: nn.Module) -> dict[str, Any]:
    """Return the model's config as `save_pretrained` of transformers writes it: without defaults and local paths."""
    model_config: Any = getattr(model, "config", None)
    if not hasattr(model_config, "to_dict"):
        raise ValueError(
            "config: expected the content of config.json, because the model is not from transformers, got None"
        )
    with_defaults: dict[str, Any] = model_config.to_dict()
    config: dict[str, Any] = model_config.to_diff_dict() if hasattr(model_config, "to_diff_dict") else with_defaults
    config.pop("_name_or_path", None)
    if "dtype" in with_defaults:
        config.setdefault("dtype", None)  # transformers before 5 calls it torch_dtype
    if "architectures" in with_defaults and not config.get("architectures"):  # save_pretrained sets it for readers
        config["architectures"] = [type(getattr(model, "_orig_mod", model)).__name__.removeprefix("FSDP")]
    return config


class _LogitsMeasurement:
    """Measures how the logits of a model on random tokens change with the dequantized weights of a folder."""

    def __init__(self, make_model: Callable[[], nn.Module], count: int, *, exported: nn.Module) -> None:
        """Compute the logits of the high-precision model on `count` tokens.

        Raises:
            InputError: the model has no `nn.Embedding`, does not take tokens alone, or has parameters of `exported`.
        """
        check_positive_integer("measure_tokens", count)
        model = make_model()
        check_is_module(model, argument="the result of make_hp_model")
        if not set(exported.parameters()).isdisjoint(model.parameters()):
            raise InputError(
                "make_hp_model: expected a function that returns a copy, whose weights are replaced, got the "
                "exported model; return copy.deepcopy(model)"
            )
        self._model = model.eval()
        vocab_size = next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), 0)
        if not vocab_size:
            raise InputError(f"the logits cannot be measured: {type(model).__name__} has no nn.Embedding of tokens")
        self._tokens = torch.randint(vocab_size, (1, count), device="cpu", generator=torch.Generator().manual_seed(0))
        try:
            self._before = _compute_logits(model, self._tokens)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"the logits cannot be measured: {type(model).__name__} does not take tokens alone ({error})"
            ) from error

    @torch.no_grad()
    def compare(self, folder: Path) -> dict[str, Any]:
        """Load the weights of `folder` into the model, and compare its logits with those before."""
        state = self._model.state_dict()
        for name, tensor in load_float8(folder, dtype=torch.float32, model=self._model).items():
            if tensor.numel():  # where quaver train has no shared experts, transformers has empty ones
                state[name].copy_(tensor)
        before, after = self._before, _compute_logits(self._model, self._tokens)
        return {
            "tokens": self._tokens.numel(),
            **replace_inf({"sqnr_db": compute_sqnr_db(before, after)}),
            "max_difference": (before - after).abs().max().item(),
            "same_argmax": (before.argmax(-1) == after.argmax(-1)).double().mean().item(),
        }


@torch.no_grad()
def _compute_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    logits: Tensor = getattr(output, "logits", output)
    return logits.double()

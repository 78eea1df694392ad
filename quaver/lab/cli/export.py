"""`quaver export SOURCE TARGET`: float8 weights for serving, from a run, a checkpoint or a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge, Le

from quaver.export import CheckpointTensors, save_float8, set_kv_scales
from quaver.export.companion_files import list_tokenizer_files
from quaver.export.converted_view import DEFAULT_FILTER
from quaver.export.files import CONFIG_JSON
from quaver.export.formats import CHECKPOINT_FORMATS, COMPRESSED_TENSORS
from quaver.export.load import Float8Checkpoint
from quaver.export.plan import plan_export
from quaver.foreign.torchao import hide_torchao_import_logs
from quaver.lab.cli.errors import report_bad_input
from quaver.lab.huggingface.export_source import ExportSource, open_huggingface_source
from quaver.lab.huggingface.float8 import make_run_source
from quaver.lab.runs.checkpoint_folder import find_checkpoint
from quaver.lab.settings.fields import OneOf, Settings, UserPath, argument, setting
from quaver.lab.settings.flags import parse_options
from quaver.lab.settings.float8 import RECIPES, RecipeName
from quaver.lab.terminal.byte_sizes import parse_bytes
from quaver.lab.terminal.progress import show_progress
from quaver.runtime.errors import InputError
from quaver.runtime.files import check_is_new


@dataclass(frozen=True)
class ExportOptions(Settings):
    """Write the float8 weights of a model, with the codes and scales of its training forward, as a folder that
    transformers, vLLM and SGLang load, or as a file that ComfyUI loads.
    """

    source: UserPath = argument("a run of quaver train, a step-... folder of it, or a Hugging Face folder")
    target: UserPath = argument("the new folder; in the format comfyui the new .safetensors file")
    recipe: RecipeName | None = setting(
        None, "Recipe whose codes are written; by default the run's. A Hugging Face folder needs one."
    )
    format: Annotated[str, OneOf(tuple(CHECKPOINT_FORMATS))] = setting(
        COMPRESSED_TENSORS,
        "compressed-tensors stores the codes of training. The others quantize again if their blocks differ: "
        "128 x 128 in compressed-tensors-block and fp8, 1 x 32 in compressed-tensors-mxfp8, one scale or 1 x 32 in "
        "comfyui.",
    )
    model: str | None = setting(None, "Which model of a run, such as tensorwise or bfloat16; the first by default.")
    dtype: Annotated[str, OneOf(("float32", "bfloat16"))] = setting(
        "bfloat16", "Dtype of the weights that stay in high precision."
    )
    filter_fqns: tuple[str, ...] = setting(
        DEFAULT_FILTER,
        "Linears whose full name contains one of these stay in high precision. Not for a float8 run, which chose them.",
    )
    own_scales: bool = setting(
        False,
        "Keep the training scale of each of q, k, v and gate, up where scales are per tensor; vLLM then quantizes "
        "these weights again.",
    )
    measure_tokens: Annotated[int, Ge(0), Le(10**7)] = setting(
        0, "Measure the change of the logits on this many random tokens; the model is then whole in memory."
    )
    max_shard_size: str = setting("5GB", "Largest size of a file.")
    kv_scales: UserPath | None = setting(
        None, "A float8 folder of this model, whose scales of a float8 KV cache are written; by default none are."
    )
    tokenizer: UserPath | None = setting(
        None, "Folder whose tokenizer files are copied; of a Hugging Face folder, its own by default."
    )

    def check(self) -> None:
        """Raise InputError for a size without a unit, and for options that the format does not read."""
        super().check()
        parse_bytes(self.max_shard_size, "--max-shard-size")
        if CHECKPOINT_FORMATS[self.format].is_file:
            folder_options = ("tokenizer", "measure_tokens", "max_shard_size", "kv_scales")
            self.require_default(*folder_options, unless="--format is that of a folder")


def main(argv: list[str]) -> int:
    """Run the verb; returns 0 when done, 2 for bad input, 4 if the result cannot be written."""
    with report_bad_input():
        options = parse_options(ExportOptions, argv, prog="quaver export SOURCE TARGET")
        target = Path(options.target)
        check_is_new(target)
        kv_scales = _read_kv_scales(options)
        with show_progress("reading the model") as set_activity:
            source = _open_source(options)
            set_activity(f"writing {target}")
            if options.own_scales:
                planned = plan_export(source.model, options.format, source.weights).format
                if planned.weight_strategy != "tensor" or planned.is_file:
                    options.require_default("own_scales", unless="a folder's weights have scales per tensor")
            if kv_scales is not None:
                set_kv_scales(source.model, kv_scales)
            written = _save(options, source, target)
    plan = written.plan
    print(f"{target}: {plan.matrix_count} float8 weights of the recipe {plan.recipe} in the format {options.format}")
    if not written.requantized:
        print("codes and scales are bit-identical to those of a training forward")
    else:
        worst = max(written.requantized.values(), key=lambda loss: loss.training_db - loss.stored_db)
        where = "quaver_export in the header of the file" if plan.format.is_file else "README.md in the folder"
        print(
            f"{len(written.requantized)} weights have other codes than in training; the largest loss is from "
            f"{worst.training_db:.2f} to {worst.stored_db:.2f} dB SQNR (see {where})"
        )
    return 0


def _open_source(options: ExportOptions) -> ExportSource:
    path = Path(options.source)
    checkpoint = find_checkpoint(path)
    if checkpoint is not None:
        return make_run_source(checkpoint, name=options.model, recipe=options.recipe, filter_fqns=options.filter_fqns)
    options.require_default("model", unless="SOURCE is a run or a checkpoint")
    if not (path / CONFIG_JSON).is_file():
        raise FileNotFoundError(
            f"SOURCE must be a run, a step-... folder of it, or a Hugging Face folder, got {str(path)!r}, which has "
            f"neither config.toml nor {CONFIG_JSON}"
        )
    if options.recipe is None:
        raise InputError(
            f"--recipe must be one of {', '.join(RECIPES)} for a Hugging Face folder; {str(path)!r} is one"
        )
    with hide_torchao_import_logs():
        return open_huggingface_source(path, recipe=options.recipe, filter_fqns=options.filter_fqns)


def _read_kv_scales(options: ExportOptions) -> dict[str, float] | None:
    if options.kv_scales is None:
        return None
    scales = Float8Checkpoint(Path(options.kv_scales), torch.float32).kv_scales
    if not scales:
        raise InputError(f"--kv-scales must be a folder with scales of a KV cache, got {options.kv_scales!r}")
    return scales


def _save(options: ExportOptions, source: ExportSource, target: Path) -> CheckpointTensors:
    files = source.files if options.tokenizer is None else list_tokenizer_files(Path(options.tokenizer))
    is_file = CHECKPOINT_FORMATS[options.format].is_file
    return save_float8(
        source.model,
        target,
        config=None if is_file else source.config,
        format=options.format,
        weights=source.weights,
        dtype=getattr(torch, options.dtype),
        forward_dtype=source.forward_dtype,
        share_fused_scales=not options.own_scales,
        max_shard_bytes=parse_bytes(options.max_shard_size, "--max-shard-size"),
        origin=source.origin,
        files=[] if is_file else files,
        make_hp_model=source.make_hp_model if options.measure_tokens else None,
        measure_tokens=options.measure_tokens,
    )

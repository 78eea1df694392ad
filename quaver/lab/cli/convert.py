"""`quaver convert hf-to-quaver` and `quaver convert quaver-to-hf`: weights from and to Hugging Face's Llama."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quaver.lab.cli.dispatch import find_verb
from quaver.lab.cli.errors import report_bad_input
from quaver.lab.huggingface.convert import export_hf, import_hf
from quaver.lab.huggingface.weights import make_file_state
from quaver.lab.settings.fields import OneOf, Settings, UserPath, argument, setting
from quaver.lab.settings.flags import parse_options
from quaver.lab.terminal.byte_sizes import parse_bytes
from quaver.lab.terminal.progress import show_progress

DTYPES = ("float32", "bfloat16")
CONVERSIONS = {
    "hf-to-quaver": "a Hugging Face folder becomes a checkpoint to train from",
    "quaver-to-hf": "a checkpoint becomes a folder for from_pretrained",
}


@dataclass(frozen=True)
class HFToQuaver(Settings):
    """Convert a Hugging Face folder into a checkpoint for --checkpoint.initial_load_path."""

    source: UserPath = argument("a folder with config.json and *.safetensors")
    target: UserPath = argument("the new folder")
    dtype: Annotated[str, OneOf(DTYPES)] = setting("float32", "Dtype of the stored weights.")


@dataclass(frozen=True)
class QuaverToHF(Settings):
    """Convert a checkpoint into a folder that transformers' from_pretrained loads."""

    source: UserPath = argument("a run of quaver train, a step-... folder of it, or the output of hf-to-quaver")
    target: UserPath = argument("the new folder")
    model: str | None = setting(None, "Which model of a run, such as tensorwise or bfloat16; the first by default.")
    dtype: Annotated[str, OneOf(DTYPES)] = setting("bfloat16", "Dtype of the weights.")
    max_shard_size: str = setting("5GB", "Largest size of a file.")
    tokenizer: UserPath | None = setting(None, "Folder to copy tokenizer files from.")


def main(argv: list[str]) -> int:
    """Run the verb; returns 0 when done, 2 for bad input, 4 if the result cannot be written."""
    usage = "quaver convert DIRECTION [--help] [options] SOURCE TARGET"
    conversion = find_verb(CONVERSIONS, argv, kind="conversion", usage=usage)
    with report_bad_input():
        (_import if conversion == "hf-to-quaver" else _export)(argv[1:])
    return 0


def _import(argv: list[str]) -> None:
    options = parse_options(HFToQuaver, argv, prog="quaver convert hf-to-quaver SOURCE TARGET")
    target = Path(options.target)
    with show_progress(f"writing {target}"):
        model = import_hf(Path(options.source), target, options.dtype)
    parameters = sum(tensor.numel() for tensor in make_file_state(model).values())
    print(f"{target}: {parameters:,} parameters in {options.dtype}")
    command = ["quaver", "train", str(target / "model.toml"), "--checkpoint.initial_load_path", str(target)]
    print(f"train with: {shlex.join(command)}")


def _export(argv: list[str]) -> None:
    options = parse_options(QuaverToHF, argv, prog="quaver convert quaver-to-hf SOURCE TARGET")
    target = Path(options.target)
    with show_progress(f"writing {target}"):
        exported = export_hf(
            Path(options.source),
            target,
            name=options.model,
            dtype=options.dtype,
            max_shard_bytes=parse_bytes(options.max_shard_size, "--max-shard-size"),
            tokenizer=Path(options.tokenizer) if options.tokenizer else None,
        )
    step = exported.record["progress"]["step"]
    print(f"{target}: the model {exported.weights_path.name} of step {step:,} in {options.dtype}")

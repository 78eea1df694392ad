"""`quaver convert hf-to-quaver` and `quaver convert quaver-to-hf`: weights from Hugging Face's Llama, and to it."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from quaver.cli.errors import bad_input, print_error
from quaver.recorder.byte_sizes import parse_bytes
from quaver.trainer.errors import CheckpointError, OutputError
from quaver.trainer.huggingface.convert import export_hf, import_hf
from quaver.trainer.huggingface.weights import file_state

EXIT_BAD_INPUT = 2
EXIT_NOT_WRITTEN = 4
DTYPES = ("float32", "bfloat16")


def run(argv: list[str]) -> int:
    """Convert as `argv` says; 0 when done, 2 for bad input, 4 where the result cannot be written."""
    with bad_input():
        options = _parser().parse_args(argv)
        convert: Callable[[argparse.Namespace], None] = options.convert
        try:
            convert(options)
        except (CheckpointError, OutputError) as error:
            print_error(error)
            return EXIT_NOT_WRITTEN if isinstance(error, OutputError) else EXIT_BAD_INPUT
    return 0


def _import(options: argparse.Namespace) -> None:
    out = _folder(options.out)
    model = import_hf(_folder(options.hf_folder), out, options.dtype)
    parameters = sum(tensor.numel() for tensor in file_state(model).values())
    print(f"{out}: {parameters:,} parameters in {options.dtype}")
    print(f"train with: quaver train {out / 'model.toml'} --checkpoint.initial_load_path {out}")


def _export(options: argparse.Namespace) -> None:
    out = _folder(options.out)
    found = export_hf(
        _folder(options.checkpoint),
        out,
        name=options.model,
        dtype=options.dtype,
        max_shard_bytes=parse_bytes(options.max_shard_size, "--max-shard-size"),
        tokenizer=_folder(options.tokenizer) if options.tokenizer else None,
    )
    step = found.record["progress"]["step"]
    print(f"{out}: the model {found.weights.name} of step {step:,} in {options.dtype}")


def _folder(text: str) -> Path:
    return Path(text).expanduser()


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the other verbs do."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("quaver convert", description="Weights from and to Hugging Face's LlamaForCausalLM.")
    ways = parser.add_subparsers(dest="way", required=True, metavar="{hf-to-quaver,quaver-to-hf}")
    _add_import(ways.add_parser("hf-to-quaver", help="a Hugging Face folder becomes a checkpoint to begin from"))
    _add_export(ways.add_parser("quaver-to-hf", help="a checkpoint becomes a folder that from_pretrained loads"))
    return parser


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hf_folder", help="with config.json and *.safetensors")
    parser.add_argument("out", help="new folder, for --checkpoint.initial_load_path")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the stored weights; default: float32")
    parser.set_defaults(convert=_import)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a step-... folder of a run, or what hf-to-quaver wrote")
    parser.add_argument("out", help="new folder, for transformers' from_pretrained")
    parser.add_argument("--model", help="which of a run's models, as tensorwise or bfloat16; default: the first")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights; default: bfloat16")
    parser.add_argument("--max-shard-size", default="5GB", help="most bytes of a file; default: 5GB")
    parser.add_argument("--tokenizer", help="folder whose tokenizer files are copied")
    parser.set_defaults(convert=_export)

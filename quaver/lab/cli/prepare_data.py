"""`quaver prepare-data [CONFIG.toml] [--section.field value ...]`: tokenizes the text ahead of a run."""

from dataclasses import dataclass, field

from quaver.lab.cli.errors import report_bad_input
from quaver.lab.cli.run_config import load_config_and_warn
from quaver.lab.data import load_data
from quaver.lab.settings import Data
from quaver.lab.settings.config_file import parse_arguments
from quaver.lab.settings.fields import Settings
from quaver.lab.settings.flags import exit_if_help
from quaver.lab.terminal.counts import format_count
from quaver.lab.trainer.display import ShownProgress


@dataclass(frozen=True)
class PrepareData(Settings):
    """Tokenize the text of a run into data.cache_folder, where `quaver train` with the same [data] section finds it.
    Cached tokens are checked against their digests, and made again if they are damaged. The other flags of `quaver
    train` are accepted too.
    """

    data: Data = field(default_factory=Data)


def main(argv: list[str]) -> int:
    """Make or check the tokens and print their numbers; returns 0 when done, 2 for bad input."""
    exit_if_help(PrepareData, argv, prog="quaver prepare-data [CONFIG.toml]")
    with report_bad_input():
        config_path, flags = parse_arguments(argv, prog="quaver prepare-data")
        data = load_data(load_config_and_warn(config_path, flags), ShownProgress())
    origin = data.origin
    files = format_count(origin["files"], "file")
    print(f"source       {origin['path']}: {files}, {origin['other_files']:,} others not read")
    print(f"tokenizer    {origin['tokenizer']}: {origin['vocab_size']:,} tokens, {origin['eos_id']} ends a document")
    for split in ("train", "validation"):
        documents, tokens = (format_count(origin[f"{split}_{noun}s"], noun) for noun in ("document", "token"))
        print(f"{split:<12} {documents}, {tokens}")
    print(f"left out     {origin['empty']:,} empty, {origin['corrupt']:,} corrupt")
    for place in origin["corrupt_places"]:
        print(f"  {place}")
    print(f"sha256       {origin['sha256']}")
    print(f"cached in    {origin['cache']}")
    return 0

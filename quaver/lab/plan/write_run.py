"""Writes a planned run: its config for `quaver train`, and the files that start it on a cluster."""

from pathlib import Path

import tomli_w

from quaver.lab.plan.launchers import make_launch_files
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.config_file import list_changed_settings
from quaver.lab.settings.parallel_dims import resolve_parallel_dims
from quaver.runtime.errors import InputError
from quaver.runtime.files import write_new_folder


def check_run_files(config: TrainConfig, ranks: int, gpus_per_node: int, path: Path) -> None:
    """Check, before a search, that `write_run` could write any layout of `config` to `path`.

    The layout does not affect the launch files. Existing launch files must have the same content.

    Raises:
        InputError: the launch files cannot be made.
        FileExistsError: the config exists, or a launch file with another content.
    """
    texts = make_launch_files(config, ranks, gpus_per_node, path)
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{str(path)!r} exists already; give another file or remove it")
    for file, text in _key_by_file(path, texts).items():
        _check_content(file, text.encode())


def write_run(config: TrainConfig, ranks: int, gpus_per_node: int, path: Path, *, comment: str) -> list[Path]:
    """Write `config` to `path`, and launch files beside it, for `ranks` GPUs on nodes of `gpus_per_node`.

    The config has the settings that differ from their defaults, so `quaver train PATH` reads an equal config. The
    launch files have the name of `path` with .torchrun.sh, .slurm.sbatch and .jobset.yaml in place of .toml, and refer
    to the config by `path`. Existing files with the same content are not changed.

    Args:
        comment: lines for the top of the config.
    Returns:
        The files of the run, the config first.
    Raises:
        InputError: the config does not run on `ranks` ranks, they do not fill nodes, `path` does not end with .toml, or
            a setting cannot be encoded in UTF-8.
        FileExistsError: one of the files exists with other content; nothing is written.
        OSError: a file cannot be written.
    """
    if path.suffix != ".toml":
        raise InputError(f"expected a config whose name ends with .toml, got {str(path)!r}")
    resolve_parallel_dims(config, world_size=ranks)
    texts = {
        path: format_config(config, comment),
        **_key_by_file(path, make_launch_files(config, ranks, gpus_per_node, path)),
    }
    contents = {file: text.encode() for file, text in texts.items()}
    for file, content in contents.items():
        _check_content(file, content)
    for file in [file for file in contents if not file.exists()]:
        with write_new_folder(file, file=file.name) as folder:
            partial = folder / file.name
            partial.write_bytes(contents[file])
            if contents[file].startswith(b"#!"):
                partial.chmod(0o755)
    return list(contents)


def format_config(config: TrainConfig, comment: str) -> str:
    """Return `config` as TOML, without defaults, below the lines of `comment`."""
    # TOML forbids control characters in comments, and UTF-8 forbids surrogates, which stand for bytes of file names.
    printable = "".join(char if char.isprintable() or char == "\n" else " " for char in comment)
    lines = [f"# {line}".rstrip() for line in printable.splitlines()]
    return "\n".join([*lines, "", tomli_w.dumps(list_changed_settings(config))])


def _key_by_file(path: Path, texts: dict[str, str]) -> dict[Path, str]:
    """Key `texts` by file instead of by ending."""
    return {path.with_name(path.stem + suffix): text for suffix, text in texts.items()}


def _check_content(path: Path, content: bytes) -> None:
    """Raise FileExistsError if `path` exists and is not a file with this content."""
    if (path.exists() or path.is_symlink()) and not (path.is_file() and path.read_bytes() == content):
        raise FileExistsError(f"{str(path)!r} exists already, with another content; give another file or remove it")

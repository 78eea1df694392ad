"""The provenance of runs and of measurements: hardware, versions, the commit of the source, the command."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NotRequired

import torch
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from quaver.lab.json_file import STRICT
from quaver.lab.runs.cpu_description import describe_cpu
from quaver.lab.runs.json_lines import iter_json_lines
from quaver.runtime.devices import is_cuda_device
from quaver.runtime.errors import InputError

GIT_TIMEOUT_S = 10


class RunStart(TypedDict):
    """A line of provenance.jsonl, written by each start of a run."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    started_at: str
    command: list[str]
    host: NotRequired[str]
    quaver: NotRequired[str]
    git: NotRequired[dict[str, Any] | None]
    environment: NotRequired[dict[str, Any]]
    from_step: NotRequired[int]
    changes: NotRequired[dict[str, Any]]


_START_ADAPTER = TypeAdapter(RunStart)


def read_starts(path: Path) -> list[RunStart]:
    """Return the lines of provenance.jsonl, without an incomplete last line.

    Raises:
        InputError: a line is not a start of a run, or `path` is not a file.
        OSError: the file cannot be read.
    """
    if not path.is_file():  # reading a FIFO would block
        raise InputError(f"{str(path)!r} is not a file; remove it")
    return list(iter_json_lines(path, _START_ADAPTER, "a start of a run"))


def collect_provenance(device: torch.device) -> dict[str, Any]:
    """Return what is needed to repeat a run: time, command, working folder, versions, the revision of the source."""
    return {
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "working_folder": os.getcwd(),
        "host": platform.node(),
        "git": find_git_revision(Path(__file__).parent),
        "environment": describe_environment(device),
    }


def describe_measurement(device: torch.device) -> dict[str, Any]:
    """Return what a result needs beside its figures: the environment, the commit, the command and the date."""
    return {
        **describe_environment(device),
        "commit": _abbreviate_commit(find_git_revision(Path(__file__).parent)),
        "command": "quaver " + shlex.join(sys.argv[1:]),
        "date": date.today().isoformat(),
    }


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return the hardware and the versions that results depend on."""
    is_cuda = is_cuda_device(device)
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else describe_cpu(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "quaver": version("quaver"),
        **({"cuda": torch.version.cuda, "hip": torch.version.hip} if is_cuda else {}),
    }


def find_git_revision(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout that tracks `folder`, and whether it has changes; None without a checkout.

    `is_modified` is None if git fails, or takes longer than `GIT_TIMEOUT_S`, as on a network's disk.
    """
    git = shutil.which("git")
    if git is None:
        return None

    def run_git(*arguments: str) -> str | None:
        # A git that is killed, as by a limit on the size of files, would leave the index locked.
        command = [git, "--no-optional-locks", "-C", str(folder), *arguments]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    # An environment inside another project's checkout, such as its .venv, is not tracked by that checkout.
    revision = run_git("rev-parse", "HEAD") if run_git("ls-files", ".") else None
    if revision is None:
        return None
    changes = run_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": revision, "is_modified": None if changes is None else bool(changes)}


def _abbreviate_commit(revision: dict[str, Any] | None) -> str:
    """Return the commit, with "+" if files differ from it, and "?" if that is not known."""
    marks = {True: "+", False: "", None: "?"}
    return "unknown" if revision is None else revision["commit"][:7] + marks[revision["is_modified"]]

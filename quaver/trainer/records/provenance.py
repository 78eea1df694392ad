"""Where a run comes from: versions, revision, command, so that it can be repeated."""

import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quaver.devices import describe


def provenance(device: torch.device) -> dict[str, Any]:
    """Return what made this run: when, the command, the folder it was typed in, versions, the source's revision."""
    return {
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "working_folder": os.getcwd(),
        "host": platform.node(),
        "quaver": version("quaver"),
        "git": git_revision(Path(__file__).parent),
        "environment": describe(device),
    }


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout that tracks `folder`, and whether its files differ; None without one."""
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*words: str) -> str | None:
        done = subprocess.run([git, "-C", str(folder), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    # Installed inside somebody else's checkout (its .venv, say), quaver's files are not that checkout's.
    revision = ask("rev-parse", "HEAD") if ask("ls-files", ".") else None
    if revision is None:
        return None
    return {"commit": revision, "is_modified": bool(ask("status", "--porcelain", "--untracked-files=no"))}

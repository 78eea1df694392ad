"""Runs a program with packages of its own, which this environment does not have."""

import os
import subprocess
import sys

import pytest


def run_with_packages(packages, arguments, folder):
    """Install packages without dependencies into `folder`, run Python with them in there, and return its output."""
    target = str(folder / "site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, *packages]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if installed.returncode:
        pytest.skip(f"pip cannot install {packages}: {installed.stderr.strip().splitlines()[-1:]}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), target])}
    options = {"capture_output": True, "text": True, "env": environment, "cwd": folder, "timeout": 240}
    done = subprocess.run([sys.executable, *arguments], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

"""Runs processes for tests, forked from a server that has already imported torch and quaver.

isolated(function, *arguments)                        # fails if the function raises or crashes its process
process = Forked(function, *arguments, cwd=folder)    # with the methods of subprocess.Popen
"""

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

PRELOAD = [
    "pytest",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "quaver.lab.cli.train",
    "tests.preloaded",
    "matplotlib.style",
    "matplotlib.backends.backend_agg",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "accelerate",
    "torchao.float8",
    "transformers.trainer",
    "pytorch_lightning",
]
"""The modules that the fork server imports, for these processes and for the ranks of the distributed tests.

The last six take seconds each, and every rank of a test in tests/library/third_party needs them. Missing modules are
skipped.
"""


def forkserver() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def isolated(function: Callable, *args: object) -> None:
    """Call `function(*args)` in a forked process. Fail if it raises, or if a signal kills the process."""
    context = forkserver()
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sending, function, args))
    process.start()
    sending.close()
    try:
        error = receiving.recv()
    except EOFError:
        error = None
    process.join()
    assert process.exitcode >= 0, f"killed by signal {-process.exitcode}"
    assert error == "", error


def _call(sending: Connection, function: Callable, args: tuple) -> None:
    gc.freeze()  # what was imported before the fork
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        function(*args)
        sending.send("")
    except BaseException:  # noqa: BLE001 - raised again by the parent
        sending.send(traceback.format_exc())


class Forked:
    """A process that runs `function(*args)` with its output in files, and exits with the code that it returns."""

    def __init__(
        self,
        function: Callable,
        *args: object,
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
        largest_file_bytes: int | None = None,
    ) -> None:
        self._files = [Path(tempfile.mkdtemp()) / name for name in ("stdout", "stderr")]
        surroundings = self._files, cwd or Path.cwd(), {**os.environ, **(environment or {})}, largest_file_bytes
        self._process = forkserver().Process(target=_run, args=(surroundings, function, args), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 240.0) -> tuple[str, str]:
        """Wait for the end, and return stdout and stderr. Raises AssertionError after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise AssertionError(f"took over {timeout} s\n" + "\n".join(path.read_text() for path in self._files))
        output, error = (path.read_text() for path in self._files)
        return output, error

    def finished(self) -> "subprocess.CompletedProcess[str]":
        output, error = self.communicate()
        return subprocess.CompletedProcess([], self.returncode, output, error)


def _run(surroundings: tuple, function: Callable, args: tuple) -> None:
    gc.freeze()  # what was imported before the fork
    files, cwd, environment, largest_file_bytes = surroundings
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if largest_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, largest_file_bytes))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    torch.set_num_threads(1)
    sys.exit(function(*args))

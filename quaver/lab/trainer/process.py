"""Process-wide behavior during a run: signals, a watchdog for hangs, determinism, the compiler's recompile limit."""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from quaver.lab.model.llama import Llama
from quaver.lab.settings import TrainConfig
from quaver.lab.terminal.escape import print_to_stderr
from quaver.recipes.linear_casts import MATMULS

CUBLAS_WORKSPACE_VARIABLE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""cuBLAS reads it at start and needs it for reproducible results (its documentation, "Results Reproducibility")."""

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
"""Options of prctl(2): the signal that a process gets when its parent ends."""

MAX_BLOCK_VARIANTS = 8
"""The compiled variants of a block: training or validation, float8 or high precision, with or without a monitor."""


@contextmanager
def silence_other_ranks(*, is_first: bool) -> Iterator[None]:
    """Show warnings of Python and torch in the block on the first rank only, because all ranks have the same warnings.

    Errors, and quaver's own log lines, are shown on every rank.
    """
    if is_first:
        yield
        return
    levels = [
        (logger, logger.level)
        for name, logger in logging.root.manager.loggerDict.items()
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger) and logger.level < logging.ERROR
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger, level in levels:
            logger.setLevel(logging.ERROR if level or logger.name == "torch" else level)
        try:
            yield
        finally:
            for logger, level in levels:
                logger.setLevel(level)


@dataclass
class StopRequest:
    """Whether a signal asked this process to stop."""

    must_stop: bool = False
    """SIGINT (Ctrl-C), SIGTERM or SIGHUP (the terminal was closed) arrived."""


@dataclass
class SnapshotRequests:
    """The memory snapshots that signals asked this process for."""

    count: int = 0
    """The number of SIGUSR1 that arrived."""


@contextmanager
def catch_stop_signals(launcher_pid: int) -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM or SIGHUP in the block into `must_stop`, so that a run ends between two steps.

    A SIGINT after any of them raises KeyboardInterrupt. A second SIGTERM or SIGHUP has no effect: a scheduler signals
    the ranks and torchrun, which signals the ranks again, and the shell and the kernel both send a SIGHUP when a
    terminal is closed. A SIGHUP that the process ignores, as under nohup, stays ignored. Only the main thread receives
    signals; in another thread nothing changes. If torchrun, the process `launcher_pid`, is killed, the run stops as
    after a SIGTERM.
    """
    request = StopRequest()
    signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals += (signal.SIGHUP,)

    def request_stop(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and request.must_stop:
            signal.default_int_handler(signum, frame)
        request.must_stop = True

    with _install_handlers(signals, request_stop), _stop_with_launcher(request, launcher_pid):
        yield request


@contextmanager
def _stop_with_launcher(request: StopRequest, launcher_pid: int) -> Iterator[None]:
    """Stop the block when torchrun is killed, on Linux. Otherwise the ranks would train on and hold the lock."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    previous = ctypes.c_int()
    libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(previous))
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM)):
        error = os.strerror(ctypes.get_errno())
        print_to_stderr(f"this rank would train on if torchrun is killed: prctl: {error}")
    if os.getppid() != launcher_pid:  # it ended before, and Linux sends no signal for that
        request.must_stop = True
    try:
        yield
    finally:
        libc.prctl(PR_SET_PDEATHSIG, previous.value)


@contextmanager
def count_snapshot_signals() -> Iterator[SnapshotRequests]:
    """Count each SIGUSR1 in the block, which would otherwise end the process, as a request for a memory snapshot."""
    requests = SnapshotRequests()

    def count_request(_signal: int, _frame: FrameType | None) -> None:
        requests.count += 1

    with _install_handlers((signal.SIGUSR1,), count_request):
        yield requests


@contextmanager
def _install_handlers(signals: tuple[signal.Signals, ...], handler: "signal._HANDLER") -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, previous_handler in previous.items():
            signal.signal(signum, previous_handler)


@dataclass
class Watchdog:
    """Writes the stacks of all threads to `path` while a step, or another task of the loop, hangs, to show where.

    Each rank watches itself. Ranks that wait for a hanging rank are late as well and write their stacks, too. A thread
    reads the stacks and holds the GIL, because reading frames that change has crashed processes. So a kernel that hangs
    while it holds the GIL writes no stacks.
    """

    path: Path

    @contextmanager
    def watch(self, seconds: float, task: str) -> Iterator[None]:
        """Append all stacks of this process to the file each time that the block has taken `seconds` more; 0 disables.

        The first time, a line on stderr says that `task` is late. The step continues until a collective times out or
        the user ends it.
        """
        if not seconds:
            yield
            return
        is_done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(seconds, task, is_done), name="watchdog", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_done.set()
            watcher.join()

    def _watch(self, seconds: float, task: str, is_done: threading.Event) -> None:
        is_reported = False
        while not is_done.wait(seconds):
            outcome = f"its stacks are in {self.path}"
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)  # machines may not share the first rank's disk
                with self.path.open("a", encoding="utf-8") as file:
                    faulthandler.dump_traceback(file=file, all_threads=True)
            except OSError as error:
                outcome = f"its stacks could not be written to {self.path}: {error.strerror or error}"
            if not is_reported:
                print_to_stderr(f"{task} takes longer than {seconds:g} s; {outcome}")
                is_reported = True


@contextmanager
def use_determinism(*, enabled: bool) -> Iterator[None]:
    """Use deterministic algorithms in the block if `enabled`; torch then refuses operations that have none.

    CPU runs are reproducible without it. On CUDA it costs speed, above all in attention.
    """
    if not enabled:
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    name, size = CUBLAS_WORKSPACE_VARIABLE
    had_workspace = name in os.environ
    os.environ.setdefault(name, size)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        if not had_workspace:
            del os.environ[name]
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]


@contextmanager
def use_fresh_compiler(config: TrainConfig, models: Iterable[Llama]) -> Iterator[None]:
    """Discard all compiled code, and extend Dynamo's recompile limit in the block, if the run compiles.

    The run would reuse the code, and `num_compiled_graphs` would miss it. Blocks with different recipes share no code.
    """
    if not config.training.compile:
        yield
        return
    from quaver.torch_private.compiler import recompile_limit  # imports the compiler, which takes seconds

    torch.compiler.reset()
    precisions_per_block = 2 ** len(MATMULS) if config.float8.high_precision_schedule else 1
    blocks = sum(len(list(model.iter_blocks())) for model in models)
    with recompile_limit(MAX_BLOCK_VARIANTS * precisions_per_block * blocks):
        yield

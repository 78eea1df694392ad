"""Sets threads, seeds, caches, Ctrl-C, garbage collection, warnings and the GPU marker for all tests."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # read on import; more would start a pool of processes
if "PYTEST_XDIST_WORKER" not in os.environ and not any("gpu" in Path(word).parts for word in sys.argv[1:]):
    # The expected numbers are a CPU's, and optimizers fail in forks of a process that has used a GPU. Workers of
    # pytest-xdist inherit the variable.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Otherwise Inductor compiles and loads a probe for each vector instruction set of the CPU, in every process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A shell makes background processes ignore SIGINT, and their children inherit that: tests of Ctrl-C would hang.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
import torch._functorch.config as compiler_config

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _isolate_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the trainer a cache of tokens for this session and the processes that it starts."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if "MPLCONFIGDIR" not in os.environ:  # listing the fonts again takes matplotlib seconds, and warns
            patch.setenv("MPLCONFIGDIR", str(user_cache / "matplotlib"))
        yield


@pytest.fixture(scope="module", autouse=True)
def _freeze_existing_objects() -> None:
    """Exclude the objects that exist before a file's tests from garbage collection.

    A full collection would visit the million objects of all imported modules, which takes 0.3 s, and predictions and
    measurements of memory start several.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_state():
    """Give each test the same random numbers, without the compiled code or the slow paths of earlier tests."""
    # Without a GPU torch.manual_seed formats a stack trace for each missing device type, 2 ms per test.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
    if "quaver.runtime.slow_paths" in sys.modules:
        sys.modules["quaver.runtime.slow_paths"].clear_slow_paths()
    yield
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()


@pytest.fixture
def memory_budget_restored():
    """Restore the compiler's memory budget after the test. monkeypatch would delete it from torch's config."""
    with compiler_config.patch(activation_memory_budget=1.0):
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Start a process group whose only rank is this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


_warnings = []
"""The tests with a warning that pyproject.toml does not list, those in workers of pytest-xdist included."""


def pytest_warning_recorded(nodeid):
    _warnings.append(nodeid)


def pytest_sessionfinish(session):
    if "tests.ranks" in sys.modules:  # pytest-xdist kills a worker that takes over 10 s to exit
        sys.modules["tests.ranks"].close_pools()
    if _warnings and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if _warnings:
        line = f"{len(_warnings)} warnings that filterwarnings in pyproject.toml does not list fail this run"
        terminalreporter.write_line(line, red=True)


def pytest_unconfigure():
    gc.unfreeze()  # otherwise modules written in C report leaks at exit


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() or os.environ.get("QUAVER_VIRTUAL_GPU"):
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):  # not in `keywords`, which has the names of folders, too
            item.add_marker(skip)

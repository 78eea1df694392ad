"""One thread per test process, seeds, a session's cache, Ctrl-C, garbage collection, warnings, and the GPU marker."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # read on import; more would start a pool of processes
if "PYTEST_XDIST_WORKER" not in os.environ and not any("gpu" in Path(word).parts for word in sys.argv[1:]):
    # Tests fork processes that train on a CPU, which CUDA's optimizers cannot after the parent saw a GPU; and they
    # compare with what a CPU computes. Workers of pytest-xdist inherit it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Else each process that generates code compiles and loads a program per set of vector instructions that the CPU has.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A shell has what it starts by & ignore SIGINT, and the processes of that ignore it too: tests of Ctrl-C would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
import torch._functorch.config as compiler_config

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The trainer's cache of tokens is this session's, also in the processes that the session starts."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if "MPLCONFIGDIR" not in os.environ:  # listing the fonts again takes matplotlib seconds, and warns
            patch.setenv("MPLCONFIGDIR", str(users / "matplotlib"))
        yield


@pytest.fixture(scope="module", autouse=True)
def _collections_skip_what_was_there_before() -> None:
    """Freeze what the file finds: a full collection otherwise visits the million objects of all imported modules.

    It takes 0.3 s, predictions and measurements of memory start several, and nothing else was left to find.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_state():
    """The same random numbers for each test, and no compiled code or slow paths of an earlier one."""
    # Without a GPU torch.manual_seed formats a stack for each kind of device that is not there, 2 ms in each test.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
    if "quaver.runtime.slow_paths" in sys.modules:
        sys.modules["quaver.runtime.slow_paths"].clear_slow_paths()
    yield
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()


@pytest.fixture
def memory_budget_restored():
    """The compiler's memory budget as it was; pytest's monkeypatch would take it out of torch's config for good."""
    with compiler_config.patch(activation_memory_budget=1.0):
        yield


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `quaver WORDS`, which must end with exit code 2 and one line on stderr, and return that line."""

    def refused(*words: object) -> str:
        from quaver.lab.cli import main  # importing it takes seconds

        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as stopped:
            code = stopped.code
        output, error = capsys.readouterr()
        (line,) = error.splitlines()
        assert code == 2, error
        assert not output or output.startswith("making tokens of "), output
        assert line.startswith("quaver: error: "), error
        return line

    return refused


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


_warnings = []
"""The tests that warned of what pyproject.toml does not list, those of workers too."""


def pytest_warning_recorded(nodeid):
    _warnings.append(nodeid)


def pytest_sessionfinish(session):
    if _warnings and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if _warnings:
        line = f"{len(_warnings)} warnings that filterwarnings in pyproject.toml does not list fail this run"
        terminalreporter.write_line(line, red=True)


def pytest_unconfigure():
    gc.unfreeze()  # else modules written in C report leaks at the exit


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() or os.environ.get("QUAVER_VIRTUAL_GPU"):
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):  # `keywords` has the names of folders, too
            item.add_marker(skip)

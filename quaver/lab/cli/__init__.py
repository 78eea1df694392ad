"""The `quaver` command: a file per verb, imported on use.

VERB_*.py are parts of a verb. dispatch.py finds the verb, errors.py reports bad input, run_config.py reads the config
of a run, and dry_run.py is `quaver train --dry-run`.
"""

import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version

from quaver.lab.cli.dispatch import find_verb
from quaver.lab.cli.errors import (
    EXIT_BAD_INPUT,
    EXIT_CLOSED_PIPE,
    EXIT_INTERRUPTED,
    EXIT_NOT_WRITTEN,
    print_error,
)
from quaver.lab.terminal.escape import print_to_stderr
from quaver.lab.terminal.progress import show_progress
from quaver.runtime.errors import NotWrittenError, has_no_room

VERBS = {
    "train": "train a Llama in float8, alone or with its bfloat16 baseline",
    "doctor": "try each recipe on each device of this machine",
    "bench": "time float8 against bfloat16: casts, matmuls, blocks, training",
    "report": "show runs on a page: curves, numerics of each layer, alarms",
    "memory": "predict a step's memory, and the tensors alive at its peak",
    "plan": "find the layout and recipe of a run on a cluster of GPUs",
    "prepare-data": "tokenize the text of a run ahead of it, and count the tokens",
    "convert": "convert weights from and to Hugging Face's Llama",
    "export": "write float8 weights for transformers, vLLM and SGLang",
    "import": "dequantize float8 weights into a folder to train from",
}

_MODULE_OF_VERB = {"import": "import_weights"}
"""The modules of verbs whose names are Python keywords."""

TRAIN_EXTRA_MODULES = ("filelock", "matplotlib", "pydantic", "rich", "safetensors", "tomli_w", "xxhash")
"""The modules of the extra `quaver[train]` in pyproject.toml."""

_CPU_ALLOCATOR = "DefaultCPUAllocator: "
"""The words before the reason in the RuntimeError that torch's CPU allocator raises; no subclass marks it."""


def main(argv: list[str] | None = None) -> int:
    """Run `quaver VERB ...` and return its exit code.

    0 done, 2 bad input or too little memory, 4 a result that cannot be written, 130 Ctrl-C or SIGTERM, 141 a closed
    pipe; verbs add others.

    Args:
        argv: the arguments after the program's name; None reads sys.argv.
    """
    argv = sys.argv[1:] if argv is None else argv
    _open_closed_streams()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the lines that torch 2.13's profiler prints
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be Unicode
    try:
        with _interrupt_on_sigterm():
            code = _run_verb(argv)
        sys.stdout.flush()  # else a closed pipe or a full disk is found when the interpreter exits
        return code
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in TRAIN_EXTRA_MODULES:
            raise
        print_error(f"quaver {argv[0]} needs {package}, which is not installed: pip install 'quaver[train]'")
        return EXIT_BAD_INPUT
    except (MemoryError, RuntimeError) as error:
        details = _describe_out_of_memory(error)
        if details is None:
            raise
        print_error(f"this machine lacks the memory{details}; make the model or the batch smaller")
        return EXIT_BAD_INPUT
    except SystemExit as stopped:
        if stopped.code == EXIT_NOT_WRITTEN:  # stdout may be on the full disk
            _discard_stdout()
        raise
    except KeyboardInterrupt:
        print_to_stderr("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the pipe has ended, as `head` does
        _discard_stdout()
        return EXIT_CLOSED_PIPE
    except NotWrittenError as error:
        print_error(error)
        return EXIT_NOT_WRITTEN
    except OSError as error:
        if not has_no_room(error):
            raise
        target = "the result" if error.filename is None else repr(str(error.filename))
        print_error(f"cannot write {target}: {error.strerror}")
        _discard_stdout()
        return EXIT_NOT_WRITTEN


def _run_verb(argv: list[str]) -> int:
    if argv[:1] == ["--version"]:
        print(f"quaver {version('quaver')}")
        return 0
    usage = "quaver VERB [options]      quaver VERB --help      quaver --version"
    try:
        verb = find_verb(VERBS, argv, kind="command", usage=usage)
        with show_progress("starting"):
            module = importlib.import_module(f"{__name__}.{_MODULE_OF_VERB.get(verb, verb.replace('-', '_'))}")
        return int(module.main(argv[1:]))
    except SystemExit as stopped:  # --help
        if stopped.code:
            raise
        return 0


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt at a SIGTERM in the block, unless the process ignores or handles it."""
    is_main_thread = threading.current_thread() is threading.main_thread()  # the only one that may set handlers
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the shell closed, as a daemon's may be.

    Otherwise print(file=sys.stderr) would write errors to stdout, and the next opened file would take the number.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends


def _discard_stdout() -> None:
    """Flush standard output if it can be, and let the rest go nowhere: the interpreter flushes it again at its exit."""
    with suppress(OSError):
        sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):  # no file descriptor
        os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _describe_out_of_memory(error: MemoryError | RuntimeError) -> str | None:
    """Return what `error` says of the memory that is missing, in brackets; None if it is another error."""
    _, is_on_cpu, details = str(error).partition(_CPU_ALLOCATOR)
    is_on_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's, which only a verb imports
    if not (isinstance(error, MemoryError) or is_on_gpu or is_on_cpu):
        return None
    details = details or str(error)
    return f" ({details.rstrip('.')})" if details else ""

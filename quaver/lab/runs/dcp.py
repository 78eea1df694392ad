"""torch.distributed.checkpoint (DCP) with errors of one line, which all ranks raise together."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.manifest import CHECKPOINT_HINT
from quaver.lab.runs.safe_dcp import CheckpointPlanner
from quaver.runtime.agreement import run_on_every_rank
from quaver.runtime.errors import describe_error


def load_state(state: dict[str, Any], reader: FileSystemReader) -> None:
    """Fill the tensors of `state`, on all ranks together. Raises CheckpointError on every rank if that fails."""
    read_metadata(reader)
    try:
        with ignore_single_process_warning():
            load(state, storage_reader=reader, planner=CheckpointPlanner())
    except (Exception, CheckpointException) as error:
        raise _make_read_error("load", reader, error) from error


def read_metadata(reader: FileSystemReader) -> Metadata:
    """Return the names, shapes and dtypes that `reader` finds.

    A collective. Raises CheckpointError on every rank if there are none, or they are damaged, on any rank.
    """

    def read() -> None:
        try:
            reader.read_metadata()
        except Exception as error:  # a damaged pickle raises anything
            raise _make_read_error("read", reader, error) from error

    run_on_every_rank(read)
    return reader.read_metadata()


def describe_innermost_cause(error: BaseException) -> str:
    """Return one line: the innermost cause of `error`. DCP wraps each rank's error, and torch the system's."""
    cause: BaseException | None = error
    seen: set[int] = set()  # two errors may be the cause of each other
    while cause is not None and id(cause) not in seen:
        error = cause
        seen.add(id(error))
        failures = error.failures if isinstance(error, CheckpointException) else {}
        context = None if error.__suppress_context__ else error.__context__
        cause = failures[min(failures)][0] if failures else error.__cause__ or context
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return describe_error(error).splitlines()[0].strip()


def call_converting_errors(action: Callable[[], Any]) -> Any:
    """Call `action`. Raises CheckpointError for any error; DCP's CheckpointException is not an Exception."""
    try:
        return action()
    except (Exception, CheckpointException) as error:
        raise CheckpointError(describe_innermost_cause(error)) from error


@contextmanager
def ignore_single_process_warning() -> Iterator[None]:
    """Silence, in the block, DCP's warning that it saves or loads in a single process, which is intended here.

    Warning filters are process-wide, so a thread must not enter the block: see [Note: background writes].
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _make_read_error(verb: str, reader: FileSystemReader, error: BaseException) -> CheckpointError:
    return CheckpointError(f"cannot {verb} {str(reader.path)!r}: {describe_innermost_cause(error)}; {CHECKPOINT_HINT}")

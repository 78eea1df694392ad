"""Errors of a run's files, with messages of one line, and how an error of one rank ends the run on all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quaver.export.folders import NotWrittenError
from quaver.lab.runs.ranks import Ranks


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and which ones are intact."""

    def __init__(self, message: str, *, is_not_written: bool = False) -> None:
        """Take the message, and whether the checkpoint could not be written, or old ones not be removed."""
        super().__init__(message)
        self.is_not_written = is_not_written


@contextmanager
def convert_to_not_written(path: str | Path) -> Iterator[None]:
    """Turn an OSError of the block into a NotWrittenError that names `path`."""
    try:
        yield
    except NotWrittenError:  # of another file, which it names
        raise
    except OSError as error:
        raise NotWrittenError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


class OutputFailures:
    """Keeps the first error of this rank's outputs until all ranks end together.

    Every rank writes outputs. If one rank raised by itself, the others would wait for it in their next collective until
    that times out. So `catch` keeps the error, the loop asks between two steps whether any rank has one, and
    `raise_on_all_ranks` raises it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.first_error = ""
        """The first error of this rank; empty without one."""

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Keep a NotWrittenError or CheckpointError of the block, which ends with it."""
        try:
            yield
        except (NotWrittenError, CheckpointError) as error:
            self.first_error = self.first_error or str(error)

    def raise_on_all_ranks(self) -> None:
        """Raise NotWrittenError on every rank if any has kept an error; it names the first such rank. A collective."""
        for rank, error in enumerate(self._ranks.gather(self.first_error)):
            if error:
                raise NotWrittenError(f"rank {rank}: {error}" if rank else error)

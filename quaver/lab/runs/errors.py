"""Errors of a run's files, with messages of one line, and how an error of one rank ends the run on all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quaver.lab.runs.ranks import Ranks
from quaver.runtime.agreement import run_on_every_rank
from quaver.runtime.errors import InputError, NotWrittenError


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it, the cause, and the intact checkpoints."""

    def __init__(self, message: str, *, is_write_error: bool = False) -> None:
        """Make the error of a write or of the removal of an old checkpoint, if `is_write_error`, else of a read."""
        super().__init__(message)
        self.is_write_error = is_write_error


@contextmanager
def reraise_as_not_written(path: str | Path) -> Iterator[None]:
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
        self._prefix = "" if ranks.is_first else f"rank {ranks.rank}: "
        self._first_error: Exception | None = None

    @property
    def has_error(self) -> bool:
        """Whether this rank has kept an error."""
        return self._first_error is not None

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Keep any error that ends the block, also an unforeseen one."""
        try:
            yield
        except (NotWrittenError, InputError) as error:
            self._first_error = self._first_error or NotWrittenError(f"{self._prefix}{error}")
        except Exception as error:  # noqa: BLE001 - `raise_on_all_ranks` raises it
            self._first_error = self._first_error or error

    def describe_other_error(self, ending_error: Exception) -> str:
        """Return the error that this rank has kept in one line; "" without one, or if it is the `ending_error`."""
        kept = self._first_error
        if kept is None or kept is ending_error:
            return ""
        return str(kept) if isinstance(kept, NotWrittenError) else f"{type(kept).__name__}: {kept}"

    def raise_on_all_ranks(self) -> None:
        """Raise the error of the lowest rank that has kept one, on every rank. A collective.

        A NotWrittenError or an InputError, of a damaged file of the run, becomes a NotWrittenError that names the rank.
        """

        def raise_kept() -> None:
            if self._first_error is not None:
                raise self._first_error

        run_on_every_rank(raise_kept)

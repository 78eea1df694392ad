"""The end of a run: its status, the summary and the curves, and the last lines on the terminal."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quaver.lab.runs.errors import CheckpointError, OutputFailures, reraise_as_not_written
from quaver.lab.runs.file_names import SUMMARY_FILE
from quaver.lab.runs.status import RunStatus
from quaver.lab.terminal.console import print_line
from quaver.lab.trainer.display import print_results
from quaver.lab.trainer.nonfinite import NonFiniteError
from quaver.lab.trainer.plot import draw_curves
from quaver.lab.trainer.summary import summarize
from quaver.lab.trainer.training_run import TrainingRun
from quaver.runtime.errors import NotWrittenError
from quaver.runtime.files import replace_file


class RunEnd:
    """How a run ended. `summary` is set after the block of `write_summary_on_exit`."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self.status = RunStatus.FAILED
        self.reason: str | None = None
        """Why the run ended before its last step: an error or an alarm."""
        self.summary: dict[str, Any] = {}

    def set_status(self, alarm: str) -> None:
        """Set the status of a run whose loop ended without an error; `alarm` says what stopped it, or is ""."""
        self.status = RunStatus.FINISHED if self._run.has_ended else RunStatus.ALARM if alarm else RunStatus.INTERRUPTED
        self.reason = alarm or None

    def set_error(self, error: Exception) -> None:
        """Set the status of a run that `error` ended."""
        if isinstance(error, NonFiniteError):
            self.status = RunStatus.NONFINITE
        elif isinstance(error, CheckpointError):
            self.status = RunStatus.CHECKPOINT_FAILED
        is_one_line = isinstance(error, (NonFiniteError, CheckpointError, NotWrittenError))
        text = next(iter(str(error).splitlines()), "")
        self.reason = str(error) if is_one_line else f"{type(error).__name__}: {text}"

    def close_checkpoints(self, *, waits: bool) -> None:
        """Finish the save in progress, or with `waits` false leave it partial. Prints its error and appends it."""
        with self._run.watch_for_hangs("the end of the last checkpoint", is_slow=True):
            unsaved = self._run.checkpoints.close(waits=waits)
        if unsaved:
            self.reason = f"{self.reason}; {unsaved}" if self.reason else unsaved
            if self._run.ranks.is_first:
                print_line(unsaved)

    def print_summary(self) -> None:
        """Print the summary and how to resume, on the first rank."""
        run = self._run
        if not run.ranks.is_first:
            return
        print_results(self.summary)
        print_line(f"run folder: {run.folder.path}")
        if self.status in (RunStatus.INTERRUPTED, RunStatus.ALARM) and run.checkpoints.folder.list_steps():
            print_line(f"resume with: quaver train --resume {shlex.quote(str(run.folder.path))}")


@contextmanager
def write_summary_on_exit(run: TrainingRun, failures: OutputFailures) -> Iterator[RunEnd]:
    """Write the summary and the curves after the block, which trains, however it ends; print them if it did not raise.

    A KeyboardInterrupt, the second Ctrl-C, ends a single process like the first one, without waiting for a checkpoint.
    An error that ended the run has priority over the errors of the outputs, which are then printed.

    Raises:
        NotWrittenError: on every rank, if a file could not be written on any rank.
    """
    end, waits, is_writable = RunEnd(run), True, True
    ending_error = None
    try:
        yield end
    except KeyboardInterrupt:
        end.status, waits = RunStatus.INTERRUPTED, False
        if not run.ranks.is_alone:
            raise
    except Exception as error:
        ending_error = error
        end.set_error(error)
        is_writable = not isinstance(error, NotWrittenError)
        raise
    finally:
        end.close_checkpoints(waits=waits)
        with failures.catch():
            end.summary = summarize(run, status=end.status, reason=end.reason)
            if is_writable and run.ranks.is_first:
                run.folder.write_json(SUMMARY_FILE, end.summary)
        if is_writable and run.ranks.is_first:
            curves = run.folder.curves_path
            with failures.catch(), reraise_as_not_written(curves), replace_file(curves) as image:
                draw_curves(run.folder.metrics_path, image, title=run.folder.path.name)
        if ending_error is not None and (other_error := failures.describe_other_error(ending_error)):
            print_line(other_error)
    failures.raise_on_all_ranks()
    end.print_summary()

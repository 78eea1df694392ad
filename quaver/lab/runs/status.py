"""How a run ended, as summary.json and the report name it."""

from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from quaver.lab.json_file import STRICT, read_json


class RunStatus(StrEnum):
    """The `status` in summary.json."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """After Ctrl-C, SIGTERM or SIGHUP."""
    ALARM = "alarm"
    """Ended by an alarm with numerics.on_alarm = stop."""
    NONFINITE = "non-finite"
    CHECKPOINT_FAILED = "checkpoint failed"
    FAILED = "failed"
    """After any other error."""

    @property
    def is_error(self) -> bool:
        """Whether an error ended the run."""
        return self not in (RunStatus.FINISHED, RunStatus.INTERRUPTED, RunStatus.ALARM)


class RunSummary(TypedDict):
    """The fields of summary.json that are read: how a run ended, after `steps` steps."""

    __pydantic_config__ = {**STRICT, "extra": "allow"}  # type: ignore[misc]
    status: RunStatus
    reason: str | None
    """The error or the alarm that ended it."""
    steps: int


_SUMMARY_ADAPTER = TypeAdapter(RunSummary)


def read_summary(path: Path) -> RunSummary | None:
    """Return the summary at `path`; None if there is no file. Raises InputError if the file is damaged."""
    return read_json(path, _SUMMARY_ADAPTER, "remove the file") if path.is_file() else None

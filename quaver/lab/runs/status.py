"""How a run ended, as summary.json and the report name it."""

from enum import StrEnum


class RunStatus(StrEnum):
    """The `status` in summary.json."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """After Ctrl-C, SIGTERM or SIGHUP."""
    ALARM = "alarm"
    """With numerics.on_alarm = stop."""
    NONFINITE = "non-finite"
    CHECKPOINT_FAILED = "checkpoint failed"
    FAILED = "failed"
    """After any other error."""

    @property
    def is_error(self) -> bool:
        """Whether an error ended the run."""
        return self not in (RunStatus.FINISHED, RunStatus.INTERRUPTED, RunStatus.ALARM)

"""`SampleWriter`: writes the header and the samples of a monitor to its sink, on the first rank.

[Note: a sink that fails] A monitor must not end a training. If the header cannot be written, the constructor raises on
all ranks. If a later line cannot be written, the monitor closes on all ranks with one warning. What the callback of an
`AlarmSink` raises ends the step on all ranks. At the end of each sampled step the ranks take the largest `Outcome` of
any rank.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from quaver.numerics.alarm_sink import AlarmSink
from quaver.numerics.record import Sink

logger = logging.getLogger(__name__)


class Outcome(enum.IntEnum):
    """The outcome of a sampled step, by [Note: a sink that fails]. A larger one overrides a smaller one."""

    WRITTEN = 0
    MONITOR_CLOSES = 1
    STEP_ENDS = 2


class Failure(NamedTuple):
    """An error of a sampled step on the first rank."""

    error: BaseException
    is_of_sink: bool
    """Whether the sink raised it."""
    outcome: Outcome

    def log(self, step: int) -> None:
        """Warn that the monitor ends after `step`, with a traceback unless the sink raised the error."""
        text = _describe_sink_error(self.error) if self.is_of_sink else "the sample could not be made"
        traceback = None if self.is_of_sink else self.error
        logger.warning("the monitor ends after step %s: %s", f"{step:,}", text, exc_info=traceback)


class SampleWriter:
    """Writes lines to a sink, each sample after its header. Without a sink it writes nothing."""

    def __init__(self) -> None:
        self._sink: Sink | None = None
        self._written_header: dict[str, Any] | None = None

    def open(self, sink: Sink | None, header: dict[str, Any]) -> None:
        """Write the first header. Raises what the sink raises."""
        self._sink = sink
        self._write_header(header)

    def _write_header(self, header: dict[str, Any]) -> None:
        if self._sink is not None and self._written_header is not header:
            self._sink.write(header)
            self._written_header = header

    @property
    def suspects(self) -> set[str]:
        """The layers that an `AlarmSink` wants extras of in the next sample."""
        return set(self._sink.alarms.suspects) if isinstance(self._sink, AlarmSink) else set()

    def write(self, header: dict[str, Any], make_sample: Callable[[], dict[str, Any] | None]) -> Failure | None:
        """Make a sample and write it, unless it is None. Returns an error, which ends the monitor or the step."""
        is_writing = False
        try:
            sample = make_sample()
            if sample is not None and self._sink is not None:
                is_writing = True
                self._write_header(header)
                self._sink.write(sample)
        except BaseException as error:  # noqa: BLE001 - the monitor raises it on all ranks, also an interrupt
            return Failure(error, is_writing, Outcome.STEP_ENDS if self._ends_step(error) else Outcome.MONITOR_CLOSES)
        return None

    def _ends_step(self, error: BaseException) -> bool:
        """Return whether an error ends the step, not the monitor: an alarm's callback raised it, or the user quits."""
        is_of_callback = isinstance(self._sink, AlarmSink) and error is self._sink.raised_by_callback
        return is_of_callback or not isinstance(error, Exception)

    def close(self) -> None:
        """Close the sink, with a warning if that fails."""
        if self._sink is not None:
            try:
                self._sink.close()
            except Exception as error:  # noqa: BLE001 - [Note: a sink that fails]
                logger.warning("the record of the monitor may be incomplete: %s", _describe_sink_error(error))
            self._sink = None


def _describe_sink_error(error: BaseException) -> str:
    line = next(iter(str(error).splitlines()), "")
    return f"its sink raised {type(error).__name__}: {line}"

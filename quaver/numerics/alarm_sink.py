"""`AlarmSink` raises alarms during a run, from the lines that a monitor writes.

    alarms = AlarmSink("numerics.jsonl", on_event=print, post_mortem="post_mortem.jsonl")
    with quaver.monitor(model, every=100, sink=alarms):
        ...

The record receives samples and alarms in order. When a value is not finite, the last samples and the alarm are also
written to a second record, which a later start of the run does not rewind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quaver.numerics.alarms import Alarm, AlarmCleared, Alarms
from quaver.numerics.history import EARLIER_SAMPLES
from quaver.numerics.record import AnySink, RecordWriter, make_sink, read_last_samples
from quaver.runtime.files import replace_file

RESUMED_SAMPLES = 64
"""Samples that are read when a run resumes; more than the `EARLIER_SAMPLES` of any rule."""


class AlarmSink:
    """A sink that gives each sample to `alarms`, and writes the sample and its alarms to another sink.

    Args:
        sink: the other sink, as for `Monitor`; None to write nothing.
        alarms: the alarms, by default of all rules.
        on_event: called with each `Alarm` and `AlarmCleared` after it was written. Its exceptions end the step.
        post_mortem: the file for the last samples up to a value that is not finite, and its alarm.
        post_mortem_samples: the most samples in the post-mortem, 1 or more.
        resumed_record: the record of a run that resumes. Its last samples count like samples of this run, so bad
            tensors stay bad and no alarm is raised twice.
    Raises:
        TypeError: `sink` is no sink, `alarms` no `Alarms`, or `on_event` no function.
        ValueError: `post_mortem_samples` is no int of 1 or more.
    """

    def __init__(
        self,
        sink: AnySink = None,
        *,
        alarms: Alarms | None = None,
        on_event: Callable[[Alarm | AlarmCleared], None] | None = None,
        post_mortem: str | Path | None = None,
        post_mortem_samples: int = EARLIER_SAMPLES,
        resumed_record: str | Path | None = None,
    ) -> None:
        if not isinstance(alarms, Alarms | None):
            raise TypeError(f"alarms: expected an Alarms, got {alarms!r}")
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event: expected a function of an event, got {on_event!r}")
        if type(post_mortem_samples) is not int or post_mortem_samples < 1:
            raise ValueError(f"post_mortem_samples: expected an integer, 1 or more, got {post_mortem_samples!r}")
        self.alarms = Alarms() if alarms is None else alarms
        self._sink = make_sink(sink)
        self._on_event = on_event
        self._post_mortem = None if post_mortem is None else Path(post_mortem)
        self._resumed_record = None if resumed_record is None else Path(resumed_record)
        self._header: dict[str, Any] = {}
        self._last_samples: deque[tuple[dict[str, Any], dict[str, Any]]] = deque(maxlen=post_mortem_samples)
        """Samples, each with its header: before a resume the model may have had other tensors."""
        self.raised_by_callback: BaseException | None = None
        """The last exception that `on_event` raised, as opposed to a sink's."""

    def write(self, line: dict[str, Any]) -> None:
        """Write a header or a sample. Raises OSError if a file cannot be written, and what `on_event` raises."""
        self._write(line)
        if line["kind"] == "header":
            self._read_resumed_samples(line["step"])
            self._header = line
        elif line["kind"] == "sample":
            self._last_samples.append((self._header, line))
            for event in self.alarms.update(self._header, line):
                self._emit(event)

    def _read_resumed_samples(self, step: int) -> None:
        if self._resumed_record is not None:
            for header, sample in read_last_samples(self._resumed_record, before=step, count=RESUMED_SAMPLES):
                self._last_samples.append((header, sample))
                self.alarms.update(header, sample)
        self._resumed_record = None

    def close(self) -> None:
        """Close the other sink."""
        if self._sink is not None:
            self._sink.close()

    def _emit(self, event: Alarm | AlarmCleared) -> None:
        self._write(event.to_dict())
        if isinstance(event, Alarm) and event.rule == "nonfinite" and self._post_mortem is not None:
            self._write_post_mortem(self._post_mortem, event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except BaseException as error:  # also an interrupt: the monitor ends the step on all ranks
                self.raised_by_callback = error
                raise

    def _write(self, line: dict[str, Any]) -> None:
        if self._sink is not None:
            self._sink.write(line)

    def _write_post_mortem(self, path: Path, alarm: Alarm) -> None:
        """Write the kept samples and the alarm as a record, which replaces an earlier one."""
        with replace_file(path) as partial:
            partial.unlink(missing_ok=True)  # of a process that was killed
            writer = RecordWriter(partial)
            written_header = None
            for header, sample in self._last_samples:
                if header is not written_header:
                    writer.write({**header, "step": sample["step"]})
                written_header = header
                writer.write(sample)
            writer.write(alarm.to_dict())
            writer.close()

"""Tests alarms beside a run: their lines in the record, the callback, and the samples before a non-finite value."""

from unittest import mock

import pytest

from quaver.numerics.alarm_sink import AlarmSink
from quaver.numerics.alarms import Alarm, AlarmCleared, Alarms
from quaver.numerics.record import Record, RecordWriter
from tests.library.numerics.samples import LAYERS, make_header, make_sample

NAN = {(LAYERS[2], "input"): {"nonfinite": 8}}


def write(sink, *lines):
    for line in lines:
        sink.write(line)


def test_alarms_stand_behind_their_sample_and_are_the_same_over_the_record(tmp_path):
    events = []
    sink = AlarmSink(tmp_path / "numerics.jsonl", on_event=events.append)
    write(sink, make_header(), *(make_sample(step, NAN if step in (5, 6) else None) for step in range(1, 10)))
    sink.close()
    record = Record.read(tmp_path / "numerics.jsonl", keeps_lines=True)
    assert [(alarm["kind"], alarm["step"]) for alarm in record.alarms] == [("alarm", 5), ("cleared", 7)]
    header, *samples = record.lines
    alarms = Alarms()
    assert [event for sample in samples for event in alarms.update(header, sample)] == events


def test_the_samples_before_a_nonfinite_value_are_kept(tmp_path):
    sink = AlarmSink(post_mortem=tmp_path / "post_mortem.jsonl", post_mortem_samples=4)
    write(sink, make_header(), *(make_sample(step) for step in range(1, 9)))
    assert not (tmp_path / "post_mortem.jsonl").exists()
    sink.write(make_sample(9, NAN))
    record = Record.read(tmp_path / "post_mortem.jsonl")
    assert record.steps.tolist() == [6, 7, 8, 9]
    assert [alarm["layer"] for alarm in record.alarms] == [LAYERS[2]]


def test_a_post_mortem_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    post_mortem = tmp_path / "post_mortem.jsonl"
    post_mortem.write_text("earlier")
    sink = AlarmSink(post_mortem=post_mortem)
    write(sink, make_header(), make_sample(1))
    with mock.patch.object(RecordWriter, "write", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        sink.write(make_sample(2, NAN))
    assert post_mortem.read_text() == "earlier"


def test_the_samples_before_a_resume_keep_the_header_of_their_tensors(tmp_path):
    path, post_mortem = tmp_path / "numerics.jsonl", tmp_path / "post_mortem.jsonl"
    write(AlarmSink(path), make_header(), make_sample(1), make_sample(2))
    header, sample = make_header(), make_sample(3, NAN)
    header |= {"step": 3, "tensors": header["tensors"][:-1]}
    sample |= {name: sample[name][:-1] for name in header["statistics"]}
    write(AlarmSink(path, post_mortem=post_mortem, resumed_record=path), header, sample)
    record = Record.read(post_mortem)
    assert record.steps.tolist() == [1, 2, 3]
    count = len(header["tensors"])
    assert [len(header["tensors"]) for header in record.headers] == [count + 1, count]


def test_the_sink_of_alarms_is_any_sink_of_a_monitor():
    lines = []
    AlarmSink(lines.append).write(make_header())
    assert lines == [make_header()]
    with pytest.raises(TypeError, match="sink: expected a path, a function or an object"):
        AlarmSink(5)
    for option, bad in {"alarms": [], "on_event": "print", "post_mortem_samples": 0}.items():
        with pytest.raises((TypeError, ValueError), match=f"^{option}: expected .*, got "):
            AlarmSink(**{option: bad})


def test_what_a_callback_raises_ends_the_step(tmp_path):
    def stop(event):
        assert isinstance(event, Alarm)
        raise KeyboardInterrupt

    sink = AlarmSink(tmp_path / "numerics.jsonl", on_event=stop)
    sink.write(make_header())
    with pytest.raises(KeyboardInterrupt):
        sink.write(make_sample(1, NAN))
    assert len(Record.read(tmp_path / "numerics.jsonl").alarms) == 1  # it was written before


@pytest.mark.parametrize("step", [1, 5, 6, 7, 9])
def test_a_loop_that_resumes_raises_what_an_uninterrupted_one_raises(tmp_path, step):
    """Killed after step 9, while it wrote; resumed after `step`."""
    bad, path = {(LAYERS[2], "input"): {"underflow": 0.3}}, tmp_path / "numerics.jsonl"
    samples = [make_sample(number, bad if 5 <= number < 11 else None) for number in range(1, 16)]
    expected, events = [], []
    write(AlarmSink(path, on_event=expected.append), make_header(), *samples)
    assert [(type(event), event.step) for event in expected] == [(Alarm, 6), (AlarmCleared, 12)]
    path.unlink()
    write(AlarmSink(path), make_header(), *samples[:9])
    path.write_bytes(path.read_bytes() + b'{"kind": "sam')
    resumed = AlarmSink(path, on_event=events.append, resumed_record=path)
    write(resumed, make_header() | {"step": step + 1}, *samples[step:10], make_header() | {"step": 11}, *samples[10:])
    assert events == [event for event in expected if event.step > step]
    assert Record.read(path).steps.tolist() == list(range(1, 16))


def test_print_of_an_alarm_is_the_line_that_the_guides_show(tmp_path):
    events = []
    sink = AlarmSink(tmp_path / "numerics.jsonl", on_event=events.append)
    write(sink, make_header(), *(make_sample(step, NAN if step == 5 else None) for step in range(1, 9)))
    alarm, cleared = events
    assert str(alarm) == f"step 5: alarm: {LAYERS[2]} input: elements that are not finite: 8, since step 5"
    assert str(cleared) == f"step 6: {LAYERS[2]} input: nonfinite has ended"
    assert repr(alarm).startswith("Alarm(step=5, since=5, rule='nonfinite'")

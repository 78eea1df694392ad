"""Alarms beside a run: their lines in the record, the callback, and the samples before what is not finite."""

import pytest

from quaver.numerics.alarms import Alarm, Alarms, Cleared
from quaver.numerics.record import Record
from quaver.numerics.watch import AlarmSink
from tests.library.numerics.samples import LAYERS, header, sample

NAN = {(LAYERS[2], "input"): {"nonfinite": 8}}


def test_alarms_stand_behind_their_sample_and_are_the_same_over_the_record(tmp_path):
    found = []
    sink = AlarmSink(tmp_path / "numerics.jsonl", on_event=found.append)
    for line in (header(), *(sample(step, NAN if step in (5, 6) else None) for step in range(1, 10))):
        sink.write(line)
    sink.close()
    record = Record.read(tmp_path / "numerics.jsonl", keeps_lines=True)
    assert [(each["kind"], each["step"]) for each in record.alarms] == [("alarm", 5), ("cleared", 7)]
    again, current = Alarms(), None
    replayed = []
    for line in record.lines:
        if line["kind"] == "header":
            current = line
        else:
            replayed += again.update(current, line)
    assert replayed == found


def test_the_samples_before_a_nonfinite_value_are_kept(tmp_path):
    sink = AlarmSink(post_mortem=tmp_path / "post_mortem.jsonl", keep=4)
    for line in (header(), *(sample(step) for step in range(1, 9))):
        sink.write(line)
    assert not (tmp_path / "post_mortem.jsonl").exists()
    sink.write(sample(9, NAN))
    record = Record.read(tmp_path / "post_mortem.jsonl")
    assert record.steps.tolist() == [6, 7, 8, 9]
    assert [each["layer"] for each in record.alarms] == [LAYERS[2]]


def test_the_samples_before_a_resume_keep_the_header_of_their_tensors(tmp_path):
    path, post_mortem = tmp_path / "numerics.jsonl", tmp_path / "post_mortem.jsonl"
    first = AlarmSink(path)
    for line in (header(), sample(1), sample(2)):
        first.write(line)
    fewer = header()["tensors"][:-1]
    resumed = AlarmSink(path, post_mortem=post_mortem, recalls=path)
    resumed.write({**header(), "step": 3, "tensors": fewer})
    resumed.write({**sample(3, NAN), **{name: sample(3, NAN)[name][: len(fewer)] for name in header()["statistics"]}})
    record = Record.read(post_mortem)
    assert record.steps.tolist() == [1, 2, 3]
    assert [len(each["tensors"]) for each in record.headers] == [len(fewer) + 1, len(fewer)]


def test_what_a_callback_raises_ends_the_step(tmp_path):
    def stop(event):
        assert isinstance(event, Alarm)
        raise KeyboardInterrupt

    sink = AlarmSink(tmp_path / "numerics.jsonl", on_event=stop)
    sink.write(header())
    with pytest.raises(KeyboardInterrupt):
        sink.write(sample(1, NAN))
    assert len(Record.read(tmp_path / "numerics.jsonl").alarms) == 1  # it was written before


@pytest.mark.parametrize("step", [1, 5, 6, 7, 9])
def test_a_loop_that_resumes_raises_what_an_uninterrupted_one_raises(tmp_path, step):
    """Killed after step 9, while it wrote; resumed after `step`."""
    bad, path, found = {(LAYERS[2], "input"): {"underflow": 0.3}}, tmp_path / "numerics.jsonl", []
    samples = [sample(each, bad if 5 <= each < 11 else None) for each in range(1, 16)]

    def write(sink, lines):
        for line in lines:
            sink.write(line)

    write(AlarmSink(path, on_event=found.append), [header(), *samples])
    assert [(type(each), each.step) for each in found] == [(Alarm, 6), (Cleared, 12)]
    path.unlink()
    write(AlarmSink(path), [header(), *samples[:9]])
    path.write_bytes(path.read_bytes() + b'{"kind": "sam')
    again = []
    resumed = AlarmSink(path, on_event=again.append, recalls=path)
    write(resumed, [{**header(), "step": step + 1}, *samples[step:10], {**header(), "step": 11}, *samples[10:]])
    assert again == [each for each in found if each.step > step]
    assert Record.read(path).steps.tolist() == list(range(1, 16))


def test_print_of_an_alarm_is_the_line_that_the_guides_show(tmp_path):
    found = []
    sink = AlarmSink(tmp_path / "numerics.jsonl", on_event=found.append)
    for line in (header(), *(sample(step, NAN if step == 5 else None) for step in range(1, 9))):
        sink.write(line)
    alarm, cleared = found
    assert str(alarm) == f"step 5: alarm: {LAYERS[2]} input: has 8 elements that are not finite, since step 5"
    assert str(cleared) == f"step 6: {LAYERS[2]} input: nonfinite has ended"
    assert repr(alarm).startswith("Alarm(step=5, since=5, rule='nonfinite'")

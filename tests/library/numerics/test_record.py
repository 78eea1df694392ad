"""Tests numerics.jsonl: what is written is read, a resumed run rewinds, and other files are refused in one line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quaver.numerics.record import Record, RecordWriter, decode_counts, encode_counts

NAMES = ["amax", "sqnr_db"]


def make_header(step: int, *layers: str, schema: int = 1) -> dict[str, Any]:
    tensors = [{"layer": layer, "operand": "input", "cast": "both", "recipe": "tensorwise"} for layer in layers]
    header = {"kind": "header", "schema": schema, "quaver": "9.9", "step": step}
    return {**header, "statistics": NAMES, "tensors": tensors}


def make_sample(step: int, amax: list[Any], **more: Any) -> dict[str, Any]:
    return {"kind": "sample", "step": step, "amax": amax, "sqnr_db": [30.0] * len(amax), **more}


def write_record(path: Path, *lines: dict[str, Any]) -> Path:
    writer = RecordWriter(path)
    for line in lines:
        writer.write(line)
    writer.close()
    return path


def test_a_record_reads_what_was_written(tmp_path):
    counts = encode_counts([0, 1, 1000])
    histogram = {"low": -3, "bins": 3, "before": [counts, None], "after": [counts, None]}
    alarm = {"kind": "alarm", "step": 20, "rule": "saturation", "value": math.inf}
    path = write_record(
        tmp_path / "numerics.jsonl",
        make_header(1, "a", "b"),
        make_sample(10, [1.5, None]),
        make_sample(20, [math.inf, 2.0], histogram=histogram, whatif={"rowwise": [27.0, None]}),
        alarm,
        make_header(25, "b", "c"),  # the model changed
        make_sample(30, [None, 7.0]),
    )
    record = Record.read(tmp_path, keeps_lines=True)
    assert [tensor["layer"] for tensor in record.tensors] == ["a", "b", "c"]
    assert record.steps.tolist() == [10, 20, 30]
    nan = math.nan
    np.testing.assert_array_equal(record.statistics["amax"], [[1.5, nan, nan], [math.inf, 2, nan], [nan, nan, 7]])
    np.testing.assert_array_equal(record.whatif["rowwise"], [[nan] * 3, [27, nan, nan], [nan] * 3])
    assert record.histograms[1].low == -3
    np.testing.assert_allclose(record.histograms[1].before[0], [0, 1, 1000], rtol=0.045)
    assert record.alarms == [alarm]
    assert not record.is_torn
    assert [line["kind"] for line in record.lines] == ["header", "sample", "sample", "header", "sample"]
    assert record.lines[2]["amax"] == [math.inf, 2.0]
    assert '"inf"' in path.read_text()
    assert "Infinity" not in path.read_text()


def test_a_resumed_run_removes_what_it_repeats(tmp_path, caplog):
    path = write_record(
        tmp_path / "n.jsonl", make_header(1, "a"), *(make_sample(step, [step]) for step in (10, 20, 30))
    )
    with path.open("a") as file:
        file.write('{"kind": "sample", "st')  # killed
    torn = Record.read(path)
    assert torn.is_torn
    assert torn.steps.tolist() == [10, 20, 30]
    write_record(path, make_header(16, "a"), make_sample(20, [21]))
    record = Record.read(path)
    assert not record.is_torn
    assert record.statistics["amax"].ravel().tolist() == [10, 21]
    assert not caplog.text
    write_record(path, make_header(1, "a"), make_sample(10, [11]))
    assert Record.read(path).statistics["amax"].ravel().tolist() == [11]
    assert "removed 4 lines from step 1 on" in caplog.text


@pytest.mark.parametrize("rotate", [lambda path: path.rename(path.with_suffix(".1")), lambda path: path.write_text("")])
def test_a_record_that_is_moved_or_truncated_during_the_run_begins_anew_with_its_header(tmp_path, caplog, rotate):
    path = tmp_path / "n.jsonl"
    writer = RecordWriter(path)
    for line in (make_header(1, "a"), make_sample(10, [1])):
        writer.write(line)
    rotate(path)
    for step in (20, 30):
        writer.write(make_sample(step, [step]))
    assert Record.read(path).statistics["amax"].ravel().tolist() == [20, 30]
    assert caplog.text.count("moved or truncated: a new record begins at step 20") == 1


def test_a_second_writer_of_a_record_is_refused_until_the_first_is_closed(tmp_path):
    path, header = tmp_path / "n.jsonl", make_header(1, "a")
    first, second = RecordWriter(path), RecordWriter(tmp_path / "." / "n.jsonl")
    first.write(header)
    first.write(make_sample(10, [1]))
    with pytest.raises(ValueError, match="another monitor of this process writes to"):
        second.write(header)
    second.close()
    first.write(make_header(11, "a"))
    assert len(path.read_text().splitlines()) == 3
    first.close()
    second.write(header)
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000, 2**31])
def test_counts_of_a_histogram_keep_5_percent(count):
    assert decode_counts(encode_counts([count]))[0] == pytest.approx(count, rel=0.045)


GOOD = json.dumps(make_header(1, "a")), json.dumps(make_sample(1, [1]))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "header"),
        ([GOOD[1]], "header"),
        ([GOOD[0]], "no samples"),
        ([json.dumps(make_header(1, schema=2)), GOOD[1]], "schema 1 .* got 2; read it with quaver 9.9"),
        (["# Log"], "line 1 .* the file is not a record of numerics"),
        ([GOOD[0], "{"], "line 2 .* remove the line"),
        ([GOOD[0], "[]"], "line 2 .* remove the line"),
        ([GOOD[0], '{"kind": "sample", "step": 1}'], "line 2 .*'amax'.* remove the line"),
        ([GOOD[0], json.dumps(make_sample(1, [1, 2]))], "line 2 .*expected 1 values, got 2"),
        ([GOOD[0], json.dumps(make_sample(1, ["x"]))], "line 2 .*expected numbers, got"),
        ([GOOD[0], GOOD[1], GOOD[1]], "line 3 .*expected a step after 1, got 1"),
        (['{"kind": "header", "schema": 1, "step": 1}', GOOD[1]], "line 1 .*lacks statistics"),
        ([GOOD[0].replace('"amax"', "[]"), GOOD[1]], "line 1 .*lacks statistics"),
        ([GOOD[0], "[" * 100_000], "line 2 .* remove the line"),
        ([GOOD[0], json.dumps(make_sample(2**63, [1]))], "line 2 .* remove the line"),
        ([GOOD[0], json.dumps({**make_sample(1, [1]), "whatif": [1]})], "line 2 .* remove the line"),
        ([GOOD[0], json.dumps({**make_sample(1, [1]), "histogram": {"bins": 10**12}})], "at most 256 bins, got 10"),
    ],
)
def test_what_is_not_a_record_is_refused_in_one_line(tmp_path, lines, message):
    path = tmp_path / "numerics.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ValueError, match=message) as caught:
        Record.read(path)
    assert "\n" not in str(caught.value)


def test_a_run_without_statistics_is_refused(tmp_path):
    with pytest.raises(ValueError, match="record them with quaver.monitor"):
        Record.read(tmp_path)

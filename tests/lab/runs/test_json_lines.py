"""Tests which records of a run's JSON lines are refused, and which lines a resumed run removes."""

import json
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from quaver.lab.runs.json_lines import JsonLinesWriter, read_json_lines, rewind_json_lines
from quaver.runtime.errors import InputError, NotWrittenError


def test_json_lines_refuse_what_json_lacks(tmp_path):
    with closing(JsonLinesWriter(tmp_path / "m.jsonl")) as metrics:
        metrics.write({"step": 1, "loss": 0.5})
        with pytest.raises(NotWrittenError, match="^cannot write step 2 to '.*m.jsonl': .*JSON"):
            metrics.write({"step": 2, "loss": float("nan")})
    assert read_json_lines(tmp_path / "m.jsonl") == [{"step": 1, "loss": 0.5}]


def rewind(*paths: Path, step: int) -> None:
    with rewind_json_lines(paths, step):
        pass


def test_rewinding_takes_later_steps_and_half_a_line_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in (1, 2, 3)]
    path.write_text("\n".join(lines) + '\n{"step": 4, "lo')
    rewind(path, step=3)
    assert [record["step"] for record in read_json_lines(path)] == [1, 2, 3]
    rewind(path, step=1)
    assert [record["step"] for record in read_json_lines(path)] == [1]
    rewind(tmp_path / "none.jsonl", step=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


DAMAGE = {
    "garbage": "garbage",
    "bytes": "\xff\xfe",
    "no object": "[]",
    "no step": '{"model": "bfloat16", "loss": 1}',
    "no number of a step": '{"step": null}',
    "an infinite step": '{"step": 1e999, "model": "bfloat16"}',
    "a negative step": '{"step": -1, "model": "bfloat16"}',
    "a model that is no name": '{"step": 1, "model": 3}',
    "a loss that is text": '{"step": 1, "model": "bfloat16", "loss": "low"}',
    "NaN": '{"step": 1, "model": "bfloat16", "loss": NaN}',
    "deep nesting": "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_named_and_no_file_changes(tmp_path, damage):
    good, bad = tmp_path / "metrics.jsonl", tmp_path / "float8_scales.jsonl"
    good.write_text('{"step": 1}\n{"step": 2}\n')
    bad.write_bytes(b'{"step": 1}\n' + DAMAGE[damage].encode("latin-1") + b"\n")
    with pytest.raises(InputError, match="line 2 of .*float8_scales.jsonl' is not a record"):
        rewind(good, bad, step=1)
    assert good.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert len(list(tmp_path.iterdir())) == 2


def test_a_record_is_read_without_half_a_line_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5, "more": [1]}\n{"step": 2, "lo')
    assert read_json_lines(path) == [{"step": 1, "loss": 2.5, "more": [1]}]
    path.write_text('{"step": 1}\n[]\n')
    with pytest.raises(InputError, match=r"line 2 of .*metrics.jsonl' is not a record of a step; remove the line"):
        read_json_lines(path)


def test_rewinding_holds_one_record_at_a_time(tmp_path):
    path = tmp_path / "float8_scales.jsonl"
    values = {f"model.layers.{index}.mlp.down_proj.input": 1.5 for index in range(200)}
    path.write_text("".join(json.dumps({"step": step, "amax": values}) + "\n" for step in range(1, 501)))
    assert path.stat().st_size > 4_000_000
    tracemalloc.start()
    try:
        rewind(path, step=400)
        rewinding = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rewinding < 500_000

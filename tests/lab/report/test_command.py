"""Tests what `quaver report` prints and writes, and that bad input is one line."""

import json
import os
from pathlib import Path

import pytest

from quaver.lab.cli import main
from quaver.lab.cli.report import ReportOptions
from quaver.lab.report.facts import list_facts
from quaver.lab.report.run import RunData
from tests.command_line import TEXT, TINY
from tests.lab.report.records import (
    make_alarm,
    make_header,
    make_layers,
    make_tensors,
    read_data,
    write_lines,
    write_run,
)

TENSORS = make_tensors(make_layers(1))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "plain"
    alarms = [make_alarm(240, TENSORS[3]), make_alarm(300, TENSORS[8], rule="underflow")]
    return write_run(folder, layers=make_layers(1), alarms=alarms, models=("tensorwise", "bfloat16"))


def test_a_report_is_printed_and_written(run, tmp_path, run_quaver):
    """The runs are a baseline without statistics, which stands first, and two with them."""
    other = write_run(tmp_path / "other", layers=make_layers(1), seed=1)
    baseline = write_run(tmp_path / "baseline", layers=make_layers(1))
    (baseline / "numerics.jsonl").unlink()
    page = tmp_path / "new" / "page.html"
    text = " ".join(run_quaver("report", baseline, run, other, "--html", page, "--top", 1).split())
    assert "plain: 2 alarms in 40 samples of 42 tensors, up to step 400; the first at step 240: " in text
    assert "other: no alarm in 40 samples of 42 tensors, up to step 400" in text
    assert "2 alarms of plain, the first 1" in text
    assert "last loss, bfloat16" in text
    assert "rowwise: 27.1 dB" in text
    assert "baseline: no statistics of float8 matmuls" in text
    assert f"saved {page}" in text
    assert "baseline and plain and other" in page.read_text()


def test_a_run_of_the_trainer_is_reported(tmp_path, run_quaver):
    (tmp_path / "text.txt").write_text(TEXT)
    argv = ["--data.path", tmp_path / "text.txt", "--job.dump_folder", tmp_path, "--job.name", "run"]
    run_quaver("train", *TINY, "--training.steps=4", "--numerics.every=2", *argv)
    text = " ".join(run_quaver("report", tmp_path / "run").split())
    assert "run: no alarm in 3 samples of " in text
    assert "peak resident memory" in text
    assert "end finished after step 4" in text
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_nonfinite_run_is_reported_with_its_error(tmp_path, run_quaver, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    argv = [f"--data.path={tmp_path / 'text.txt'}", f"--job.dump_folder={tmp_path}", "--job.name=run"]
    assert main(["train", *TINY, *argv, "--optimizer.lr=1e30", "--lr_scheduler.warmup_steps=0"]) == 3
    error = capsys.readouterr().err.strip().removeprefix("quaver: error: ")
    text = " ".join(run_quaver("report", tmp_path / "run").split())
    assert f"run: non-finite after step 1: {error}; no statistics of float8 matmuls" in text
    (data,) = read_data(tmp_path / "run" / "report.html")["runs"]
    ((step, event),) = data["events"]
    assert (data["is_healthy"], step, event.partition(", ")[0]) == (False, 2, f"not finite: {error.partition(', ')[0]}")


def test_a_run_without_a_summary_goes_on_or_was_killed_or_could_not_write(tmp_path, run_quaver):
    folder = write_run(tmp_path / "run", layers=["a"])
    (folder / "summary.json").unlink()
    text = " ".join(run_quaver("report", folder).split())
    assert "end none written: the run goes on, was killed, or could not write it" in text


def test_the_name_of_a_run_need_not_be_unicode(tmp_path, run_quaver):
    folder = write_run(tmp_path / os.fsdecode(b"run \xff"), layers=make_layers(1))
    run_quaver("report", folder)
    assert "run \\udcff" in (folder / "report.html").read_text()


def test_a_torn_line_of_each_file_is_noted(tmp_path, run_quaver):
    folder, names = write_run(tmp_path / "run", layers=["a"]), ("metrics.jsonl", "numerics.jsonl", "provenance.jsonl")
    for name in names:
        with (folder / name).open("a") as file:
            file.write('{"ste')
    text = " ".join(run_quaver("report", folder).split())
    assert all(f"run: the last line of {name} was incomplete" in text for name in names)


def test_a_record_alone_is_reported_without_its_torn_line(run, tmp_path, run_quaver):
    record = tmp_path / "some.jsonl"
    record.write_bytes((run / "numerics.jsonl").read_bytes()[:-20])
    text = " ".join(run_quaver("report", record, "--html", tmp_path / "page.html").split())
    assert "some.jsonl: the last line of some.jsonl was incomplete" in text
    assert not list(tmp_path.glob("report.html"))


RECORD = "numerics.jsonl"
DAMAGE = {
    "another schema": (RECORD, lambda old: old.replace(b'"schema": 1', b'"schema": 2'), "expected schema 1 in"),
    "no header": (RECORD, lambda old: old.split(b"\n", 1)[1], "expected a header in the first line"),
    "no samples": (RECORD, lambda old: old.split(b"\n")[0] + b"\n", "has no samples"),
    "empty": (RECORD, lambda old: b"", "expected a header"),
    "a line that is cut": (RECORD, lambda old: old.replace(b'"amax": [', b'"amax": ', 1), "line 2 of"),
    "bytes": (RECORD, lambda old: b"\xff\xfe\x00\n", "line 1 of"),
    "an alarm without a rule": (RECORD, lambda old: old.replace(b'"rule"', b'"ruler"', 1), "no proper 'rule'"),
    "remedies": (RECORD, lambda old: old.replace(b'"remedies": [', b'"remedies": [3, ', 1), "'remedies'"),
    "metrics": ("metrics.jsonl", lambda old: b"[]\n", "line 1 of"),
    "conversion": ("conversion_report.json", lambda old: b"{}", "report.json' is damaged: config is missing"),
    "summary": ("summary.json", lambda old: b"{}", "summary.json' is damaged: status is missing"),
    "provenance": ("provenance.jsonl", lambda old: b"{}\n", "is not a start of a run"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_is_named_in_one_line(tmp_path, run_refused, case):
    alarms = [make_alarm(20, make_tensors(["a"])[0])]
    folder = write_run(tmp_path / "run", layers=["a"], samples=3, steps=10, alarms=alarms)
    name, change, expected = DAMAGE[case]
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    assert expected in run_refused("report", folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_a_folder_in_place_of_a_file_is_named_in_one_line(tmp_path, run_refused, name):
    folder = write_run(tmp_path / "run", layers=["a"])
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"{str(folder / name)!r} is not a file; remove it" in run_refused("report", folder)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "the following arguments are required: RUNS; see quaver report --help"),
        (["{folder}/missing"], "there is no run"),
        (["{folder}"], "is not the folder of a run: it has neither metrics.jsonl nor numerics.jsonl"),
        (["{run}/metrics.jsonl"], "a file of a run, not its numerics.jsonl; give its folder '{run}'"),
        (["{run}", "{run}"], "RUNS must be different runs"),
        (["{run}", "--html", "{folder}"], "--html must be a file to write, got the folder"),
        (["{run}", "--html", "/dev/null/page.html"], "--html: cannot write"),
        (["{run}", "--htlm", "a"], "unknown flag: '--htlm'; did you mean '--html'?"),
        (["{run}", "--top", "-1"], "--top must be"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(run, tmp_path, run_refused, argv, expected):
    argv = [word.format(folder=tmp_path, run=run) for word in argv]
    assert expected.format(run=run) in run_refused("report", *argv)


def test_a_folder_of_runs_names_the_runs(tmp_path, run_refused):
    for number in range(5):
        (tmp_path / f"run{number}").mkdir()
        (tmp_path / f"run{number}" / "metrics.jsonl").touch()
    assert f"runs in it: '{tmp_path}/run0', '{tmp_path}/run1', '{tmp_path}/run2' and 2 more" in run_refused(
        "report", tmp_path
    )


def test_a_run_without_statistics_has_a_page(tmp_path, run_quaver):
    write_lines(tmp_path / "a" / "metrics.jsonl", [{"step": 1, "model": "a", "loss": 1.0}])
    printed = run_quaver("report", tmp_path / "a")
    assert "a: no statistics of float8 matmuls; --numerics.every 100 records them" in printed
    assert (tmp_path / "a" / "report.html").is_file()


def test_steps_that_measure_memory_do_not_count_as_speed():
    speeds = (1, 5, 1, 10, 5, 20)  # the second start begins after the third step
    steps = [{"step": step, "tokens_per_s": speed} for step, speed in enumerate(speeds, start=1)]
    for step in (2, 5):
        steps[step - 1]["measures_memory"] = True
    assert dict(list_facts(RunData("run", Path("run"), steps)))["median tokens/s"] == "20"


def test_one_run_under_two_paths_is_given_twice():
    with pytest.raises(ValueError, match=r"RUNS must be different runs, got '\./runs/x' twice"):
        ReportOptions(runs=("runs/x", "./runs/x"))


def test_a_full_disk_is_one_line(run, capsys):
    assert main(["report", str(run), "--html", "/dev/full"]) == 4
    line = "quaver: error: --html: cannot write /dev/full: No space left on device"
    assert capsys.readouterr().err.splitlines()[-1] == line


def test_unknown_statistics_of_a_record_are_left_out(tmp_path, run_quaver):
    lines = [make_header(TENSORS[:1]) | {"statistics": ["rms"]}, {"kind": "sample", "step": 1, "rms": [2.0]}]
    write_lines(tmp_path / "numerics.jsonl", lines)
    run_quaver("report", tmp_path)
    assert json.loads((tmp_path / "numerics.jsonl").open().readline())["statistics"] == ["rms"]

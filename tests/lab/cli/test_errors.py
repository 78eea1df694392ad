"""Tests that bad input is one line and that a ValueError of a bug is a traceback."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from quaver import convert_to_float8_training
from quaver.export import save
from quaver.lab.cli import errors, export, main, plan, train
from quaver.lab.model import float8
from quaver.lab.plan import advise, search
from quaver.lab.runs.lock import HOLDER_FILE
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.settings import Float8
from quaver.lab.trainer import run_setup
from tests.command_line import TEXT, TINY

TRAIN = f"{' '.join(TINY)} --data=text.txt"


def fail(*args, **options):
    raise ValueError("not enough values to unpack")


@pytest.fixture
def _text_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)


def test_a_value_error_is_not_reported_as_bad_input():
    with pytest.raises(ValueError, match="^not enough values to unpack$"), errors.report_bad_input():
        fail()


def test_no_command_catches_the_value_error_of_a_bug():
    paths = list(Path(errors.__file__).parent.glob("*.py"))
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    caught = {ast.unparse(node.type) for node in nodes if isinstance(node, ast.ExceptHandler) and node.type is not None}
    assert "OSError" in caught
    assert not any("ValueError" in name or name.endswith("Exception") for name in caught)


@pytest.mark.parametrize(
    ("owner", "name", "command"),
    [
        (run_setup, "make_models", f"train {TRAIN}"),
        (RunFolder, "open", f"train {TRAIN}"),
        (float8, "convert_layers", f"train {TRAIN}"),
        (Float8, "require_default", f"train {TRAIN}"),
        (search, "estimate_peak", f"plan {TRAIN}"),
        (advise, "predict_run_memory", f"memory --advise {TRAIN}"),
    ],
)
@pytest.mark.usefixtures("_text_file")
def test_a_bug_is_not_shown_as_bad_input(owner, name, command, monkeypatch):
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(ValueError, match="^not enough values to unpack$"):
        main(command.split())


@pytest.mark.parametrize(("module", "name", "verb"), [(run_setup, "make_models", "train"), (plan, "search", "plan")])
@pytest.mark.usefixtures("_text_file")
def test_an_error_without_text_is_shown_by_its_class(module, name, verb, monkeypatch, capsys):
    def refuse(*args, **options):
        raise NotImplementedError

    monkeypatch.setattr(module, name, refuse)
    with pytest.raises(SystemExit, match="^2$"):
        main(f"{verb} {TRAIN}".split())
    assert capsys.readouterr().err.splitlines()[-1] == "quaver: error: NotImplementedError"


@pytest.mark.usefixtures("_text_file")
def test_a_sigterm_before_the_training_is_one_line_and_frees_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "build_run", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert main(f"train {TRAIN} --job.name=a".split()) == 130
    assert capsys.readouterr().err == "quaver: interrupted\n"
    assert not (tmp_path / "runs" / "a" / HOLDER_FILE).exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_bug_while_weights_are_written_is_not_shown_as_bad_input(tmp_path, monkeypatch):
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    source = SimpleNamespace(model=model, config={}, weights=None, forward_dtype=None, origin={}, files=[])
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(export, "open_huggingface_source", lambda path, **options: source)
    monkeypatch.setattr(save, "iter_float8_weights", fail)
    with pytest.raises(ValueError, match="^not enough values to unpack$"):
        main(["export", str(tmp_path), str(tmp_path / "out"), "--recipe", "rowwise"])


@pytest.mark.parametrize("command", ["--version", "doctor --help", "doctor --gpu h100", "doctor --gpu h100 --json"])
def test_a_stdout_that_takes_nothing_has_the_documented_exit_code(command, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    for target, expected in ((writer, 141), ("/dev/full", 4)):
        with open(target, "w") as file:
            monkeypatch.setattr(sys, "stdout", file)
            try:
                code = main(command.split())
            except SystemExit as stopped:
                code = stopped.code
            assert code == expected
    assert "error: cannot write the result: No space left on device\n" in capsys.readouterr().err


@pytest.mark.parametrize(("closed", "opened"), [("<&- 2>&-", (0, 2)), (">&-", (1,))])
def test_a_closed_stream_goes_nowhere_and_its_number_to_no_file(closed, opened, tmp_path):
    """The codes: 2 for an unknown command, plus 1 for each closed stream that is not /dev/null afterwards."""
    (tmp_path / "program.py").write_text(
        "import os, sys\nfrom quaver.lab.cli import main\ncode = main(['trian'])\n"
        f"null = os.stat('/dev/null').st_rdev\nsys.exit(code + sum(os.fstat(n).st_rdev != null for n in {opened}))\n"
    )
    command = f'exec "{sys.executable}" {tmp_path / "program.py"} {closed}'
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ("unknown command 'trian'" in ended.stderr) == (closed == ">&-")

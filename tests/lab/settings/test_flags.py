"""Tests how the arguments of a command become values, and what is said about wrong ones."""

import shlex
from dataclasses import dataclass
from typing import Annotated

import pytest

from quaver.lab.bench.gemm import GemmBenchmark
from quaver.lab.cli.bench_ledger import LedgerOptions
from quaver.lab.cli.bench_roofline import RooflineOptions
from quaver.lab.cli.memory import MemoryOptions
from quaver.lab.cli.plan_options import PlanOptions
from quaver.lab.settings.config_file import parse_arguments
from quaver.lab.settings.fields import AtLeast1, OneOf, Settings, UserPath, argument, setting
from quaver.lab.settings.flags import parse_options, split_flags


@dataclass(frozen=True)
class Options(Settings):
    """Options of a command that is not there."""

    what: Annotated[str, OneOf(("linear", "block"))] = argument("what to run")
    seq_len: AtLeast1 | None = setting(None, "Tokens of a sequence.")
    modes: tuple[Annotated[str, OneOf(("eager", "compiled"))], ...] = setting(("eager",), "Modes to run.")
    json: bool = setting(False, "Print JSON in 100%.")
    vs: str | None = setting(None, "Words of another run.")
    out: UserPath | None = setting(None, "A file.")
    folders: tuple[UserPath, ...] = setting((), "Folders.")


def parse(*argv: str) -> Options:
    return parse_options(Options, list(argv), prog="quaver none {linear,block}")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("block", Options("block")),
        ("block --seq-len 4", Options("block", seq_len=4)),
        ("block --seq_len=4", Options("block", seq_len=4)),
        ("--json block", Options("block", json=True)),
        ("--json false block", Options("block")),
        ("--json=true --no-json block", Options("block")),
        ("--seq-len 3 block --seq-len 4", Options("block", seq_len=4)),
        ("block --modes eager,compiled", Options("block", modes=("eager", "compiled"))),
        ("--modes=eager,compiled block", Options("block", modes=("eager", "compiled"))),
        ("block --modes eager --modes compiled", Options("block", modes=("eager", "compiled"))),
        ("block --modes compiled --json", Options("block", modes=("compiled",), json=True)),
        ("block --vs '--a.b c --d'", Options("block", vs="--a.b c --d")),
        ("block --vs=--a.b", Options("block", vs="--a.b")),
        ("block --vs -5GB --json", Options("block", vs="-5GB", json=True)),
    ],
)
def test_flags_become_values(flags, expected):
    assert parse(*shlex.split(flags)) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "^the following arguments are required: WHAT; see quaver none --help$"),
        ("conv", "^WHAT must be one of linear, block, got 'conv'$"),
        ("block x", "^unexpected argument 'x'; see quaver none --help$"),
        ("block -x", "^unexpected argument '-x'"),
        ("block --sq-len 4", "^unknown flag: '--sq-len'; did you mean '--seq-len'"),
        ("block --seq-len", "^--seq-len must have a value; see quaver none --help$"),
        ("block --out=~nosuchuser/a", "^--out must be a path that does not begin with the home of an unknown user"),
        ("block --seq_len 0", "^--seq-len must be at least 1, got 0$"),
        ("block --seq-len 1.5", "^--seq-len must be an integer, got '1.5'$"),
        ("block --modes eager fast", "^--modes must be one of eager, compiled, got 'fast'$"),
        ("block --json=maybe", "^--json must be true or false, got 'maybe'$"),
        ("block --vs --json", "^--vs must have a value; see"),
    ],
)
def test_wrong_flags_have_errors_of_one_line(flags, message):
    with pytest.raises(ValueError, match=message):
        parse(*flags.split())


@dataclass(frozen=True)
class Part(Settings):
    """Options before or after the flags of a run."""

    seq_len: AtLeast1 | None = setting(None, "Tokens of a sequence.")
    json: bool = setting(False, "Print JSON.")


def test_a_home_is_expanded_in_each_path_of_an_option(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("block", "--out=~/a.json", "--folders", "~/b", "c").out == str(tmp_path / "a.json")
    assert parse("block", "--out=~/a.json", "--folders", "~/b", "c").folders == (str(tmp_path / "b"), "c")
    assert parse("block", "--vs=~/a.toml").vs == "~/a.toml"
    assert parse_arguments(["~/a.toml"]) == (tmp_path / "a.toml", {})


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        *((PlanOptions, flag) for flag in ("spec", "output", "write")),
        *((MemoryOptions, flag) for flag in ("output", "html", "png")),
        *((kind, "output") for kind in (GemmBenchmark, LedgerOptions, RooflineOptions)),
    ],
)
def test_commands_expand_the_home_of_a_file(kind, flag, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = {"write": "~/a.toml", "png": "~/a.png"}.get(flag, "~/a")
    assert getattr(kind(**{flag: file}), flag) == file.replace("~", str(tmp_path))


def test_words_of_another_command_are_left_in_order():
    argv = ["--json", "a.toml", "--seq-len", "4", "--training.compile", "--float8.filter_fqns", "x", "y"]
    values, rest = split_flags(Part, argv)
    assert values == {"json": True, "seq_len": 4}
    path, flags = parse_arguments(rest)
    assert str(path) == "a.toml"
    assert flags == {"training": {"compile": True}, "float8": {"filter_fqns": ["x", "y"]}}


def test_the_files_of_the_working_folder_do_not_change_what_words_mean(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yes").touch()
    assert parse_arguments(["--compare", "yes"]) == (None, {"job": {"compare": "yes"}})


def test_an_attached_list_does_not_take_the_words_after_it():
    path, flags = parse_arguments(["--validation.freq=2", "--float8.filter_fqns=2,x", "a.toml"])
    assert str(path) == "a.toml"
    assert flags["float8"] == {"filter_fqns": ["2", "x"]}


@pytest.mark.parametrize("argv", [['["a", "b"]'], ["['a','b']"], ["[a,b]"], ["[a,", "b]"]])
def test_a_list_is_typed_as_help_shows_it(argv):
    _, flags = parse_arguments(["--float8.filter_fqns", *argv])
    assert flags["float8"] == {"filter_fqns": ["a", "b"]}
    assert parse_arguments(["--float8.filter_fqns=[]"])[1]["float8"] == {"filter_fqns": []}


def test_the_help_prints_each_flag_once_with_choices_and_default(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    modes = "--modes [eager|compiled ...]"
    for part in ("quaver none {linear,block}", "--seq-len INT", modes, '["eager"]', "Print JSON in 100%."):
        assert part in printed
    assert "--seq_len" not in printed

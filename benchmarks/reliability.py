"""Tests what `quaver train` survives: kills, full disks and bad inputs. Prints the table of docs/reliability.md.

    python -m benchmarks.reliability                  # some 15 minutes on two cores
    python -m benchmarks.reliability --part phases --tries 11
    python -m benchmarks.reliability --part soak --minutes 60
    python -m benchmarks.reliability --part cost      # the time that the manifest adds to a save

Every run is a fork of this process, which has imported everything and has one thread; the part `ranks` starts torchrun.
A try is survived if the statement in its line of the table holds. The first failure ends the script with a line that
says why, and exit code 1.
"""

import argparse
import dataclasses
import math
import os
import pkgutil
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import quaver.lab.trainer.train  # noqa: F401 - imported once, before the forks
from quaver.lab.cli import main
from quaver.lab.cli.errors import EXIT_NOT_WRITTEN
from quaver.lab.huggingface.weights import make_meta_state
from quaver.lab.runs.checkpoint import Checkpointer
from quaver.lab.runs.checkpoint_folder import CheckpointFolder
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.runs.manifest import MANIFEST_FILE, check_manifest
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import Checkpoint, Model, TrainConfig
from quaver.lab.settings.fields import OneOf
from quaver.roofline.device_specs import get_peak_flops

RUN_FLAGS = [
    *("--model.dim=32", "--model.n_layers=1", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.hidden_dim=48"),
    *("--training.seq_len=32", "--training.local_batch_size=2", "--training.device=cpu"),
    *("--validation.freq=1000000", "--validation.steps=1", "--lr_scheduler.schedule=constant"),
    *("--lr_scheduler.warmup_steps=3", "--float8.recipe_name=delayed", "--checkpoint.interval=2"),
    *("--checkpoint.keep_latest_k=2", "--checkpoint.resume=auto"),
]

PHASES = (
    "quaver.lab.runs.checkpoint_folder.CheckpointFolder.make_partial",
    "torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data",
    "torch.distributed.checkpoint.filesystem._write_item",
    "torch.distributed.checkpoint.filesystem.FileSystemWriter.finish",
    "quaver.lab.runs.checkpoint.check_readable",
    "quaver.lab.runs.checkpoint_folder.write_manifest",
    "quaver.lab.runs.checkpoint_folder.flush_folder",
    "quaver.lab.runs.checkpoint_folder.rename",
    "quaver.lab.runs.checkpoint_folder.CheckpointFolder.prune",
    "quaver.lab.runs.checkpoint_folder.shutil.rmtree",
)
"""The steps of a save in their order; a process is killed when it calls one of them."""


class Runs:
    """Starts runs on one text in a folder, and checks their files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 200)

    def get_path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def make_argv(self, name: str, *more: str) -> list[str]:
        return [*RUN_FLAGS, f"--data={self.folder / 'text.txt'}", f"--job.dump_folder={self.folder / 'runs'}"] + [
            f"--job.name={name}",
            *more,
        ]

    def start(self, argv: list[str], prepare: Callable[[], object] = lambda: None) -> int:
        """Fork `quaver train` after `prepare`, with its output in a file; return the process id."""
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            prepare()
            code = main(["train", *argv])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        finally:
            os._exit(code)

    def run(self, argv: list[str], prepare: Callable[[], object] = lambda: None) -> int:
        """Run to the end and return the exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.start(argv, prepare), 0)[1])

    @property
    def errors(self) -> list[str]:
        """The lines that the last run wrote to stderr, without warnings that it took over a lock."""
        lines = (self.folder / "stderr").read_text(errors="replace").splitlines()
        return [line for line in lines if "took over the lock" not in line]

    def check_checkpoints(self, name: str, at_least: int) -> int:
        """Return the newest step, not older than `at_least`; every complete checkpoint must match its manifest."""
        folder = CheckpointFolder(self.get_path(name) / "checkpoint")
        steps = folder.list_steps()
        for step in steps:
            check_manifest(folder.get_path(step))
        newest = max(steps, default=0)
        require(newest >= at_least, f"the checkpoint of step {at_least} was lost: there is {steps}")
        return newest

    def check_same(self, name: str, newest: int) -> None:
        """Resume `name`, and require numbers bit-identical to those of a run that was never interrupted."""
        last = f"--training.steps={newest + 3}"
        require(self.run(self.make_argv(name, last)) == 0, f"the last resume failed: {self.errors}")
        require(self.run(self.make_argv("whole", last)) == 0, f"the whole run failed: {self.errors}")
        require(
            self.read_numbers(name) == self.read_numbers("whole"),
            "a resumed run has other losses than an uninterrupted one",
        )
        shutil.rmtree(self.get_path("whole"))

    def count_metrics_bytes(self, name: str) -> int:
        return len(_read_content(self.get_path(name) / "metrics.jsonl"))

    def wait_for_step(self, name: str, written_bytes: int, pid: int) -> None:
        """Wait until `name` has more metrics than `written_bytes`. Exits if the process ends before."""
        while self.count_metrics_bytes(name) <= written_bytes:
            require(_is_running(pid), f"the run {name} ended before its first step: {self.errors}")
            time.sleep(0.01)

    def read_numbers(self, name: str) -> list[tuple[object, ...]]:
        records = read_json_lines(self.get_path(name) / "metrics.jsonl")
        return [(line["step"], line["loss"], line["grad_norm"]) for line in records if line["kind"] == "step"]


def _read_content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def require(holds: bool, what: str) -> None:
    """Exit with the message `what` unless `holds`."""
    if not holds:
        raise SystemExit(f"benchmarks.reliability: {what}")


def kill_in_phases(runs: Runs, tries: int, rng: random.Random) -> None:
    newest = 0
    for number in range(tries):
        phase, calls = PHASES[number % len(PHASES)], rng.randint(1, 3)

        original = pkgutil.resolve_name(phase)

        def kill_in_phase(phase=phase, calls=calls, original=original) -> None:
            left = iter(range(calls))

            def die(*arguments, **options):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            mock.patch(phase, die).start()

        code = runs.run(runs.make_argv("phases", "--training.steps=1000000"), kill_in_phase)
        require(code == -signal.SIGKILL, f"a run to be killed in {phase} ended with {code}: {runs.errors}")
        newest = runs.check_checkpoints("phases", newest)
    runs.check_same("phases", newest)


def kill_at_random(runs: Runs, tries: int, rng: random.Random) -> None:
    newest = 0
    for _ in range(tries):
        child = runs.start(runs.make_argv("random", "--training.steps=1000000"))
        time.sleep(rng.uniform(0.1, 2.0))
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        require(code == -signal.SIGKILL, f"a run to be killed ended with {code}: {runs.errors}")
        newest = runs.check_checkpoints("random", newest)
    runs.check_same("random", newest)


def send_signals(runs: Runs, tries: int, rng: random.Random) -> None:
    newest = 0
    for number in range(tries):
        not_by_nohup = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
        written_bytes = runs.count_metrics_bytes("signals")
        child = runs.start(runs.make_argv("signals", "--training.steps=1000000"), not_by_nohup)
        runs.wait_for_step("signals", written_bytes, child)
        os.kill(child, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[number % 3])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        require(code == 130, f"a run that a signal ends has exit code {code}: {runs.errors}")
        newest = runs.check_checkpoints("signals", newest + 1)
    runs.check_same("signals", newest)


def fill_disks(runs: Runs, tries: int, rng: random.Random) -> None:
    require(runs.run(runs.make_argv("full", "--training.steps=4")) == 0, f"the first run failed: {runs.errors}")
    largest = max(path.stat().st_size for path in (runs.get_path("full") / "checkpoint").rglob("*"))
    newest = 4
    for number in range(tries):
        limit = max(1, largest * number // tries)

        def limit_file_size(limit=limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        code = runs.run(runs.make_argv("full", f"--training.steps={newest + 2}"), limit_file_size)
        require(code in (2, EXIT_NOT_WRITTEN), f"with files of at most {limit} bytes the exit code is {code}")
        newest = runs.check_checkpoints("full", newest)
    runs.check_same("full", newest)


def damage_checkpoints(runs: Runs, tries: int, rng: random.Random) -> None:
    require(runs.run(runs.make_argv("damage", "--training.steps=2")) == 0, f"the first run failed: {runs.errors}")
    checkpoint = runs.get_path("damage") / "checkpoint" / "step-00000002"
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    for number in range(tries):
        path = files[number % len(files)]
        content = path.read_bytes()
        path.write_bytes(_damage_bytes(content, number // len(files) % 3, rng))
        code = runs.run(runs.make_argv("damage", "--training.steps=3"))
        require(code == 2, f"a run with a damaged {path.name} has exit code {code}")
        require(len(runs.errors) == 1 and str(path) in runs.errors[0], f"no line names {path}: {runs.errors}")
        path.write_bytes(content)
    require(runs.run(runs.make_argv("damage", "--training.steps=3")) == 0, f"the whole checkpoint fails: {runs.errors}")


def _damage_bytes(content: bytes, kind: int, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    if kind == 0:
        return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
    return content[:place] if kind == 1 else rng.randbytes(len(content))


def give_bad_inputs(runs: Runs, tries: int, rng: random.Random) -> None:
    """Alternate between bad settings on the command line, bad settings in TOML, and damaged files of a run."""
    require(runs.run(runs.make_argv("inputs", "--training.steps=2")) == 0, f"the first run failed: {runs.errors}")
    settings = [
        name for name in _iter_strict_settings() if not any(word.startswith(f"--{name}=") for word in RUN_FLAGS)
    ]
    bad_values = ("", "x", "1 2", "[[", "0x", "--", "1e", "{}", "none at all", "\u2460")
    toml = runs.folder / "bad.toml"
    for number in range(tries):
        name, value = rng.choice(settings), rng.choice(bad_values)
        section, _, field = name.partition(".")
        folder = runs.get_path("inputs")
        metrics, config = folder / "metrics.jsonl", folder / "config.toml"
        path, content, argv, named = toml, b"", runs.make_argv("new", str(toml)), name
        match number % 6:
            case 0:
                argv = runs.make_argv("new", f"--{name}={value}")
            case 1:
                argv, named = runs.make_argv("new", f"--{section}.{field[:-1]}=1"), f"{section}.{field[:-1]}"
            case 2:
                content = f"[{section}]\n{field} = {value!r}\n".encode()
            case 3:
                content, named = _insert_bytes(b"[training]\nsteps = 2\n", b"\xff", rng), str(toml)
            case 4:
                path, content, named = config, _insert_bytes(config.read_bytes(), b"\xff", rng), str(config)
                argv = ["--resume", str(folder), "--training.steps=3"]
            case 5:
                lines = metrics.read_bytes().splitlines(keepends=True)
                lines.insert(rng.randrange(len(lines)), rng.randbytes(8).replace(b"\n", b"?") + b"\n")
                path, content, named = metrics, b"".join(lines), str(metrics)
                argv = ["--resume", str(folder), "--training.steps=3"]
        before = _read_content(path)
        path.write_bytes(content)
        code = runs.run(argv)
        require(code == 2, f"the exit code of {argv[-1]} with {content[-80:]!r} is {code}: {runs.errors}")
        require(len(runs.errors) == 1 and named in runs.errors[0], f"no line names {named}: {runs.errors}")
        path.write_bytes(before)
    require(not runs.get_path("new").exists(), "a refused run left a folder")
    last = ["--resume", str(runs.get_path("inputs")), "--training.steps=3"]
    require(runs.run(last) == 0, f"the run whose files were damaged and mended fails: {runs.errors}")


def _iter_strict_settings() -> Iterator[str]:
    """Yield the settings, as section.field, that are numbers, booleans or one of a few words."""
    for section in dataclasses.fields(TrainConfig):
        for field in dataclasses.fields(type(getattr(TrainConfig(), section.name))):
            is_word = any(isinstance(item, OneOf) for item in getattr(field.type, "__metadata__", ()))
            if is_word or isinstance(field.default, bool | int | float):
                yield f"{section.name}.{field.name}"


def _insert_bytes(content: bytes, more: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + more + content[place:]


def run_soak(minutes: float) -> Iterator[str]:
    """Run for `minutes` with a save every 20 steps. Yields memory, files and threads after 10%, 50% and 100% of it."""
    yield "| | seconds | steps | saves | MB in memory | most so far | open files | threads |"
    yield "|---|---|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        argv = runs.make_argv("soak", "--training.steps=100000000", "--checkpoint.interval=20", "--validation.freq=50")
        child, began = runs.start(argv), time.monotonic()
        for title, share in (("begin", 0.1), ("middle", 0.5), ("end", 1.0)):
            while time.monotonic() < began + 60 * minutes * share:
                time.sleep(1)
                require(_is_running(child), f"the run ended: {runs.errors}")
            status = dict(line.split(":\t") for line in Path(f"/proc/{child}/status").read_text().splitlines())
            memory, most = (int(status[key].split()[0]) / 1e3 for key in ("VmRSS", "VmHWM"))
            steps = len(runs.read_numbers("soak"))
            counts = [len(os.listdir(f"/proc/{child}/fd")), int(status["Threads"])]
            seconds = time.monotonic() - began
            row = [title, f"{seconds:.0f}", steps, steps // 20, f"{memory:.0f}", f"{most:.0f}", *counts]
            yield f"| {' | '.join(map(str, row))} |"
        os.kill(child, signal.SIGINT)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        require(code == 130, f"the run ends with exit code {code}: {runs.errors}")


def run_two_ranks(runs: Runs, tries: int, rng: random.Random) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    newest = 0
    for number in range(tries):
        command = [*launcher, "-m", "quaver", "train", *runs.make_argv("ranks", "--training.steps=1000000")]
        written_bytes = runs.count_metrics_bytes("ranks")
        with (runs.folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        runs.wait_for_step("ranks", written_bytes, process.pid)
        time.sleep(rng.uniform(0, 1))
        ranks = [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        killed = ([ranks[rng.randrange(2)]], [process.pid], [process.pid, *ranks])[number % 3]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 120
        while any(map(_is_running, ranks)):  # a rank ends when another rank or torchrun ends
            require(time.monotonic() < deadline, "a rank still runs, two minutes after its launcher was killed")
            time.sleep(0.05)
        newest = runs.check_checkpoints("ranks", newest)
    for name in ("ranks", "whole"):
        command = [*launcher, "-m", "quaver", "train", *runs.make_argv(name, f"--training.steps={newest + 3}")]
        require(subprocess.run(command, capture_output=True).returncode == 0, f"the last run of {name} failed")
    require(
        runs.read_numbers("ranks") == runs.read_numbers("whole"),
        "a resumed run has other losses than one that is whole",
    )


_WITHOUT_READING_BACK = {"quaver.lab.runs.checkpoint.check_readable": lambda *_: None}
_WITHOUT_MANIFEST = {
    "quaver.lab.runs.checkpoint.hash_files_of_rank": lambda *_: {},
    "quaver.lab.runs.checkpoint_folder.write_manifest": lambda *_: None,
}
_PATCHES_OF_SAVES: list[dict[str, object]] = [{**_WITHOUT_READING_BACK, **_WITHOUT_MANIFEST}, _WITHOUT_READING_BACK, {}]
"""The patches for a save without manifest and reading back, with a manifest, and with both."""


def time_manifests(saves: int) -> Iterator[str]:
    """Time saves without a manifest, with one, and with one and reading back, in turns. Yields lower quartiles."""
    yield "| a save | MB | seconds | with a manifest | and read back |"
    yield "|---|---|---|---|---|"
    large = Model(dim=640, n_layers=4, n_heads=8, n_kv_heads=4, hidden_dim=1664, vocab_size=2048)
    for title, model in (("the debug model", Model()), ("a larger one", large)):
        shapes = {name: tensor.shape for name, tensor in make_meta_state(model).items()}
        state = {part: {name: torch.randn(shape) for name, shape in shapes.items()} for part in ("model", "m", "v")}
        seconds: list[list[float]] = [[], [], []]
        with tempfile.TemporaryDirectory() as folder:
            config = Checkpoint(keep_latest_k=1)
            saver = Checkpointer(CheckpointFolder(Path(folder)), config, Ranks(), torch.device("cpu"), {})
            for step in range(3 * saves):
                with ExitStack() as stack:
                    for name, value in _PATCHES_OF_SAVES[step % 3].items():
                        stack.enter_context(mock.patch(name, value))
                    start = time.perf_counter()
                    saver._write(step + 1, {"model": state}, {"format": 1})
                    seconds[step % 3].append(time.perf_counter() - start)
        size = sum(3 * 4 * math.prod(shape) for shape in shapes.values()) / 1e6
        low = [statistics.quantiles(samples, n=4)[0] for samples in seconds]
        cells = [f"{quartile:.3f} ({quartile / low[0] - 1:+.1%})" for quartile in low[1:]]
        yield f"| {title} | {size:.0f} | {low[0]:.3f} | {' | '.join(cells)} |"


def _is_running(pid: int) -> bool:
    return _read_content(Path(f"/proc/{pid}/stat")).rpartition(b") ")[2][:1] not in (b"", b"Z")


class Part(NamedTuple):
    """What a line of the table tries, how often, and what it says must hold."""

    run: Callable[[Runs, int, random.Random], None]
    tries: int
    statement: str


PARTS = {
    "phases": Part(
        kill_in_phases,
        110,
        f"SIGKILL inside a save, at each of {len(PHASES)} steps of it in turn; no checkpoint lost, same losses",
    ),
    "random": Part(
        kill_at_random, 80, "SIGKILL at a random moment of the first two seconds; no checkpoint lost, same losses"
    ),
    "signals": Part(
        send_signals,
        12,
        "SIGINT, SIGTERM or SIGHUP; ends with a checkpoint of its last step and exit code 130, same losses",
    ),
    "disks": Part(
        fill_disks,
        20,
        "no file can grow beyond a limit, from 1 byte up; exit code 2 or 4, no checkpoint lost, same losses",
    ),
    "damage": Part(
        damage_checkpoints,
        60,
        "one bit of a file flipped, or the file cut, or another in its place; exit code 2 and one line that names it",
    ),
    "inputs": Part(
        give_bad_inputs,
        300,
        "a bad setting on the command line or in TOML, a damaged file of a run; exit code 2, one line that names it",
    ),
    "ranks": Part(
        run_two_ranks,
        8,
        "two ranks: SIGKILL to one, to torchrun or to all three; every rank ends, no checkpoint lost, same losses",
    ),
}


def iter_rows(parts: list[str], tries: int | None, seed: int) -> Iterator[str]:
    """Run the parts, and yield the lines of the table."""
    yield "| what happens, and what must hold | held / tried |"
    yield "|---|---|"
    for name in parts:
        part = PARTS[name] if tries is None else PARTS[name]._replace(tries=tries)
        with tempfile.TemporaryDirectory() as folder:
            part.run(Runs(Path(folder)), part.tries, random.Random(seed))
        yield make_row(part)


def make_row(part: Part) -> str:
    """Return the line of the table for a part whose tries all held."""
    return f"| {part.statement} | {part.tries} / {part.tries} |"


def run_parts(argv: list[str] | None = None) -> None:
    """Run the parts that the command line, or `argv`, names, and print their lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", choices=[*PARTS, "soak", "cost"], action="append", help="default: all but the last two"
    )
    parser.add_argument("--tries", type=int, help="of each part, in place of its own number")
    parser.add_argument("--seed", type=int, default=1, help="of what each try does")
    parser.add_argument("--minutes", type=float, default=15, help="of --part soak")
    options = parser.parse_args(argv)
    if options.part not in (None, ["soak"], ["cost"]) and not PARTS.keys() >= set(options.part):
        parser.error("soak and cost run alone, without another --part")
    torch.set_num_threads(1)
    get_peak_flops(torch.device("cpu"))  # measured here, and not in each fork
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, seed {options.seed}", flush=True)
    if options.part == ["cost"]:
        lines = time_manifests(options.tries or 15)
    elif options.part == ["soak"]:
        lines = run_soak(options.minutes)
    else:
        lines = iter_rows(options.part or list(PARTS), options.tries, options.seed)
    for row in lines:
        print(row, flush=True)


if __name__ == "__main__":
    run_parts()

"""Random mutants of the code that only a GPU takes, or of the library: does a test fail for each?

    python -m benchmarks.mutation.coverage MAP.json
    python -m benchmarks.mutation.mutants MAP.json --count 150 --seed 1       # half an hour of CPU
    python -m benchmarks.mutation.mutants MAP.json --only 1f03a2,9c77e0 --whole     # these, by all of their tests
    python -m benchmarks.mutation.coverage MAP.json --card library
    python -m benchmarks.mutation.mutants MAP.json --library --count 300      # of all folders of the library in turn

A mutant is one change of one expression: a comparison, an operator or a constant is another, a condition is negated,
two arguments are exchanged, a call is left out. Its tests are those that run its line, the shortest cases first, until
one fails, as many as take `--seconds` of CPU. They run in a fork of a process that has imported a copy of the package,
with the code of the mutant in place of that of its functions. A seed orders mutants by a hash of what they change, so
that changes elsewhere leave the choice as it is. Printed are the key, the place and the change of each, and the test
that failed. Exit code 1 where more than 5% survive, of the library 10%. Tests on several ranks and with other libraries
are not among those of the library, so that its share is the least that every run kills.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutation.coverage import COMPILED, LIBRARY, prepare, run_pytest
from benchmarks.mutation.lines import ROOT, Source, read_library, read_package

OTHER_OPERATOR = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Pow: ast.Mult,
}
CARD = "h100"
CARDS = "", CARD
"""The cards whose tests one process can run."""
CALLS_WITH_MESSAGES = ("report_slow_path", "RuntimeError", "ValueError")
"""Calls whose arguments are messages, which are not changed."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    statement: int
    """The line of its statement, which a map has."""
    before: str
    after: str
    text: str
    """The file with the change."""
    key: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def iter_mutants(file: str, source: Source, seed: int, *, whole_file: bool = False) -> Iterator[Mutant]:
    """Yield the mutants of a file's code for a GPU and of the conditions that lead to it, or of the whole file."""
    seen, count = set(), Counter[str]()
    lines = source.text.splitlines()
    for condition, _ in source.deciding_conditions:
        condition.is_condition = True  # type: ignore[attr-defined]
    roots = source.list_bodies() if whole_file else source.gpu_code
    for root, line in [*((root, root.lineno) for root in roots), *source.deciding_conditions]:  # type: ignore[attr-defined]
        for node, statement_line in _iter_expressions(root, line):
            for mutated in _iter_changes(node):
                before, after = ast.unparse(node), "pass" if mutated is None else ast.unparse(mutated)
                place = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, after
                if before == after or place in seen:
                    continue
                seen.add(place)
                parts = _split_around(source.text, node)
                new = after if isinstance(mutated, (ast.Call, ast.Name, ast.Constant, type(None))) else f"({after})"
                identity = f"{seed} {file} {lines[node.lineno - 1].strip()} {before} {after}"
                count[identity] += 1
                key = hashlib.sha256(f"{identity} {count[identity]}".encode()).hexdigest()[:6]
                yield Mutant(file, node.lineno, statement_line, before, after, parts[0] + new + parts[1], key)


def _split_around(text: str, node: ast.expr) -> tuple[str, str]:
    lines = text.encode().splitlines(keepends=True)
    first, last = lines[node.lineno - 1], lines[(node.end_lineno or 0) - 1]
    before = b"".join(lines[: node.lineno - 1]) + first[: node.col_offset]
    after = last[node.end_col_offset :] + b"".join(lines[node.end_lineno or 0 :])
    return before.decode(), after.decode()


def _iter_expressions(root: ast.AST, line: int) -> Iterator[tuple[Any, int]]:
    """Yield expressions with the lines of their statements, without annotations, decorators and messages."""
    if isinstance(root, ast.expr):
        yield root, line
    if isinstance(root, ast.JoinedStr) or (isinstance(root, ast.Call) and _get_name(root) in CALLS_WITH_MESSAGES):
        return
    for field, value in ast.iter_fields(root):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                if isinstance(root, (ast.If, ast.While, ast.IfExp)) and field == "test":
                    child.is_condition = True  # type: ignore[attr-defined]
                if isinstance(root, ast.Expr):
                    child.is_statement = True  # type: ignore[attr-defined]
                yield from _iter_expressions(child, child.lineno if isinstance(child, ast.stmt) else line)


def _get_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _iter_changes(node: Any) -> Iterator[ast.expr | None]:
    """Yield replacements of an expression; None removes it."""
    if getattr(node, "is_condition", False):
        yield ast.UnaryOp(ast.Not(), node)
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[index] = OTHER_OPERATOR[type(operator)]()
            yield changed
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OTHER_OPERATOR:
        changed = copy.deepcopy(node)
        changed.op = OTHER_OPERATOR[type(node.op)]()  # type: ignore[attr-defined]
        yield changed
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1 if isinstance(node.value, int) else node.value * 2 or 1.0)
    elif isinstance(node, ast.Call):
        yield from _iter_call_changes(node)


def _iter_call_changes(node: ast.Call) -> Iterator[ast.expr | None]:
    if getattr(node, "is_statement", False):
        yield None
        return
    plain = [index for index, arg in enumerate(node.args) if not isinstance(arg, ast.Starred)]
    for first, second in zip(plain, plain[1:], strict=False):
        if second == first + 1 and ast.dump(node.args[first]) != ast.dump(node.args[second]):
            changed = copy.deepcopy(node)
            changed.args[first], changed.args[second] = changed.args[second], changed.args[first]
            yield changed
    if isinstance(node.func, ast.Attribute) and not ast.unparse(node.func.value).startswith(
        ("tl", "torch", "F", "math")
    ):
        yield node.func.value
    elif node.args and not isinstance(node.args[0], ast.Starred):
        yield node.args[0]


class Runner:
    """Runs tests in forks of this process, which has imported the package and the tests, from a copy of both."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder = folder
        for name in ("quaver", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("results"))
        shutil.copy2(ROOT / "pyproject.toml", folder)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True
        with contextlib.redirect_stdout(io.StringIO()):
            run_pytest([*files, "--collect-only", "-q", "-q"])
        import torch

        torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(1))  # imports what is imported late
        torch.compiler.reset()

    def run(self, mutant: Mutant | None, card: str, tests: list[str], seconds: float) -> str:
        """Return the test that fails, or how else the run ended: exit code or timeout; "" if all tests pass."""
        path = self.folder / "quaver" / mutant.file if mutant else None
        output = self.folder / "output"
        if path is not None:
            shutil.copy2(path, self.folder / "original")
            path.write_text(mutant.text, encoding="utf-8")
        if card == COMPILED:
            child = self._start_process(card, tests, output).pid
        elif not (child := os.fork()):
            self._run_child(mutant, tests, output)
        try:
            status = _wait(child, seconds)
        finally:
            if path is not None:
                shutil.copy2(self.folder / "original", path)
        if status is None:
            return f"more than {seconds:.0f} s"
        if status == 0:
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+.*)", output.read_text(errors="replace"), re.MULTILINE)
        return failed.group(1)[:200] if failed else f"exit code {status}"

    def _start_process(self, card: str, tests: list[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a new process, which imports Triton without its interpreter."""
        code = f"from benchmarks.mutation.coverage import *; prepare({card!r}); sys.exit(run_pytest(sys.argv[1:]))"
        command = [sys.executable, "-c", code, *tests, "-x", "-q", "-rfE"]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        with output.open("wb") as to:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=to, stderr=to, start_new_session=True
            )

    def _run_child(self, mutant: Mutant | None, tests: list[str], output: Path) -> None:
        code = 70
        try:
            os.setsid()
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            if mutant is not None and not _exchange_code(self.folder / "quaver" / mutant.file):
                return
            code = run_pytest([*tests, "-x", "-q", "-rfE", "--rootdir", str(self.folder)])
        finally:
            sys.stdout.flush()
            os._exit(code)


def _exchange_code(path: Path) -> bool:
    """Give the functions of a file the code that the file has now, and return whether any changed.

    Kernels need no more than the file: Triton's interpreter reads a function when it first runs it.
    """
    from triton.runtime.interpreter import InterpretedFunction

    InterpretedFunction.rewritten_fn.clear()
    codes, exchanged = {}, 0
    pending = [compile(path.read_text(encoding="utf-8"), str(path), "exec")]
    while pending:
        code = pending.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    for function in gc.get_objects():
        if type(function) is types.FunctionType and function.__code__.co_filename == str(path):  # no proxy
            new = codes.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
            if new is not None and new != function.__code__:
                function.__code__ = new
                exchanged += 1
    return exchanged > 0


def _wait(child: int, seconds: float) -> int | None:
    """Return the exit code, or None after killing a child that used `seconds` of CPU, or ten times as many of time."""
    began = time.monotonic()
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if used > seconds or time.monotonic() - began > 10 * seconds:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.05)


def choose_tests(tests: dict[str, dict[str, Any]], mutant: Mutant, seconds: float) -> list[tuple[str, list[str]]]:
    """Return the tests of a mutant by card, for `seconds`: the shortest case of each first parameter, then others."""
    line_tests = sorted(
        (test["seconds"], card, name)
        for card in (*CARDS, COMPILED, LIBRARY)
        for name, test in tests.get(card, {}).items()
        if test["outcome"] == "passed" and mutant.statement in test["lines"].get(mutant.file, ())
    )
    first, others, seen = [], [], set()
    for test in line_tests:
        (others if (function := test[2].partition("-")[0]) in seen else first).append(test)
        seen.add(function)
    by_card: dict[str, list[str]] = {}
    left = seconds
    for took, card, name in first + others:
        if took <= left or not by_card:
            left -= took
            by_card.setdefault(COMPILED if card == COMPILED else CARD, []).append(name)
    return sorted(by_card.items(), reverse=True)


def judge(runner: Runner, tests: dict[str, dict[str, Any]], mutant: Mutant, seconds: float) -> str:
    """Return the test that killed a mutant, or ""."""
    for card, names in choose_tests(tests, mutant, seconds):
        if killed := runner.run(mutant, card, names, 4 * seconds + 60):
            return f"{card} {killed}".strip()
    return ""


def main() -> int:
    """Parse, make mutants, judge them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("map", type=Path, help="JSON file of benchmarks.mutation.coverage")
    parser.add_argument("--count", type=int, default=150, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="of the order of mutants")
    parser.add_argument("--seconds", type=float, default=15.0, help="CPU time of a mutant's tests")
    parser.add_argument("--only", type=lambda text: set(text.split(",")), help="keys of mutants, with commas between")
    parser.add_argument("--whole", action="store_true", help="all tests of each line")
    parser.add_argument("--library", action="store_true", help="of a map of the library")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    args = parser.parse_args()
    tests = json.loads(args.map.read_text(encoding="utf-8"))
    tests = {LIBRARY: tests} if args.library else tests
    ran = {
        (file, line)
        for card_tests in tests.values()
        for test in card_tests.values()
        for file, lines in test["lines"].items()
        for line in lines
    }
    read = read_library() if args.library else read_package()
    sources = {file: source for file, source in read.items() if args.library or not source.queries_device}
    everything = [
        mutant
        for file, source in sources.items()
        for mutant in iter_mutants(file, source, args.seed, whole_file=args.library)
    ]
    possible = [mutant for mutant in everything if (mutant.file, mutant.statement) in ran]
    possible.sort(key=lambda mutant: mutant.key)
    if args.library:
        possible = _sort_by_folder(possible)
    taken = [mutant for mutant in possible[: args.count] if args.only is None or mutant.key in args.only]
    print(f"{len(everything)} mutants, {len(possible)} of lines that tests run; {len(taken)} of them, seed {args.seed}")
    if args.list:
        print(*(f"{mutant.key} {mutant}" for mutant in taken), sep="\n")
        return 0
    prepare(LIBRARY if args.library else CARD)
    names = [name for card in (*CARDS, LIBRARY) for name in tests.get(card, ()) if "::" in name]
    files = sorted({name.partition("::")[0] for name in names})
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), files)
        for mutant in taken:
            began = time.monotonic()
            killed = judge(runner, tests, mutant, 1e9 if args.whole else args.seconds)
            if not killed:
                survivors.append(mutant)
            print(f"{mutant.key} {mutant}\n       {time.monotonic() - began:.0f} s {killed or 'SURVIVED'}", flush=True)
    print(f"{len(taken) - len(survivors)} of {len(taken)} killed; survivors:")
    print(*(f"{mutant.key} {mutant}" for mutant in survivors), sep="\n")
    return int(len(survivors) > (0.1 if args.library else 0.05) * len(taken))


def _sort_by_folder(mutants: list[Mutant]) -> list[Mutant]:
    """Return the mutants in turns of the library's folders."""
    turns = Counter[str]()
    ordered = []
    for mutant in mutants:
        folder = mutant.file.partition("/")[0]
        ordered.append((turns[folder], mutant.key, mutant))
        turns[folder] += 1
    return [mutant for *_, mutant in sorted(ordered, key=lambda turn: turn[:2])]


if __name__ == "__main__":
    sys.exit(main())

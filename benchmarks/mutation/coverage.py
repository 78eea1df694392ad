"""Which lines that only a GPU takes the tests without a GPU run, test by test; or which lines of the library.

    python -m benchmarks.mutation.coverage MAP.json                       # tests of every run and of the night
    python -m benchmarks.mutation.coverage MAP.json --card h100 [WORDS]   # one process of it, with words for pytest
    python -m benchmarks.mutation.coverage MAP.json --print               # the lines of a map that is there
    python -m benchmarks.mutation.coverage MAP.json --card library        # tests of every run, and all lines

A map has for each test its seconds of CPU and the lines that it runs. There is a process for each card, whose Triton
interprets, and one that compiles kernels for a GPU. Lines are those that Python traces, those that Dynamo reads in its
place, and those that Triton compiles. Exit code 1 where less than 98% of the lines are run, or a test fails.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.mutation.lines import ROOT, read_library, read_package

COMPILED = "compiled"
RUNS = {
    COMPILED: [
        *("tests/library/kernels/test_triton_cast_compiled.py", "tests/library/linear/test_gemm.py"),
        *("tests/library/runtime/test_slow_paths.py", "tests/lab/doctor", "-m", "not nightly"),
        "tests/library/optim/test_options.py::test_a_step_in_a_cuda_graph_is_refused",
        "tests/library/numerics/test_monitor.py::test_a_sample_in_a_cuda_graph_is_refused",
    ],
    "": [
        *(f"tests/library/kernels/test_{name}.py" for name in ("dispatch", "triton_cast")),
        *("tests/library/virtual_gpu", "tests/lab/trainer/test_virtual_gpu.py"),
        # It expects that Triton of its own process compiles.
        "--deselect=tests/library/virtual_gpu/test_inductor.py::"
        "test_a_card_without_inductors_code_and_a_missing_interpreter_are_refused",
    ],
    "h100": ["tests/gpu"],
    "b200": ["tests/gpu"],
}
"""Tests by the card that QUAVER_VIRTUAL_GPU names; those of COMPILED compile kernels, and run none."""
LIBRARY = "library"
OF_LIBRARY = [
    *("tests/library", "-m", "not nightly and not gpu"),
    *(f"--ignore=tests/library/{name}" for name in ("distributed", "foreign", "virtual_gpu")),
]
"""The tests of a map of the library: of every run, in one process, without other libraries."""
OTHERS = "tests/library/virtual_gpu/test_tests_for_a_gpu.py", "tests/library/virtual_gpu/test_contracts.py"
"""The first runs tests/gpu, the second no line of the package."""


_WRITES_EVERY = 20.0
"""Seconds."""


@contextlib.contextmanager
def call_in_this_process(**environment: str) -> Iterator[Callable[..., Any]]:
    """In place of `process` of triton_kernels.py, where Triton interprets already."""
    yield lambda function, *args: function(*args)


def prepare(card: str) -> None:
    """The environment of a process for a card; before triton is imported."""
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    if card not in (COMPILED, LIBRARY):
        os.environ.update(TRITON_INTERPRET="1", QUAVER_VIRTUAL_GPU=card)
    sys.path.insert(0, str(ROOT))


def run_pytest(words: list[str], *plugins: object) -> int:
    """Run tests in this process, in which interpreters of tests are no processes of their own."""
    import pytest

    from tests.library.kernels import triton_kernels

    if os.environ.get("TRITON_INTERPRET"):
        triton_kernels.process = call_in_this_process
        triton_kernels.patch_the_language_once()
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "-m", "", "--timeout", "0"]
    return int(pytest.main([*options, *words], plugins=list(plugins)))


class Tracer:
    """A plugin that writes down the lines of each test."""

    def __init__(self, lines: dict[str, set[int]], output: Path) -> None:
        self.lines, self.found, self.output = lines, defaultdict(set), output
        self.tests: dict[str, Any] = {}
        self.of_code: dict[Any, Any] = {}
        self.written = time.monotonic()

    def enter(self, frame: Any, event: str, _: object) -> Any:
        """The trace function of threads: the one of a frame whose lines count, else None."""
        code = frame.f_code
        if code not in self.of_code:
            wanted = self.lines.get(code.co_filename, set()) & {line for *_, line in code.co_lines()}
            self.of_code[code] = (wanted, self.in_frame(code.co_filename, wanted)) if wanted else None
        known = self.of_code[code]
        return None if known is None or known[0] <= self.found[code.co_filename] else known[1]

    def in_frame(self, file: str, wanted: set[int]) -> Any:
        """The trace function of a frame."""

        def line(frame: Any, event: str, _: object) -> Any:
            if frame.f_lineno in wanted:
                self.found[file].add(frame.f_lineno)
            return line

        return line

    def start(self) -> None:
        """Trace this thread and new ones."""
        self.found, self.began = defaultdict(set), time.process_time()
        threading.settrace(self.enter)
        sys.settrace(self.enter)

    def stop(self, test: dict[str, Any]) -> None:
        """Trace no longer, and write down what a test ran."""
        sys.settrace(None)
        files = {Path(file).relative_to(ROOT / "quaver").as_posix(): found for file, found in self.found.items()}
        lines = {file: sorted(found) for file, found in files.items()}
        test.update(seconds=round(time.process_time() - self.began, 2), lines=lines)
        if time.monotonic() - self.written > _WRITES_EVERY:  # a run may be stopped
            self.write()

    def write(self) -> None:
        """Write the map."""
        self.output.write_text(json.dumps(self.tests), encoding="utf-8")
        self.written = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        self.write()

    def pytest_collection_finish(self) -> None:
        self.tests["import"] = {"outcome": "import"}
        self.stop(self.tests["import"])

    def pytest_runtest_protocol(self, item: Any) -> None:
        self.start()

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed"})
        if report.outcome != "passed":
            test["outcome"] = report.outcome if report.failed else report.longrepr[2]
        if report.when == "teardown":
            self.stop(test)

    def hear(self, file: str, line: int) -> None:
        """Count a line that Python does not run, if it is among the lines."""
        if line in self.lines.get(file, ()):
            self.found[file].add(line)

    def hear_compilers(self) -> None:
        """Have Dynamo and Triton tell which lines they read."""
        from torch._dynamo import symbolic_convert
        from triton.compiler import code_generator

        of_dynamo, of_triton = symbolic_convert.InstructionTranslatorBase, code_generator.CodeGenerator
        starts_line, visit = of_dynamo.starts_line, of_triton.visit

        def dynamo(translator: Any, line: int) -> None:
            self.hear(translator.f_code.co_filename, line)
            starts_line(translator, line)

        def triton(generator: Any, node: Any) -> Any:
            if isinstance(node, ast.stmt) and hasattr(node, "lineno"):  # Triton makes others
                self.hear(generator.file_name, generator.begin_line + node.lineno)
            return visit(generator, node)

        of_dynamo.starts_line, of_triton.visit = dynamo, triton


def trace(card: str, output: str, words: list[str]) -> int:
    """Run the tests of a card, and write their lines."""
    prepare(card)
    if card == LIBRARY:
        wanted = {str(source.path): source.list_body_lines() for source in read_library().values()}
    else:
        wanted = {str(source.path): source.list_lines() for source in read_package().values()}
    tracer = Tracer({file: lines for file, lines in wanted.items() if lines}, Path(output))
    tracer.hear_compilers()
    tracer.start()  # decorators run where modules are imported
    return run_pytest(words, tracer)


def report(tests: dict[str, dict[str, Any]]) -> float:
    """Print the lines that no test runs; the share of those that one does, without LAB."""
    ran: dict[str, set[int]] = defaultdict(set)
    for of_card in tests.values():
        for test in of_card.values():
            for file, lines in test["lines"].items():
                ran[file].update(lines)
    counted = {True: [0, 0], False: [0, 0]}
    for file, source in read_package().items():
        lines = source.list_lines()
        left = lines - ran[file]
        counted[source.is_lab] = [
            old + len(new) for old, new in zip(counted[source.is_lab], (lines, left), strict=True)
        ]
        if left:
            print(f"{file}: {len(left)} of {len(lines)} lines are not run")
            text = source.text.splitlines()
            print(*(f"{line:5} {text[line - 1]}" for line in sorted(left)), sep="\n")
    print(f"\nof what asks a device about itself {counted[True][1]} of {counted[True][0]} lines are not run")
    count, missed = counted[False]
    print(f"{count - missed} of {count} other lines are run, {1 - missed / count:.1%}")
    return 1 - missed / count


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("map")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--card", choices=(*RUNS, LIBRARY), help="this process runs the tests of one card")
    args, words = parser.parse_known_args()
    if args.card is not None:
        tests = OF_LIBRARY if args.card == LIBRARY else [*RUNS[args.card], *(f"--ignore={other}" for other in OTHERS)]
        return trace(args.card, args.map, words or tests)
    ended = 0
    if not args.print:
        tests = {}
        for card in RUNS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.mutation.coverage",
                f"{args.map}.{card}",
                "--card",
                card,
                *words,
            ]
            ended |= subprocess.run(command, cwd=ROOT, check=False).returncode
            tests[card] = json.loads(Path(f"{args.map}.{card}").read_text(encoding="utf-8"))
        Path(args.map).write_text(json.dumps(tests), encoding="utf-8")
    return ended or int(report(json.loads(Path(args.map).read_text(encoding="utf-8"))) < 0.98)


if __name__ == "__main__":
    sys.exit(main())

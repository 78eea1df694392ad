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
TESTS_OF_CARD = {
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
LIBRARY_TESTS = [
    *("tests/library", "-m", "not nightly and not gpu"),
    *(f"--ignore=tests/library/{name}" for name in ("distributed", "third_party", "virtual_gpu")),
]
"""The tests of a map of the library, which run in one process, without other libraries."""
OMITTED_TESTS = "tests/library/virtual_gpu/test_tests_for_a_gpu.py", "tests/library/virtual_gpu/test_contracts.py"
"""Tests that are not traced: the first runs tests/gpu, the second no line of the package."""


_WRITE_INTERVAL_S = 20.0


@contextlib.contextmanager
def call_in_this_process(**environment: str) -> Iterator[Callable[..., Any]]:
    """Replace `process` of triton_kernels.py in a process whose Triton interprets already."""
    yield lambda function, *args: function(*args)


def prepare(card: str) -> None:
    """Set the environment of this process for a card, before triton is imported."""
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
    """A plugin of pytest that records the lines of each test."""

    def __init__(self, lines: dict[str, set[int]], output: Path) -> None:
        self.lines, self.found, self.output = lines, defaultdict(set), output
        self.tests: dict[str, Any] = {}
        self.tracers: dict[Any, Any] = {}
        self.written = time.monotonic()

    def trace_thread(self, frame: Any, event: str, _: object) -> Any:
        """Return the trace function of a frame that has lines to record, else None."""
        code = frame.f_code
        if code not in self.tracers:
            wanted = self.lines.get(code.co_filename, set()) & {line for *_, line in code.co_lines()}
            self.tracers[code] = (wanted, self._make_line_tracer(code.co_filename, wanted)) if wanted else None
        known = self.tracers[code]
        return None if known is None or known[0] <= self.found[code.co_filename] else known[1]

    def _make_line_tracer(self, file: str, wanted: set[int]) -> Any:
        """Return a trace function that records the lines of `wanted`."""

        def trace_line(frame: Any, event: str, _: object) -> Any:
            if frame.f_lineno in wanted:
                self.found[file].add(frame.f_lineno)
            return trace_line

        return trace_line

    def start(self) -> None:
        """Trace this thread and new ones."""
        self.found, self.began = defaultdict(set), time.process_time()
        threading.settrace(self.trace_thread)
        sys.settrace(self.trace_thread)

    def stop(self, test: dict[str, Any]) -> None:
        """End tracing, and record the lines of a test."""
        sys.settrace(None)
        files = {Path(file).relative_to(ROOT / "quaver").as_posix(): found for file, found in self.found.items()}
        lines = {file: sorted(found) for file, found in files.items()}
        test.update(seconds=round(time.process_time() - self.began, 2), lines=lines)
        if time.monotonic() - self.written > _WRITE_INTERVAL_S:  # a run may be stopped
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

    def record_line(self, file: str, line: int) -> None:
        """Record a line that a compiler reads instead of Python, if it is among the lines."""
        if line in self.lines.get(file, ()):
            self.found[file].add(line)

    def trace_compilers(self) -> None:
        """Patch Dynamo and Triton to record the lines that they read."""
        from torch._dynamo import symbolic_convert
        from triton.compiler import code_generator

        translator_class, generator_class = symbolic_convert.InstructionTranslatorBase, code_generator.CodeGenerator
        starts_line, visit = translator_class.starts_line, generator_class.visit

        def record_and_start_line(translator: Any, line: int) -> None:
            self.record_line(translator.f_code.co_filename, line)
            starts_line(translator, line)

        def record_and_visit(generator: Any, node: Any) -> Any:
            if isinstance(node, ast.stmt) and hasattr(node, "lineno"):  # Triton makes others
                self.record_line(generator.file_name, generator.begin_line + node.lineno)
            return visit(generator, node)

        translator_class.starts_line, generator_class.visit = record_and_start_line, record_and_visit


def trace(card: str, output: str, words: list[str]) -> int:
    """Run the tests of a card, and write their lines."""
    prepare(card)
    if card == LIBRARY:
        wanted = {str(source.path): source.list_body_lines() for source in read_library().values()}
    else:
        wanted = {str(source.path): source.list_lines() for source in read_package().values()}
    tracer = Tracer({file: lines for file, lines in wanted.items() if lines}, Path(output))
    tracer.trace_compilers()
    tracer.start()  # decorators run where modules are imported
    return run_pytest(words, tracer)


def report(tests: dict[str, dict[str, Any]]) -> float:
    """Print the lines that no test runs; the share of those that one does, without DEVICE_QUERIES."""
    ran: dict[str, set[int]] = defaultdict(set)
    for card_tests in tests.values():
        for test in card_tests.values():
            for file, lines in test["lines"].items():
                ran[file].update(lines)
    counted = {True: [0, 0], False: [0, 0]}
    for file, source in read_package().items():
        lines = source.list_lines()
        missed_lines = lines - ran[file]
        counted[source.queries_device] = [
            old + len(new) for old, new in zip(counted[source.queries_device], (lines, missed_lines), strict=True)
        ]
        if missed_lines:
            print(f"{file}: {len(missed_lines)} of {len(lines)} lines are not run")
            text = source.text.splitlines()
            print(*(f"{line:5} {text[line - 1]}" for line in sorted(missed_lines)), sep="\n")
    print(f"\nof what asks a device about itself {counted[True][1]} of {counted[True][0]} lines are not run")
    count, missed = counted[False]
    print(f"{count - missed} of {count} other lines are run, {1 - missed / count:.1%}")
    return 1 - missed / count


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("map", help="JSON file of the map, which is written")
    parser.add_argument("--print", action="store_true", help="print the lines of the map; run no test")
    parser.add_argument("--card", choices=(*TESTS_OF_CARD, LIBRARY), help="this process runs the tests of one card")
    args, words = parser.parse_known_args()
    if args.card is not None:
        tests = (
            LIBRARY_TESTS
            if args.card == LIBRARY
            else [*TESTS_OF_CARD[args.card], *(f"--ignore={file}" for file in OMITTED_TESTS)]
        )
        return trace(args.card, args.map, words or tests)
    ended = 0
    if not args.print:
        tests = {}
        for card in TESTS_OF_CARD:
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

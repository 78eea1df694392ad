"""The CPU measurements of docs/performance.md: `quaver bench` on one thread, into benchmarks/results/cpu/.

    python -m benchmarks.measured --again [linear cast ...] --update-docs    measure all of it, or some benchmarks
    python -m benchmarks.measured --update-docs                              the page again, from the files

About ten minutes on a quiet machine, with torchao if it is installed.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.record import ROOT, markdown, show

DOCS = ROOT / "docs" / "performance.md"
FOLDER = ROOT / "benchmarks" / "results" / "cpu"
COMMON = ("--device", "cpu", "--threads", "1")
COMMANDS = {
    "linear": "linear --shapes 1024 --recipes tensorwise rowwise rowwise_with_gw_hp delayed",
    "cast": "cast --shapes 1024,1024x4096",
    "gemm": "gemm --shapes 1024",
    "block": "block --model debug --tokens 2048 --seq-len 256 --recipes tensorwise rowwise rowwise_with_gw_hp delayed",
    "train": "train --rounds 12 --recipes tensorwise rowwise rowwise_with_gw_hp delayed",
}

MODES = ("eager", "compiled")

Rows = list[dict[str, Any]]


def measure(name: str) -> int:
    """Run one benchmark; returns its exit code."""
    return subprocess.run([sys.executable, "-m", "quaver.cli", *words(name)], cwd=ROOT).returncode


def words(name: str) -> list[str]:
    """The arguments of `quaver`."""
    output = (FOLDER / f"{name}.json").relative_to(ROOT)
    return ["bench", *COMMANDS[name].split(), *COMMON, "--output", str(output)]


def tables(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The page's tables, by name."""
    return {f"cpu {name}": _TABLES[name](results[name]["rows"]) for name in results}


def _ms(row: dict[str, Any]) -> str:
    timing = row["timing"]
    return f"{timing['median_us'] / 1e3:,.3g} ({timing['p10_us'] / 1e3:,.3g} to {timing['p90_us'] / 1e3:,.3g})"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _by(rows: Rows, *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[key] for key in keys): row for row in rows}


def _values(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows if row[key]))


def _linear(rows: Rows) -> str:
    """A line for each recipe; ratios are eager / compiled."""
    found, lines = _by(rows, "mode", "library", "recipe"), []
    for recipe in _values(rows, "recipe"):
        ours = [found[mode, "quaver", recipe] for mode in MODES]
        ratios = [" / ".join(_times(row[key]) for row in ours) for key in ("time_over_bfloat16", _PEER)]
        lines.append([f"`{recipe}`", ratios[0], ratios[1] if ours[0][_PEER] else ""])
    return markdown(["eager / compiled", "time / bfloat16", "torchao's time / quaver's"], lines)


def _cast(rows: Rows) -> str:
    """A line for each cast of the largest matrix: milliseconds of each contestant."""
    largest = [row for row in rows if row["matrix"] == rows[-1]["matrix"]]
    found, lines = _by(largest, "cast", "library", "mode"), []
    contestants = (("copy", ""), ("quaver", "eager"), ("quaver", "compiled"), ("PyTorch", "compiled"))
    contestants += (("torchao", "compiled"),)
    for kind in _values(largest, "cast"):
        cells = [found.get((kind, *each)) for each in contestants]
        lines.append([f"`{kind}`", *("" if row is None else _ms(row) for row in cells)])
    return markdown([f"{rows[-1]['matrix']}, ms", *(" ".join(each).strip() for each in contestants)], lines)


def _gemm(rows: Rows) -> str:
    found = _by(rows, "gemm", "contestant")
    lines = [
        [gemm, *(f"{1e3 * found[gemm, each]['tflops_per_s']:,.0f}" for each in _values(rows, "contestant"))]
        for gemm in _values(rows, "gemm")
    ]
    return markdown(["GFLOP/s", *_values(rows, "contestant")], lines)


def _block(rows: Rows) -> str:
    found, lines = _by(rows, "mode", "recipe"), []
    for recipe in _values(rows, "recipe"):
        ours = [found[mode, recipe] for mode in MODES]
        ratios = (" / ".join(_times(row[f"{key}_over_bfloat16"]) for row in ours) for key in ("time", "peak"))
        lines.append([f"`{recipe}`", *ratios])
    return markdown(["eager / compiled", "time / bfloat16", "peak memory / bfloat16"], lines)


def _train(rows: Rows) -> str:
    lines = [
        [f"`{row['precision']}`", f"{row['tokens_per_s']:,.0f}"]
        + [_times(row[f"{key}_over_high_precision"]) for key in ("time", "peak")]
        for row in rows
    ]
    return markdown(["precision", "tokens/s", "time / bfloat16", "peak memory / bfloat16"], lines)


_PEER = "torchao_time_over_this"
_TABLES = {"linear": _linear, "cast": _cast, "gemm": _gemm, "block": _block, "train": _train}


def read() -> dict[str, dict[str, Any]]:
    """The recorded results, by name."""
    return {name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in COMMANDS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", nargs="*", choices=COMMANDS, metavar="NAME", help="measure these, or all")
    parser.add_argument("--update-docs", action="store_true", help=f"fill the tables of {DOCS.name}")
    options = parser.parse_args()
    if options.again is not None:
        codes = [measure(name) for name in options.again or COMMANDS]
        if any(codes):
            return max(codes)
    show(tables(read()), DOCS, update=options.update_docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What `quaver bench` measures on this machine's CPU, one thread, into benchmarks/results/cpu/ and docs/performance.md.

    python -m benchmarks.measured --again [linear cast ...] --update-docs    measure all of it, or what is named
    python -m benchmarks.measured --update-docs                              the page again, from the files

On a quiet machine: about ten minutes, torchao included where it is installed.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.record import ROOT, fill, markdown

DOCS = ROOT / "docs" / "performance.md"
FOLDER = ROOT / "benchmarks" / "results" / "cpu"
COMMON = ("--device", "cpu", "--threads", "1")
COMMANDS = {
    "linear": "linear --shapes 1024 --recipes tensorwise rowwise rowwise_with_gw_hp delayed",
    "cast": "cast --shapes 1024,1024x4096",
    "gemm": "gemm --shapes 1024",
    "host": "host --modes eager",
    "block": "block --model debug --tokens 2048 --seq-len 256 --recipes tensorwise rowwise rowwise_with_gw_hp delayed",
    "train": "train --rounds 12 --recipes tensorwise rowwise rowwise_with_gw_hp delayed",
}

Rows = list[dict[str, Any]]


def measure(name: str) -> int:
    """Run one benchmark; returns its exit code."""
    return subprocess.run([sys.executable, "-m", "quaver.cli", *words(name)], cwd=ROOT).returncode


def words(name: str) -> list[str]:
    """What stands behind `quaver` on the command line."""
    output = (FOLDER / f"{name}.json").relative_to(ROOT)
    return ["bench", *COMMANDS[name].split(), *COMMON, "--output", str(output)]


def tables(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The page's tables, by name."""
    made = {f"cpu {name}": _TABLES[name](results[name]["rows"]) for name in results}
    return made | {"cpu machine": _machines(results)}


def _machines(results: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, result in results.items():
        about = result["environment"]
        versions = f"torch {about['torch']}" + (f", torchao {about['torchao']}" if "torchao" in about else "")
        lines.append([f"`quaver bench {COMMANDS[name]}`", about["device"], versions, about["commit"], about["date"]])
    return markdown(["command, with `--device cpu --threads 1`", "device", "versions", "commit", "date"], lines)


def _us(timing: dict[str, Any]) -> str:
    return f"{timing['median_us']:,.0f} ({timing['p10_us']:,.0f} .. {timing['p90_us']:,.0f})"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _linear(rows: Rows) -> str:
    head = ["mode", "library", "recipe", "us (p10 .. p90)", "time / bfloat16", "torchao's time / quaver's"]
    return markdown(head, [
        [
            row["mode"], row["library"], row["recipe"], _us(row["timing"]), _times(row["time_over_bfloat16"]),
            _times(row["torchao_time_over_this"]),
        ]
        for row in rows
    ])  # fmt: skip


def _cast(rows: Rows) -> str:
    head = ["matrix", "cast", "library", "mode", "us (p10 .. p90)", "bytes an element", "floor", "of a copy's GB/s"]
    return markdown(head, [
        [
            row["matrix"], row["cast"], row["library"], row["mode"], _us(row["timing"]),
            "unknown" if row["counted_bytes_per_element"] is None else f"{row['counted_bytes_per_element']:g}",
            f"{row['floor_bytes_per_element']:g}", f"{row['share_of_copy']:.0%}",
        ]
        for row in rows
    ])  # fmt: skip


def _gemm(rows: Rows) -> str:
    head = ["matmul", "contestant", "us (p10 .. p90)", "GFLOP/s", "time / bfloat16"]
    return markdown(head, [
        [
            row["gemm"], row["contestant"], _us(row["timing"]), f"{1e3 * row['tflops_per_s']:,.0f}",
            _times(row["time_over_bfloat16"]),
        ]
        for row in rows
    ])  # fmt: skip


def _host(rows: Rows) -> str:
    head = ["library", "recipe", "us (p10 .. p90)", "time / bfloat16", "dispatched operations"]
    return markdown(head, [
        [row["library"], row["recipe"], _us(row["timing"]), _times(row["time_over_bfloat16"]), row["operations"]]
        for row in rows
    ])  # fmt: skip


def _block(rows: Rows) -> str:
    head = ["mode", "recipe", "us (p10 .. p90)", "time / bfloat16", "peak / bfloat16"]
    return markdown(head, [
        [
            row["mode"], row["recipe"] or "bfloat16", _us(row["timing"]), _times(row["time_over_bfloat16"]),
            _times(row["peak_over_bfloat16"]),
        ]
        for row in rows
    ])  # fmt: skip


def _train(rows: Rows) -> str:
    head = ["precision", "step, us (p10 .. p90)", "tokens/s", "time / bfloat16", "peak / bfloat16"]
    return markdown(head, [
        [
            row["precision"], _us(row["timing"]), f"{row['tokens_per_s']:,.0f}",
            _times(row["time_over_high_precision"]), _times(row["peak_over_high_precision"]),
        ]
        for row in rows
    ])  # fmt: skip


_TABLES = {"linear": _linear, "cast": _cast, "gemm": _gemm, "host": _host, "block": _block, "train": _train}


def read() -> dict[str, dict[str, Any]]:
    """What was measured, by name."""
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
    filled = fill(DOCS.read_text(encoding="utf-8"), tables(read()))
    if options.update_docs:
        DOCS.write_text(filled, encoding="utf-8")
    else:
        print("\n\n".join(tables(read()).values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Helpers of the benchmark scripts: run a function on ranks, record the provenance of figures, fill tables in pages."""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from quaver.lab.runs.provenance import describe_measurement

ROOT = Path(__file__).resolve().parent.parent


def run_on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, device_type: str = "cpu") -> list[Any]:
    """Call `function(mesh, *arguments)` on each rank in a new process, and return the results. One rank has no mesh."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_on_rank, (ranks, folder, device_type, function, arguments), nprocs=ranks)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _run_on_rank(
    rank: int, ranks: int, folder: str, device_type: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    mesh = None
    if ranks > 1:
        if device_type == "cuda":
            torch.cuda.set_device(rank)
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        mesh = init_device_mesh(device_type, (ranks,))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(function(mesh, *arguments)))
    if mesh is not None:
        dist.barrier()
        dist.destroy_process_group()


def run_quaver(arguments: list[str]) -> int:
    """Run `quaver` with these arguments in the repository root, and return its exit code."""
    command = [sys.executable, "-m", "quaver", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def describe_provenance(script: str, device_type: str = "cpu", **more: Any) -> dict[str, Any]:
    """Return the origin of figures: machine, versions, command, commit, and whether the package differs from it.

    Args:
        script: the name of the running module in `benchmarks`.
        device_type: the type of the device that was measured.
        more: further fields, or replacements.
    """
    command = shlex.join(["python", "-m", f"benchmarks.{script}", *sys.argv[1:]])
    origin = describe_measurement(torch.device(device_type)) | {"command": command}
    return origin | {"uncommitted_changes_in_quaver": has_changed("quaver")} | more


def list_versions(*packages: str) -> dict[str, str]:
    """Return the versions of the installed ones among `packages`."""
    installed = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def has_changed(folder: str) -> bool | None:
    """Whether files under `folder` differ from the commit; None without git."""
    try:
        command = ["git", "status", "--porcelain", "--", folder]
        return bool(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None


def make_markdown_table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def fill_page(page: str, tables: dict[str, str]) -> str:
    """Return the page with each table put between its `<!-- table: name -->` and the next `<!-- end -->`.

    Raises:
        ValueError: the page lacks these comments.
    """
    for name, table in tables.items():
        before, start_marker, following = page.partition(f"<!-- table: {name} -->")
        _, end_marker, after = following.partition("<!-- end -->")
        if not start_marker or not end_marker:
            raise ValueError(f"expected <!-- table: {name} --> and <!-- end --> in the page")
        page = f"{before}{start_marker}\n{table}\n{end_marker}{after}"
    return page


def show_tables(tables: dict[str, str], page: Path, *, update: bool) -> None:
    """Print tables, and write them into the page if `update`."""
    for name, table in tables.items():
        print(f"{name}\n{table}\n")
    if update:
        page.write_text(fill_page(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def make_page_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of a script that measures, records figures and fills the tables of a page."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="take the recorded figures; measure nothing")
    parser.add_argument("--update-docs", action="store_true", help="record what was measured, and rewrite the page")
    return parser


def record_and_show(
    options: argparse.Namespace,
    measure: Callable[[], dict[str, Any]],
    record: Path,
    tables: Callable[[dict[str, Any]], dict[str, str]],
    page: Path,
) -> dict[str, Any]:
    """Measure, or read the record, and print the tables. With --update-docs also write the record and the page."""
    results: dict[str, Any] = json.loads(record.read_text()) if options.recorded else measure()
    if options.update_docs and not options.recorded:
        write_results(record, results)
    show_tables(tables(results), page, update=options.update_docs)
    return results


def write_results(file: Path, results: dict[str, Any]) -> None:
    """Write indented JSON, with each list or object that holds no other on one line."""
    innermost = re.compile(r"[\[{][^][{}]*[]}]")
    text = json.dumps(results, indent=2)
    file.write_text(innermost.sub(lambda match: " ".join(match.group().split()), text) + "\n")

"""What one float8 block of Llama 3 8B costs: the table of docs/experiments/block-cost.md, counted without a GPU.

    python -m benchmarks.ledger --update-docs              minutes; writes benchmarks/results/ledger.{json,png}
    python -m benchmarks.ledger --recorded --update-docs   the page again, from the recorded counts

Runs `quaver bench ledger` for an H200, beside torchao.
"""

import json
from typing import Any

from benchmarks.record import ROOT, make_markdown_table, make_page_parser, record_and_show
from quaver.lab.cli import main as quaver

PAGE = ROOT / "docs" / "experiments" / "block-cost.md"
RECORD = ROOT / "benchmarks" / "results" / "ledger.json"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")
COMMAND = ["bench", "ledger", "--model", "llama-8b", "--gpu", "h200", "--peer", "torchao", "--recipe", *RECIPES]


def count_block() -> dict[str, Any]:
    """Run the command, which writes RECORD and its picture."""
    code = quaver([*COMMAND, "--output", str(RECORD)])
    if code:
        raise SystemExit(code)
    results = json.loads(RECORD.read_text())
    results["environment"]["command"] = f"quaver {' '.join(COMMAND)}"
    return results


def make_tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the printed table, in Markdown."""
    rows = results["table"]
    return {"block cost": make_markdown_table(list(rows[0]), [list(row.values()) for row in rows])}


def main() -> None:
    record_and_show(make_page_parser(__doc__).parse_args(), count_block, RECORD, make_tables, PAGE)


if __name__ == "__main__":
    main()

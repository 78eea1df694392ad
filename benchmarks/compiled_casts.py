"""Counts what compiled code on a Hopper GPU moves for a float8 linear's casts, on a machine without a GPU.

    python -m benchmarks.compiled_casts                  into results/compiled_casts.json, tables to the terminal
    python -m benchmarks.compiled_casts --update-docs    and into docs/performance.md

Nothing is measured: bytes are read from the Triton code that Inductor writes (inductor_for_gpu.py,
kernel_accesses.py), those of quaver's operations from the table in quaver/kernels/layouts.py. Both ways of
QUAVER_KERNELS_IN_COMPILED_CODE are counted.
"""

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import nn

from benchmarks.inductor_for_gpu import Code, Operator, as_hopper, written_for_a_gpu
from benchmarks.kernel_accesses import Access, accesses, tiles
from benchmarks.record import ROOT, fill, has_changed, markdown
from quaver import Float8LinearConfig, convert_to_float8_training
from quaver.bench.harness import environment
from quaver.bench.modules import BFLOAT16, Subject, model_of
from quaver.kernels import layout_ops
from quaver.trainer.float8 import fuse_producers

RESULTS = ROOT / "benchmarks" / "results" / "compiled_casts.json"
PAGE = ROOT / "docs" / "performance.md"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
CASTS = ("compiler", "kernels")
TOKENS, INPUTS, OUTPUTS = 16384, 4096, 14336
"""Llama 3 8B's `gate`: no two of its three operands have equally many elements."""
OPERANDS = {TOKENS * INPUTS: "input", INPUTS * OUTPUTS: "weight", TOKENS * OUTPUTS: "grad_output"}
SEQ_LEN = 8192
GIB = 2**30


@dataclass
class Moved:
    """What kernels move: each element that is loaded for the first time, or stored, and what is loaded again."""

    bytes: float = 0
    far_again_bytes: float = 0
    """Loaded again by the same kernel, after it has gone through whole columns: counted in `bytes`, too."""
    again_bytes: float = 0
    """Loaded again by the same kernel after no more than some rows: a cache may have it. Not in `bytes`."""
    store_bytes: list[list[int]] = field(default_factory=list)
    """Of each kernel that Inductor wrote and that stores float8: how many bytes of it a thread stores at a time, for
    the narrowest and the widest of its tiles."""

    def add(self, accessed: list[Access], bytes_of: Callable[[Access], int]) -> None:
        for access in accessed:
            far = access.again and access.down_columns
            self.bytes += bytes_of(access) * (far or not access.again)
            self.far_again_bytes += bytes_of(access) * far
            self.again_bytes += bytes_of(access) * (access.again and not far)


def linear(recipe: str, casts: str) -> tuple[dict[str, Moved], int]:
    """What one bfloat16 linear moves for its casts in forward and backward, in bytes per element of each operand.

    Returns:
        That by operand; and the number of kernels that are launched beside the matmuls.
    """
    with written_for_a_gpu() as (_, backend, written), _casts(casts):
        module = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16))
        convert_to_float8_training(module, config=Float8LinearConfig.from_recipe_name(recipe))
        rows = torch.empty(TOKENS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
        output = torch.compile(module, backend=backend, fullgraph=True)(rows)
        output.backward(torch.empty_like(output))
    moved = {name: Moved() for name in OPERANDS.values()}
    for code in written:
        for name in code.launches:
            _add_kernel(name, code.kernels[name], moved)
        for operator in _casts_in(code):
            elements = operator.read[0].numel()
            moved[OPERANDS[elements]].bytes += _bytes_of(operator) / elements
    return moved, sum(map(_launches, written))


def _add_kernel(name: str, source: str, moved: dict[str, Moved]) -> None:
    found = accesses(source)
    for elements, operand in OPERANDS.items():
        of_operand = [access for access in found if access.elements == elements]
        moved[operand].add(of_operand, lambda access: access.element_bytes)
        if any(access.is_store and access.element_bytes == 1 for access in of_operand):
            others = Counter(each.element_bytes for each in found if each.is_store and each.element_bytes > 1)
            with as_hopper():
                widths = [min((tile.stores - others).keys()) for tile in tiles(name, source)]
            moved[operand].store_bytes.append([min(widths), max(widths)])


def block(recipe: str, casts: str) -> tuple[Moved, int]:
    """What a block of Llama 3 8B moves in forward and backward beside its matmuls and attention, in bytes; kernels."""
    model = model_of("llama-8b")
    with written_for_a_gpu() as (_, backend, written), _casts(casts):
        subject = Subject("block", model, SEQ_LEN)
        if recipe != BFLOAT16:
            convert_to_float8_training(subject, config=Float8LinearConfig.from_recipe_name(recipe))
            fuse_producers(subject)
        hidden = torch.empty(TOKENS // SEQ_LEN, SEQ_LEN, model.dim, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = torch.compile(subject, backend=backend, fullgraph=True)(hidden)
        output.backward(torch.empty_like(output))
    moved = Moved()
    for code in written:
        for name in code.launches:
            moved.add(accesses(code.kernels[name]), lambda access: access.bytes)
        moved.bytes += sum(map(_bytes_of, _casts_in(code)))
    return moved, sum(map(_launches, written))


# ---- quaver's operations ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    """How often an operation reads its matrix, and how many kernels it launches; for row codes alone, and otherwise."""

    reads_for_rows: int
    reads: int
    kernels_for_rows: int
    launched: int
    columns_at: int | None = None
    """The argument that says whether column codes are wanted."""

    def is_for_rows(self, operator: Operator) -> bool:
        return self.columns_at is not None and not operator.given[self.columns_at]

    def kernels(self, operator: Operator) -> int:
        return self.kernels_for_rows if self.is_for_rows(operator) else self.launched


_OPERATIONS = {
    "cast_layouts": _Operation(2, 2, 2, 2),
    "cast_layouts_with_persistent_scale": _Operation(1, 1, 2, 2),
    "cast_axes": _Operation(1, 2, 1, 3, columns_at=3),  # amaxes of columns begin with a fill of zeros
    "cast_with_scales": _Operation(1, 1, 1, 1),
}
"""As quaver/kernels/layouts.py says."""


def _casts_in(code: Code) -> list[Operator]:
    return [operator for operator in code.operators if operator.name in _OPERATIONS]


def _launches(code: Code) -> int:
    return len(code.launches) + sum(_OPERATIONS[each.name].kernels(each) for each in _casts_in(code))


def _bytes_of(operator: Operator) -> int:
    operation = _OPERATIONS[operator.name]
    reads = operation.reads_for_rows if operation.is_for_rows(operator) else operation.reads
    made = (each.numel() * each.element_size() for each in operator.made if each.dim() == 2)
    return reads * operator.read[0].numel() * operator.read[0].element_size() + sum(made)


def _casts(casts: str) -> AbstractContextManager[Any]:
    return patch.object(layout_ops, "COMPILED_CODE_CALLS_KERNELS", casts == "kernels")


# ---- results ---------------------------------------------------------------------------------------------------------


def count() -> dict[str, Any]:
    """All of it, as it goes into the file."""
    linears, blocks = [], []
    for recipe in RECIPES:
        for casts in CASTS:
            moved, launches = linear(recipe, casts)
            operands = {name: asdict(of) for name, of in moved.items()}
            linears.append({"recipe": recipe, "casts": casts, "kernels": launches} | operands)
            print(f"linear, {recipe}, {casts}: { ({name: of.bytes for name, of in moved.items()}) }", flush=True)
    for recipe, casts in [(BFLOAT16, "compiler"), *((recipe, casts) for recipe in RECIPES for casts in CASTS)]:
        moved_by_block, launches = block(recipe, casts)
        blocks.append({"recipe": recipe, "casts": casts, "kernels": launches} | asdict(moved_by_block))
        print(f"block, {recipe}, {casts}: {moved_by_block.bytes / GIB:.2f} GiB", flush=True)
    return {"linear": linears, "block": blocks}


def tables(counted: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/performance.md."""
    head = ["recipe", "casts", *OPERANDS.values(), "kernels", "float8 a thread stores at a time, by tile"]
    rows = [
        [f"`{row['recipe']}`", f"`{row['casts']}`", *(_in_words(row[name]) for name in OPERANDS.values())]
        + [row["kernels"], _widths_in_words(row)]
        for row in counted["linear"]
    ]
    block_head = ["recipe", "casts", "GiB", "of them again, far", "again, near", "kernels"]
    block_rows = [
        [f"`{row['recipe']}`", f"`{row['casts']}`" if row["recipe"] != BFLOAT16 else ""]
        + [f"{row[name] / GIB:.2f}" for name in ("bytes", "far_again_bytes", "again_bytes")]
        + [row["kernels"]]
        for row in counted["block"]
    ]
    return {"compiled casts": markdown(head, rows), "compiled block": markdown(block_head, block_rows)}


def _in_words(moved: dict[str, Any]) -> str:
    again = moved["again_bytes"]
    return f"{moved['bytes']:.3g}" + (f" (+{again:g})" if again else "")


def _widths_in_words(row: dict[str, Any]) -> str:
    widths = [each for name in OPERANDS.values() for each in row[name]["store_bytes"]]
    if not widths:
        return "8 and 16"  # as tests/unit/test_triton_layouts_compiled.py reads from the PTX of quaver's kernels
    return f"{min(low for low, _ in widths)} to {max(high for _, high in widths)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update-docs", action="store_true", help="write the tables into docs/performance.md")
    options = parser.parse_args(argv)
    counted = count()
    command = shlex.join(["python", "-m", "benchmarks.compiled_casts", *(sys.argv[1:] if argv is None else argv)])
    found = environment(torch.device("cpu")) | {"command": command, "uncommitted": has_changed("quaver")}
    recorded = {"environment": found | {"triton": triton.__version__}} | counted
    RESULTS.write_text(json.dumps(recorded, indent=1) + "\n")
    made = tables(counted)
    for table in made.values():
        print(f"\n{table}")
    if options.update_docs:
        PAGE.write_text(fill(PAGE.read_text(), made))
    return 0


if __name__ == "__main__":
    sys.exit(main())

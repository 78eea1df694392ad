"""The precision of the sums in a GPU's float8 matmuls, by operands and K, without a GPU: a table of docs/numerics.md.

    python -m benchmarks.hardware_sums [--emulate-sums-of h100] [--update-docs]

Casts two float32 matrices [64, K] tensorwise to e4m3. The SQNR of the sums is against exact sums of the same codes,
with and without fast accumulation; the SQNR of the casts is beside it. K is not split, as for results of a linear's
size.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.record import ROOT, make_markdown_table, show_tables
from quaver.kernels.operands import Operand
from quaver.numerics.accumulation import ACCUMULATION_BY_GPU, get_accumulation
from quaver.numerics.matmul_sums import MatmulSqnrs, SampledRows, observe_sums
from quaver.recipes.scaling import dynamic_cast

PAGE = ROOT / "docs" / "numerics.md"
SIZES = (4096, 16384)
ROWS = 64


def _add_outlier_channel(matrix: Tensor) -> Tensor:
    matrix[:, 7] *= 300
    return matrix


OPERANDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "normal": (torch.clone, torch.clone),
    "both positive": (torch.abs, torch.abs),
    "one channel x 300": (_add_outlier_channel, torch.clone),
}


def measure_sums(operands: str, k: int, gpu: str) -> MatmulSqnrs:
    """Return the SQNR of the sums and the casts of `operands`."""
    torch.manual_seed(0)
    rows = []
    for change in OPERANDS[operands]:
        hp = change(torch.randn(ROWS, k))
        codes, _, dequant_scale = dynamic_cast(hp, torch.float8_e4m3fn, None, power_of_2=False)
        rows.append(SampledRows(hp, Operand(codes, dequant_scale)))
    left, right = rows
    sums = MatmulSqnrs.from_values(observe_sums(left, right, get_accumulation(gpu)).tolist())
    assert sums is not None
    return sums


def make_table(gpu: str) -> str:
    """Return the table in Markdown."""
    rows = []
    for operands in OPERANDS:
        by_size = [measure_sums(operands, k, gpu) for k in SIZES]
        decibels = zip(*([sums.fast, sums.exact, sums.casts] for sums in by_size), strict=True)
        rows.append([operands, *(" / ".join(f"{value:.1f}" for value in of_sizes) for of_sizes in decibels)])
    sizes = " / ".join(map(str, SIZES))
    return make_markdown_table([f"operands, K = {sizes}", "sums, fast accumulation", "sums without", "casts"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate-sums-of", choices=tuple(ACCUMULATION_BY_GPU), default="h100")
    parser.add_argument("--update-docs", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    show_tables({"sums": make_table(options.emulate_sums_of)}, PAGE, update=options.update_docs)


if __name__ == "__main__":
    main()

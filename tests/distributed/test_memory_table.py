"""The memory table's rows under FSDP2, whose buffers are emptied and filled again: float8 takes no more there."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.memory import measure_row
from benchmarks.memory_modules import Case, Size
from benchmarks.memory_report import ratios
from tests.distributed.ranks import run

SMALL = Size(dim=128, hidden_dim=448, sequences=4, seq_len=128)


def rows_of(module: str, checkpointing: str) -> list[dict]:
    mesh = init_device_mesh("cpu", (2,))
    cases = [Case(module, precision, checkpointing, ranks=2) for precision in ("bfloat16", "tensorwise", "rowwise")]
    return [measure_row(case, SMALL, torch.device("cpu"), mesh) for case in cases]


@pytest.mark.parametrize("checkpointing", ["none", "op"])
def test_float8_takes_no_more_than_bfloat16_under_fsdp2(checkpointing):
    for rows in run(2, rows_of, "2 blocks", checkpointing):
        assert max(ratios(row, rows)["peak"] for row in rows) <= 1
        weights = 4 * (2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 448) + 4 * 2 * 128  # of a block, in float32
        shards = 3 * 2 * weights // 2  # parameters and two moments of two blocks, half on each rank
        assert all(shards <= row["resident_bytes"] <= 1.1 * shards for row in rows)

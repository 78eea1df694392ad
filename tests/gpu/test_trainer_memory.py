"""The peak memory of a step as the CUDA allocator tells it."""

import pytest
import torch

from quaver.trainer.memory import measure_peak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1024 * 1024


def test_growth_is_added_to_what_is_resident_and_others_do_not_count():
    device = torch.device("cuda")
    other = torch.zeros(MIB, device=device)
    own = torch.zeros(2 * MIB, device=device)
    with measure_peak([own], device=device, countable=False) as peak:
        torch.zeros(4 * MIB, device=device)
    assert peak.peak_bytes == 4 * (2 * MIB + 4 * MIB)
    assert peak.source == "torch.cuda.max_memory_allocated"
    assert other.numel() == MIB

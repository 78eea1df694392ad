"""Tests the maximum of amaxes over ranks."""

import torch
import torch.distributed as dist

from quaver.runtime.collectives import NO_AMAX, all_reduce_max
from tests.ranks import on_ranks


@on_ranks(2)
def test_the_maximum_keeps_a_nan_and_lacks_only_what_all_lack():
    amaxes = torch.tensor([[NO_AMAX, NO_AMAX, -torch.nan, 3.0], [NO_AMAX, 0.0, 5.0, 4.0]])
    own, expected = amaxes[dist.get_rank()], torch.tensor([NO_AMAX, 0.0, torch.nan, 4.0])
    largest = all_reduce_max(own, dist.group.WORLD, allow_missing=True)
    torch.testing.assert_close(largest, expected, rtol=0, atol=0, equal_nan=True)
    present = all_reduce_max(own[2:], dist.group.WORLD)
    torch.testing.assert_close(present, expected[2:], rtol=0, atol=0, equal_nan=True)

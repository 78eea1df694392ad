"""The helper that the other tests here stand on: it reports failures and hangs."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RanksError, run


def _sum_of_ranks():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def _fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("no")


def _sleep():
    time.sleep(30)


def test_every_rank_answers():
    assert run(2, _sum_of_ranks) == [1, 1]


def test_a_failure_is_told_by_rank_and_ends_nothing_else():
    with pytest.raises(RanksError) as error:
        run(2, _fail_on_rank_1)
    assert error.value.messages[0] is None
    assert "ValueError: no" in error.value.messages[1]
    assert run(2, _sum_of_ranks) == [1, 1]


def test_a_hang_ends():
    with pytest.raises(RanksError, match="no answer within 1"):
        run(2, _sleep, timeout=1)

"""Tests that a failure or a hang in the pool of ranks fails its test by name, and the next test gets working ranks."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import RanksError, run


def sum_ranks():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("no")


def sleep():
    time.sleep(30)


def count_threads_and_redistribute():
    """Return the threads of this rank before it redistributes a DTensor on a new mesh."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    threads = len(os.listdir("/proc/self/task"))
    distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)]).redistribute(placements=[Shard(0), Shard(0)])
    return threads


def die():
    if dist.get_rank() == 0:
        os._exit(1)


def test_a_failure_has_the_traceback_of_its_rank():
    with pytest.raises(RanksError) as error:
        run(2, fail_on_rank_1)
    assert error.value.messages[0] is None
    assert "ValueError: no" in error.value.messages[1]
    assert run(2, sum_ranks) == [1, 1]


def test_a_hang_ends_and_names_the_test():
    with pytest.raises(RanksError, match="sleep in .*test_a_hang_ends_and_names_the_test(.|\n)*no answer within 1 s"):
        run(2, sleep, timeout=1)
    assert run(2, sum_ranks) == [1, 1]


def test_a_rank_that_dies_is_replaced():
    with pytest.raises(RanksError, match="rank 0: the process died"):
        run(2, die, timeout=10)
    assert run(2, sum_ranks) == [1, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_the_threads_of_a_group_end_with_its_test():
    first, *later = (run(2, count_threads_and_redistribute) for _ in range(4))
    assert later == [first] * 3

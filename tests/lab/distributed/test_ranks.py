"""Tests that a failure or a hang in the pool of ranks fails its test by name, and the next test gets working ranks."""

import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from quaver.lab.runs import checkpoint
from quaver.lab.runs.dcp import load_state
from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.ranks import Ranks
from quaver.lab.runs.safe_dcp import CheckpointReader
from quaver.lab.trainer.training_run import begin_folder
from quaver.runtime.agreement import run_on_every_rank, run_on_first_rank
from quaver.runtime.float8_collectives import NOTHING_OBSERVED, max_over_ranks
from tests.ranks import RanksError, mesh_of, on_ranks, run


def sum_ranks():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def find_largest_amaxes():
    own = [[NOTHING_OBSERVED, NOTHING_OBSERVED, -torch.nan, 3.0], [NOTHING_OBSERVED, 0.0, 5.0, 4.0]][dist.get_rank()]
    amaxes = torch.tensor(own)
    return max_over_ranks(amaxes, dist.group.WORLD, allow_missing=True), max_over_ranks(amaxes[2:], dist.group.WORLD)


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


def test_every_rank_answers():
    assert run(2, sum_ranks) == [1, 1]


def test_the_maximum_keeps_a_nan_and_lacks_only_what_all_lack():
    expected = torch.tensor([NOTHING_OBSERVED, 0.0, torch.nan, 4.0])
    for largest, present in run(2, find_largest_amaxes):
        torch.testing.assert_close(largest, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(present, expected[2:], rtol=0, atol=0, equal_nan=True)


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


def begin(fail):
    """Rank 0 alone has the run folder."""
    rank = dist.get_rank()
    folder = SimpleNamespace(begin=fail) if rank == 0 else None
    run_on_every_rank(partial(begin_folder, folder, None, {}))


def read(fail):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "read_record", fail if dist.get_rank() == 0 else lambda _: {})
        checkpoint.read_verified_record(Path(), Ranks(dist.get_rank(), dist.get_rank(), 2), verifies=False)


def load(fail):
    reader = CheckpointReader(Path())
    reader.read_metadata = fail if dist.get_rank() == 0 else lambda: Metadata({}, storage_data={})
    load_state({}, reader)


@on_ranks(2)
def test_a_shard_that_one_rank_cannot_read_is_an_error_on_all(tmp_path):
    state = {"weight": distribute_tensor(torch.arange(8.0), mesh_of((2,)), [Shard(0)])}
    dcp.save(state, checkpoint_id=tmp_path)
    if dist.get_rank() == 1:
        shard = tmp_path / "__1_0.distcp"
        shard.write_bytes(bytes(shard.stat().st_size))
    dist.barrier()
    with pytest.raises(CheckpointError, match=f"cannot load '{tmp_path}'"):
        load_state(state, CheckpointReader(tmp_path))
    dist.barrier()


@pytest.mark.parametrize("work", [run_on_first_rank, begin, read, load])
@on_ranks(2)
def test_what_rank_0_raises_is_raised_on_all(work):
    """Also an unforeseen error, here of a class that cannot be pickled."""

    class Unforeseen(Exception):
        pass

    def fail(*_):
        raise Unforeseen("no")

    with pytest.raises((Unforeseen, RuntimeError), match="no") as error:
        work(fail)
    assert dist.get_rank() == 0 or error.value.__notes__ == ["raised on rank 0"]
    dist.barrier()

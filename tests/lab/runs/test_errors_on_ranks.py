"""Tests that what fails on one rank, in a run folder or in its checkpoints, is an error on all."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard, distribute_tensor

from quaver.lab.runs import checkpoint
from quaver.lab.runs.checkpoint_folder import CheckpointFolder, RunProgress
from quaver.lab.runs.dcp import load_state
from quaver.lab.runs.errors import CheckpointError, OutputFailures
from quaver.lab.runs.ranks import Ranks
from quaver.lab.runs.safe_dcp import CheckpointReader
from quaver.lab.settings import Checkpoint
from quaver.lab.trainer.training_run import begin_folder
from quaver.runtime.agreement import run_on_every_rank, run_on_first_rank
from tests.ranks import get_cached_mesh, on_ranks


def begin(fail):
    """Rank 0 alone has the run folder."""
    rank = dist.get_rank()
    folder = SimpleNamespace(begin=fail) if rank == 0 else None
    run_on_every_rank(partial(begin_folder, folder, None, {}))


def read(fail):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "read_record", fail if dist.get_rank() == 0 else lambda _: {})
        checkpoint._read_record_on_every_rank(Path(), Ranks(dist.get_rank(), dist.get_rank(), 2), verifies=False)


def write(fail):
    rank = dist.get_rank()
    failures = OutputFailures(Ranks(rank, rank, 2))
    with failures.catch():
        fail() if rank == 0 else None
    failures.raise_on_all_ranks()


def load(fail):
    reader = CheckpointReader(Path())
    reader.read_metadata = fail if dist.get_rank() == 0 else lambda: Metadata({}, storage_data={})
    load_state({}, reader)


@on_ranks(2)
def test_a_shard_that_one_rank_cannot_read_is_an_error_on_all(tmp_path):
    state = {"weight": distribute_tensor(torch.arange(8.0), get_cached_mesh((2,)), [Shard(0)])}
    dcp.save(state, checkpoint_id=tmp_path)
    if dist.get_rank() == 1:
        shard = tmp_path / "__1_0.distcp"
        shard.write_bytes(bytes(shard.stat().st_size))
    dist.barrier()
    with pytest.raises(CheckpointError, match=f"cannot load '{tmp_path}'"):
        load_state(state, CheckpointReader(tmp_path))
    dist.barrier()


@on_ranks(2)
def test_a_state_that_one_rank_cannot_copy_is_an_error_on_all(tmp_path):
    rank = dist.get_rank()
    ranks = Ranks(rank, rank, 2)
    model = torch.nn.Linear(2, 2)
    saved = SimpleNamespace(name="rowwise", model=model, scaling=None, optimizer=torch.optim.AdamW(model.parameters()))
    config = Checkpoint(enable=True, async_mode="async")
    checkpointer = checkpoint.Checkpointer(CheckpointFolder(tmp_path), config, ranks, torch.device("cpu"), {})
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(checkpoint.DefaultStager, "stage", Mock(side_effect=RuntimeError("no pinned memory")))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="step 1 could not be copied to host memory: no pinned memory"):
                checkpointer.save(RunProgress(step=1), [saved])
    dist.barrier()


@pytest.mark.parametrize("work", [run_on_first_rank, begin, read, write, load])
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

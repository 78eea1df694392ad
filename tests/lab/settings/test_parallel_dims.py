"""Tests which configs fit which numbers of ranks, the launcher's environment, and how ranks agree."""

import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from quaver.lab.runs import ranks as ranks_module
from quaver.lab.runs.ranks import Ranks, Refusal, read_ranks
from quaver.lab.settings import Comm, Float8, Parallelism, TrainConfig, Training
from quaver.lab.settings.parallel_dims import ParallelDims, resolve_parallel_dims
from quaver.runtime.devices import MissingDeviceError


def make_config(dp_replicate: int = 1, dp_shard: int = -1, tp: int = 1, **sections: object) -> TrainConfig:
    return TrainConfig(parallelism=Parallelism(dp_replicate, dp_shard, tp), **sections)


@pytest.mark.parametrize(
    ("degrees", "world_size", "mesh"),
    [
        ((1, -1, 1), 1, {}),
        ((1, -1, 2), 2, {"tp": 2}),
        ((1, -1, 2), 8, {"dp_shard": 4, "tp": 2}),
        ((2, -1, 1), 2, {"dp_replicate": 2, "dp_shard": 1}),
        ((2, 2, 2), 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    ],
)
def test_degrees_make_a_mesh(degrees, world_size, mesh):
    _, dims = resolve_parallel_dims(make_config(*degrees), world_size=world_size)
    assert dims.mesh == mesh
    assert dims.world_size == world_size


@pytest.mark.parametrize(
    ("degrees", "world_size", "product"),
    [((1, 1, 1), 2, r"1 \* 1 \* 1"), ((1, 2, 2), 8, r"1 \* 2 \* 2"), ((2, -1, 2), 6, r"a multiple of 2 \* 2")],
)
def test_degrees_that_do_not_multiply_to_the_number_of_processes_are_refused(degrees, world_size, product):
    with pytest.raises(ValueError, match=f"the number of processes = {world_size}, got {product}; change a degree"):
        resolve_parallel_dims(make_config(*degrees), world_size=world_size)


def test_data_parallel_ranks_count_slower_than_tensor_parallel_ones():
    ranks = [resolve_parallel_dims(make_config(tp=2), rank=rank, world_size=6)[1] for rank in range(6)]
    assert [dims.data_parallel_rank for dims in ranks] == [0, 0, 1, 1, 2, 2]
    assert {dims.data_parallel_degree for dims in ranks} == {3}


def test_the_global_batch_is_filled_in_and_divides():
    def fill_in(world_size: int, **training: int) -> int:
        chosen = make_config(training=Training(local_batch_size=2, **training), tp=world_size // 3)
        return resolve_parallel_dims(chosen, world_size=world_size)[0].training.global_batch_size

    assert fill_in(3) == 6
    assert fill_in(6) == 6  # tensor parallel ranks share theirs
    assert fill_in(3, global_batch_size=12) == 12
    with pytest.raises(ValueError, match="a multiple of training.local_batch_size = 2 on 3 data-parallel ranks, got 8"):
        fill_in(3, global_batch_size=8)


@pytest.mark.parametrize(
    ("degrees", "sections", "refusal"),
    [
        ((2, 1), {"float8": Float8(enable_fsdp_float8_all_gather=True)}, "all_gather must be false where no weight is"),
        ((2, 1), {"comm": Comm(float8_gradients=True)}, "float8_gradients must be false where no gradient is reduce-"),
        ((1, 2), {"training": Training(reduce="last_all_reduce")}, "reduce must be every or last without replicas"),
        ((1, 1, 2), {}, "fsdp_reshard_after_forward must be default where FSDP2 gathers no weight"),
    ],
)
def test_a_setting_of_a_collective_is_refused_on_ranks_without_it(degrees, sections, refusal):
    config = make_config(*degrees, **sections)
    if not sections:
        config = replace(config, parallelism=replace(config.parallelism, fsdp_reshard_after_forward="never"))
    with pytest.raises(ValueError, match=refusal):
        resolve_parallel_dims(config, world_size=2)


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets variables of a launcher, where none are set."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    return lambda **values: [monkeypatch.setenv(name, value) for name, value in values.items()]


TWO = {"WORLD_SIZE": "2", "RANK": "1"}
ELASTIC = TWO | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Ranks(0, 0, 1)),
        (TORCHRUN, Ranks(5, 1, 8)),
        (ELASTIC | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, Ranks(1, 1, 2)),
        (ELASTIC | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the env"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be an integer from 1, got 'two'; start the ranks with torchrun, or"),
        ({"WORLD_SIZE": "2"}, "RANK must be an integer from 0 and below WORLD_SIZE = 2, got ''"),
        (TWO | {"RANK": "2"}, "RANK must be an integer from 0 and below WORLD_SIZE = 2, got '2'"),
        (TWO | {"LOCAL_RANK": "x"}, "LOCAL_RANK must be .* got 'x'"),
        (TWO, "MASTER_ADDR must be set with WORLD_SIZE = 2; use torchrun"),
    ],
)
def test_the_launchers_environment_is_read_or_refused(environment, values, expected):
    environment(**values)
    if isinstance(expected, Ranks):
        assert read_ranks() == expected
        assert read_ranks().is_alone == (not values)
        return
    with pytest.raises(ValueError, match=expected):
        read_ranks()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MissingDeviceError, match="local rank 2 needs a GPU of its own, but torch sees 2 on this"):
        Ranks(2, 2, 4).choose_device(torch.device("cuda"))
    assert Ranks(2, 2, 4).choose_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    ("inputs", "verdict"),
    [
        ([("", "same"), ("", "same"), ("", "same")], ""),
        ([("bad", ""), ("bad", ""), ("bad", "")], "bad"),
        ([("", "same"), ("full", "same"), ("bad", "same")], "rank 1: full (not written)"),
        ([("", "same"), ("", "same"), ("no such\nfile", "")], "rank 2: no such\nfile"),
        ([("", "same"), ("", "other"), ("", "same")], "rank 1 read another config or other data than rank 0"),
    ],
)
def test_every_rank_agrees_on_the_same_error(monkeypatch, inputs, verdict):
    answers = agree_in_threads(monkeypatch, dict(enumerate(inputs)))
    assert len(answers) == 3
    assert all(words.startswith(verdict) and bool(words) == bool(verdict) for words in answers.values())


def agree_in_threads(monkeypatch, inputs: dict[int, tuple[str, str]], late_s: float = 0.0) -> dict[int, str]:
    """Return the answer that each rank of `inputs`, of three, reads. Rank 2 starts `late_s` later."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setattr(ranks_module, "open_store", lambda rank, world_size: store)
    answers: dict[int, str] = {}

    def agree(rank: int) -> None:
        time.sleep(late_s if rank == 2 else 0)
        try:
            message, fingerprint = inputs[rank]
            refusal = Refusal(message, is_write_error=message == "full") if message else None
            verdict = Ranks(rank, rank, 3).agree_on_refusal(refusal, fingerprint)
            answers[rank] = "" if verdict is None else verdict.message + " (not written)" * verdict.is_write_error
        except TimeoutError as error:
            answers[rank] = f"TimeoutError: {error}"

    threads = [threading.Thread(target=agree, args=(rank,), daemon=True) for rank in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


def test_ranks_wait_longer_for_data_than_the_timeout_of_their_store(monkeypatch):
    inputs = dict.fromkeys(range(3), ("", "same"))
    assert agree_in_threads(monkeypatch, inputs, late_s=1.0) == dict.fromkeys(range(3), "")


@pytest.mark.parametrize(("missing", "line"), [(2, "waited 1 s for rank 2"), (0, "TimeoutError: waited 2 s for rank")])
def test_a_rank_that_does_not_come_is_named_by_the_others(monkeypatch, missing, line):
    monkeypatch.setattr(ranks_module, "INPUT_TIMEOUT_S", 1)
    monkeypatch.setattr(ranks_module, "STORE_TIMEOUT_S", 1)
    answers = agree_in_threads(monkeypatch, {rank: ("", "same") for rank in range(3) if rank != missing})
    assert len(answers) == 2
    assert all(words.startswith(line) and "quaver prepare-data" in words for words in answers.values())


def test_a_rank_that_ends_before_it_reads_the_answer_is_named_by_rank_0(monkeypatch):
    monkeypatch.setattr(ranks_module, "STORE_TIMEOUT_S", 1)
    store = HashStore()
    for key in ("input of 1", "verdict read by 1", "input of 2"):
        PrefixStore("quaver/1", store).set(key, "same\nnull" if key.startswith("input") else "")
    monkeypatch.setattr(ranks_module, "open_store", lambda rank, world_size: store)
    verdict = Ranks(0, 0, 3).agree_on_refusal(fingerprint="same")
    assert verdict == Refusal("waited 1 s for rank 2, which checked its input and then ended")


def test_a_single_process_needs_no_communication():
    alone = Ranks()
    assert alone.agree_on_refusal(Refusal("bad")) == Refusal("bad")
    assert alone.holds_on_any(True, torch.device("cpu"))
    assert not alone.holds_on_any(False, torch.device("cpu"))
    assert alone.all_gather_objects("x") == ["x"]
    with alone.open_process_group(torch.device("cpu"), 1):
        assert not torch.distributed.is_initialized()


def test_a_resolved_config_resolves_to_itself_on_fewer_ranks():
    """The config that two ranks write repeats their run in one process."""
    wide, _ = resolve_parallel_dims(make_config(training=Training(local_batch_size=2)), world_size=2)
    alone, dims = resolve_parallel_dims(wide, world_size=1)
    assert alone == wide
    assert dims == ParallelDims()
    assert replace(wide.training, global_batch_size=-1) == Training(local_batch_size=2)

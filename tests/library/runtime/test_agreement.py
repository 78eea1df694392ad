"""Tests how ranks compare, share errors, and wait for each other in a store."""

from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from quaver.runtime import agreement
from quaver.runtime.agreement import (
    check_ranks_agree,
    check_ranks_agree_after_change,
    run_on_every_rank,
    wait_at_store_barrier,
)
from quaver.torch_private.fake_ranks import FakeStore
from tests.isolated import isolated
from tests.ranks import on_ranks, refusal, run


def _compare(lines):
    return refusal(partial(check_ranks_agree, lines[dist.get_rank()], None, subject="lines"))


def test_every_rank_raises_if_one_has_other_lines():
    assert run(2, _compare, [["a", "b"], ["a", "b"]]) == ["no error"] * 2
    message = "RuntimeError: ranks disagree about lines: rank 0 has 'b', rank 1 has 'c'"
    assert run(2, _compare, [["a", "b"], ["a", "c"]]) == [message] * 2


@on_ranks(2)
def test_every_rank_gets_the_results_of_all():
    assert run_on_every_rank(dist.get_rank) == [0, 1]


def _fail_on_rank_1():
    class UnpicklableError(Exception):
        pass

    if dist.get_rank() == 1:
        raise UnpicklableError("no disk")


def test_an_error_that_cannot_be_pickled_is_raised_with_its_text_on_every_rank():
    messages = run(2, refusal, run_on_every_rank, _fail_on_rank_1)
    assert messages == ["RuntimeError: UnpicklableError: no disk", "UnpicklableError: no disk"]


class _Store:
    """A store whose `wait` times out, after it has run `arrive` once."""

    def __init__(self, arrive, timeout_s=50):
        self.arrive, self.store = arrive, dist.HashStore()
        self.timeout = timedelta(seconds=timeout_s)

    def __getattr__(self, name):
        return getattr(self.store, name)

    def wait(self, keys, timeout):
        if self.store.check(keys):
            return
        arrive, self.arrive = self.arrive, lambda: None
        arrive()
        raise dist.DistStoreError("timeout")


@pytest.fixture
def group(monkeypatch):
    """Return a group of two ranks, whose attribute `store` the test sets. Each call is of another rank."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", iter(range(100)).__next__)
    pair = SimpleNamespace(get_group_store=lambda: pair.store)
    return pair


def wait(group):
    wait_at_store_barrier(group, "it happened", advice="all")


def test_a_file_store_waits_to_its_limit_and_names_the_remedy(group, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(agreement, "_SILENT_WAIT", timedelta(milliseconds=10))
    group.store = dist.FileStore(str(tmp_path / "store"), 2)
    group.store.set_timeout(timedelta(seconds=1))
    with pytest.raises(RuntimeError, match="it happened on rank .*, and not every rank reported it: all"):
        wait(group)
    assert "waits for the other ranks: it happened" in caplog.text


def test_a_rank_whose_time_ends_as_the_last_one_arrives_goes_on_like_it(group):
    group.store = _Store(lambda: wait(group))
    wait(group)
    with pytest.raises(RuntimeError, match="it happened on rank .*, and not every rank reported it: all"):
        wait(group)
    group.store.arrive = lambda: wait(group)  # the failed call does not count
    wait(group)


def test_a_rank_that_waits_long_logs_what_happened(group, caplog):
    group.store = _Store(lambda: wait(group), timeout_s=100)
    wait(group)
    assert "waits for the other ranks: it happened" in caplog.text


def _compare_fake_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with FakeTensorMode():
        check_ranks_agree_after_change(["a line"], dist.group.WORLD, subject="lines")


def test_a_process_that_only_pretends_to_have_other_ranks_compares_nothing():
    isolated(_compare_fake_ranks)

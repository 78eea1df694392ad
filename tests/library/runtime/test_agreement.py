"""Tests how ranks compare, and how they wait for each other in a store."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from quaver.runtime.agreement import check_ranks_agree_after_change, wait_at_store_barrier
from quaver.torch_private.fake_ranks import FakeStore
from tests.isolated import isolated


class _Store:
    """A store whose `wait` times out, after it has run `arrive` once."""

    def __init__(self, arrive):
        self.arrive, self.store = arrive, dist.HashStore()

    def __getattr__(self, name):
        return getattr(self.store, name)

    def wait(self, keys, timeout):
        if self.store.check(keys):
            return
        arrive, self.arrive = self.arrive, lambda: None
        arrive()
        raise dist.DistStoreError("timeout")


def test_a_rank_whose_time_ends_as_the_last_one_arrives_goes_on_like_it(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", iter(range(100)).__next__)
    group = SimpleNamespace(get_group_store=lambda: store)
    store = _Store(lambda: wait_at_store_barrier(group, "it happened", advice="all"))
    wait_at_store_barrier(group, "it happened", advice="all")
    with pytest.raises(RuntimeError, match="it happened on rank .*, and not every rank reported it: all"):
        wait_at_store_barrier(group, "it happened", advice="all")
    store.arrive = lambda: wait_at_store_barrier(group, "it happened", advice="all")  # the failed call does not count
    wait_at_store_barrier(group, "it happened", advice="all")


def _compare_fake_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with FakeTensorMode():
        check_ranks_agree_after_change(["a line"], dist.group.WORLD, subject="lines")


def test_a_process_that_only_pretends_to_have_other_ranks_compares_nothing():
    isolated(_compare_fake_ranks)

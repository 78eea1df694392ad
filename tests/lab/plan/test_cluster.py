"""Tests the seconds of collectives: orders, limits, and figures that others measured."""

import operator
from dataclasses import replace

import pytest

from benchmarks.plan.local_ranks import MeasuredCluster
from quaver.lab.plan.cluster import NETWORK, NVLINK, Cluster
from quaver.roofline.device_specs import find_device_spec

H100 = find_device_spec("h100")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = [2**power for power in range(2, 34, 3)]
GROUPS = [(2, 1), (8, 1), (16, 1), (16, 8), (64, 4), (1024, 1), (1024, 8)]


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_take_longer_and_more_bandwidth_never_does(kind):
    slow, fast = Cluster(H100, network_gbit_per_s=200.0), Cluster(H100, network_gbit_per_s=400.0)
    for ranks, stride in GROUPS:
        slow_s, fast_s = (
            [cluster.predict_collective_seconds(kind, size, ranks, stride) for size in SIZES]
            for cluster in (slow, fast)
        )
        for times in (slow_s, fast_s):
            assert times == sorted(times)
            assert times[0] < times[-1]
        assert all(map(operator.le, fast_s, slow_s))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_sends_nothing_and_more_nodes_never_help_a_small_tensor(kind):
    cluster = Cluster(H100)
    assert cluster.predict_collective_seconds(kind, 2**30, 1) == 0
    times = [cluster.predict_collective_seconds(kind, 64, ranks) for ranks in (8, 16, 64, 512, 4096)]
    assert times == sorted(times)


def test_a_measured_cluster_takes_the_measured_times():
    cluster = MeasuredCluster(H100, per_byte={"all_gather": 2.0})
    assert [cluster.predict_collective_seconds("all_gather", 3.0, ranks) for ranks in (1, 2)] == [0.0, 6.0]


def test_groups_across_nodes_use_the_network():
    cluster = Cluster(H100)
    assert [cluster.find_link(ranks, stride) for ranks, stride in ((8, 1), (2, 4), (1, 64))] == [NVLINK] * 3
    assert [cluster.find_link(ranks, stride) for ranks, stride in ((16, 1), (2, 8), (3, 4))] == [NETWORK] * 3
    assert cluster.count_nodes(1024, 1) == cluster.count_nodes(128, 8) == 128


@pytest.mark.parametrize(
    ("device", "kind", "size", "ranks", "bus_gb_per_s"),
    [
        ("h200", "all_gather", 2**34, 8, 361.4),  # "Machine Learning Engineering", network
        ("b200", "all_reduce", 2**33, 8, 677.0),
        ("h100", "all_gather", 2**24, 8, 170.3),  # XLA's table for sm_90
        ("h100", "reduce_scatter", 2**27, 8, 286.6),
        ("h100", "all_gather", 2**30, 8, 342.2),
    ],
)
def test_bus_bandwidths_are_near_measured_ones(device, kind, size, ranks, bus_gb_per_s):
    seconds = Cluster(find_device_spec(device)).predict_collective_seconds(kind, size, ranks)
    times = 2 if kind == "all_reduce" else 1
    assert times * size * (ranks - 1) / ranks / seconds / 1e9 == pytest.approx(bus_gb_per_s, rel=0.25)


@pytest.mark.parametrize(("ranks", "sent_share", "gb_per_s"), [(8, 7 / 8, 155.5), (16, 1 / 2, 43.0)])
def test_all_to_alls_reach_the_rates_of_deepep(ranks, sent_share, gb_per_s):
    """On H800s: 153 and 158 GB/s over NVLink in a node, 43 GB/s between two nodes (DeepEP, docs/legacy.md)."""
    cluster = Cluster(replace(H100, link_gb_per_s=200.0))
    seconds = cluster.predict_collective_seconds("all_to_all", 2**30, ranks)
    assert sent_share * 2**30 / seconds / 1e9 == pytest.approx(gb_per_s, rel=0.04)


def test_two_nodes_with_slow_interfaces_reach_what_google_measured():
    """2 x 8 H100 with 8 x 200 Gb/s: an all-gather of 8 GiB has 188.8 GB/s on the bus."""
    seconds = Cluster(H100, network_gbit_per_s=200.0).predict_collective_seconds("all_gather", 2**33, 16)
    assert 2**33 * 15 / 16 / seconds / 1e9 == pytest.approx(188.8, rel=0.05)

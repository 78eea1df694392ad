"""Tests the memory that a run records: of the process, of a GPU, and of the tensors of one step."""

import types

import pytest
import torch
from torch import nn

from quaver.lab.trainer.memory import count_storage_bytes, describe_memory, measure_peak, read_device_memory


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_memory_of_a_cpu_is_the_peak_of_the_process_in_bytes(platform, unit, monkeypatch):
    monkeypatch.setattr("sys.platform", platform)
    usage = types.SimpleNamespace(ru_maxrss=(3 << 30) // unit)
    monkeypatch.setattr("resource.getrusage", lambda who: usage)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2 << 20}.__getitem__)
    record = read_device_memory(torch.device("cpu"))
    assert record == {"memory_peak_rss_bytes": 3 << 30, "memory_peak_rss_share": 3 / 8}
    assert describe_memory(record) == "3 GiB (38%) peak rss"


def test_memory_of_a_gpu_has_both_peaks(monkeypatch):
    stats = {"active_bytes.all.peak": 3 << 30, "reserved_bytes.all.peak": 4 << 30, "num_alloc_retries": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    properties = types.SimpleNamespace(total_memory=8 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    record = read_device_memory(torch.device("cuda"))
    assert record["memory_active_share"] == 3 / 8
    assert record["memory_reserved_share"] == 1 / 2
    assert record["memory_retries"] == 1
    assert describe_memory(record) == "3 GiB (38%) active, 4 GiB (50%) reserved"


def test_resident_tensors_count_a_shared_storage_once():
    weight = torch.zeros(256)
    assert count_storage_bytes([weight, weight.view(16, 16), torch.zeros(256)]) == 2 * 1024


def test_the_allocators_log_has_the_peak_of_the_counted_tensors():
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    peaks = []
    for is_countable in (True, False):
        layers.zero_grad()
        with measure_peak(layers.parameters(), device=torch.device("cpu"), is_countable=is_countable) as peak:
            layers(torch.zeros(32, 64)).sum().backward()
        peaks.append(peak)
    assert peaks[0].source == "tensors of one step, exact"
    assert peaks[1].source == "tensors of one step, from the CPU allocator's log"
    assert peaks[1].peak_bytes == pytest.approx(peaks[0].peak_bytes, abs=64)  # scalars

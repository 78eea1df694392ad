"""The peak memory of a step against sums by hand."""

import pytest
import torch
from torch import nn

from quaver.trainer.memory import measure_peak, storage_bytes

KIB = 1024


def test_activations_of_a_linear_by_hand():
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    x = torch.zeros(32, 64)
    with measure_peak(layers.parameters(), device=torch.device("cpu"), countable=True) as peak:
        layers(x).sum().backward()
    activation, weight = 32 * 64 * 4, 64 * 64 * 4
    # at the end: relu output (freed once used), hidden gradients and both weight gradients
    assert peak.peak_bytes >= 2 * weight + 2 * weight
    assert peak.peak_bytes <= 4 * weight + 4 * activation
    assert peak.exact
    assert peak.source == "tensors of one step, exact"


def test_resident_tensors_count_a_shared_storage_once():
    weight = torch.zeros(256)
    assert storage_bytes([weight, weight.view(16, 16), torch.zeros(256)]) == 2 * KIB


def test_the_allocators_log_has_the_peak_of_the_counted_tensors():
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    peaks = []
    for countable in (True, False):
        layers.zero_grad()
        with measure_peak(layers.parameters(), device=torch.device("cpu"), countable=countable) as peak:
            layers(torch.zeros(32, 64)).sum().backward()
        peaks.append(peak)
    assert all(each.exact for each in peaks)
    assert peaks[1].source == "tensors of one step, from the CPU allocator's log"
    assert peaks[1].peak_bytes == pytest.approx(peaks[0].peak_bytes, abs=64)  # scalars

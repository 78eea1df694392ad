"""The peak memory of a step against sums by hand."""

import torch
from torch import nn

from quaver.trainer.memory import TensorBytes, measure_peak, storage_bytes

KIB = 1024


def test_counts_what_is_alive_at_once():
    with TensorBytes() as counted:
        a = torch.zeros(256)  # 1 KiB
        b = torch.zeros(512)  # 2 KiB
        del a
        c = torch.zeros(256)
    assert counted.live_bytes == 3 * KIB
    assert counted.peak_bytes == 3 * KIB
    del b, c
    assert counted.live_bytes == 0


def test_views_and_in_place_operators_count_nothing():
    old = torch.zeros(256)
    with TensorBytes() as counted:
        old.add_(1)
        old.view(16, 16).t()
        new = torch.ones(256)
        view = new[:10]
        del new
        assert counted.live_bytes == KIB  # the view keeps the whole storage
        del view
    assert (counted.live_bytes, counted.peak_bytes) == (0, KIB)


def test_a_temporary_in_backward_is_seen():
    x = torch.zeros(256, requires_grad=True)
    with TensorBytes() as counted:
        y = (x * 2).exp()  # x * 2 is not kept, exp keeps its result
        assert counted.peak_bytes == 2 * KIB
        assert counted.live_bytes == KIB
        y.sum().backward()
    # y, d(exp), d(x * 2), and scalars; the gradient of y is expanded, so it has no storage of its own
    assert 3 * KIB <= counted.peak_bytes < 3 * KIB + 64
    assert counted.live_bytes >= 2 * KIB  # y and x.grad


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


def test_compiled_steps_are_not_measured():
    with measure_peak([], device=torch.device("cpu"), countable=False) as peak:
        torch.ones(8 * KIB)
    assert (peak.peak_bytes, peak.exact) == (None, False)
    assert peak.source.startswith("not measured")

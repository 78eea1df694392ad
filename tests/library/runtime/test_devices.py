"""Tests that the compute capability of "the current device" follows torch.cuda.set_device."""

import torch

from quaver.runtime.devices import get_compute_capability


def test_the_capability_of_the_current_device_is_that_of_the_device_now(monkeypatch):
    capabilities = {101: (8, 0), 102: (9, 0)}  # no machine has so many: results are cached by index

    def read(index):
        return capabilities[torch.cuda.current_device() if index is None else index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", read)
    for current, capability in capabilities.items():
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert get_compute_capability(None) == capability

"""Tests a virtual GPU beyond its matmuls: what a captured CUDA graph may hold."""

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from quaver import convert_to_float8_training, monitor
from tests.recipes import DYNAMIC_RECIPES
from tests.thinned import by_day
from tests.virtual_gpu import virtual_gpu
from tests.virtual_gpu.runtime import simulate_capture, simulate_strict_capture


def _step(module, input):
    output = module(input)
    output.backward(torch.ones_like(output))


def _capture(recipe):
    """Train a linear under capture, after a step outside; return the errors of a first matmul and of a monitor."""
    with virtual_gpu("h100"), np.errstate(all="ignore"):
        module = convert_to_float8_training(nn.Linear(32, 48).bfloat16(), config=recipe)
        input = torch.randn(16, 32).bfloat16()
        with simulate_strict_capture(), pytest.raises(RuntimeError, match="CUDA graph") as first:
            _step(module, input)
        _step(module, input)
        with simulate_strict_capture():
            _step(module, input)
        with monitor(module):
            _step(module, input)
            # Its number of the step lies on the host, which `simulate_strict_capture` takes for the device's.
            with simulate_capture(), pytest.raises(RuntimeError, match="CUDA graph") as monitored:
                _step(module, input)
    return str(first.value), str(monitored.value)


@pytest.mark.parametrize("recipe", by_day(["tensorwise"], DYNAMIC_RECIPES))
def test_a_captured_step_reads_nothing_on_the_host(interpreter, recipe):
    first, monitored = interpreter(_capture, recipe)
    assert "run a step before the capture" in first
    assert "close the monitor" in monitored


def test_a_read_on_the_host_raises_while_a_graph_is_captured():
    total = torch.ones(2).sum()
    with virtual_gpu("h100"), simulate_strict_capture(), pytest.raises(RuntimeError, match="read on the host"):
        total.item()

"""Defines a small model for tests of the memory tool, and a measured step to compare a prediction with."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from quaver.lab.memory import predict_step_memory
from quaver.lab.memory.train_step.predict_run import HAS_VISIBLE_RESIZES
from quaver.lab.recorder.allocator import measure_usage

needs_gathers = pytest.mark.skipif(not HAS_VISIBLE_RESIZES, reason="gathers into fake tensors go unseen in this torch")
CPU = torch.device("cpu")
WITHIN = 0.03
"""Of a measurement: what predictions are to keep."""


class Block(nn.Module):
    """Two linears and an activation between them."""

    def __init__(self, activation=torch.relu, *, width=64, hidden=256):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.activation = activation

    def forward(self, rows):
        return self.down(self.activation(self.up(rows)))


def build_stack(activation=torch.relu, layers=3, **sizes):
    """Blocks named layers.0, layers.1, ..."""
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*(Block(activation, **sizes) for _ in range(layers)))))


def check_explained(model, inputs, loss, *, optimizer=torch.optim.AdamW, **options):
    """Predict a step, train two, and compare the prediction with the second; returns the prediction."""
    prediction = predict_step_memory(model, inputs, loss=loss, optimizer=optimizer, **options)
    trained_by = optimizer(model.parameters())

    def step(mark):
        output = loss(model(*inputs))
        mark()
        output.backward()
        del output
        trained_by.step()
        model.zero_grad(set_to_none=True)

    step(lambda: None)
    with measure_usage(CPU) as measured:
        step(measured.mark)
    check(prediction, measured.usage)
    return prediction


def check(prediction, usage):
    """Compare a prediction with a measurement."""
    assert prediction.step_peak_bytes == pytest.approx(usage.tensor_peak_bytes, rel=WITHIN)
    assert prediction.saved_by_forward_bytes == pytest.approx(usage.saved_bytes, rel=WITHIN)

"""Tests `predict_step_memory` on models with a replaced forward, and on checkpoints with a policy of the user's."""

import pytest
import torch
from torch import nn

from quaver import convert_to_float8_training
from quaver.lab.memory import predict_step_memory
from tests.isolated import isolated
from tests.library.third_party.checkpointed import Block
from tests.thinned import at_night


def explain_closures(recipe):
    model, unused = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2))
    input = torch.randn(512, 64)
    convert_to_float8_training(model, config=recipe)
    for module in (model, model[0]):
        forward = module.forward
        module.forward = lambda input, forward=forward: forward(input)
        try:
            predict_step_memory(model, (input,))
        except Exception as error:  # noqa: BLE001 - as good as a result
            print("refused:", type(error).__name__, error)
        del module.forward
    output = model(input)
    assert type(output) is torch.Tensor
    convert_to_float8_training(unused, config=recipe).load_state_dict(model.state_dict())
    assert output.equal(unused(input.clone()))


@pytest.mark.parametrize("recipe", ["rowwise", *at_night([("rowwise_with_gw_hp",)])])
def test_a_replaced_forward_is_explained_or_refused_and_leaves_no_trace(recipe):
    """A crash of the process would be neither."""
    isolated(explain_closures, recipe)


@pytest.mark.parametrize(("recipe", "policy", "nesting"), [
    ("rowwise", "everything", "nested"),
    *at_night([
        ("tensorwise", "casts, amaxes and matmuls", "flat"),
        ("rowwise_with_gw_hp", "nothing", "reentrant"),
        ("delayed", "amaxes", "nested"),
        ("rowwise", "casts, amaxes and matmuls", "nested"),
    ]),
])  # fmt: skip
def test_the_peak_with_a_users_checkpoint_is_the_same_at_each_call(recipe, policy, nesting):
    block = convert_to_float8_training(Block(policy, nesting), config=recipe)
    peaks = {predict_step_memory(block, (torch.randn(24, 32, requires_grad=True),)).step_peak_bytes for _ in range(2)}
    assert len(peaks) == 1
    assert peaks.pop() > 0

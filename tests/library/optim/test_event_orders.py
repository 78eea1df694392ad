"""Random orders of what users do to an optimizer: steps, new groups and casts determine its bits, and nothing else.

Refused steps and loads, saved and loaded states, and copies in between must not change a parameter or a state.
"""

import copy
import random

import pytest
import torch
from torch import nn

from quaver.optim import CombinedOptimizer, Float8AdamW, Float8Muon
from quaver.optim.combined import list_optimizers
from tests.library.optim.training import assert_same_states, give_gradients
from tests.steps import by_torch_save
from tests.thinned import at_night

EVENTS_OF_A_USER = 20
KINDS = {
    "AdamW": [Float8AdamW],
    "Muon": [Float8Muon],
    "combined": [Float8Muon, Float8AdamW],
    "combined with torch": [torch.optim.SGD, Float8AdamW],
}


def make_optimizer(kinds, groups):
    """Make an optimizer of each kind for its param groups, and combine several."""
    optimizers = [kind(part, lr=1e-2) for kind, part in zip(kinds, groups, strict=True)]
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(*optimizers)


class User:
    """Two matrices in each optimizer, and what a user does to them."""

    def __init__(self, kinds):
        torch.manual_seed(0)
        self.kinds = kinds
        self.parameters = [nn.Parameter(0.1 * torch.randn(16, 300)) for _ in range(2 * len(kinds))]
        pairs = [self.parameters[i : i + 2] for i in range(0, len(self.parameters), 2)]
        self.optimizer = make_optimizer(kinds, [[{"params": [parameter]} for parameter in pair] for pair in pairs])

    def step(self, seed):
        give_gradients(self.parameters, seed)
        self.optimizer.step()

    def add_group(self, seed):
        values = torch.randn(16, 256, generator=torch.Generator().manual_seed(seed))
        self.parameters.append(nn.Parameter(values.to(self.parameters[0].dtype)))
        group = {"params": self.parameters[-1:], "weight_decay": 0.3}
        list_optimizers(self.optimizer)[-1].add_param_group(group)

    def cast(self, seed):
        nn.ParameterList(self.parameters).to([torch.float32, torch.bfloat16][seed % 2])

    def refuse_step(self, seed):
        give_gradients(self.parameters, seed)
        group = self.optimizer.param_groups[-1]
        (parameter,), lr = group["params"], group["lr"]
        if seed % 3 == 0:
            group["lr"] = -1.0
        elif seed % 3 == 1:
            parameter.grad = parameter.grad.to_sparse()
        else:
            dtype = parameter.dtype
            nn.ParameterList([parameter]).double()
        with pytest.raises(ValueError, match="expected"):
            self.optimizer.step()
        group["lr"] = lr
        if seed % 3 == 2:
            nn.ParameterList([parameter]).to(dtype)

    def refuse_load(self, seed):
        saved = copy.deepcopy(self.optimizer.state_dict())
        saved["param_groups"][0]["lr"], saved["param_groups"][-1]["weight_decay"] = 7.0, -1.0
        with pytest.raises(ValueError, match="weight_decay: expected"):
            self.optimizer.load_state_dict(saved)

    def resume(self, seed):
        saved = by_torch_save(self.optimizer.state_dict(), weights_only=True)
        parts = [part.param_groups for part in list_optimizers(self.optimizer)]
        groups = [[{"params": group["params"]} for group in part] for part in parts]
        self.optimizer = make_optimizer(self.kinds, groups)
        self.optimizer.load_state_dict(saved)

    def copy(self, seed):
        self.parameters, self.optimizer = [copy.deepcopy, by_torch_save][seed % 2]((self.parameters, self.optimizer))


CHANGES = ["step", "add_group", "cast"]
OTHERS = ["refuse_step", "refuse_load", "resume", "copy"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [range(3), *at_night([(range(3, 40),)])], ids=str)
def test_only_steps_new_groups_and_casts_change_what_an_optimizer_computes(kind, seeds):
    happened = set()
    for seed in seeds:
        draw = random.Random(seed)
        events = [(draw.choice(["step", *CHANGES, *OTHERS]), draw.randrange(1000)) for _ in range(EVENTS_OF_A_USER)]
        user, plain = User(KINDS[kind]), User(KINDS[kind])
        for event, number in [*events, ("step", 0)]:
            getattr(user, event)(number)
            if event in CHANGES:
                getattr(plain, event)(number)
            states = [([*side.parameters], side.optimizer) for side in (user, plain)]
            try:
                assert_same_states(*states)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {event} in {events}: {error}") from error
            happened.add(event)
    assert happened == {*CHANGES, *OTHERS}

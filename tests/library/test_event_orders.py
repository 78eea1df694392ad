"""Random orders of what users do to a model: after each event it computes what a fresh conversion of its weights does.

A stale cache, a forgotten hook or a wrong class would show as other bits of the output or of a gradient.
"""

import copy
import io
import pickle
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quaver import (
    Float8Linear,
    Float8LinearRecipeName,
    cast_weights_once,
    convert_to_float8_training,
    convert_to_high_precision,
    float8_scaling_state,
    monitor,
    set_high_precision_matmuls,
    sync_float8_amax_and_scale_history,
    use_float8_primary_weights,
)
from quaver.checkpointing.store import stop_storing_activations, store_activations_in_float8
from quaver.linear.class_change import get_class_parts
from quaver.optim import Float8AdamW
from tests.steps import assert_same, results_of
from tests.thinned import at_night

MATMULS = ("output", "grad_input", "grad_weight")
EVENTS = 24


class Net(nn.Module):
    """Three linears that share an input, a linear with a bias, a norm, and a head in high precision."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.RMSNorm(48), nn.Linear(48, 40, bias=False)
        self.q, self.k, self.v = (nn.Linear(48, 32, bias=False) for _ in range(3))
        self.o = nn.Linear(32, 48)
        self.recomputes = False

    def attend(self, hidden):
        return self.o(torch.sigmoid(self.q(hidden)) * self.k(hidden) + self.v(hidden))

    def forward(self, input):
        hidden = self.norm(input)
        if self.recomputes and self.training:
            return self.head(input + checkpoint(self.attend, hidden, use_reentrant=False))
        return self.head(input + self.attend(hidden))


class User:
    """A model and the state of what a user did to it. Each event is a method that begins with `do_`."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = self.random.choice([torch.float32, torch.bfloat16])
        self.model, self.recipe, self.matmuls = Net().to(self.dtype), None, {}
        self.stores = self.is_primary = False
        self.make_optimizer()

    def make_optimizer(self):
        kinds = [lambda parameters: torch.optim.SGD(parameters, lr=0.02), Float8AdamW]
        self.optimizer = self.random.choice(kinds)([p for p in self.model.parameters() if p.requires_grad])

    def draw(self):
        tokens = self.random.choice([1, 3, 32])
        return torch.randn(2, tokens, 48, generator=torch.Generator().manual_seed(self.random.randrange(10**9))).to(
            self.dtype
        )

    def run_backward(self):
        self.model(self.draw()).float().square().mean().backward()

    def convert(self, model):
        return convert_to_float8_training(model, config=self.recipe, module_filter_fn=lambda _, name: name != "head")

    def do_convert(self):
        if self.recipe is None:
            self.recipe = self.random.choice(list(Float8LinearRecipeName)).value
            self.convert(self.model)

    def do_convert_back(self):
        if not self.is_primary and self.recipe is not None:
            convert_to_high_precision(self.model)
            self.recipe, self.matmuls = None, {}
            self.make_optimizer()

    def do_step(self):
        self.run_backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.random.random() < 0.5)
        if self.recipe is not None and "delayed" in self.recipe:
            sync_float8_amax_and_scale_history(self.model)

    def do_accumulate(self):
        if self.recipe is not None:
            with cast_weights_once(self.model):
                self.run_backward()
                self.run_backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def do_monitored_step(self):
        if self.recipe is not None:
            with monitor(self.model, every=1):
                self.do_step()

    def do_evaluate(self):
        contexts = [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
        self.model.train(self.random.random() < 0.5)
        with self.random.choice(contexts)():
            self.model(self.draw())

    def do_write(self):
        parameter = self.random.choice([p for p in self.model.parameters() if p.dim() == 2])
        values = 0.1 * torch.randn(parameter.shape).to(parameter.dtype)
        with torch.no_grad():
            ways = [lambda: parameter.mul_(1.25), lambda: parameter.copy_(values), self.load_halved]
            if not self.is_primary:
                ways += [lambda: parameter.data.add_(0.01), lambda: setattr(parameter, "data", values)]
            self.random.choice(ways)()

    def load_halved(self):
        self.model.load_state_dict({name: 0.5 * value for name, value in self.model.state_dict().items()})

    def do_fail(self):
        linear = self.random.choice([self.model.q, self.model.v, self.model.o])
        register = self.random.choice([linear.register_forward_pre_hook, linear.register_forward_hook])
        hook = register(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.run_backward()
        hook.remove()
        self.optimizer.zero_grad()

    def do_copy(self):
        if not self.is_primary:
            copies = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), save_and_load]
            self.model = self.random.choice(copies)(self.model)
            self.make_optimizer()

    def do_recompute(self):
        self.model.recomputes = not self.model.recomputes

    def do_store(self):
        (stop_storing_activations if self.stores else store_activations_in_float8)(self.model)
        self.stores = not self.stores

    def do_make_primary(self):
        if self.recipe is not None and not self.is_primary and not self.matmuls and self.recipe != "delayed":
            self.optimizer = use_float8_primary_weights(self.model, self.optimizer, master_dtype=self.dtype)
            self.is_primary = True

    def do_switch_matmuls(self):
        if self.recipe is not None and not self.is_primary:
            linears = [name for name, module in self.model.named_modules() if isinstance(module, Float8Linear)]
            self.matmuls = {name: self.random.sample(MATMULS, self.random.randrange(3)) for name in linears}
            set_high_precision_matmuls(self.model, lambda name: self.matmuls[name])

    def do_freeze(self):
        if not self.is_primary:
            self.model.q.requires_grad_(not self.model.q.weight.requires_grad)
            self.make_optimizer()

    def make_fresh(self):
        """Return a new model with the weights of this one, converted and configured in the same way at once."""
        fresh = Net().to(self.dtype)
        fresh.load_state_dict({name: value.detach().clone() for name, value in self.model.state_dict().items()})
        fresh.q.requires_grad_(self.model.q.weight.requires_grad)
        fresh.recomputes = self.model.recomputes
        if self.recipe is not None:
            self.convert(fresh)
            float8_scaling_state(fresh).load_state_dict(copy.deepcopy(float8_scaling_state(self.model).state_dict()))
        if self.matmuls:
            set_high_precision_matmuls(fresh, lambda name: self.matmuls[name])
        if self.stores:
            store_activations_in_float8(fresh)
        return fresh

    def check(self):
        input = self.draw()
        results = []
        for model in (self.model, self.make_fresh()):
            model.train().zero_grad()
            results.append(results_of(model, input))
            model.zero_grad()
        assert_same(*results)
        assert (get_class_parts(self.model.q).float8 is not None) == (self.recipe is not None)


def save_and_load(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("seed", [*range(12), *at_night((seed,) for seed in range(12, 80))])
def test_a_model_computes_what_a_fresh_conversion_does_after_any_events(seed):
    user, done = User(seed), []
    events = [name for name in dir(user) if name.startswith("do_")]
    for _ in range(EVENTS):
        done.append(user.random.choice(events))
        getattr(user, done[-1])()
        try:
            user.check()
        except AssertionError as error:
            raise AssertionError(f"{user.recipe}, {user.dtype}, after {', '.join(done)}: {error}") from error

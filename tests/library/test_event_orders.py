"""Random orders of what users do to a model: after each event it computes what a fresh conversion of its weights does.

A stale cache, a forgotten hook or a wrong class would show as other bits of the output or of a gradient.
"""

import copy
import pickle
import random
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import quaver
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
from quaver.activations.store import stop_storing_activations, store_activations_in_float8
from quaver.experts.module_weight import ModuleWeight
from quaver.linear.class_change import get_class_parts
from quaver.optim import CombinedOptimizer, Float8AdamW, Float8Muon
from quaver.weights.cast_once import is_cast_once
from quaver.weights.primary_weight import Float8PrimaryWeight
from tests.steps import assert_same, by_torch_save, compute_results
from tests.thinned import at_night

MATMULS = ("output", "grad_input", "grad_weight")
EVENTS_OF_A_USER = 24


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


def combine(parameters):
    matrices, vectors = ([p for p in parameters if (p.dim() == 2) == is_matrix] for is_matrix in (True, False))
    return CombinedOptimizer(Float8Muon(matrices, lr=0.02), Float8AdamW(vectors))


EVENTS = {}
"""Methods of `User` by name, each with the states in which its event can happen."""


def event(is_enabled=lambda user: True):
    """Add the method below to EVENTS."""

    def add(method):
        EVENTS[method.__name__] = (method, is_enabled)
        return method

    return add


class Interrupt:
    """Raises KeyboardInterrupt at the given call of quaver's functions, as Ctrl-C may.

    Python swallows it in what weakrefs call, and in `__enter__` and `__exit__` no scope can close.
    """

    def __init__(self, call):
        self.call, self.was_raised = call, False

    def profile(self, frame, kind, _):
        name = frame.f_code.co_name
        is_exempt = name.startswith(("_clear", "clear_")) or name in ("__enter__", "__exit__", "close")
        if kind == "call" and frame.f_code.co_filename.startswith(quaver.__path__[0]) and not is_exempt:
            self.call -= 1
            if self.call == 0:
                self.was_raised = True
                raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self.profile)
        return self

    def __exit__(self, kind, *_):
        sys.setprofile(None)
        return kind is KeyboardInterrupt and self.was_raised


class User:
    """A model and the state of what a user did to it. Each event asserts that it happened."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = self.random.choice([torch.float32, torch.bfloat16])
        self.model, self.recipe, self.matmuls = Net().to(self.dtype), None, {}
        self.stores = self.is_primary = False
        self.compiles = seed % 4 == 0  # it takes seconds
        self.make_optimizer()

    def make_optimizer(self):
        kinds = [lambda parameters: torch.optim.SGD(parameters, lr=0.02), Float8AdamW, combine]
        self.optimizer = self.random.choice(kinds)([p for p in self.model.parameters() if p.requires_grad])

    def draw(self):
        tokens = self.random.choice([1, 3, 32])
        return torch.randn(2, tokens, 48, generator=torch.Generator().manual_seed(self.random.randrange(10**9))).to(
            self.dtype
        )

    def run_backward(self):
        self.model(self.draw()).float().square().mean().backward()

    def convert_model(self, model):
        convert_to_float8_training(model, config=self.recipe, module_filter_fn=lambda _, name: name != "head")

    def change_weights(self, change):
        before = [weight.detach().clone() for weight in self.model.parameters()]
        change()
        assert not all(map(torch.equal, before, self.model.parameters()))

    @event(lambda user: user.recipe is None)
    def convert(self):
        self.recipe = self.random.choice(list(Float8LinearRecipeName)).value
        self.convert_model(self.model)
        assert len(self.find_linears()) == 4

    def find_linears(self):
        return {name: module for name, module in self.model.named_modules() if isinstance(module, Float8Linear)}

    @event(lambda user: user.recipe is not None and not user.is_primary)
    def convert_back(self):
        convert_to_high_precision(self.model)
        assert not self.find_linears()
        self.recipe, self.matmuls = None, {}
        self.make_optimizer()

    @event()
    def step(self):
        self.run_backward()
        self.change_weights(self.optimizer.step)
        self.optimizer.zero_grad(set_to_none=self.random.random() < 0.5)
        if self.recipe is not None and "delayed" in self.recipe:
            sync_float8_amax_and_scale_history(self.model)

    @event(lambda user: user.recipe is not None)
    def accumulate(self):
        with cast_weights_once(self.model):
            self.run_backward()
            assert is_cast_once(ModuleWeight(self.model.k)) != self.is_primary
            self.run_backward()
        self.change_weights(self.optimizer.step)
        self.optimizer.zero_grad()

    @event(lambda user: user.recipe is not None)
    def step_monitored(self):
        with monitor(self.model, every=1) as watch:
            self.step()
            watch.step()
        assert len(watch.samples) == 1

    @event()
    def evaluate(self):
        is_training = self.random.random() < 0.5
        contexts = [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
        with self.random.choice(contexts)():
            output = self.model.train(is_training)(self.draw())
        assert output.dtype == self.dtype or output.requires_grad  # with autocast

    @event()
    def write(self):
        parameter = self.random.choice([p for p in self.model.parameters() if p.dim() == 2])
        values = 0.1 * torch.randn(parameter.shape).to(parameter.dtype)
        ways = [lambda: parameter.mul_(1.25), lambda: parameter.copy_(values), self.load_halved]
        if not self.is_primary:
            ways += [lambda: parameter.data.add_(0.01), lambda: setattr(parameter, "data", values)]
        with torch.no_grad():
            self.change_weights(self.random.choice(ways))

    def load_halved(self):
        self.model.load_state_dict({name: 0.5 * value for name, value in self.model.state_dict().items()})

    @event()
    def fail(self):
        linear = self.random.choice([self.model.q, self.model.v, self.model.o])
        register = self.random.choice([linear.register_forward_pre_hook, linear.register_forward_hook])
        hook = register(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.run_backward()
        hook.remove()
        self.optimizer.zero_grad()

    @event(lambda user: user.recipe is not None)
    def interrupt(self):
        """Ctrl-C in a forward, a backward, an optimizer's step, a sync, or a monitor of them."""
        step, call = (
            self.random.choice([self.step, self.accumulate, self.step_monitored]),
            self.random.randrange(1, 400),
        )
        with Interrupt(call) as interrupt:
            step()
        while not interrupt.was_raised:
            call //= 2
            with Interrupt(call) as interrupt:
                step()
        self.optimizer.zero_grad()

    @event(lambda user: user.recipe is not None)
    def train_two(self):
        """Run both forwards on one input before both backwards, of this model and of one with another recipe."""
        other, input = Net().to(self.dtype), self.draw()
        convert_to_float8_training(other, config=self.random.choice(list(Float8LinearRecipeName)))
        alone = [compute_results(model.train(), input) for model in (self.model, other)]
        both = nn.ModuleList([self.model, other])
        together = compute_results(both, input, call=lambda input: torch.stack([self.model(input), other(input)]))
        assert_same(together[2:], [*alone[0][2:], *alone[1][2:]])
        self.optimizer.zero_grad()

    @event(lambda user: user.recipe is not None and not user.stores and user.compiles)
    def compile(self):
        self.compiles, input = False, self.draw()
        models = self.model.train(), self.make_fresh()
        assert_same(
            *(compute_results(model, input, call=torch.compile(model, backend="aot_eager")) for model in models)
        )
        torch.compiler.reset()
        self.optimizer.zero_grad()

    @event(lambda user: not user.is_primary)
    def copy(self):
        original = self.model
        copies = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), by_torch_save]
        self.model = self.random.choice(copies)(original)
        assert self.model.q.weight.data_ptr() != original.q.weight.data_ptr()
        self.make_optimizer()

    @event()
    def recompute(self):
        self.model.recomputes = not self.model.recomputes
        with mock.patch.object(self.model, "attend", wraps=self.model.attend) as attend:
            self.model.train()
            self.run_backward()
        assert attend.call_count == 1 + self.model.recomputes
        self.optimizer.zero_grad()

    @event()
    def store(self):
        self.stores = not self.stores
        if self.stores:
            store_activations_in_float8(self.model, modules=[""])
        else:
            stop_storing_activations(self.model)
        assert any(get_class_parts(module).wrappers for module in self.model.modules()) == self.stores

    @event(lambda user: user.recipe not in (None, "delayed") and not user.is_primary and not user.matmuls)
    def make_primary(self):
        self.optimizer = use_float8_primary_weights(self.model, self.optimizer, master_dtype=self.dtype)
        self.is_primary = True
        assert isinstance(self.model.k.weight, Float8PrimaryWeight)

    @event(lambda user: user.recipe is not None and not user.is_primary)
    def switch_matmuls(self):
        self.matmuls = {name: self.random.sample(MATMULS, self.random.randrange(3)) for name in self.find_linears()}
        set_high_precision_matmuls(self.model, lambda name: self.matmuls[name])
        for name, linear in self.find_linears().items():
            assert set(linear.config.high_precision_matmuls) == set(self.matmuls[name])

    @event(lambda user: not user.is_primary)
    def freeze(self):
        self.model.q.requires_grad_(not self.model.q.weight.requires_grad)
        self.make_optimizer()
        self.run_backward()
        assert (self.model.q.weight.grad is None) != self.model.q.weight.requires_grad
        self.optimizer.zero_grad()

    def make_fresh(self):
        """Return a new model with the weights of this one, converted and configured in the same way at once."""
        fresh = Net().to(self.dtype)
        fresh.load_state_dict({name: value.detach().clone() for name, value in self.model.state_dict().items()})
        fresh.q.requires_grad_(self.model.q.weight.requires_grad)
        fresh.recomputes = self.model.recomputes
        if self.recipe is not None:
            self.convert_model(fresh)
            float8_scaling_state(fresh).load_state_dict(copy.deepcopy(float8_scaling_state(self.model).state_dict()))
        if self.matmuls:
            set_high_precision_matmuls(fresh, lambda name: self.matmuls[name])
        if self.stores:
            store_activations_in_float8(fresh, modules=[""])
        return fresh

    def check(self):
        input = self.draw()
        results = []
        for model in (self.model, self.make_fresh()):
            model.train().zero_grad()
            results.append(compute_results(model, input))
            model.zero_grad()
        assert_same(*results)
        assert (get_class_parts(self.model.q).float8 is not None) == (self.recipe is not None)
        for linear in self.find_linears().values():
            assert linear.probes is None
            assert not linear.cast_once_weights


@pytest.mark.parametrize("seeds", [range(12), *at_night([(range(12, 80),)])], ids=str)
def test_a_model_computes_what_a_fresh_conversion_does_after_any_events(seeds):
    happened = set()
    for seed in seeds:
        user, done = User(seed), []
        for _ in range(EVENTS_OF_A_USER):
            done.append(user.random.choice([name for name, (_, is_enabled) in EVENTS.items() if is_enabled(user)]))
            try:
                EVENTS[done[-1]][0](user)
                user.check()
            except AssertionError as error:
                where = f"seed {seed}, {user.recipe}, {user.dtype}, after {', '.join(done)}"
                raise AssertionError(f"{where}: {error}") from error
        happened |= set(done)
    assert happened == set(EVENTS)

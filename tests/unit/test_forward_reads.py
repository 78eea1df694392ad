"""A gathered weight lets go of its cast for the output when no recomputation will read it, and not before."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from quaver import float8_linear, linear_gemms
from quaver.forward_reads import ForwardReads
from tests.distributed.models import config_of
from tests.unit.test_tensor import as_float8_weight

CONFIG = config_of("rowwise")
SMALL, LARGE = 6, 2500  # tokens of a linear that is one function of autograd, and of one that is two
TOKENS = pytest.mark.parametrize("tokens", [SMALL, LARGE])


class Weight:
    """A square weight as FSDP2 would have gathered it for a backward that recomputes; called, it is a linear."""

    def __init__(self, lets_go=True, requires_grad=True):
        torch.manual_seed(0)
        self.tensor = as_float8_weight(torch.randn(28, 28), CONFIG).requires_grad_(requires_grad)
        self.codes = self.tensor.data_fp8.clone()
        self.reads = ForwardReads(self.let_go)
        self.tensor.forward_reads = self.reads if lets_go else None

    def __call__(self, input):
        return float8_linear(input, self.tensor, config=CONFIG)

    def let_go(self):
        assert not self.is_gone
        self.tensor.data_fp8.untyped_storage().resize_(0)

    @property
    def is_gone(self):
        return self.tensor.data_fp8.untyped_storage().size() == 0

    def gather(self, *, in_backward):
        self.tensor.data_fp8.untyped_storage().resize_(self.codes.nbytes)
        with torch.autograd._unsafe_preserve_version_counter(self.tensor.data_fp8):
            self.tensor.data_fp8.copy_(self.codes)
        self.reads.gather(in_backward=in_backward)


def recomputed(function, *inputs, **options):
    return checkpoint(function, *inputs, **{"use_reentrant": False, "preserve_rng_state": False, **options})


def make_input(tokens=SMALL, requires_grad=True):
    return torch.randn(tokens, 28, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)


def gradients(network, tokens=SMALL, lets_go=True):
    """Of the input and the weight after `network(weight, input)` and its backward; and the weight."""
    weight, input = Weight(lets_go), make_input(tokens)
    network(weight, input).sin().sum().backward()
    return input.grad, weight.tensor.grad, weight


def once(weight, input):
    return weight(input)


def in_a_checkpoint(weight, input):
    return recomputed(weight, input)


def in_two_checkpoints(weight, input):
    return recomputed(weight, recomputed(weight, input).tanh())


def twice_in_a_checkpoint(weight, input):
    return recomputed(lambda hidden: weight(weight(hidden).tanh()), input)


def in_nested_checkpoints(weight, input):
    return recomputed(lambda hidden: recomputed(weight, hidden.tanh()).sin(), input)


def in_a_checkpoint_to_its_end(weight, input):
    with set_checkpoint_early_stop(False):
        return recomputed(weight, input)


NETWORKS = [
    once,
    in_a_checkpoint,
    in_two_checkpoints,
    twice_in_a_checkpoint,
    in_nested_checkpoints,
    in_a_checkpoint_to_its_end,
]


@TOKENS
@pytest.mark.parametrize("network", NETWORKS)
def test_a_backward_lets_go_when_the_last_recomputation_is_over(network, tokens):
    of_input, of_weight, weight = gradients(network, tokens)
    expected_of_input, expected_of_weight, kept = gradients(network, tokens, lets_go=False)
    assert weight.is_gone
    assert not kept.is_gone
    assert torch.equal(of_input, expected_of_input)
    assert torch.equal(of_weight, expected_of_weight)


@TOKENS
def test_it_goes_before_the_backward_multiplies(tokens, monkeypatch):
    weight, input, seen = Weight(), make_input(tokens), []
    loss = recomputed(lambda hidden: weight(weight(hidden).tanh()), input).sum()
    multiply = linear_gemms._matmul

    def watch(*args):
        seen.append(weight.is_gone)
        return multiply(*args)

    monkeypatch.setattr(linear_gemms, "_matmul", watch)
    loss.backward()
    assert seen == [False, False, False, True, True]  # one recomputed, two of each backward


@TOKENS
def test_it_waits_for_the_backwards_of_other_microbatches(tokens):
    weight, first, second = Weight(), make_input(tokens), make_input(tokens)
    losses = [recomputed(weight, input).sin().sum() for input in (first, second)]
    losses[0].backward()
    assert not weight.is_gone
    losses[1].backward()
    assert weight.is_gone
    assert torch.equal(first.grad, second.grad)


@TOKENS
def test_it_waits_for_the_last_backward_of_a_graph(tokens):
    weight, input = Weight(), make_input(tokens)
    loss = recomputed(weight, input).sin().sum()
    loss.backward(retain_graph=True)
    assert not weight.is_gone
    loss.backward()
    assert weight.is_gone
    assert torch.equal(input.grad / 2, gradients(in_a_checkpoint, tokens)[0])


def test_a_graph_that_is_kept_after_its_backward_holds_nothing_up():
    weight = Weight()
    losses = []
    for _ in range(2):
        weight.gather(in_backward=False)
        losses.append(recomputed(weight, make_input()).sin().sum())
        weight.gather(in_backward=True)
        losses[-1].backward()
        assert weight.is_gone


def test_a_graph_that_is_dropped_holds_nothing_up():
    weight = Weight()
    weight(make_input()).sum()
    recomputed(weight, make_input()).sum()  # this one, until the next step: what was dropped may be computed again
    for is_known in (False, True):
        weight.gather(in_backward=False)
        loss = recomputed(weight, make_input()).sum()
        weight.gather(in_backward=True)
        loss.backward()
        assert weight.is_gone == is_known


def test_a_forward_without_gradients_holds_nothing_up():
    weight = Weight()
    with torch.no_grad():
        weight(make_input())
        recomputed(weight, make_input())
    with torch.inference_mode():
        weight(make_input())
    loss = recomputed(weight, make_input()).sum()
    with torch.no_grad():
        weight(make_input())
    loss.backward()
    assert weight.is_gone


# ---- what is read again without a token ------------------------------------------------------------------------------


def reentrant(weight, input):
    return checkpoint(weight, input, use_reentrant=True, preserve_rng_state=False)


def reentrant_first(weight, input):
    return recomputed(weight, reentrant(weight, input).tanh())


def reentrant_last(weight, input):
    return reentrant(weight, recomputed(weight, input).tanh())


def without_gradient(weight, hidden):
    with torch.no_grad():
        return weight(hidden)


def let_go_of(weight, hidden):
    return weight(hidden).detach()


def target_first(target, weight, input):
    """A checkpoint reads a weight so that its linear has no backward, beside what has one; another reads it later."""
    hidden = recomputed(lambda hidden: hidden.tanh() * target(weight, hidden), input)
    return recomputed(weight, hidden)


def of_a_constant_first(weight, input):
    constant = make_input(requires_grad=False)
    hidden = recomputed(lambda hidden: hidden.tanh() * weight(constant), input)
    return recomputed(weight, hidden)


UNSEEN = [
    reentrant_first,
    reentrant_last,
    partial(target_first, without_gradient),
    partial(target_first, let_go_of),
]


@pytest.mark.parametrize("network", UNSEEN)
def test_what_may_be_read_unseen_stays(network):
    of_input, of_weight, weight = gradients(network)
    expected_of_input, expected_of_weight, _ = gradients(network, lets_go=False)
    assert not weight.is_gone
    assert torch.equal(of_input, expected_of_input)
    assert torch.equal(of_weight, expected_of_weight)


def test_a_frozen_weight_that_is_read_for_a_constant_stays():
    """The linear of a constant has no backward, and is computed again with what is multiplied by it."""
    weight, input = Weight(requires_grad=False), make_input()
    of_a_constant_first(weight, input).sum().backward()
    assert not weight.is_gone


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_compiled_code_recomputes_stays(backend):
    """Compiled code leaves no token, and reads without a check."""
    compiled = torch.compile(lambda input, weight: float8_linear(input, weight, config=CONFIG), backend=backend)

    def network(weight, input):
        hidden = recomputed(lambda hidden: compiled(hidden, weight.tensor), input)
        return recomputed(weight, hidden.tanh())

    for _ in range(2):  # when it is compiled, and when it is called again
        of_input, of_weight, weight = gradients(network)
        expected_of_input, expected_of_weight, _ = gradients(network, lets_go=False)
        assert not weight.is_gone
        assert torch.equal(of_input, expected_of_input)
        assert torch.equal(of_weight, expected_of_weight)


def test_what_was_unseen_counts_for_its_step_only():
    weight, input = Weight(), make_input()
    for network, is_gone in ((reentrant_last, False), (in_a_checkpoint, True)):
        weight.gather(in_backward=False)
        loss = network(weight, input).sum()
        weight.gather(in_backward=True)
        loss.backward()
        assert weight.is_gone == is_gone


def test_nothing_waits_for_the_garbage_collector():
    """References to gathered memory are counted, and a count that differed between ranks would hang them."""
    gc.disable()
    try:
        weight = Weight()
        recomputed(weight, make_input()).sum().backward()
        dead = weakref.ref(weight), weakref.ref(weight.reads), weakref.ref(weight.tensor)
        del weight
        assert [each() for each in dead] == [None] * 3
    finally:
        gc.enable()


def test_what_has_gone_is_not_read_in_silence():
    weight, input = Weight(), make_input()
    recomputed(weight, input).sum().backward()
    for forward in (weight, in_a_checkpoint):
        with pytest.raises(RuntimeError, match="has been through its recomputations.*reshard_after_forward=False"):
            forward(input) if forward is weight else forward(weight, input)


# ---- what a linear lets go of itself ---------------------------------------------------------------------------------


@TOKENS
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_linear_lets_go_of_what_it_saved_before_it_multiplies(tokens, keeps_graph, monkeypatch):
    """Of the input that a checkpoint keeps, too, which is alive in its backward only as long as it is not cast."""
    weight, alive = Weight(), []
    hidden = make_input(tokens) * 1.5
    watched = StorageWeakRef(hidden.untyped_storage())
    loss = recomputed(weight, hidden).sum()
    del hidden
    make_grad_input = linear_gemms._grad_input

    def watch(*args):
        alive.append(not watched.expired())
        return make_grad_input(*args)

    monkeypatch.setattr(linear_gemms, "_grad_input", watch)
    loss.backward(retain_graph=keeps_graph)
    assert alive == [keeps_graph]
    if keeps_graph:
        loss.backward()
        assert alive == [True, False]

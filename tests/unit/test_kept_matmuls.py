"""A recomputation that looks all outputs of a weight up does without its cast for the output; no other one has to."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quaver import float8_linear
from quaver.activation_checkpointing import apply_activation_checkpointing
from quaver.gemm import native_operands
from quaver.saved_hooks import nothing_is_recomputed, only_keeps
from quaver.tensor import NeverRead
from tests.unit.test_forward_reads import CONFIG, LARGE, SMALL, Weight, make_input, recomputed

TOKENS = pytest.mark.parametrize("tokens", [SMALL, LARGE])
KEPT, COMPUTED_AGAIN, NOT_COMPUTED_AGAIN = 0, 1, 2  # the places of the weights of a block, by what becomes of outputs


def plainly(weight, hidden):
    return weight(hidden)


class Gathered(Weight):
    def let_go(self):
        self.tensor.data_fp8.untyped_storage().resize_(0)


class Block(nn.Module):
    """Four linears, of which the policy keeps the first and the third in all forwards; `read` calls the first two.

    Not the last, whose recomputation does not get there; nor the second, whatever weight that reads.
    """

    def __init__(self, read=plainly, *, shares=False):
        super().__init__()
        self.weights = [Gathered(), Gathered(), Gathered()]
        self.read = read
        self.second = KEPT if shares else COMPUTED_AGAIN

    def forward(self, input):
        hidden = self.read(self.weights[KEPT], input).tanh()
        hidden = self.read(self.weights[self.second], hidden).sin()
        hidden = self.weights[KEPT](hidden).tanh()
        return self.weights[NOT_COMPUTED_AGAIN](hidden)


def with_policy(block):
    apply_activation_checkpointing([block], mode="selective", preserve_rng_state=False)
    return block


def gather(block, *, in_backward, all_casts=False):
    """Gather as FSDP2 would. Returns for each weight whether the backward is to go without the forward's cast."""
    without = []
    for weight in block.weights:
        without.append(in_backward and weight.reads.are_kept and not all_casts)
        weight.gather(in_backward=in_backward)
        if without[-1]:
            weight.tensor.data_fp8.untyped_storage().resize_(0)
    return without


def step(block, tokens=SMALL, *, all_casts=False, call=None, losses=1, hooks=nullcontext, **options):
    """Gradients of a step, and what `gather` returns before its backward."""
    inputs = [make_input(tokens) for _ in range(losses)]
    gather(block, in_backward=False)
    with hooks():
        outputs = [(call or block)(input).sin().sum() for input in inputs]
    without = gather(block, in_backward=True, all_casts=all_casts)
    torch.stack(outputs).sum().backward(**options)
    grads = [input.grad for input in inputs] + [weight.tensor.grad for weight in block.weights]
    return [None if grad is None else grad.clone() for grad in grads], without


def equal(grads, expected):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def check(expected_without, *, tokens=SMALL, steps=1, make=Block, call=lambda block: None, **options):
    """Steps do without these casts, and give what they give with all of them."""
    block, reference = with_policy(make()), with_policy(make())
    for _ in range(steps):
        grads, without = step(block, tokens, call=call(block), **options)
        expected, _ = step(reference, tokens, call=call(reference), all_casts=True, **options)
        assert without == expected_without
        assert equal(grads, expected)


@TOKENS
def test_what_is_looked_up_needs_no_cast_for_the_output(tokens):
    check([True, False, False], tokens=tokens, steps=3)


def test_one_output_that_is_computed_again_needs_it():
    check([False, False, False], make=lambda: Block(shares=True), steps=2)


def test_microbatches_may_share_a_gather():
    check([True, False, False], losses=2, steps=2)


@only_keeps
def pack(tensor):
    return tensor


def keeping_hooks():
    return saved_tensors_hooks(pack, lambda tensor: tensor)


def test_hooks_that_only_keep_change_nothing():
    check([True, False, False], hooks=keeping_hooks, steps=2)


@pytest.mark.parametrize("hooks", [nullcontext, keeping_hooks])
def test_a_checkpoint_around_the_policys_reads_everything_again(hooks):
    def around(block):
        def region(input):
            with hooks():  # which hides the checkpoint around
                return block(input)

        return lambda input: recomputed(region, input)

    check([False, False, False], call=around, steps=2)


def test_a_reentrant_checkpoint_around_reads_everything_again():
    def around(block):
        return lambda input: checkpoint(block, input, use_reentrant=True, preserve_rng_state=False)

    check([False, False, False], call=around, steps=2)


def test_a_checkpoint_inside_reads_its_part_again():
    check([False, False, False], make=lambda: Block(lambda weight, hidden: recomputed(weight, hidden)), steps=2)


def test_other_hooks_get_everything():
    check([False, False, False], hooks=save_on_cpu, steps=2)


def test_hooks_inside_get_everything():
    def read(weight, hidden):
        with save_on_cpu():
            return weight(hidden)

    check([False, False, False], make=lambda: Block(read), steps=2)


@pytest.mark.parametrize("how", ["values", "clone", "compiled"])
def test_what_is_read_in_another_way_is_gathered(how):
    compiled = torch.compile(lambda hidden, weight: float8_linear(hidden, weight, config=CONFIG), backend="aot_eager")
    ways = {
        "values": lambda weight: weight.tensor.to_high_precision().sum(),
        "clone": lambda weight: weight.tensor.detach().clone().data_fp8.float().sum(),
        "compiled": lambda weight: compiled(make_input(), weight.tensor).detach().sum(),
    }

    def read(weight, hidden):
        return weight(hidden) * ways[how](weight).clamp(1, 2)

    check([False, False, False], make=lambda: Block(read))


def test_a_padded_copy_is_made_again():
    padded = replace(CONFIG, pad_inner_dim=True)

    def read(weight, hidden):
        return float8_linear(hidden, weight.tensor, config=padded)

    check([False, False, False], make=lambda: Block(read))


def test_the_forward_of_a_graph_that_was_dropped_is_not_forgotten():
    """When it was dropped differs between ranks, so that must not tell what they gather."""
    block = with_policy(Block())
    gather(block, in_backward=False)
    block.weights[KEPT](make_input()).sum()
    for _ in range(2):
        assert step(block)[1] == [False, False, False]


def test_a_backward_that_keeps_its_graph_is_not_the_last():
    block, input = with_policy(Block()), make_input()
    gather(block, in_backward=False)
    outer = block.weights[KEPT](input).sum()
    outer.backward(retain_graph=True)
    assert step(block)[1] == [False, False, False]
    outer.backward()
    assert step(block)[1] == [True, False, False]


def test_forwards_without_gradients_count_for_nothing():
    block = with_policy(Block())
    for grad_mode in (torch.no_grad, torch.inference_mode):
        gather(block, in_backward=False)
        with grad_mode():
            block(make_input())
        assert step(block)[1] == [True, False, False]


def test_what_was_read_unseen_counts_for_its_step_only():
    block = with_policy(Block())
    assert step(block)[1][KEPT]
    assert not step(block, call=lambda input: (block.weights[KEPT].reads.read_unseen(), block(input))[1])[1][KEPT]
    assert step(block)[1][KEPT]


def test_a_forward_in_the_backward_is_refused():
    """Of the same weight, by a hook that no forward could have announced."""
    block, input = with_policy(Block()), make_input()
    gather(block, in_backward=False)
    output = block(input)
    output.register_hook(lambda grad: block.weights[KEPT](input.detach()) * 0 + grad)
    assert gather(block, in_backward=True)[KEPT]
    with pytest.raises(RuntimeError, match="reshard_after_forward=False"):
        output.sum().backward()


class LooksNothingUp(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@TOKENS
def test_to_multiply_with_what_has_no_memory_is_an_error(tokens):
    """Should the result not be there, there is none, rather than a wrong one."""
    weight = Weight()
    weight.let_go()
    with LooksNothingUp() as mode:
        weight.reads.keep(mode)
        with pytest.raises(RuntimeError, match=r"exact_float8_mm.* would read a weight that was not gathered"):
            weight(make_input(tokens))


def test_a_stand_in_is_laid_out_for_hardware_without_a_read():
    """What a GPU's float8 matmul is given, when it is looked up."""
    codes = torch.zeros(48, 32, dtype=torch.float8_e4m3fn)
    stand_in = NeverRead.in_place_of(codes)
    a, scales = codes[:16], (torch.ones(16, 1), torch.ones(1, 48))
    b = native_operands(a, stand_in.t(), *scales)[1]
    expected = native_operands(a, codes.t(), *scales)[1]
    assert type(b) is NeverRead
    assert (b.shape, b.stride(), b.dtype, b.device) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
        expected.device,
    )


def test_nothing_that_a_checkpoint_keeps_outlives_its_backward():
    gc.disable()
    try:
        block, kept = with_policy(Block()), []
        gather(block, in_backward=False)
        hidden = make_input() * 1.5
        kept.append(weakref.ref(hidden))
        output = block(hidden).sum()
        recomputations = list(block.weights[KEPT].reads._recomputations)
        assert len(recomputations) == 1
        kept.append(weakref.ref(recomputations.pop()))
        del hidden
        output.backward()
        del output
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()


def test_hooks_are_left_as_they_were():
    seen = []
    with saved_tensors_hooks(lambda tensor: seen.append("outer") or tensor, lambda tensor: tensor), keeping_hooks():
        assert not nothing_is_recomputed()
        make_input().sin()
        with saved_tensors_hooks(lambda tensor: seen.append("inner") or tensor, lambda tensor: tensor):
            assert not nothing_is_recomputed()
            make_input().sin()
    with keeping_hooks(), keeping_hooks():
        assert nothing_is_recomputed()
    assert nothing_is_recomputed()
    assert seen == ["inner"]

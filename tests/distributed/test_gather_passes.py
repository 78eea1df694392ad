"""A pass gathers the casts of a weight that it reads, and trains to the bit as if it gathered all."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from quaver import convert_to_float8_training, scaling
from quaver.activation_checkpointing import apply_activation_checkpointing
from quaver.distributed.gather_passes import BACKWARD, FORWARD, Gathered
from quaver.distributed.weight_scales import WholeScales
from tests.distributed.models import DIM, HIDDEN, LEARNING_RATE, batches, config_of, loss_of, make_model
from tests.distributed.ranks import run
from tests.distributed.test_fsdp import part_of, world_mesh

STEPS = 3
BOTH = [FORWARD, BACKWARD]


def checkpointed(model, mode, option="op"):
    blocks = list(model)[:-1]
    apply_activation_checkpointing(blocks, mode=mode, selective_ac_option=option, preserve_rng_state=False)


FULL, BY_OPERATION = partial(checkpointed, mode="full"), partial(checkpointed, mode="selective")


class Recomputed(torch.nn.Module):
    """Recomputes a block, and is no part of what is compiled."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden):
        return checkpoint(self.block, hidden, use_reentrant=False, preserve_rng_state=False)


def train(recipe, *, before=None, compiled=False, recomputed=None, hooks=nullcontext, micro_batches=1, **options):
    """The losses and, of the last step, (pass, linear, casts) of the first block, as they are gathered.

    Args:
        recomputed: "inside" or "outside" of what fully_shard is given: blocks run in a checkpoint of torch.
    """
    model = make_model()
    convert_to_float8_training(model, config=config_of(recipe, enable_fsdp_float8_all_gather=True))
    if before:
        before(model)
    first = model[0]
    for place, block in enumerate(list(model)[:-1]):
        if compiled:
            block.compile(fullgraph=True)
        if recomputed:
            model[place] = Recomputed(block)
        fully_shard(model[place] if recomputed == "inside" else block, mesh=world_mesh(), **options)
    fully_shard(model, mesh=world_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches(STEPS, dist.get_world_size()):
        with watched(first) as seen:
            for micro_batch in range(micro_batches):
                model.set_reshard_after_backward(micro_batch == micro_batches - 1)
                with hooks():
                    loss = loss_of(model(part_of(batch)))
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(loss_of(model(part_of(batch))).item())
    return losses, seen


@contextmanager
def watched(block):
    """A list of (pass, linear, casts) of what is gathered of a block."""
    names = {block.up: "up", block.down: "down"}
    seen, needed = [], Gathered._needed

    def watch(self):
        places = needed(self)
        name = names.get(self.param._module_info.module)
        if name:
            seen.append(("backward" if torch._C._current_graph_task_id() != -1 else "forward", name, places))
        return places

    Gathered._needed = watch
    yield seen
    Gathered._needed = needed


def both_ways(cases):
    """For each case what `train` gives, and the losses where both passes gather both casts."""
    results = []
    for recipe, options in cases:
        torch._dynamo.reset()
        losses, seen = train(recipe, **options)
        needed, Gathered._needed = Gathered._needed, lambda self: BOTH
        reference, _ = train(recipe, **options)
        Gathered._needed = needed
        results.append((losses, reference, seen))
    return results


def check(cases, expected, ranks=2):
    for per_case in run(ranks, both_ways, cases):
        for (recipe, options), of_pass, (losses, reference, seen) in zip(cases, expected, per_case, strict=True):
            assert losses == reference, (recipe, options)
            assert seen == of_pass, (recipe, options, seen)


def gathered(forward, backward):
    """What is seen of a step; `backward` is that of both linears, or a dict."""
    of = backward if isinstance(backward, dict) else {"up": backward, "down": backward}
    return [("forward", name, forward) for name in ("up", "down")] + [("backward", name, of[name]) for name in of]


def test_without_recomputation_each_pass_gathers_what_it_reads():
    cases = [("rowwise", {}), ("rowwise_with_gw_hp", {}), ("rowwise", {"compiled": True})]
    check(cases, [gathered([FORWARD], [BACKWARD])] * 3)


def test_a_backward_gathers_what_it_recomputes_from():
    full, by_operation = {"before": FULL}, {"before": BY_OPERATION}
    cases = [
        ("rowwise", full),
        ("rowwise", by_operation),
        ("rowwise", {**full, "compiled": True}),
        ("rowwise_with_gw_hp", {**by_operation, "compiled": True}),
        *(
            ("rowwise", {"recomputed": where, "compiled": compiled})
            for where in ("inside", "outside")
            for compiled in (False, True)
        ),
    ]
    all_again = gathered([FORWARD], BOTH)
    compiled = gathered([FORWARD], {"up": BOTH, "down": [BACKWARD]})  # nobody reads the result of down again
    by_operation = gathered([FORWARD], {"up": [BACKWARD], "down": BOTH})  # the result of up is kept
    both_unread = gathered([FORWARD], [BACKWARD])
    check(cases, [all_again, by_operation, compiled, both_unread, *[all_again] * 4])


def test_what_stays_gathered_is_gathered_whole():
    cases = [("rowwise", {"reshard_after_forward": False}), ("rowwise", {"micro_batches": 2})]
    forward = [("forward", name, BOTH) for name in ("up", "down")]
    stays_after_backward = gathered([FORWARD], BOTH) + gathered([FORWARD], [BACKWARD])[2:]
    check(cases, [forward, stays_after_backward])


@contextmanager
def watched_letting_go(lets_go=True):
    """A list of (linear, whether the forward's cast has no memory then), as the backwards of linears begin."""
    seen, let_go = [], Gathered._let_go

    def watch(self):
        if lets_go:
            let_go(self)
        name = self.param._param_fqn
        if name.startswith("0."):
            seen.append((name.split(".")[-2], self.buffers[FORWARD].untyped_storage().size() == 0))

    Gathered._let_go = watch
    yield seen
    Gathered._let_go = let_go


def what_goes(cases):
    """For each case what has no memory, and the losses with and without."""
    results = []
    for recipe, options in cases:
        with watched_letting_go() as seen:
            losses, _ = train(recipe, **options)
        with watched_letting_go(lets_go=False):
            reference, _ = train(recipe, **options)
        results.append((losses, reference, seen))
    return results


def test_a_backward_lets_go_of_what_it_has_recomputed_from():
    goes = [
        ("rowwise", {"before": FULL}),
        ("rowwise_with_gw_hp", {"before": BY_OPERATION}),
        ("rowwise", {"recomputed": "inside"}),
        ("rowwise", {"recomputed": "outside"}),
    ]
    stays = [
        ("rowwise", {"before": FULL, "reshard_after_forward": False}),
        ("rowwise", {"before": FULL, "micro_batches": 2}),
    ]
    gone, kept = ([(name, is_gone) for name in ("down", "up")] for is_gone in (True, False))
    expected = [gone * STEPS] * len(goes) + [kept * STEPS, (kept + gone) * STEPS]
    for per_case in run(2, what_goes, goes + stays):
        for case, of_case, (losses, reference, seen) in zip(goes + stays, expected, per_case, strict=True):
            assert losses == reference, case
            assert seen == of_case, (case, seen)


def kept_between_gathers(recipes):
    """For each recipe the bytes of the gathered scales, and of the kept ones, of a weight that its forward has left."""
    results = []
    for recipe in recipes:
        model = make_model()
        convert_to_float8_training(model, config=config_of(recipe, enable_fsdp_float8_all_gather=True))
        for block in list(model)[:-1]:
            fully_shard(block, mesh=world_mesh())
        fully_shard(model, mesh=world_mesh())
        linear, gathered = model[0].up, []
        linear.register_forward_pre_hook(lambda module, _, gathered=gathered: gathered.append(module.weight))
        for batch in batches(2, dist.get_world_size()):
            loss = loss_of(model(part_of(batch)))
            kept = [linear.weight._local_tensor.scales(), gathered[-1].dequant_scale, gathered[-1].first_dequant_scale]
            sizes = [kept[0].quant.nbytes, kept[0].dequant, *(each.untyped_storage().size() for each in kept[1:])]
            loss.backward()
        results.append((sizes, len(set(map(id, gathered)))))
    return results


def test_of_scales_only_one_way_is_kept_between_gathers():
    rows_and_columns, rows_and_one = 4 * (DIM + HIDDEN), 4 * (HIDDEN + 1)
    for tensorwise, rowwise, mixed in run(2, kept_between_gathers, ["tensorwise", "rowwise", "rowwise_with_gw_hp"]):
        assert tensorwise == ([4, None, 0, 0], 1)
        assert rowwise == ([rows_and_columns, None, 0, 0], 1)
        assert mixed == ([rows_and_one, None, 0, 0], 1)


@pytest.mark.parametrize("power_of_2", [False, True])
def test_scales_are_the_same_whenever_they_are_made(power_of_2):
    amaxes = torch.tensor([0.0, 1e-38, 1e-12, 0.3, 1.0, 448.0, 3e38, torch.inf, torch.nan])
    amaxes = torch.cat([amaxes, torch.rand(1000) * 10 ** torch.linspace(-20, 20, 1000)])
    quant = scaling.amax_to_quant_scale(amaxes, torch.float8_e4m3fn, power_of_2=power_of_2)
    expected = scaling.to_dequant_scale(quant)
    for dequant in (None, expected.clone()):
        written = torch.empty_like(quant)
        WholeScales(quant, dequant, ((1, quant.numel()),)).write_dequant(written)
        assert torch.equal(written.view(torch.int32), expected.view(torch.int32))
        assert written._version == 0
    exact = (1.0 / quant.double()).float()
    assert torch.equal(exact.view(torch.int32), expected.view(torch.int32))


def save_in_block(model, from_call=0):
    """Have hooks inside a block, where FSDP has gathered already, copy what is saved; from this call on."""
    up, calls = model[0].up, []
    call = up.forward

    def forward(x):
        calls.append(x)
        with save_on_cpu() if len(calls) > from_call else nullcontext():
            return call(x)

    up.forward = forward


def test_hooks_that_read_what_is_saved_are_given_it():
    cases = [("rowwise", {"hooks": save_on_cpu}), ("rowwise", {"before": save_in_block})]
    inside = [("forward", "up", BOTH), *gathered([FORWARD], [BACKWARD])[1:]]
    check(cases, [gathered(BOTH, [BACKWARD]), inside])  # on a CPU it is the codes that are kept, not a copy


def refusals():
    """What is said of hooks that come late, and of a module that is recomputed in one of two places."""

    def read_late(model):
        save_in_block(model, from_call=1)

    def use_twice(model):
        call = model[0].forward
        model[0].forward = lambda x: call(checkpoint(call, x, use_reentrant=False, preserve_rng_state=False))

    messages = []
    for before in (read_late, use_twice):
        with pytest.raises(RuntimeError) as error:
            train("rowwise", before=before)
        messages.append(str(error.value))
    return messages


def test_what_was_not_gathered_is_not_read_in_silence():
    for late, twice in run(2, refusals):
        assert "hooks for saved tensors would read a weight" in late
        assert "reshard_after_forward=False" in twice

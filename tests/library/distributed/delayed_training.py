"""Trains under data parallelism, and compares losses, scales and collectives with one process."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from quaver import sync_float8_amax_and_scale_history
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from tests.counting import CollectiveCounter
from tests.library.distributed import models

STEPS = 2

LAYERS, LINEARS = 3, 5

HAS_PERSISTENT_WEIGHTS = {"delayed": True, "delayed_with_dynamic_weight": False}


def train(
    model,
    *,
    steps=STEPS,
    precompute=False,
    accumulate=1,
    no_sync=None,
    scope=contextlib.nullcontext,
    autocast=False,
    compiled=False,
):
    """Train on this rank's parts; return losses, snapshots after each sync, and the collectives of each step.

    Collectives are (calls, bytes) of all-reduces in the forwards, in the sync and in the backwards, and of gathers in
    the forwards. Those of compiled code are not counted, because a dispatch mode turns the compiler off; after its
    first step it may not be compiled again.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, ranks = torch.optim.AdamW(trained, lr=models.LEARNING_RATE), dist.get_world_size()
    losses, snapshots, exchanged = [], [], []
    for step, batch in enumerate(models.get_batches(steps, accumulate * ranks)):
        total, forward, sync, backward = 0.0, CollectiveCounter(), CollectiveCounter(), CollectiveCounter()
        torch._dynamo.config.error_on_recompile = compiled and step > 0
        with scope(model):
            for index, microbatch in enumerate(batch.chunk(accumulate)):
                last = index == accumulate - 1
                with contextlib.nullcontext() if last or no_sync is None else no_sync():
                    counter = contextlib.nullcontext() if compiled else forward
                    with counter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        loss = (
                            models.compute_loss(model(models.get_rank_part(microbatch).requires_grad_())) / accumulate
                        )
                    with contextlib.nullcontext() if compiled else backward:
                        loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        with sync:
            sync_float8_amax_and_scale_history(model)
        models.assert_same_scaling_on_all_ranks(model)
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        dist.all_reduce(mean := torch.tensor(total))
        losses.append(mean.item() / ranks)
        snapshots.append(models.copy_scaling(model))
        counted = [(counter, "all_reduce") for counter in (forward, sync, backward)] + [(forward, "all_gather")]
        exchanged.append([(counter.calls[kind], counter.bytes[kind]) for counter, kind in counted])
    torch._dynamo.config.error_on_recompile = False
    return losses, snapshots, exchanged


def check_against_one_process(results, expected, ranks, what):
    """Compare losses, scales and histories.

    Amaxes and scales of the first step have the bits of one process, except for the loss, which a rank does not divide
    by the ranks (powers of two here). After it the ranks have added gradients in another order: see test_fsdp.py for
    1e-5 of the losses; amaxes move by float32 rounding at most.
    """
    (losses, snapshots, _), (expected_losses, expected_snapshots) = results, expected
    assert losses[0] == pytest.approx(expected_losses[0], rel=1e-6), what
    assert losses == pytest.approx(expected_losses, rel=1e-5), what
    models.assert_same_snapshots(snapshots, expected_snapshots, lambda step: 1e-6 if step else 0, what, ranks)


def check_exchanges(exchanged, recipe, what, *, gathers=True, precompute=False, tensors=None):
    """Assert one all-reduce in the sync, of 8 bytes a tensor, and one in forwards for unknown scales of weights."""
    persistent = HAS_PERSISTENT_WEIGHTS[recipe]
    tensors = tensors or LINEARS * (3 if persistent else 2)
    for step, (forward, sync, backward, _) in enumerate(exchanged):
        checks = 1 if step == 0 else 0  # of 16 bytes
        assert sync == (1 + checks, 8 * tensors + 16 * checks), (what, step)
        exchanges = gathers and (step == 0 or (not persistent and not precompute))
        assert forward == ((1 + checks, 4 * LINEARS + 16 * checks) if exchanges else (0, 0)), (what, step)
        assert backward == (0, 0) or what in REDUCE_GRADIENTS, (what, step)


REDUCE_GRADIENTS = ("hsdp", "DDP", "DDP, weights to gather")

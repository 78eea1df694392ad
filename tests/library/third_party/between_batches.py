"""Evaluates, swaps in averaged weights and fails between the batches of a run, and compares it with one left alone.

A driver `drive(model, between, folder)` trains the model with two batches a step, in one library's loop. It calls
`between(model, ends_step)` after each batch, saves into the folder, and returns the model and a function that loads the
folder into another Llama.
"""

import itertools

import pytest
import torch

from tests.library.third_party.llama import BATCHES, batches, convert, copy_weights, llama
from tests.steps import assert_same

EVERY = 2


def run_loop(model, optimizer, backward, between):
    optimizer.zero_grad()
    for index, batch in enumerate(batches()):
        ends_step = (index + 1) % EVERY == 0
        backward(model(**batch).loss / EVERY)
        if ends_step:
            optimizer.step()
            optimizer.zero_grad()
        between(model, ends_step)


def load_llama(state):
    model = llama()
    model.load_state_dict(state)
    return model


def train(drive, model, folder, between=lambda model, ends_step: None):
    folder.mkdir(parents=True)
    return drive(model, between, folder)


def evaluate(model):
    *_, last = batches()
    training = model.training
    with torch.no_grad():
        loss = model.eval()(**last).loss.item()
    model.train(training)
    return loss


class EvaluateWithAverage:
    """Evaluates after each batch; after each step it averages the weights, and evaluates with the average."""

    def __init__(self):
        self.average, self.losses = None, []

    @torch.no_grad()
    def __call__(self, model, ends_step):
        if not ends_step:
            self.losses.append(evaluate(model))
            return
        weights = copy_weights(model)
        self.average = self.average or copy_weights(model)
        for name, parameter in model.named_parameters():
            parameter.copy_(self.average[name].lerp_(parameter, 0.5))
        self.losses.append(evaluate(model))
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def check_evaluations(drive, build, folder, convert=convert):
    evaluations = EvaluateWithAverage()
    model, reload = train(drive, build(), folder / "evaluated", evaluations)
    alone, _ = train(drive, build(), folder / "alone")
    assert_same(copy_weights(model), copy_weights(alone))
    last = evaluate(model)
    reloaded = convert(reload(), "rowwise")
    assert evaluate(reloaded) == last
    with torch.no_grad():
        for parameter, average in zip(reloaded.parameters(), evaluations.average.values(), strict=True):
            parameter.copy_(average)
    assert evaluate(reloaded) == evaluations.losses[-1] != last
    assert len(evaluations.losses) == BATCHES


def check_a_failed_run(drive, build, folder):
    calls = itertools.count()

    def fail(model, ends_step):
        if next(calls) == EVERY:
            raise OSError("no batch")

    model = build()
    with pytest.raises(OSError, match="no batch"):
        train(drive, model, folder / "failed", fail)
    model.load_state_dict(build().state_dict())
    again, _ = train(drive, model, folder / "again")
    fresh, _ = train(drive, build(), folder / "fresh")
    assert_same(copy_weights(again), copy_weights(fresh))

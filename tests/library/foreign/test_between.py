"""Tests what users do between the batches of a trainer: evaluate, swap in averaged weights, fail, save, load elsewhere.

A driver, `train_by_...`, trains a model with two batches a step, in one library's loop. It calls `between(model,
ends_step)` after each batch, saves into a folder, and returns the model and a function that loads the folder into
another Llama.
"""

import itertools

import peft
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, TrainerCallback

from quaver.integrations.transformers import Float8Callback
from tests.library.foreign import hf_trainer, test_lightning, test_trl
from tests.library.foreign.llama import BATCHES, batches, convert, llama, optimizer_of, weights_of
from tests.library.foreign.table import proves
from tests.steps import assert_same
from tests.thinned import at_night

EVERY = 2
TRAINER_OPTIONS = {"gradient_accumulation_steps": EVERY, "max_steps": BATCHES // EVERY, "max_grad_norm": 0.0}


class Callback(TrainerCallback):
    def __init__(self, between):
        self.between = between

    def on_substep_end(self, args, state, control, model, **kwargs):
        self.between(model, False)

    def on_step_end(self, args, state, control, model, **kwargs):
        self.between(model, True)


def train_by_transformers(model, between, folder):
    callbacks = [Float8Callback(), Callback(between)]
    run = hf_trainer.trained(folder, model, callbacks, **TRAINER_OPTIONS)
    run.save_model(folder / "saved")
    return run.model, lambda: LlamaForCausalLM.from_pretrained(folder / "saved")


def train_by_trl(model, between, folder):
    run = test_trl.sft(folder, model, [Callback(between)], **TRAINER_OPTIONS)
    run.train()
    run.save_model(folder / "saved")
    return run.model, lambda: LlamaForCausalLM.from_pretrained(folder / "saved")


def run_loop(model, optimizer, backward, between):
    optimizer.zero_grad()
    for index, batch in enumerate(batches()):
        ends_step = (index + 1) % EVERY == 0
        backward(model(**batch).loss / EVERY)
        if ends_step:
            optimizer.step()
            optimizer.zero_grad()
        between(model, ends_step)


def train_by_peft(model, between, folder):
    adapted, _ = train_by_transformers(model, between, folder)
    return adapted, lambda: peft.PeftModel.from_pretrained(llama(), folder / "saved")


def train_by_accelerate(model, between, folder):
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    run_loop(prepared, optimizer, accelerator.backward, between)
    accelerator.save_model(prepared, folder)
    return prepared, lambda: load_llama(load_file(folder / "model.safetensors"))


def train_by_fabric(model, between, folder):
    fabric, wrapped, optimizer = test_lightning.with_fabric(model, "rowwise")
    run_loop(wrapped, optimizer, fabric.backward, between)
    fabric.save(folder / "state", {"model": wrapped})
    return wrapped, lambda: load_llama(torch.load(folder / "state")["model"])


def train_by_lightning(model, between, folder):
    class Between(test_lightning.lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            between(module.model, (index + 1) % EVERY == 0)

    module = test_lightning.Module("rowwise", False)
    module.model = model
    options = {"accumulate_grad_batches": EVERY, "callbacks": [Between()], "enable_checkpointing": False}
    run = test_lightning.trainer(folder, BATCHES // EVERY, **options)
    run.fit(module, batches())
    run.save_checkpoint(folder / "last.ckpt")
    state = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    return model, lambda: load_llama({name.removeprefix("model."): tensor for name, tensor in state.items()})


def load_llama(state):
    model = llama()
    model.load_state_dict(state)
    return model


LIBRARIES = {"transformers": train_by_transformers, "TRL": train_by_trl, "PEFT": train_by_peft}
LIBRARIES |= {"Accelerate": train_by_accelerate, "Fabric": train_by_fabric, "Lightning": train_by_lightning}


def by_library(*every_night, without=()):
    """Mark a test to run for each library, for some only nightly."""
    names = [name for name in LIBRARIES if name not in (*every_night, *without)]
    return pytest.mark.parametrize("library", [*names, *at_night((name,) for name in every_night)])


def build_model(library):
    if library != "PEFT":
        return llama("rowwise")
    torch.manual_seed(1)
    return peft.get_peft_model(llama("rowwise"), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))


def train(library, folder, between=lambda model, ends_step: None, model=None):
    folder.mkdir(parents=True)
    return LIBRARIES[library](model or build_model(library), between, folder)


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
        weights = weights_of(model)
        self.average = self.average or weights_of(model)
        for name, parameter in model.named_parameters():
            parameter.copy_(self.average[name].lerp_(parameter, 0.5))
        self.losses.append(evaluate(model))
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


@proves("transformers' Trainer", "evaluate in a step", "EMA swap", "reload")
@proves("TRL", "evaluate in a step", "EMA swap", "reload")
@proves("PEFT", "evaluate in a step", "EMA swap", "reload")
@proves("Accelerate", "evaluate in a step", "EMA swap", "reload")
@proves("Fabric", "evaluate in a step", "EMA swap", "reload")
@proves("Lightning's Trainer", "evaluate in a step", "EMA swap", "reload")
@by_library("TRL", "PEFT")
def test_evaluations_of_the_weights_and_of_their_average_change_nothing(library, tmp_path):
    check_evaluations(library, tmp_path)


def check_evaluations(library, folder):
    evaluations = EvaluateWithAverage()
    model, reload = train(library, folder / "evaluated", evaluations)
    alone, _ = train(library, folder / "alone")
    assert_same(weights_of(model), weights_of(alone))
    last = evaluate(model)
    reloaded = convert(reload(), "rowwise")
    assert evaluate(reloaded) == last
    with torch.no_grad():
        for parameter, average in zip(reloaded.parameters(), evaluations.average.values(), strict=True):
            parameter.copy_(average)
    assert evaluate(reloaded) == evaluations.losses[-1] != last
    assert len(evaluations.losses) == BATCHES


@proves("TRL", "after a failed run")
@proves("PEFT", "after a failed run")
@proves("Accelerate", "after a failed run")
@proves("Fabric", "after a failed run")
@proves("Lightning's Trainer", "after a failed run")
@by_library("TRL", "PEFT", without=["transformers"])  # test_float8_callback.py has it
def test_a_run_after_one_that_failed_within_a_step_is_a_fresh_run(library, tmp_path):
    check_a_failed_run(library, tmp_path)


def check_a_failed_run(library, folder):
    calls = itertools.count()

    def fail(model, ends_step):
        if next(calls) == EVERY:
            raise OSError("no batch")

    model = build_model(library)
    with pytest.raises(OSError, match="no batch"):
        train(library, folder / "failed", fail, model)
    model.load_state_dict(build_model(library).state_dict())
    again, _ = train(library, folder / "again", model=model)
    fresh, _ = train(library, folder / "fresh")
    assert_same(weights_of(again), weights_of(fresh))

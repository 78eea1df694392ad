"""What users do between the batches of each trainer: evaluate, swap in averaged weights, fail, save, load elsewhere.

A driver trains a model with two batches a step, in one library's loop. It calls `between(model, ends_step)` after each
batch, saves into a folder, and returns the model and a function that loads what it saved into another Llama.
"""

import itertools

import peft
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, TrainerCallback

from quaver import convert_to_float8_training
from quaver.integrations.transformers import Float8Callback
from tests.library.foreign import test_lightning, test_transformers_trainer, test_trl
from tests.library.foreign.llama import BATCHES, batches, llama, not_the_head, optimizer_of, weights_of
from tests.library.foreign.table import proves
from tests.steps import assert_same

EVERY = 2


class Callback(TrainerCallback):
    def __init__(self, between):
        self.between = between

    def on_substep_end(self, args, state, control, model, **kwargs):
        self.between(model, False)

    def on_step_end(self, args, state, control, model, **kwargs):
        self.between(model, True)


def by_transformers(model, between, folder):
    options = {"gradient_accumulation_steps": EVERY, "max_steps": BATCHES // EVERY}
    callbacks = [Float8Callback(), Callback(between)]
    run = test_transformers_trainer.trained(folder, model, callbacks, max_grad_norm=0.0, **options)
    run.save_model(folder / "saved")
    return run.model, lambda: LlamaForCausalLM.from_pretrained(folder / "saved")


def by_trl(model, between, folder):
    options = {"gradient_accumulation_steps": EVERY, "max_steps": BATCHES // EVERY, "max_grad_norm": 0.0}
    run = test_trl.sft(folder, model, [Callback(between)], **options)
    run.train()
    run.save_model(folder / "saved")
    return run.model, lambda: LlamaForCausalLM.from_pretrained(folder / "saved")


def loop(model, optimizer, backward, between):
    optimizer.zero_grad()
    for index, batch in enumerate(batches()):
        ends_step = (index + 1) % EVERY == 0
        backward(model(**batch).loss / EVERY)
        if ends_step:
            optimizer.step()
            optimizer.zero_grad()
        between(model, ends_step)


def by_peft(model, between, folder):
    adapted, _ = by_transformers(model, between, folder)
    return adapted, lambda: peft.PeftModel.from_pretrained(llama(), folder / "saved")


def by_accelerate(model, between, folder):
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    loop(prepared, optimizer, accelerator.backward, between)
    accelerator.save_model(prepared, folder)
    return prepared, lambda: loaded(load_file(folder / "model.safetensors"))


def by_fabric(model, between, folder):
    fabric, wrapped, optimizer = test_lightning.with_fabric(model, "rowwise")
    loop(wrapped, optimizer, fabric.backward, between)
    fabric.save(folder / "state", {"model": wrapped})
    return wrapped, lambda: loaded(torch.load(folder / "state")["model"])


def by_lightning(model, between, folder):
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
    return model, lambda: loaded({name.removeprefix("model."): each for name, each in state.items()})


def loaded(state):
    model = llama()
    model.load_state_dict(state)
    return model


LIBRARIES = {
    "transformers": by_transformers,
    "TRL": by_trl,
    "PEFT": by_peft,
    "Accelerate": by_accelerate,
    "Fabric": by_fabric,
    "Lightning": by_lightning,
}


def by_library(*every_night, without=()):
    """Runs a test for each library, for some only nightly."""
    marks = {name: [pytest.mark.nightly] if name in every_night else [] for name in LIBRARIES if name not in without}
    return pytest.mark.parametrize("library", [pytest.param(name, marks=each) for name, each in marks.items()])


def made(library):
    if library != "PEFT":
        return llama("rowwise")
    torch.manual_seed(1)
    return peft.get_peft_model(llama("rowwise"), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))


def trained(library, folder, between=lambda model, ends_step: None, model=None):
    folder.mkdir(parents=True)
    return LIBRARIES[library](model or made(library), between, folder)


def evaluated(model):
    *_, last = batches()
    training = model.training
    with torch.no_grad():
        loss = model.eval()(**last).loss.item()
    model.train(training)
    return loss


class Swap:
    """Averages the weights after each step, and evaluates them in place of the model's; evaluates after each batch."""

    def __init__(self):
        self.average, self.losses = None, []

    @torch.no_grad()
    def __call__(self, model, ends_step):
        kept = weights_of(model)
        if not ends_step:
            self.losses.append(evaluated(model))
            return
        self.average = self.average or weights_of(model)
        for name, each in model.named_parameters():
            each.copy_(self.average[name].lerp_(each, 0.5))
        self.losses.append(evaluated(model))
        for name, each in model.named_parameters():
            each.copy_(kept[name])


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
    swap = Swap()
    model, reload = trained(library, folder / "swapped", swap)
    alone, _ = trained(library, folder / "alone")
    assert_same(weights_of(model), weights_of(alone))
    last = evaluated(model)
    again = convert_to_float8_training(reload(), config="rowwise", module_filter_fn=not_the_head)
    assert evaluated(again) == last
    with torch.no_grad():
        for (_, each), average in zip(again.named_parameters(), swap.average.values(), strict=True):
            each.copy_(average)
    assert evaluated(again) == swap.losses[-1] != last
    assert len(swap.losses) == BATCHES


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

    model = made(library)
    with pytest.raises(OSError, match="no batch"):
        trained(library, folder / "failed", fail, model)
    model.load_state_dict(made(library).state_dict())
    again, _ = trained(library, folder / "again", model=model)
    fresh, _ = trained(library, folder / "fresh")
    assert_same(weights_of(again), weights_of(fresh))

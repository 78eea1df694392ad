"""Tests what users do between the batches of a trainer: evaluate, swap in averaged weights, fail, save, load elsewhere.

Each `train_by_...` is a driver of tests/library/third_party/between_batches.py.
"""

from functools import partial

import peft
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, TrainerCallback

from quaver.integrations.transformers import Float8Callback
from tests.library.third_party import hf_trainer, lightning_trainer
from tests.library.third_party.between_batches import EVERY, check_a_failed_run, check_evaluations, load_llama, run_loop
from tests.library.third_party.llama import BATCHES, batches, build_optimizer, llama
from tests.library.third_party.sft_trainer import sft
from tests.library.third_party.table import proves
from tests.thinned import at_night

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
    run = sft(folder, model, [Callback(between)], **TRAINER_OPTIONS)
    run.train()
    run.save_model(folder / "saved")
    return run.model, lambda: LlamaForCausalLM.from_pretrained(folder / "saved")


def train_by_peft(model, between, folder):
    adapted, _ = train_by_transformers(model, between, folder)
    return adapted, lambda: peft.PeftModel.from_pretrained(llama(), folder / "saved")


def train_by_accelerate(model, between, folder):
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, build_optimizer(model))
    run_loop(prepared, optimizer, accelerator.backward, between)
    accelerator.save_model(prepared, folder)
    return prepared, lambda: load_llama(load_file(folder / "model.safetensors"))


def train_by_fabric(model, between, folder):
    fabric, wrapped, optimizer = lightning_trainer.set_up_fabric(model, "rowwise")
    run_loop(wrapped, optimizer, fabric.backward, between)
    fabric.save(folder / "state", {"model": wrapped})
    return wrapped, lambda: load_llama(torch.load(folder / "state")["model"])


def train_by_lightning(model, between, folder):
    class Between(lightning_trainer.lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            between(module.model, (index + 1) % EVERY == 0)

    module = lightning_trainer.Module("rowwise", False)
    module.model = model
    options = {"accumulate_grad_batches": EVERY, "callbacks": [Between()], "enable_checkpointing": False}
    run = lightning_trainer.make_trainer(folder, BATCHES // EVERY, **options)
    run.fit(module, batches())
    run.save_checkpoint(folder / "last.ckpt")
    state = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    return model, lambda: load_llama({name.removeprefix("model."): tensor for name, tensor in state.items()})


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


@proves("transformers' Trainer", "evaluate in a step", "EMA swap", "reload")
@proves("TRL", "evaluate in a step", "EMA swap", "reload")
@proves("PEFT", "evaluate in a step", "EMA swap", "reload")
@proves("Accelerate", "evaluate in a step", "EMA swap", "reload")
@proves("Fabric", "evaluate in a step", "EMA swap", "reload")
@proves("Lightning's Trainer", "evaluate in a step", "EMA swap", "reload")
@by_library("TRL", "PEFT")
def test_evaluations_of_the_weights_and_of_their_average_change_nothing(library, tmp_path):
    check_evaluations(LIBRARIES[library], partial(build_model, library), tmp_path)


@proves("TRL", "after a failed run")
@proves("PEFT", "after a failed run")
@proves("Accelerate", "after a failed run")
@proves("Fabric", "after a failed run")
@proves("Lightning's Trainer", "after a failed run")
@by_library("TRL", "PEFT", without=["transformers"])  # test_float8_callback.py has it
def test_a_run_after_one_that_failed_within_a_step_is_a_fresh_run(library, tmp_path):
    check_a_failed_run(LIBRARIES[library], partial(build_model, library), tmp_path)

"""Tests float8 primary weights in transformers' Trainer and in Accelerate against ordinary ones, to the bit."""

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaForCausalLM

from quaver import use_float8_primary_weights
from quaver.integrations.transformers import Float8Callback
from quaver.weights.primary_weight import Float8PrimaryWeight
from tests.library.foreign.hf_trainer import trained as trained_by
from tests.library.foreign.llama import BATCHES, batches, llama, optimizer_of
from tests.steps import assert_same


def trained(folder, *, primary, **options):
    model = llama("tensorwise")
    optimizer = optimizer_of(model)
    if primary:
        optimizer = use_float8_primary_weights(model, optimizer)
    options = {"warmup_steps": 2, "lr_scheduler_type": "linear", **options}
    return trained_by(folder, model, [Float8Callback()], (optimizer, None), **options)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "bf16": True}], ids=["", "accumulate bf16"])
def test_transformers_trainer(tmp_path, options):
    plain = trained(tmp_path, primary=False, **options).model.state_dict()
    run = trained(tmp_path, primary=True, save_strategy="no" if options else "steps", **options)
    assert_same(run.model.state_dict(), plain)
    assert isinstance(run.model.model.layers[0].mlp.up_proj.weight, Float8PrimaryWeight)
    if options:
        return
    resumed = trained(tmp_path, primary=True, resume=tmp_path / "checkpoint-2")
    assert_same(resumed.model.state_dict(), plain)
    resumed.model.save_pretrained(tmp_path / "saved")
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict(), plain)


def _train_with_accelerate(folder, primary):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama("rowwise")
    optimizer = optimizer_of(model)
    if primary:
        optimizer = use_float8_primary_weights(model, optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, batches())
    losses = []

    def epoch():
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())

    epoch()
    accelerator.save_state(folder)
    epoch()
    accelerator.load_state(folder)
    epoch()
    assert losses[BATCHES : 2 * BATCHES] == losses[2 * BATCHES :]
    return losses


def test_accelerate(tmp_path):
    plain, primary = (_train_with_accelerate(tmp_path / str(primary), primary) for primary in (False, True))
    assert primary == plain

"""Tests float8 optimizers and primary weights in other trainers, to the bit: resumed runs, and ordinary weights."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaForCausalLM

from quaver import use_float8_primary_weights
from quaver.integrations.transformers import Float8Callback
from quaver.optim import CombinedOptimizer, Float8AdamW, Float8Muon, make_param_groups
from quaver.weights.primary_weight import Float8PrimaryWeight
from tests.library.third_party.accelerated import save_and_resume, train_as_documented
from tests.library.third_party.hf_trainer import get_losses, trained
from tests.library.third_party.llama import BATCHES, batches, build_optimizer, llama
from tests.ranks import run as run_on_ranks
from tests.steps import assert_same
from tests.thinned import at_night


def make_adamw(model):
    return Float8AdamW(make_param_groups(model), lr=1e-3, weight_decay=0.0)


def make_muon(model):
    matrices = {p for layer in model.model.layers for p in layer.parameters() if p.dim() == 2}
    others = [p for p in model.parameters() if p not in matrices]
    muon = Float8Muon([p for p in model.parameters() if p in matrices], lr=1e-3, adjust_lr_fn="match_rms_adamw")
    return CombinedOptimizer(muon, Float8AdamW(others, lr=1e-3, weight_decay=0.0))


@pytest.mark.parametrize("make_optimizer", [make_adamw, make_muon])
def test_a_run_resumed_by_transformers_goes_on_as_before(tmp_path, make_optimizer):
    def run(**options):
        model = llama("tensorwise")
        return trained(tmp_path, model, optimizers=(make_optimizer(model), None), **options)

    whole, resumed = run(save_strategy="steps"), run(resume=tmp_path / "checkpoint-2")
    assert get_losses(resumed)[-2:] == get_losses(whole)[-2:]
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


WAYS = [("DDP", None, make_adamw), ("FSDP2", "FULL_STATE_DICT", make_adamw)]
WAYS += at_night(("FSDP2", "SHARDED_STATE_DICT", make) for make in (make_adamw, make_muon))


@pytest.mark.parametrize(("strategy", "state_dict_type", "make_optimizer"), WAYS)
def test_a_run_resumed_by_accelerate_goes_on_as_before(tmp_path, strategy, state_dict_type, make_optimizer):
    options = strategy, False, state_dict_type, str(tmp_path), make_optimizer
    for whole, resumed in run_on_ranks(2, save_and_resume, *options):
        assert resumed == whole


def train_by_transformers(folder, *, primary, **options):
    model = llama("tensorwise")
    optimizer = build_optimizer(model)
    if primary:
        optimizer = use_float8_primary_weights(model, optimizer)
    options = {"warmup_steps": 2, "lr_scheduler_type": "linear", **options}
    return trained(folder, model, [Float8Callback()], (optimizer, None), **options)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "bf16": True}], ids=["", "accumulate bf16"])
def test_primary_weights_train_in_transformers_trainer(tmp_path, options):
    plain = train_by_transformers(tmp_path, primary=False, **options).model.state_dict()
    run = train_by_transformers(tmp_path, primary=True, save_strategy="no" if options else "steps", **options)
    assert_same(run.model.state_dict(), plain)
    assert isinstance(run.model.model.layers[0].mlp.up_proj.weight, Float8PrimaryWeight)
    if options:
        return
    resumed = train_by_transformers(tmp_path, primary=True, resume=tmp_path / "checkpoint-2")
    assert_same(resumed.model.state_dict(), plain)
    resumed.model.save_pretrained(tmp_path / "saved")
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict(), plain)


def train_by_accelerate(folder, primary):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama("rowwise")
    optimizer = build_optimizer(model)
    if primary:
        optimizer = use_float8_primary_weights(model, optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, batches())
    epoch = partial(train_as_documented, accelerator, model, optimizer, loader, schedule)
    losses = epoch()
    accelerator.save_state(folder)
    losses += epoch()
    accelerator.load_state(folder)
    losses += epoch()
    assert losses[BATCHES : 2 * BATCHES] == losses[2 * BATCHES :]
    return losses


def test_primary_weights_train_in_accelerate(tmp_path):
    plain, primary = (train_by_accelerate(tmp_path / str(primary), primary) for primary in (False, True))
    assert primary == plain

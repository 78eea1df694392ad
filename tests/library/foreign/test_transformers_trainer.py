"""Tests transformers' Trainer on a converted model: losses of a loop written by hand, evaluation, export."""

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.library.foreign.hf_trainer import checkpointing, losses_of, trained
from tests.library.foreign.llama import Tokens, clip, float8_names, llama, train_by_hand
from tests.library.foreign.table import proves
from tests.thinned import at_night

RUNS = [("rowwise_with_gw_hp", checkpointing(use_reentrant=False))]
RUNS += at_night([("tensorwise", {}), ("rowwise", checkpointing(use_reentrant=True))])


@proves("transformers' Trainer", "train", "checkpointing")
@pytest.mark.parametrize(("recipe", "options"), RUNS)
def test_the_losses_of_a_loop_written_by_hand(tmp_path, recipe, options):
    losses = losses_of(trained(tmp_path, recipe, **options))
    assert losses == pytest.approx(train_by_hand(llama(recipe), before=clip), abs=5e-5)  # logged with 4 places
    assert losses != pytest.approx(train_by_hand(llama(), before=clip), abs=5e-5)


@proves("transformers' Trainer", "compile")
@pytest.mark.nightly
def test_the_trainers_compilation_changes_no_loss(tmp_path):
    run = trained(tmp_path, "rowwise", torch_compile=True, torch_compile_backend="aot_eager")
    assert losses_of(run) == pytest.approx(train_by_hand(llama("rowwise"), before=clip), rel=1e-3)


@proves("transformers' Trainer", "evaluate")
def test_evaluation_generation_and_export(tmp_path):
    run = trained(tmp_path, "rowwise", bf16=True)
    assert run.evaluate()["eval_loss"] > 0
    prompt = Tokens()[0]["input_ids"][None, :4]
    assert run.model.eval().generate(prompt, max_new_tokens=3, do_sample=False).shape == (1, 7)
    run.model.save_pretrained(tmp_path / "saved")
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert not float8_names(exported)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, exported.get_parameter(name))

"""transformers' Trainer on a converted model: the losses of a loop written by hand, checkpoints, evaluation, export."""

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from quaver import Float8Linear
from tests.library.foreign.llama import BATCHES, Tokens, clip, llama, train_by_hand
from tests.library.foreign.table import proves
from tests.thinned import at_night


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return None


def trainer(folder, model, callbacks=(), optimizers=(None, None), **options):
    """On a model, or on a Llama converted with the recipe of that name."""
    model = llama(model) if isinstance(model, str) else model
    defaults = {
        "max_steps": BATCHES,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-3,
    }
    arguments = TrainingArguments(
        output_dir=str(folder),
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **(defaults | options),
    )
    data = {"train_dataset": Tokens(), "eval_dataset": Tokens()}
    return InOrder(model=model, args=arguments, callbacks=list(callbacks), optimizers=optimizers, **data)


def trained(*args, resume=None, **options):
    """`trainer`, trained, from the checkpoint `resume`."""
    run = trainer(*args, **options)
    run.train(resume_from_checkpoint=resume and str(resume))
    return run


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@proves("transformers' Trainer", "train")
@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", *at_night([("tensorwise",)])])
def test_the_losses_of_a_loop_written_by_hand(tmp_path, recipe):
    run = trained(tmp_path, recipe)
    assert losses_of(run) == pytest.approx(train_by_hand(llama(recipe), before=clip), abs=5e-5)  # logged with 4 places
    assert losses_of(run) != pytest.approx(train_by_hand(llama(), before=clip), abs=5e-5)


@proves("transformers' Trainer", "checkpointing")
@pytest.mark.parametrize("use_reentrant", [False, *at_night([(True,)])])
def test_gradient_checkpointing_changes_nothing(tmp_path, use_reentrant):
    checkpointed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    runs = [trained(tmp_path / str(i), "rowwise", **options) for i, options in enumerate([{}, checkpointed])]
    assert losses_of(runs[0]) == losses_of(runs[1])


@proves("transformers' Trainer", "compile")
@pytest.mark.nightly
def test_the_trainers_compilation_changes_no_loss(tmp_path):
    runs = [trained(tmp_path / "eager", "rowwise")]
    runs.append(trained(tmp_path / "compiled", "rowwise", torch_compile=True, torch_compile_backend="aot_eager"))
    assert losses_of(runs[1]) == pytest.approx(losses_of(runs[0]), rel=1e-3)


@proves("transformers' Trainer", "evaluate")
def test_evaluation_generation_and_export(tmp_path):
    run = trained(tmp_path, "rowwise", bf16=True)
    assert run.evaluate()["eval_loss"] > 0
    prompt = Tokens()[0]["input_ids"][None, :4]
    assert run.model.eval().generate(prompt, max_new_tokens=3, do_sample=False).shape == (1, 7)
    run.model.save_pretrained(tmp_path / "saved")
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert not any(isinstance(module, Float8Linear) for module in exported.modules())
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, exported.get_parameter(name))

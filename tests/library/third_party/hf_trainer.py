"""Makes transformers' Trainer of the foreign tests, and reads its losses."""

from transformers import Trainer, TrainingArguments

from tests.library.third_party.llama import BATCHES, Tokens, llama


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return None


def settings(folder, **options):
    """Return the arguments of a run of BATCHES steps that saves nothing."""
    defaults = {"output_dir": str(folder), "max_steps": BATCHES, "per_device_train_batch_size": 2, "logging_steps": 1}
    defaults |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "save_strategy": "no", "save_steps": 2}
    defaults |= {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
    return defaults | options


def trainer(folder, model, callbacks=(), optimizers=(None, None), **options):
    """Return a trainer of a model, or of a Llama converted with the recipe of that name."""
    model = llama(model) if isinstance(model, str) else model
    arguments = TrainingArguments(**settings(folder, **options))
    data = {"train_dataset": Tokens(), "eval_dataset": Tokens()}
    return InOrder(model=model, args=arguments, callbacks=list(callbacks), optimizers=optimizers, **data)


def trained(*args, resume=None, **options):
    """Return `trainer` after its run, from the checkpoint `resume` if it is given."""
    run = trainer(*args, **options)
    run.train(resume_from_checkpoint=resume and str(resume))
    return run


def get_losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def checkpointing(use_reentrant):
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}

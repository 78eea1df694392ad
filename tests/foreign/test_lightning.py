"""Lightning's Trainer on a converted model: the losses of a loop written by hand, validation, checkpoints."""

import pytest
import torch

from quaver import Float8Linear, convert_to_float8_training
from tests.foreign.llama import BATCHES, batches, llama, not_the_head, optimizer_of, train_by_hand

lightning = pytest.importorskip("pytorch_lightning")


class Module(lightning.LightningModule):
    """Converts when it is made, or when Lightning configures the model."""

    def __init__(self, recipe, in_hook):
        super().__init__()
        self.recipe, self.in_hook, self.losses = recipe, in_hook, []
        self.model = llama(None if in_hook else recipe)

    def configure_model(self):
        if self.in_hook:
            convert_to_float8_training(self.model, config=self.recipe, module_filter_fn=not_the_head)

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.model(**batch).loss)

    def configure_optimizers(self):
        return optimizer_of(self)


def trainer(folder, steps, **options):
    return lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=2,
        **options,
    )


@pytest.mark.parametrize("in_hook", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_losses_of_a_loop_written_by_hand(tmp_path, recipe, in_hook):
    """Validation runs in inference mode in mid-epoch, on the modules and caches that train."""
    module = Module(recipe, in_hook)
    trainer(tmp_path, BATCHES).fit(module, batches(), batches())
    assert module.losses == train_by_hand(llama(recipe))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precisions_and_checkpoints(tmp_path, precision):
    module = Module("rowwise", False)
    run = trainer(tmp_path, BATCHES, precision=precision)
    run.fit(module, batches(), batches())
    path = run.checkpoint_callback.best_model_path
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert set(saved) == {f"model.{name}" for name in llama().state_dict()}
    resumed = Module("rowwise", False)
    again = trainer(tmp_path / "again", BATCHES + 1, precision=precision)
    again.fit(resumed, batches(), batches(), ckpt_path=path)
    assert again.global_step == BATCHES + 1
    assert resumed.losses[0] < module.losses[0]
    assert any(isinstance(each, Float8Linear) for each in resumed.modules())

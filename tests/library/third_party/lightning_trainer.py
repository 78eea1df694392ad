"""Makes Lightning's module, plugin, Trainer and Fabric of the foreign tests."""

import pytest

lightning = pytest.importorskip("pytorch_lightning")

from lightning_fabric import Fabric  # noqa: E402 - it comes with Lightning

from quaver.integrations.lightning import Float8FabricPrecision, Float8Precision  # noqa: E402
from tests.library.third_party.llama import build_optimizer, convert, is_not_head, llama  # noqa: E402


class Module(lightning.LightningModule):  # type: ignore[name-defined]
    """Converts when it is made, or when Lightning configures the model."""

    def __init__(self, recipe, in_hook):
        super().__init__()
        self.recipe, self.in_hook, self.losses = recipe, in_hook, []
        self.model = llama(None if in_hook else recipe)

    def configure_model(self):
        if self.in_hook:
            convert(self.model, self.recipe)

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs, batch, index):
        self.losses.append(outputs["loss"].item() * self.trainer.accumulate_grad_batches)

    def validation_step(self, batch, index):
        self.log("validation", self.model(**batch).loss)

    def configure_optimizers(self):
        return build_optimizer(self)


def make_plugin(recipe, autocast_dtype=None):
    return Float8Precision(recipe, module_filter_fn=is_not_head, autocast_dtype=autocast_dtype)


def make_trainer(folder, steps, **options):
    silent = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "val_check_interval": 2, **silent, **options}
    return lightning.Trainer(max_steps=steps, default_root_dir=folder, **options)


def set_up_fabric(model, recipe="tensorwise", autocast_dtype=None):
    plugin = Float8FabricPrecision(recipe, module_filter_fn=is_not_head, autocast_dtype=autocast_dtype)
    fabric = Fabric(accelerator="cpu", plugins=[plugin])
    return fabric, *fabric.setup(model, build_optimizer(model))

"""Lightning's Trainer on a converted model: the losses of a loop written by hand, validation, checkpoints."""

import os
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch

from quaver import (
    Float8Linear,
    conversion_report,
    convert_to_float8_training,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from tests.library.foreign.llama import BATCHES, batches, llama, not_the_head, optimizer_of, train_by_hand
from tests.library.foreign.table import lacks, proves, refuses
from tests.steps import assert_same
from tests.thinned import thinned

lightning = pytest.importorskip("pytorch_lightning")

from lightning_fabric import Fabric  # noqa: E402 - it comes with Lightning

from quaver.integrations.lightning import Float8FabricPrecision, Float8Monitor, Float8Precision  # noqa: E402
from quaver.numerics.record import Record  # noqa: E402


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
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs, batch, index):
        self.losses.append(outputs["loss"].item() * self.trainer.accumulate_grad_batches)

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
        **{"val_check_interval": 2, **options},
    )


@proves("Lightning's Trainer", "train", "evaluate")
@pytest.mark.parametrize(("recipe", "in_hook"), thinned(["tensorwise", "rowwise"], [False, True], together=1))
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


@proves("Lightning's Trainer", "compile")
@pytest.mark.nightly
def test_a_compiled_module_trains_as_before(tmp_path):
    plugin = Float8Precision("rowwise", module_filter_fn=not_the_head, autocast_dtype=None)
    module = Module(None, False)
    compiled = torch.compile(module, backend="aot_eager")
    trainer(tmp_path, BATCHES, plugins=[plugin]).fit(compiled, batches())
    assert sum(isinstance(each, Float8Linear) for each in module.modules()) == 14
    assert module.losses == pytest.approx(train_by_hand(llama("rowwise")), rel=1e-4)


@proves("Lightning's Trainer", "accumulate", "evaluate")
@pytest.mark.parametrize("every", [2, 3])
def test_validation_within_and_between_accumulated_steps_changes_no_scale(tmp_path, every):
    """It runs in eval and inference mode, under the plugin's autocast."""
    runs = {}
    for validates in (True, False):
        module = Module(None, False)
        options = {"val_check_interval": every} if validates else {"val_check_interval": 2, "limit_val_batches": 0}
        plugin = Float8Precision("delayed", module_filter_fn=not_the_head)
        trainer(tmp_path, BATCHES // 2, plugins=[plugin], accumulate_grad_batches=2, **options).fit(
            module, batches(), batches()
        )
        runs[validates] = module.losses, float8_scaling_state(module.model).state_dict()
    assert_same(runs[True], runs[False])


@proves("Lightning's Trainer", "best model")
def test_the_best_checkpoint_comes_with_its_scales(tmp_path):
    """Every step makes the loss worse."""

    class Ascending(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, maximize=True)

    module, plugin = (
        Ascending(None, False),
        Float8Precision("delayed", module_filter_fn=not_the_head, autocast_dtype=None),
    )
    best = lightning.callbacks.ModelCheckpoint(monitor="validation", save_on_train_epoch_end=False)
    run = trainer(tmp_path, BATCHES, plugins=[plugin], callbacks=[best], val_check_interval=1)
    run.fit(module, batches(), batches())
    (found,) = run.validate(module, batches(), ckpt_path="best")
    assert best.best_model_path.endswith("step=1.ckpt")
    assert found["validation"] == best.best_model_score.item()


lacks(
    "Lightning's Trainer",
    "heads",
    "adapters before",
    "adapters after",
    "merge",
    "reference model",
    sentence="the module is the user's, with what it consists of.",
)


@proves("Lightning's Trainer", "save, resume", "resume elsewhere")
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_the_precision_plugin_converts_scales_and_saves(tmp_path, recipe):
    def plugin():
        return Float8Precision(recipe, module_filter_fn=not_the_head, autocast_dtype=None)

    module = Module(None, False)
    run = trainer(tmp_path, BATCHES, plugins=[plugin()])
    run.fit(module, batches(), batches())
    model = llama(recipe)
    assert module.losses == train_by_hand(model, after=sync_float8_amax_and_scale_history)
    assert_same(float8_scaling_state(module.model).state_dict(), float8_scaling_state(model).state_dict())
    resumed = Module(None, False)
    again = trainer(tmp_path / "again", BATCHES + 1, plugins=[plugin()])
    again.fit(resumed, batches(), batches(), ckpt_path=run.checkpoint_callback.best_model_path)
    whole = Module(None, False)
    trainer(tmp_path / "whole", BATCHES + 1, plugins=[plugin()]).fit(whole, batches(), batches())
    assert resumed.losses == whole.losses[BATCHES:]


def test_a_monitor_samples_optimizer_steps(tmp_path):
    module, plain = Module("rowwise", False), Module("rowwise", False)
    options = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    trainer(tmp_path, BATCHES // 2, callbacks=[Float8Monitor(every=1)], **options).fit(module, batches(), batches())
    trainer(tmp_path / "plain", BATCHES // 2, **options).fit(plain, batches(), batches())
    assert module.losses == plain.losses
    record = Record.read(tmp_path)
    assert record.steps.tolist() == list(range(1, BATCHES // 2 + 1))
    assert record.tensors[0]["layer"].startswith("model.model.layers.0.")


def with_fabric(autocast_dtype=None, prepare=lambda model: model):
    plugin = Float8FabricPrecision("tensorwise", module_filter_fn=not_the_head, autocast_dtype=autocast_dtype)
    fabric, model = Fabric(accelerator="cpu", plugins=[plugin]), prepare(llama())
    return fabric, *fabric.setup(model, optimizer_of(model))


def loop(model, optimizer, backward, every=1, only=range(BATCHES)):
    """The losses of some of the batches, an evaluation last."""
    losses = train_by_hand(model, optimizer, backward, every=every, only=only)
    *_, last = batches()
    with torch.inference_mode():
        return [*losses, model.eval()(**last).loss.item()]


def loop_by_hand(every=1):
    model = llama("tensorwise")
    return loop(model, optimizer_of(model), torch.Tensor.backward, every)


@proves("Lightning's Trainer", "accumulate", "checkpointing")
@pytest.mark.parametrize(("every", "checkpointing"), [(2, False), (1, True)])
def test_accumulation_and_checkpointing(tmp_path, every, checkpointing):
    module = Module("tensorwise", False)
    if checkpointing:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer(tmp_path, BATCHES // every, accumulate_grad_batches=every).fit(module, batches())
    assert module.losses == loop_by_hand(every)[:-1]


@proves("Fabric", "train", "accumulate", "checkpointing", "evaluate")
@pytest.mark.parametrize(("every", "checkpointing"), [(1, False), (2, False), (1, True)])
def test_the_losses_of_fabric_are_those_of_a_loop_written_by_hand(every, checkpointing):
    fabric, model, optimizer = with_fabric()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert loop(model, optimizer, fabric.backward, every) == loop_by_hand(every)
    assert conversion_report(model).float8_flops_fraction > 0.5


@proves("Fabric", "compile")
@pytest.mark.nightly
def test_a_model_compiled_before_or_after_fabric_trains_as_before():
    for compiles_first in (True, False):
        compiled = partial(torch.compile, backend="aot_eager")
        fabric, model, optimizer = with_fabric(prepare=compiled if compiles_first else lambda model: model)
        model = model if compiles_first else compiled(model)
        assert conversion_report(model).float8_flops_fraction > 0.5
        assert loop(model, optimizer, fabric.backward) == pytest.approx(loop_by_hand(), rel=1e-4)


def test_fabric_with_autocast_differs_by_its_rounding():
    fabric, model, optimizer = with_fabric(torch.bfloat16)
    losses, by_hand = loop(model, optimizer, fabric.backward), loop_by_hand()
    assert losses == pytest.approx(by_hand, rel=0.01)
    assert losses != by_hand


lacks(
    "Fabric",
    "best model",
    "heads",
    "adapters before",
    "adapters after",
    "merge",
    "reference model",
    sentence="the model and the loop are the user's.",
)


@proves("Fabric", "save, resume", "resume elsewhere")
def test_a_resumed_fabric_run_goes_on_as_before(tmp_path):
    fabric, model, optimizer = with_fabric()
    whole = loop(model, optimizer, fabric.backward, only=range(2))[:2]
    fabric.save(tmp_path / "state", {"model": model, "optimizer": optimizer})
    whole += loop(model.train(), optimizer, fabric.backward, only=range(2, BATCHES))
    assert whole == loop_by_hand()
    fabric, model, optimizer = with_fabric()
    (tmp_path / "state").rename(tmp_path / "moved")
    fabric.load(tmp_path / "moved", {"model": model, "optimizer": optimizer})
    assert loop(model, optimizer, fabric.backward, only=range(2, BATCHES)) == whole[2:]


@refuses(
    "Lightning's Trainer",
    "FSDP2",
    "`ModelParallelStrategy` shards before the plugin converts. Convert in `configure_model`, before `fully_shard`.",
)
def test_a_module_that_is_sharded_already_is_refused():
    module = torch.nn.Linear(16, 16)
    refused = pytest.raises(RuntimeError, match="convert_to_float8_training at the beginning of configure_model")
    with mock.patch("quaver.integrations.lightning.DTensor", torch.nn.Parameter), refused:
        Float8Precision("rowwise").convert_module(module)


OF_THE_OTHER_PACKAGE = """
import lightning as L
import torch
from quaver import conversion_report
from quaver.integrations.lightning import Float8FabricPrecision, Float8Monitor, Float8Precision

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
    def training_step(self, batch, index):
        return self.linear(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

options = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "callbacks": [Float8Monitor(every=1)]}
module = Module()
L.Trainer(max_steps=2, plugins=[Float8Precision("delayed")], **options).fit(module, torch.randn(4, 2, 16))
fabric = L.Fabric(accelerator="cpu", plugins=[Float8FabricPrecision("rowwise")])
linear = torch.nn.Linear(16, 16)
model, optimizer = fabric.setup(linear, torch.optim.SGD(linear.parameters(), 0.1))
fabric.backward(model(torch.randn(4, 16)).sum())
optimizer.step()
assert [layer.backend for each in (module, model) for layer in conversion_report(each).converted] == ["exact"] * 2
print("both work")
"""


@pytest.mark.nightly
def test_the_plugins_work_under_the_package_lightning(tmp_path):
    target = str(tmp_path / "site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, "lightning"]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if installed.returncode:
        pytest.skip(f"pip cannot install lightning: {installed.stderr.strip().splitlines()[-1:]}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), target])}
    command = [sys.executable, "-c", OF_THE_OTHER_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=240)
    assert "both work" in done.stdout, done.stderr[-3000:]

"""Tests Lightning's Trainer on a converted model: losses of a loop written by hand, validation, checkpoints."""

from functools import partial
from unittest import mock

import pytest
import torch

from quaver import conversion_report, sync_float8_amax_and_scale_history
from tests.library.third_party import llama as models
from tests.library.third_party.installed import run_with_packages
from tests.library.third_party.lightning_trainer import Module, make_plugin, make_trainer, set_up_fabric
from tests.library.third_party.llama import BATCHES, batches, build_optimizer, get_scales, llama, train_by_hand
from tests.library.third_party.table import proves, refuses
from tests.mixture import DIM, make_mixture
from tests.steps import assert_same
from tests.thinned import at_night

lightning = pytest.importorskip("pytorch_lightning")

from lightning_fabric import Fabric  # noqa: E402 - it comes with Lightning

from quaver.integrations import lightning as integration  # noqa: E402
from quaver.integrations.lightning import Float8FabricPrecision, Float8Monitor, Float8Precision  # noqa: E402
from quaver.numerics.record import Record  # noqa: E402


@proves("Lightning's Trainer", "train", "accumulate", "checkpointing", "evaluate")
@pytest.mark.parametrize(
    ("recipe", "in_hook", "every", "checkpoints"), [("tensorwise", False, 2, False), ("rowwise", True, 1, True)]
)
def test_losses_are_those_of_a_loop_written_by_hand(tmp_path, recipe, in_hook, every, checkpoints):
    """Validation runs in inference mode in mid-epoch, on the modules and caches that train."""
    module = Module(recipe, in_hook)
    if checkpoints:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    make_trainer(tmp_path, BATCHES // every, accumulate_grad_batches=every).fit(module, batches(), batches())
    assert module.losses == train_by_hand(llama(recipe), every=every)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_checkpoint_of_any_precision_resumes(tmp_path, precision):
    module = Module("rowwise", False)
    run = make_trainer(tmp_path, 2, precision=precision, limit_train_batches=2)
    run.fit(module, batches(), batches())
    path = run.checkpoint_callback.best_model_path
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert set(saved) == {f"model.{name}" for name in llama().state_dict()}
    resumed = Module("rowwise", False)
    again = make_trainer(tmp_path / "again", 3, precision=precision, limit_train_batches=2)
    again.fit(resumed, batches(), batches(), ckpt_path=path)
    assert again.global_step == 3
    assert resumed.losses[0] < module.losses[0]
    assert len(models.list_float8_names(resumed)) == 14


@proves("Lightning's Trainer", "compile")
@pytest.mark.nightly
def test_a_compiled_module_trains_as_before(tmp_path):
    module = Module(None, False)
    compiled = torch.compile(module, backend="aot_eager")
    make_trainer(tmp_path, BATCHES, plugins=[make_plugin("rowwise")]).fit(compiled, batches())
    assert len(models.list_float8_names(module)) == 14
    assert module.losses == pytest.approx(train_by_hand(llama("rowwise")), rel=1e-4)


@proves("Lightning's Trainer", "evaluate in a step")
def test_validation_within_and_between_accumulated_steps_changes_no_scale(tmp_path):
    """It runs in eval and inference mode after each batch, under the plugin's autocast."""
    runs = []
    for validates in ({"val_check_interval": 1}, {"limit_val_batches": 0}):
        module, options = Module(None, False), {"accumulate_grad_batches": 2, **validates}
        autocasts = make_plugin("delayed", autocast_dtype=torch.bfloat16)
        make_trainer(tmp_path, BATCHES // 2, plugins=[autocasts], **options).fit(module, batches(), batches())
        runs.append((module.losses, get_scales(module.model)))
    assert_same(*runs)


@proves("Lightning's Trainer", "best model")
def test_the_best_checkpoint_comes_with_its_scales(tmp_path):
    """Every step makes the loss worse."""

    class Ascending(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, maximize=True)

    module = Ascending(None, False)
    best = lightning.callbacks.ModelCheckpoint(monitor="validation", save_on_train_epoch_end=False)
    run = make_trainer(tmp_path, 2, plugins=[make_plugin("delayed")], callbacks=[best], val_check_interval=1)
    run.fit(module, batches(), batches())
    (metrics,) = run.validate(module, batches(), ckpt_path="best")
    assert best.best_model_path.endswith("step=1.ckpt")
    assert metrics["validation"] == best.best_model_score.item()


@proves("Lightning's Trainer", "save, resume", "resume elsewhere")
@pytest.mark.parametrize("recipe", ["delayed", *at_night([("rowwise",)])])
def test_the_precision_plugin_converts_scales_and_saves(tmp_path, recipe):
    module, model = Module(None, False), llama(recipe)
    run = make_trainer(tmp_path, BATCHES, plugins=[make_plugin(recipe)])
    run.fit(module, batches(), batches())
    by_hand = partial(train_by_hand, model, build_optimizer(model), after=sync_float8_amax_and_scale_history)
    assert module.losses == by_hand()
    assert_same(get_scales(module.model), get_scales(model))
    resumed, again = Module(None, False), make_trainer(tmp_path / "again", BATCHES + 1, plugins=[make_plugin(recipe)])
    again.fit(resumed, batches(), batches(), ckpt_path=run.checkpoint_callback.best_model_path)
    assert resumed.losses == by_hand(only=[0])


def test_a_checkpoint_without_scales_resumes_and_says_so(tmp_path, caplog):
    run = make_trainer(tmp_path, 2, limit_train_batches=2)
    run.fit(Module(None, False), batches())
    again = make_trainer(tmp_path / "again", 3, limit_train_batches=2, plugins=[make_plugin("delayed")])
    again.fit(Module(None, False), batches(), ckpt_path=run.checkpoint_callback.best_model_path)
    assert again.global_step == 3
    assert "float8: the checkpoint has no persistent scales" in caplog.text


def test_a_monitor_samples_optimizer_steps(tmp_path):
    module, options = Module("rowwise", False), {"accumulate_grad_batches": 2, "val_check_interval": 1}
    module.model = llama("rowwise", layers=1)
    make_trainer(tmp_path, BATCHES // 2, callbacks=[Float8Monitor(every=1)], **options).fit(
        module, batches(), batches()
    )
    assert module.losses == train_by_hand(llama("rowwise", layers=1), every=2)
    record = Record.read(tmp_path)
    assert record.steps.tolist() == list(range(1, BATCHES // 2 + 1))
    assert record.tensors[0]["layer"].startswith("model.model.layers.0.")


def loop(model, optimizer, backward, every=1, only=range(BATCHES)):
    """Train on some of the batches, and return the losses, with that of an evaluation last."""
    losses = train_by_hand(model, optimizer, backward, every=every, only=only)
    *_, last = batches()
    with torch.inference_mode():
        return [*losses, model.eval()(**last).loss.item()]


def run_loop_by_hand(every=1):
    model = llama("tensorwise")
    return loop(model, build_optimizer(model), torch.Tensor.backward, every)


@proves("Fabric", "train", "accumulate", "checkpointing", "evaluate")
@pytest.mark.parametrize(("every", "checkpointing"), [(2, False), (1, True)])
def test_the_losses_of_fabric_are_those_of_a_loop_written_by_hand(every, checkpointing):
    fabric, model, optimizer = set_up_fabric(llama())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert loop(model, optimizer, fabric.backward, every) == run_loop_by_hand(every)
    assert conversion_report(model).float8_flops_fraction > 0.5


@proves("Fabric", "compile")
@pytest.mark.nightly
def test_a_model_compiled_before_or_after_fabric_trains_as_before():
    for compiles_first in (True, False):
        compiled = partial(torch.compile, backend="aot_eager")
        fabric, model, optimizer = set_up_fabric(compiled(llama()) if compiles_first else llama())
        model = model if compiles_first else compiled(model)
        assert conversion_report(model).float8_flops_fraction > 0.5
        assert loop(model, optimizer, fabric.backward) == pytest.approx(run_loop_by_hand(), rel=1e-4)


def test_fabric_with_autocast_differs_by_its_rounding():
    fabric, model, optimizer = set_up_fabric(llama(), autocast_dtype=torch.bfloat16)
    losses, by_hand = loop(model, optimizer, fabric.backward), run_loop_by_hand()
    assert losses == pytest.approx(by_hand, rel=0.01)
    assert losses != by_hand


def test_each_optimizer_of_fabric_updates_the_scales_of_its_own_modules():
    fabric = Fabric(accelerator="cpu", plugins=[Float8FabricPrecision("delayed", autocast_dtype=None)])
    sides = [fabric.setup(model, build_optimizer(model)) for model in (make_mixture(), make_mixture())]
    for model, _ in sides:
        fabric.backward(model(torch.randn(8, DIM)).sum())
    for stepped, (_, optimizer) in enumerate(sides, 1):
        optimizer.step()
        known = [get_scales(model)["1.out.weight.quant_scale"].item() > 0 for model, _ in sides]
        assert known == [index < stepped for index in range(2)]
    layers = conversion_report(sides[0][0]).layers
    assert {layer.name.removeprefix("_forward_module.") for layer in layers} >= {"1.out", "1.experts.down_proj"}
    assert not any("tied" in layer.reason for layer in layers)


@proves("Fabric", "save, resume", "resume elsewhere")
def test_a_resumed_fabric_run_goes_on_as_before(tmp_path):
    fabric, model, optimizer = set_up_fabric(llama())
    whole = loop(model, optimizer, fabric.backward, only=range(2))[:2]
    fabric.save(tmp_path / "state", {"model": model, "optimizer": optimizer})
    whole += loop(model.train(), optimizer, fabric.backward, only=range(2, BATCHES))
    assert whole == run_loop_by_hand()
    fabric, model, optimizer = set_up_fabric(llama())
    (tmp_path / "state").rename(tmp_path / "moved")
    fabric.load(tmp_path / "moved", {"model": model, "optimizer": optimizer})
    assert loop(model, optimizer, fabric.backward, only=range(2, BATCHES)) == whole[2:]


@refuses(
    "Lightning's Trainer",
    "FSDP2",
    "where `ModelParallelStrategy` shards before the plugin converts. Convert in `configure_model`, before "
    "`fully_shard`.",
)
def test_a_module_that_is_sharded_already_is_refused():
    module = torch.nn.Linear(16, 16)
    refused = pytest.raises(RuntimeError, match="convert_to_float8_training at the beginning of configure_model")
    with mock.patch.object(integration, "DTensor", torch.nn.Parameter), refused:
        Float8Precision("rowwise").convert_module(module)


@pytest.mark.parametrize("plugin", [Float8Precision, Float8FabricPrecision])
def test_wrong_arguments_are_refused_before_a_module_is_converted(plugin):
    with pytest.raises(ValueError, match="rowise"):
        plugin("rowise")
    with pytest.raises(TypeError, match="module_filter_fn: expected a function of a module and its name, got 3"):
        plugin("rowwise", module_filter_fn=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        Float8Monitor(evry=3)


PROGRAM_OF_LIGHTNING = """
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
for converted in (module, model):
    assert [layer.backend for layer in conversion_report(converted).converted] == ["exact"]
print("both work")
"""


@pytest.mark.nightly
def test_the_plugins_work_under_the_package_lightning(tmp_path):
    assert "both work" in run_with_packages(["lightning"], ["-c", PROGRAM_OF_LIGHTNING], tmp_path)

"""Tests quaver.integrations.transformers: the preparation of a model, transformers' Trainer, and the callback in it."""

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import quaver
from quaver import Float8Linear, assert_float8_training, cast_weights_once, conversion_report, convert_to_high_precision
from quaver.integrations.transformers import Float8Callback, prepare_model_for_float8
from quaver.numerics.record import Record
from tests.library.third_party.hf_trainer import checkpointing, get_losses
from tests.library.third_party.hf_trainer import trained as trained_by
from tests.library.third_party.hf_trainer import trainer as trainer_of
from tests.library.third_party.llama import (
    BATCHES,
    Tokens,
    build_optimizer,
    clip,
    copy_weights,
    get_scales,
    llama,
    train_by_hand,
)
from tests.library.third_party.table import proves
from tests.steps import assert_same
from tests.thinned import at_night

OPTIONS = {"per_device_eval_batch_size": 2 * BATCHES, "max_grad_norm": 0.0}
SAVING = {"save_strategy": "steps"}
BEST = {**SAVING, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
BEST |= {"metric_for_best_model": "loss", "load_best_model_at_end": True}


def trainer(folder, model, **options):
    return trainer_of(folder, model, [Float8Callback()], **OPTIONS, **options)


def trained(folder, model, callback=None, **options):
    return trained_by(folder, model, [callback or Float8Callback()], **OPTIONS, **options)


def prepared(recipe="rowwise", layers=2):
    return prepare_model_for_float8(llama(layers=layers), recipe)


@proves("transformers' Trainer", "save, resume", "resume elsewhere")
def test_delayed_scales_follow_and_a_resumed_run_has_them(tmp_path):
    """The log says how much is in float8 and how the scales fit."""
    model = prepared("delayed")
    losses, scales = train_by_hand(model, before=quaver.sync_float8_amax_and_scale_history), get_scales(model)
    run = trained(tmp_path, prepared("delayed"), **SAVING)
    assert get_losses(run) == pytest.approx(losses, abs=5e-5)
    followed = get_scales(run.model)
    assert all(torch.allclose(followed[name], scales[name], rtol=1e-5) for name in scales)  # Trainer's AdamW is fused
    entry = [entry for entry in run.state.log_history if "loss" in entry][-1]
    assert entry["float8_flops"] == conversion_report(run.model).float8_flops_fraction > 0.5
    assert entry["float8_saturated"] >= 0
    assert entry["float8_scale_fit"] > 0
    moved = (tmp_path / "checkpoint-2").rename(tmp_path / "moved")
    resumed = trained(tmp_path / "other", prepared("delayed"), resume=moved)
    assert get_losses(resumed)[-2:] == get_losses(run)[-2:]
    assert_same(get_scales(resumed.model), followed)


@proves("transformers' Trainer", "best model")
@proves("PEFT", "best model")
@pytest.mark.parametrize(
    ("recipe", "steps", "learning_rate"), [("delayed", 2, 10.0), *at_night([("LoRA", BATCHES, 1e4)])]
)
def test_the_best_model_comes_with_its_scales(tmp_path, recipe, steps, learning_rate):
    """The learning rate makes every step worse than the first. The default dtype changes no scale."""
    best, short = (lora() if recipe == "LoRA" else prepared(recipe) for _ in range(2))
    torch.set_default_dtype(torch.bfloat16)
    try:
        best = trained(tmp_path, best, max_steps=steps, learning_rate=learning_rate, **BEST)
    finally:
        torch.set_default_dtype(torch.float32)
    assert best.state.best_global_step == 1
    short = trained(tmp_path / "1", short, max_steps=1, learning_rate=learning_rate)
    assert_same(copy_weights(best.model), copy_weights(short.model))
    assert_same(get_scales(best.model), get_scales(short.model))


def test_a_checkpoint_without_scales_resumes_and_says_so(tmp_path, caplog):
    plain = trained_by(tmp_path, llama(), [], max_steps=2, **OPTIONS, **SAVING)
    assert "Float8Callback" not in plain.state.stateful_callbacks
    resumed = trained(tmp_path, prepared("delayed"), resume=tmp_path / "checkpoint-2", **SAVING)
    assert "has no persistent scales" in caplog.text
    again = trained(tmp_path, prepared("delayed"), resume=tmp_path / f"checkpoint-{BATCHES}")
    assert_same(get_scales(again.model), get_scales(resumed.model))


class InTheMiddle(TrainerCallback):
    """Calls a function between the two microbatches of each step, with the steps before, the control and the model."""

    def __init__(self, function):
        self.function = function

    def on_substep_end(self, args, state, control, model, **options):
        self.function(state.global_step, control, model)


def fail_in_the_second_step(step, control, model):
    if step == 1:
        raise OSError("no batch")


def stop_in_the_second_step(step, control, model):
    control.should_training_stop = step == 1


@proves("transformers' Trainer", "after a failed run")
def test_a_run_after_a_failed_one_closes_what_that_left_open(tmp_path):
    model, options = prepared(layers=1), {"gradient_accumulation_steps": 2, "max_steps": 2}
    callback = Float8Callback(monitor=100)
    failing = trainer_of(tmp_path, model, [callback, InTheMiddle(fail_in_the_second_step)], **OPTIONS, **options)
    with pytest.raises(OSError, match="no batch"):
        failing.train()
    with pytest.raises(RuntimeError, match="by a Trainer's Float8Callback, whose close"), cast_weights_once(model):
        pass
    model.load_state_dict(llama(layers=1).state_dict())
    run = trained(tmp_path / "second", model, Float8Callback(monitor=100), **options)
    assert get_losses(run) == get_losses(trained(tmp_path / "fresh", prepared(layers=1), **options))
    with cast_weights_once(model), pytest.raises(RuntimeError, match="leave it before you"), cast_weights_once(model):
        pass


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_trials_of_one_trainer_start_afresh(tmp_path, recipe):
    """As those of `hyperparameter_search`: `model_init` makes another model for each, and the callback stays."""
    arguments = TrainingArguments(str(tmp_path), max_steps=3, logging_steps=1, use_cpu=True, report_to=[], seed=0)
    models = {"model_init": lambda: prepared(recipe), "train_dataset": Tokens()}
    run, losses = Trainer(args=arguments, callbacks=[Float8Callback(monitor=100)], **models), []
    for learning_rate in (1e-3, 1e-2, 1e-3):
        arguments.learning_rate = learning_rate
        run.train()
        losses.append(get_losses(run))
    assert losses[0] == losses[2] != losses[1]


def test_a_sample_of_zeros_has_no_sqnr_to_log(tmp_path):
    model = prepared(layers=1)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    run = trained(tmp_path, model, Float8Callback(monitor=100), max_steps=1)
    assert "float8_flops" in run.state.log_history[0]
    assert "float8_sqnr_min_db" not in run.state.log_history[0]


def test_the_log_of_a_step_with_nan_says_so(tmp_path):
    model = prepared("delayed", layers=1)
    torch.nn.init.constant_(model.model.layers[0].self_attn.v_proj.weight, torch.nan)
    run = trained(tmp_path, model, max_steps=1, logging_nan_inf_filter=False)
    assert np.isnan([run.state.log_history[0][name] for name in ("loss", "float8_scale_fit")]).all()


@pytest.mark.parametrize("monitor", ["10", 2.5, True, {"evry": 10}, {"steps_by_hand": True}])
def test_a_callback_refuses_what_no_monitor_takes(monitor):
    with pytest.raises(TypeError, match="^monitor: "):
        Float8Callback(monitor=monitor)


def test_a_monitor_samples_every_step_and_changes_no_loss(tmp_path):
    model = prepared(layers=1)
    plain = trained(tmp_path / "plain", prepared(layers=1))
    run = trained(tmp_path, model, Float8Callback(monitor=2), **SAVING)
    assert get_losses(run) == get_losses(plain)
    again, callback = prepared(layers=1), Float8Callback(monitor={"every": 1})
    resumed = trained(tmp_path, again, callback, resume=tmp_path / "checkpoint-2")
    record = Record.read(tmp_path)
    assert record.steps.tolist() == [1, 2, *range(3, BATCHES + 1)]
    lowest = np.nanmin(record.statistics["sqnr_db"][-1])
    assert resumed.state.log_history[-2]["float8_sqnr_min_db"] == pytest.approx(lowest)
    assert all(linear.probes is None for linear in model.modules() if isinstance(linear, Float8Linear))


@proves("transformers' Trainer", "accumulate")
def test_accumulation_quantizes_each_weight_once_and_changes_no_loss(tmp_path):
    options = {"gradient_accumulation_steps": 2, "max_steps": 2}
    run, steps = trainer(tmp_path, prepared(), **options), []

    def assert_a_scope_is_open(step, control, model):
        with pytest.raises(RuntimeError, match="opened by a Trainer's Float8Callback"), cast_weights_once(model):
            pass
        steps.append(step)

    run.add_callback(InTheMiddle(assert_a_scope_is_open))
    run.train()
    assert steps == [0, 1]
    without_callback = trained_by(tmp_path, prepared(), [], **OPTIONS, **options)
    assert get_losses(run) == get_losses(without_callback)


@proves("transformers' Trainer", "accumulate", "evaluate")
@pytest.mark.parametrize("recipe", ["delayed", *at_night([("delayed_with_dynamic_weight",)])])
def test_evaluations_change_neither_losses_nor_scales(tmp_path, recipe):
    """After an evaluation `on_step_begin` finds the model in eval mode. A resumed run does not."""
    options = {"gradient_accumulation_steps": 2, "max_steps": 4, "save_steps": 2, "eval_steps": 2, **SAVING}
    runs = {}
    for evaluates in (True, False):
        model = prepared(recipe)
        strategy = {"eval_strategy": "steps", "eval_on_start": True} if evaluates else {}
        runs[evaluates] = trained(tmp_path / str(evaluates), model, **options, **strategy)
    options |= {"eval_strategy": "steps", "resume": tmp_path / "True" / "checkpoint-2"}
    resumed = trained(tmp_path / "True", prepared(recipe), **options)
    for run in (runs[False], resumed):
        assert get_losses(run) == get_losses(runs[True])
        assert_same(get_scales(run.model), get_scales(runs[True].model))


def test_a_run_that_stops_within_a_step_ends_with_the_weights_of_its_best_checkpoint(tmp_path):
    model = prepared("delayed")
    run = trainer(tmp_path, model, gradient_accumulation_steps=2, max_steps=3, **BEST)
    run.add_callback(InTheMiddle(stop_in_the_second_step))
    run.train()
    assert run.state.global_step == 1
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert_same(model.state_dict(), load_file(tmp_path / "checkpoint-1" / "model.safetensors"))
    with cast_weights_once(model):  # no scope is open
        pass


@pytest.mark.parametrize("first", ["convert", "adapt"])
def test_adapters_and_the_head_stay_in_high_precision(first):
    adapter = peft.LoraConfig(r=4, target_modules="all-linear")
    build = prepared if first == "convert" else llama
    model = peft.get_peft_model(build(), adapter)
    model = model if first == "convert" else prepare_model_for_float8(model, "rowwise")
    report = conversion_report(model)
    assert len(report.converted) == 14
    assert all("lora" in layer.name or "lm_head" in layer.name for layer in report.skipped)
    if first == "adapt":
        assert {layer.reason for layer in report.skipped} == {"adapter", "output head"}
    assert_float8_training(model, build_optimizer(model), allow_frozen=True)
    with pytest.raises(RuntimeError, match="weights that require no gradient: .* and 11 more"):
        assert_float8_training(model)
    assert not conversion_report(convert_to_high_precision(model)).converted
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()


def lora():
    torch.manual_seed(1)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    return peft.get_peft_model(prepared("tensorwise"), adapter)


@proves("PEFT", "train", "accumulate", "checkpointing", "evaluate")
@pytest.mark.parametrize(
    "options",
    [{"gradient_accumulation_steps": 2, "max_steps": BATCHES // 2, "gradient_checkpointing": True}, *at_night([({},)])],
)
def test_lora_trains_as_in_a_loop_by_hand(tmp_path, options):
    model, every = lora(), options.get("gradient_accumulation_steps", 1)
    losses, before = train_by_hand(model, every=every), copy_weights(lora())
    run = trained(tmp_path, lora(), **options)
    by_step = torch.tensor(losses).view(-1, every).mean(1).tolist()
    assert get_losses(run) == pytest.approx(by_step, abs=5e-5)
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, _ in run.model.named_parameters() if "lora_" in name}
    (everything,) = torch.utils.data.DataLoader(Tokens(), batch_size=len(Tokens()))
    with torch.no_grad():
        by_hand = model.eval()(**everything).loss.item()
    assert run.evaluate(Tokens())["eval_loss"] == pytest.approx(by_hand, abs=1e-4)


@proves("PEFT", "save, resume", "resume elsewhere")
def test_a_resumed_lora_goes_on_as_before_and_its_adapter_fits_the_unconverted_model(tmp_path):
    whole = trained(tmp_path, lora(), **SAVING)
    moved = (tmp_path / "checkpoint-2").rename(tmp_path / "moved")
    resumed = trained(tmp_path / "other", lora(), resume=moved)
    assert get_losses(resumed)[2:] == get_losses(whole)[2:]
    whole.model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    assert all(torch.equal(p, loaded.get_parameter(name)) for name, p in whole.model.named_parameters())


WRONG = {
    "weight replaced": "float8 weights that the optimizer does not hold: model.layers.0.self_attn.q_proj; make",
    "optimizer of another model": "the optimizer holds 21 parameters that the model does not have",
    "twice": "holds more than once: model.layers.0.self_attn.q_proj.weight",
    "forward replaced": "model.layers.0.self_attn.q_proj: its forward was replaced on the instance, and it has",
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_what_would_train_something_else_is_refused(wrong):
    model = prepared()
    linear, optimizer = model.model.layers[0].self_attn.q_proj, build_optimizer(model)
    assert_float8_training(model, optimizer)
    if wrong == "weight replaced":
        linear.weight = torch.nn.Parameter(linear.weight.clone())
    elif wrong == "optimizer of another model":
        optimizer = build_optimizer(llama())
    elif wrong == "twice":
        optimizer = torch.optim.SGD([{"params": [*model.parameters(), linear.weight]}], lr=0.1)
    else:
        model(torch.arange(8)[None])
        linear.forward = linear.forward
    with pytest.raises(RuntimeError, match=WRONG[wrong]):
        assert_float8_training(model, optimizer)


def test_an_optimizer_may_train_a_loss_beside_the_model_and_not_without_float8(tmp_path):
    model = prepared()
    loss = torch.nn.Linear(16, 16)
    assert_float8_training(model, torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1))
    with pytest.raises(RuntimeError, match="holds 2 parameters that the model does not have"):
        assert_float8_training(model, torch.optim.SGD([*model.model.parameters(), *loss.parameters()], lr=0.1))
    with pytest.raises(RuntimeError, match="no linear is in float8"):
        trainer(tmp_path, llama()).train()


RUNS = [("rowwise_with_gw_hp", checkpointing(use_reentrant=False))]
RUNS += at_night([("tensorwise", {}), ("rowwise", checkpointing(use_reentrant=True))])


@proves("transformers' Trainer", "train", "checkpointing")
@pytest.mark.parametrize(("recipe", "options"), RUNS)
def test_a_run_without_the_callback_has_the_losses_of_a_loop_written_by_hand(tmp_path, recipe, options):
    losses = get_losses(trained_by(tmp_path, recipe, **options))
    assert losses == pytest.approx(train_by_hand(llama(recipe), before=clip), abs=5e-5)  # logged with 4 places
    assert losses != pytest.approx(train_by_hand(llama(), before=clip), abs=5e-5)


@proves("transformers' Trainer", "compile")
@pytest.mark.nightly
def test_the_trainers_compilation_changes_no_loss(tmp_path):
    run = trained_by(tmp_path, "rowwise", torch_compile=True, torch_compile_backend="aot_eager")
    assert get_losses(run) == pytest.approx(train_by_hand(llama("rowwise"), before=clip), rel=1e-3)


@proves("transformers' Trainer", "evaluate")
def test_a_trained_model_evaluates_generates_and_exports(tmp_path):
    run = trained_by(tmp_path, "rowwise", bf16=True)
    assert run.evaluate()["eval_loss"] > 0
    prompt = Tokens()[0]["input_ids"][None, :4]
    assert run.model.eval().generate(prompt, max_new_tokens=3, do_sample=False).shape == (1, 7)
    run.model.save_pretrained(tmp_path / "saved")
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert not conversion_report(exported).converted
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, exported.get_parameter(name))

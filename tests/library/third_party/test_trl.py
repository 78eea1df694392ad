"""Tests TRL's SFTTrainer, DPOTrainer and GRPOTrainer on a converted model."""

import copy
import math
from functools import partial

import pytest
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM

from quaver import serving_config
from quaver.integrations.transformers import Float8Callback, prepare_model_for_float8
from tests.library.third_party.accelerated import find_changed
from tests.library.third_party.hf_trainer import get_losses, settings, trained
from tests.library.third_party.llama import (
    BATCHES,
    clip,
    copy_weights,
    get_scales,
    list_float8_names,
    llama,
    train_by_hand,
)
from tests.library.third_party.sft_trainer import WORDS, make_dataset, make_tokenizer, sft
from tests.library.third_party.table import proves
from tests.steps import assert_same
from tests.thinned import at_night


def make_trainer_options(dataset):
    """Return what every trainer gets. A list of samples may stand for the dataset."""
    dataset = Dataset.from_list(dataset) if isinstance(dataset, list) else dataset
    return {"train_dataset": dataset, "processing_class": make_tokenizer(), "callbacks": [Float8Callback()]}


@proves("TRL", "train", "checkpointing")
@pytest.mark.parametrize("gradient_checkpointing", [True, *at_night([(False,)])])
def test_sft_has_the_losses_of_a_loop_written_by_hand(tmp_path, gradient_checkpointing):
    model = llama("rowwise")
    before = copy_weights(model)
    run = sft(tmp_path, model, gradient_checkpointing=gradient_checkpointing)
    run.train()
    assert get_losses(run) == pytest.approx(train_by_hand(llama("rowwise"), before=clip), abs=1e-4)
    assert find_changed(model, before) == set(before)


ACCUMULATE = {"gradient_accumulation_steps": 2, "max_steps": BATCHES // 2}
COMPILE = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@proves("TRL", "accumulate", "compile")
@pytest.mark.nightly
@pytest.mark.parametrize("options", [ACCUMULATE, COMPILE], ids=["accumulate", "compile"])
def test_sft_trains_as_transformers_trainer(tmp_path, options):
    by_trl = sft(tmp_path / "trl", llama("rowwise"), **options)
    by_trl.train()
    by_transformers = trained(tmp_path / "transformers", "rowwise", [Float8Callback()], **options)
    assert get_losses(by_trl) == pytest.approx(get_losses(by_transformers), abs=1e-4)


@proves("TRL", "save, resume", "resume elsewhere")
@pytest.mark.nightly
def test_sft_resumes_a_moved_checkpoint_with_its_scales(tmp_path):
    whole, resumed = (
        sft(tmp_path / name, prepare_model_for_float8(llama(), "delayed"), save_strategy="steps", save_steps=2)
        for name in ("whole", "resumed")
    )
    whole.train()
    resumed.train(resume_from_checkpoint=str((tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "moved")))
    assert get_losses(resumed)[-2:] == get_losses(whole)[-2:]
    assert_same(get_scales(resumed.model), get_scales(whole.model))


@proves("TRL", "best model")
@pytest.mark.nightly
def test_the_best_model_of_sft_comes_with_its_scales(tmp_path):
    """The learning rate makes every step worse than the first."""
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options = {"learning_rate": 10.0, **saving, "metric_for_best_model": "loss"}
    best = sft(tmp_path, prepare_model_for_float8(llama(), "delayed"), load_best_model_at_end=True, **options)
    best.train()
    assert best.state.best_global_step == 1
    short = sft(tmp_path / "1", prepare_model_for_float8(llama(), "delayed"), max_steps=1, learning_rate=10.0)
    short.train()
    assert_same(get_scales(best.model), get_scales(short.model))


@proves("TRL", "adapters after")
def test_sft_adds_adapters_to_a_converted_model(tmp_path):
    model = prepare_model_for_float8(llama(), "rowwise")
    adapters = LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    options = make_trainer_options(make_dataset())
    run = trl.SFTTrainer(model, trl.SFTConfig(**settings(tmp_path)), peft_config=adapters, **options)
    before = copy_weights(run.model)
    run.train()
    assert len(list_float8_names(run.model)) == 14
    assert find_changed(run.model, before) == {name for name in before if "lora_" in name}


@proves("TRL", "evaluate")
@pytest.mark.parametrize("has_reference", [*at_night([(False,)]), True])
def test_dpo_learns_which_answer_was_chosen(tmp_path, has_reference):
    model = prepare_model_for_float8(llama(), "rowwise")
    before = copy_weights(model)
    prompts = (" ".join(WORDS[n : n + 8]) for n in range(2 * BATCHES))
    answers = {"chosen": " w1 w2 w3 w4", "rejected": " w5 w6 w7 w8"}
    options = make_trainer_options([{"prompt": prompt, **answers} for prompt in prompts])
    arguments = trl.DPOConfig(**settings(tmp_path), precompute_ref_log_probs=not has_reference)
    options |= {"args": arguments, "eval_dataset": options["train_dataset"]}
    run = trl.DPOTrainer(model, copy.deepcopy(model) if has_reference else None, **options)
    run.train()
    assert len(list_float8_names(model)) == 14
    assert find_changed(model, before) == set(before)
    losses = get_losses(run)
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < losses[0]
    assert run.evaluate()["eval_rewards/accuracies"] == 1.0


def save_and_load(folder, config="rowwise"):
    """Return a model with a name, by which TRL loads the reference."""
    llama().save_pretrained(folder / "model")
    return prepare_model_for_float8(LlamaForCausalLM.from_pretrained(folder / "model"), config)


def dpo(folder, model, convert_reference=True, **options):
    """Return a DPOTrainer after one step on four pairs."""
    pairs = [{"prompt": " w1 w2", "chosen": f" w{n + 1} w{n + 2}", "rejected": f" w{n + 5} w{n + 9}"} for n in range(4)]
    options |= make_trainer_options(pairs) | {"callbacks": [Float8Callback(convert_reference=convert_reference)]}
    run = trl.DPOTrainer(model, args=trl.DPOConfig(**settings(folder, max_steps=1), beta=1.0), **options)
    run.train()
    return run


@proves("PEFT", "reference model")
@pytest.mark.nightly
def test_the_reference_of_adapters_is_the_model_without_them(tmp_path):
    adapters = LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    run = dpo(tmp_path, prepare_model_for_float8(llama(), "rowwise"), peft_config=adapters)
    assert get_losses(run) == [pytest.approx(math.log(2), abs=1e-4)]  # the adapters begin at 0


@proves("TRL", "reference model")
@pytest.mark.parametrize("convert", [True, False])
def test_the_reference_that_trl_loads_is_in_float8_too(tmp_path, convert):
    run = dpo(tmp_path, save_and_load(tmp_path), convert)
    assert len(list_float8_names(run.ref_model)) == (14 if convert else 0)
    assert (get_losses(run)[0] == pytest.approx(math.log(2), abs=1e-6)) is convert


@pytest.mark.nightly
@proves("TRL", "reference model")
@pytest.mark.parametrize("kind", ["KTO", "RLOO"])
def test_the_first_batch_has_no_divergence_from_the_reference_that_trl_loads(kind, tmp_path):
    options = settings(tmp_path, max_steps=1, per_device_train_batch_size=4)
    data = [{"prompt": f"w{i} w2", "completion": f" w{i + 3} w5", "label": i % 2 == 0} for i in range(8)]
    if kind == "KTO":
        make_trainer, arguments = trl.KTOTrainer, trl.KTOConfig(**options)
    else:
        make_trainer = partial(trl.RLOOTrainer, reward_funcs=[lambda completions, **kwargs: [1.0] * len(completions)])
        arguments = trl.RLOOConfig(**options, num_generations=2, max_completion_length=8, beta=0.1)
        data = [{"prompt": sample["prompt"]} for sample in data]
    run = make_trainer(save_and_load(tmp_path), args=arguments, **make_trainer_options(data))
    run.train()
    assert run.state.log_history[0]["kl"] == 0
    assert len(list_float8_names(run.ref_model)) == 14


def reward_different_words(completions, **kwargs):
    return [float(len(set(completion.split()))) for completion in completions]


SERVINGS = "vllm-per-token", "sglang-block"


@proves("TRL", "reference model")
@pytest.mark.parametrize(
    "recipe", ["delayed", *at_night((name,) for name in ("rowwise", "tensorwise", "blockwise", "mxfp8", *SERVINGS))]
)
@pytest.mark.parametrize("reference", ["loaded", *at_night([("given",)])])
def test_grpo_has_no_divergence_at_learning_rate_0(recipe, reference, tmp_path):
    """The model is its own rollout, in training's casts or a server's.

    The second step has the delayed scales of the first, the reference's too.
    """
    model = save_and_load(tmp_path, serving_config(recipe) if recipe in SERVINGS else recipe)
    options = {"max_steps": 2, "learning_rate": 0.0, "per_device_train_batch_size": 4, "num_generations": 2}
    arguments = trl.GRPOConfig(**settings(tmp_path, **options), max_completion_length=8, beta=0.1)
    data = make_trainer_options([{"prompt": f"w{i} w{i + 2}"} for i in range(8)])
    run = trl.GRPOTrainer(model, [reward_different_words], args=arguments, **data)
    if reference == "given":
        run.ref_model = copy.deepcopy(model).eval()
    run.train()
    assert [entry["kl"] for entry in run.state.log_history if "kl" in entry] == [0.0, 0.0]
    assert len(list_float8_names(run.ref_model)) == 14

"""Tests stored activations in other people's models and trainers: gradients are near, and losses those by hand."""

import copy
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import transformers

from quaver.activations import activation_report, stop_storing_activations, store_activations_in_float8
from quaver.integrations.transformers import Float8Callback
from tests.library.third_party.accelerated import save_and_resume, train_by_accelerate_and_by_hand
from tests.library.third_party.hf_trainer import checkpointing, get_losses, trained
from tests.library.third_party.llama import BATCHES, batches, build_optimizer, convert, llama, sharded, train_by_hand
from tests.ranks import run as run_on_ranks
from tests.thinned import at_night

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE |= {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KEYS = {**SHAPE, "num_key_value_heads": 1}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
T5 = {"d_model": 128, "d_ff": 256, "num_layers": 1, "num_heads": 2, "d_kv": 64, "decoder_start_token_id": 0}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**KEYS, "attn_implementation": "sdpa"}),
    "llama, eager attention": ("LlamaForCausalLM", "LlamaConfig", {**KEYS, "attn_implementation": "eager"}),
    "bert": ("BertForMaskedLM", "BertConfig", {**SHAPE, "attention_probs_dropout_prob": 0.0}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"vocab_size": 64, "pad_token_id": 0, **T5}),
    "qwen3 with experts": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**KEYS, **EXPERTS}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch_has_near_gradients(name):
    torch.manual_seed(0)
    model_class, config_class, sizes = MODELS[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).train()
    convert(model, "rowwise")
    tokens = torch.randint(3, 64, (2, 128))
    mask = torch.ones_like(tokens)
    mask[1, -40:] = 0

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()

    store_activations_in_float8(model)
    report = activation_report(model, step)
    assert min(report.gradient_sqnr_db.values()) > 18
    assert report.bytes_after < 0.6 * report.bytes_before


def build_storing_llama(recipe="rowwise"):
    model = llama(recipe)
    store_activations_in_float8(model)
    return model


@pytest.mark.parametrize("is_checkpointed", [False, *at_night([(True,)])])
def test_transformers_trainer_has_the_losses_of_a_loop_written_by_hand(is_checkpointed, tmp_path):
    """transformers' Trainer evaluates in between, saves and is resumed: the losses of a loop by hand, not a plain's."""
    options = {"max_grad_norm": 0.0, "save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 1}
    by_hand, plain = build_storing_llama(), llama("rowwise")
    if is_checkpointed:
        options |= checkpointing(use_reentrant=False)
        by_hand.gradient_checkpointing_enable({"use_reentrant": False})
    run = trained(tmp_path, build_storing_llama(), [Float8Callback()], **options)
    assert get_losses(run) == pytest.approx(train_by_hand(by_hand), abs=5e-5)  # Trainer's AdamW is fused
    assert get_losses(run) != pytest.approx(train_by_hand(plain), abs=5e-5)
    resumed = trained(tmp_path, build_storing_llama(), [Float8Callback()], resume=tmp_path / "checkpoint-2", **options)
    assert get_losses(resumed) == get_losses(run)


@pytest.mark.parametrize("variant", ["checkpointing", *at_night([("accumulate",)])])
def test_accelerate_has_the_losses_of_a_loop_written_by_hand(variant):
    """Accumulated gradients or checkpoints under DDP, and an evaluation: the losses of torch's DDP by hand."""
    for by_accelerate, by_hand in run_on_ranks(2, train_by_accelerate_and_by_hand, variant, build_storing_llama):
        assert variant == "checkpointing" or by_accelerate == by_hand
        assert by_accelerate == pytest.approx(by_hand, rel=0.01)


@pytest.mark.nightly
def test_accelerate_with_fsdp2_goes_on_after_a_save(tmp_path):
    options = "FSDP2", True, "SHARDED_STATE_DICT", str(tmp_path)
    runs = run_on_ranks(2, save_and_resume, *options, build_optimizer, store_activations_in_float8)
    for whole, resumed in runs:
        assert resumed == whole


def train_with_fsdp2(checkpointing):
    """Return the losses of this rank: of a plain model, of one that stores before it is sharded, and of one after."""
    losses = []
    for when in ("never", "before", "after"):
        model = llama("rowwise")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if when == "before":
            store_activations_in_float8(model)
        model = sharded(model)
        if when == "after":
            store_activations_in_float8(model)
        losses.append(train_by_hand(model, rank=dist.get_rank(), only=range(2)))
    return losses


@pytest.mark.parametrize("checkpointing", [False, *at_night([(True,)])])
def test_fsdp2_stores_the_same_before_and_after_sharding(checkpointing):
    for plain, before, after in run_on_ranks(2, train_with_fsdp2, checkpointing):
        assert before == after
        assert before == pytest.approx(plain, rel=0.01)
        assert before != plain  # of checkpointed blocks the last norm alone, which is outside


def test_a_resumed_lightning_run_goes_on_as_before(tmp_path):
    """A run accumulates gradients, validates in between, saves in mid-epoch, and is resumed."""
    from tests.library.third_party import lightning_trainer

    def fit(steps, **options):
        with mock.patch.object(lightning_trainer, "llama", build_storing_llama):
            module = lightning_trainer.Module("rowwise", False)
        run = lightning_trainer.make_trainer(tmp_path / str(steps), steps, accumulate_grad_batches=2)
        run.fit(module, batches(), batches(), **options)
        return module, run.checkpoint_callback.best_model_path

    whole, path = fit(BATCHES // 2)
    assert whole.losses == train_by_hand(build_storing_llama(), every=2)
    assert whole.losses != train_by_hand(llama("rowwise"), every=2)
    resumed, _ = fit(BATCHES // 2 + 1, ckpt_path=path)
    assert resumed.losses[0] < whole.losses[0]


def test_adapters_store_in_either_order_and_merge():
    """The model stores before or after adapters are added; then they are merged, and a copy that keeps teaches it."""
    adapter = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    stores_first, adapts_first = (
        peft.get_peft_model(build("rowwise"), adapter) for build in (build_storing_llama, llama)
    )
    adapts_first.load_state_dict(stores_first.state_dict())
    teacher = copy.deepcopy(adapts_first)
    store_activations_in_float8(adapts_first)
    expected = train_by_hand(copy.deepcopy(teacher), only=range(2))
    for model in (stores_first, adapts_first):
        losses = train_by_hand(model, only=range(2))
        assert losses == pytest.approx(expected, rel=0.01)
        assert losses != expected
    prompt = torch.arange(8)[None]
    merged = stores_first.merge_and_unload().requires_grad_()
    logits = merged(prompt).logits
    (logits - teacher(prompt).logits.detach()).square().mean().backward()
    stop_storing_activations(merged)
    assert torch.equal(merged(prompt).logits, logits)

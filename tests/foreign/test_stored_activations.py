"""transformers' models with padding store their activations in float8, and their gradients are near."""

import pytest
import torch
import transformers

from quaver import Float8LinearConfig, convert_to_float8_training
from quaver.checkpointing import activation_report, store_activations_in_float8
from tests.foreign.llama import llama
from tests.foreign.test_transformers_trainer import losses_of, trainer

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, **WORDS, num_key_value_heads=1, attn_implementation="sdpa")
    ),
    "llama, eager attention": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, **WORDS, num_key_value_heads=1, attn_implementation="eager")
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SHAPE, **WORDS, attention_probs_dropout_prob=0.0)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=128, d_ff=256, num_layers=1, num_heads=2, d_kv=64, decoder_start_token_id=0, **WORDS
        )
    ),
    "qwen3 with experts": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SHAPE, **WORDS, num_key_value_heads=1, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: "lm_head" not in fqn)
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


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_transformers_trainer(tmp_path, options):
    """The losses of a run that stores are near those of one that keeps, and generate() says the same."""
    runs = []
    for stores in (False, True):
        model = llama("rowwise")
        if stores:
            tokens = torch.arange(8)[None]
            expected = model.generate(tokens, max_new_tokens=4, do_sample=False)
            store_activations_in_float8(model)
            assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), expected)
        runs.append(trainer(tmp_path / str(stores), model, max_steps=4, **options))
        runs[-1].train()
        assert runs[-1].evaluate()["eval_loss"] > 0
    assert losses_of(runs[1]) == pytest.approx(losses_of(runs[0]), rel=0.01)
    weights = zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True)
    assert not all(torch.equal(kept, stored) for kept, stored in weights)

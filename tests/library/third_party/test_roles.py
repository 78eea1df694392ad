"""Output heads, adapters and routers stay in high precision, whatever wraps the model, and the report says which."""

import peft
import pytest
import torch
import transformers
from torch import nn

from quaver import conversion_report
from quaver.integrations.transformers import prepare_model_for_float8
from tests.library.third_party.llama import llama
from tests.library.third_party.table import proves

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {**SMALL, "vocab_size": 128, "num_labels": 16}
BARK = {"hidden_size": 64, "num_heads": 4, "num_layers": 2, "input_vocab_size": 64, "output_vocab_size": 64}
SPEECH = {**SMALL, "vocab_size": 32, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
MUSIC = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
VISION = {**SMALL, "image_size": 32, "patch_size": 16}
DECODER = {**VISION, "decoder_hidden_size": 64, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}

HEADS = {
    "BertForSequenceClassification": ("BertConfig", BERT, {"classifier", "bert.pooler.dense"}),
    "RobertaForSequenceClassification": ("RobertaConfig", BERT, {"classifier.dense", "classifier.out_proj"}),
    "BertForTokenClassification": ("BertConfig", BERT, {"classifier"}),
    "ViTForImageClassification": ("ViTConfig", {**VISION, "num_labels": 16}, {"classifier"}),
    "LlamaForSequenceClassification": ("LlamaConfig", BERT, {"score"}),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", SPEECH, {"lm_head"}),
    "BarkFineModel": ("BarkFineConfig", BARK, {f"lm_heads.{i}" for i in range(7)}),
    "BarkCausalModel": ("BarkSemanticConfig", BARK, {"lm_head"}),
    "MusicgenForCausalLM": ("MusicgenDecoderConfig", MUSIC, {f"lm_heads.{i}" for i in range(4)}),
    # Not the blocks of its decoder.
    "ViTMAEForPreTraining": ("ViTMAEConfig", DECODER, {"decoder.decoder_embed", "decoder.decoder_pred"}),
}


def find_skipped_linears(model):
    """Return the reasons for linears that are not converted, by name."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {layer.name: layer.reason for layer in conversion_report(model).skipped if layer.name in linears}


@proves("transformers' Trainer", "heads")
@pytest.mark.parametrize("name", HEADS)
def test_output_heads_are_recognized_by_their_position(name):
    config, options, expected = HEADS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**options))
    prepare_model_for_float8(model, "rowwise")
    reasons = find_skipped_linears(model)
    assert set(reasons) == expected
    assert all(reason.startswith("output head") for reason in reasons.values())


def test_a_projector_between_two_models_is_not_a_head():
    text = {**SMALL, "num_key_value_heads": 2, "vocab_size": 128}
    towers = {"vision_config": transformers.CLIPVisionConfig(**VISION), "text_config": transformers.LlamaConfig(**text)}
    config = transformers.LlavaConfig(**towers, image_token_index=5)
    model = prepare_model_for_float8(transformers.LlavaForConditionalGeneration(config), "rowwise")
    assert [layer.name for layer in conversion_report(model).skipped] == ["lm_head"]


TUNERS = {
    "modules_to_save": peft.LoraConfig(r=16, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "LoRA": peft.LoraConfig(r=16, target_modules=["q_proj", "lm_head"]),
    "LoHa": peft.LoHaConfig(r=16, target_modules=["q_proj", "lm_head"]),
    "IA3": peft.IA3Config(target_modules=["q_proj", "lm_head"], feedforward_modules=[]),
    "OFT": peft.OFTConfig(r=0, oft_block_size=16, target_modules=["q_proj", "lm_head"]),
    "AdaLoRA": peft.AdaLoraConfig(init_r=16, target_r=16, total_step=10, target_modules=["q_proj", "lm_head"]),
    "prompt": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=64),
}


@proves("PEFT", "adapters before", "heads")
@pytest.mark.parametrize("name", TUNERS)
def test_heads_and_adapters_that_peft_made_first_stay(name):
    model = prepare_model_for_float8(peft.get_peft_model(llama(), TUNERS[name]), "rowwise")
    reasons = find_skipped_linears(model)
    heads = {name for name, reason in reasons.items() if reason == "output head"}
    assert heads
    assert all("lm_head" in name for name in heads)
    assert {reasons[name] for name in reasons if name not in heads} <= {"adapter"}
    assert len(conversion_report(model).converted) == 14


def test_token_adapters_on_a_tied_head_leave_it():
    model = llama()
    model.lm_head.weight, model.config.tie_word_embeddings = model.model.embed_tokens.weight, True
    config = peft.LoraConfig(r=16, target_modules=["q_proj"], trainable_token_indices=[1, 2])
    adapted = peft.get_peft_model(model, config)
    prepare_model_for_float8(adapted, "rowwise")
    assert not any("lm_head" in layer.name for layer in conversion_report(adapted).converted)
    adapted(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()

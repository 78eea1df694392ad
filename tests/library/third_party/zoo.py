"""Builds small models of transformers from their configs, with a batch."""

import torch
import transformers

TOKENS = torch.arange(64).reshape(2, 32) * 7 % 127 + 1  # without 0, the padding token, whose embedding is zero
LABELS = {"labels": TOKENS}
TEXT = {"input_ids": TOKENS, **LABELS}
GENERATOR = torch.Generator().manual_seed(0)
NOISE, TARGET = torch.randn(2, 3, 64, 64, generator=GENERATOR), torch.randn(2, 32, 4, 4, generator=GENERATOR)
PIXELS = torch.randn(2, 3, 32, 32, generator=GENERATOR)
SOUND = torch.randn(2, 80, 64, generator=GENERATOR)

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "vocab_size": 128, "intermediate_size": 96, "num_key_value_heads": 2, "attention_dropout": 0.0}
MIXTURE = {**DECODER, "num_experts_per_tok": 2, "output_router_logits": True}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {**SIZES, **NO_DROPOUT, "vocab_size": 128, "intermediate_size": 96}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROUTED = {"moe_intermediate_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
DEEPSEEK = {**DECODER, **MLA, **ROUTED, "num_key_value_heads": 4, "first_k_dense_replace": 1}
GLM4 = {**DECODER, **ROUTED, "n_group": 1, "topk_group": 1, "head_dim": 16, "n_routed_experts": 4}
LLAMA4 = {**DECODER, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "pad_token_id": 0}
FALCON = {**SIZES, "vocab_size": 128, "bias": True, "attention_dropout": 0.0}
GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
NEOX = {**SIZES, "vocab_size": 128, "intermediate_size": 96}
OPT = {**SIZES, "vocab_size": 128, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "attention_dropout": 0.0}
T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
VISION = {"image_size": 32, "patch_size": 8}
VIT = {**SIZES, **NO_DROPOUT, **VISION, "intermediate_size": 96, "num_labels": 4}
SAM = {**SIZES, "image_size": 64, "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 128}
TOWER = {**SIZES, "intermediate_size": 96}
CLIP_TEXT = {**TOWER, "vocab_size": 128, "eos_token_id": 2}
CLIP = {"text_config": CLIP_TEXT, "vision_config": {**TOWER, **VISION}, "projection_dim": 32}
WHISPER = {"vocab_size": 128, "d_model": 64, "dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER |= {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "max_source_positions": 32}
WHISPER |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "max_target_positions": 64}
MAMBA = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "time_step_rank": 16}

MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER, TEXT),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**DECODER, "sliding_window": 16}, TEXT),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**DECODER, "tie_word_embeddings": True}, TEXT),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**DECODER, "head_dim": 16}, TEXT),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**DECODER, "head_dim": 16}, TEXT),
    "phi": ("PhiConfig", "PhiForCausalLM", {**DECODER, "resid_pdrop": 0.0}, TEXT),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**DECODER, "resid_pdrop": 0.0}, TEXT),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", NEOX, TEXT),
    "falcon": ("FalconConfig", "FalconForCausalLM", FALCON, TEXT),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, TEXT),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT, TEXT),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**MIXTURE, "num_local_experts": 4}, TEXT),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**MIXTURE, "num_experts": 4, "pad_token_id": 0}, TEXT),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**MIXTURE, "num_local_experts": 4, "head_dim": 16}, TEXT),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", GLM4, TEXT),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4, TEXT),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**MIXTURE, "num_experts": 4, "head_dim": 16}, TEXT),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK, TEXT),
    "bert": ("BertConfig", "BertForMaskedLM", ENCODER, TEXT),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", ENCODER, TEXT),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, TEXT),
    "vit": ("ViTConfig", "ViTForImageClassification", VIT, {"pixel_values": PIXELS, "labels": torch.arange(2)}),
    "clip": ("CLIPConfig", "CLIPModel", CLIP, {"input_ids": TOKENS, "pixel_values": PIXELS, "return_loss": True}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER, {"input_features": SOUND, **LABELS}),
    "mamba": ("MambaConfig", "MambaForCausalLM", MAMBA, TEXT),
    "sam": ("SamVisionConfig", "SamVisionModel", {**SAM, "output_channels": 32}, {"pixel_values": NOISE}),
}


def make(name, **sizes):
    """Return the model in training mode, with a batch for it; `sizes` replace its own."""
    config_class, model_class, defaults, inputs = MODELS[name]
    config = getattr(transformers, config_class)(**{**defaults, **sizes})
    config.pad_token_id, config.decoder_start_token_id, config.use_cache = 0, 0, False
    return getattr(transformers, model_class)(config).train(), inputs


def compute_loss(model, inputs, autocast=False):
    dtype = next(model.parameters()).dtype
    floats = {name: value for name, value in inputs.items() if torch.is_tensor(value) and value.is_floating_point()}
    inputs = inputs | {name: value.to(dtype) for name, value in floats.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(**inputs)
    if hasattr(outputs, "loss"):
        return outputs.loss.float()
    return (outputs.last_hidden_state.float() - TARGET).square().mean()

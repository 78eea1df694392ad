"""Compares names, weights, logits and gradients of the model with transformers' Llama."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quaver.lab.huggingface.config import make_hf_config
from quaver.lab.model.llama import Llama, count_training_flops_per_token, scale_frequencies
from quaver.lab.model.loss import compute_next_token_loss
from quaver.lab.settings import Model

CONFIG = Model(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96, rope_theta=10000.0, norm_eps=1e-6)
TIED = Model(dim=64, n_layers=2, n_heads=4, n_kv_heads=1, hidden_dim=96, tie_word_embeddings=True)


def build_reference(config: Model) -> LlamaForCausalLM:
    torch.manual_seed(7)
    shape = {"vocab_size": config.vocab_size, "hidden_size": config.dim, "intermediate_size": config.hidden_dim}
    shape |= {"num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads}
    shape |= {"num_key_value_heads": config.n_kv_heads, "tie_word_embeddings": config.tie_word_embeddings}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    return LlamaForCausalLM(LlamaConfig(**shape, rms_norm_eps=config.norm_eps, rope_parameters=rope))


@pytest.fixture(params=[CONFIG, TIED], ids=["untied", "tied"])
def pair(request: pytest.FixtureRequest) -> tuple[Llama, LlamaForCausalLM]:
    """Return the same weights in the trainer's model and in that of transformers."""
    reference = build_reference(request.param)
    with torch.no_grad():  # weights of one would hide a norm that is never applied
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model = Llama(request.param)
    model.load_state_dict(reference.state_dict())
    return model, reference


def test_logits_and_gradients_equal_in_float32(pair):
    model, reference = pair
    tokens = torch.randint(0, 256, (2, 40))
    logits, expected = model(tokens), reference(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1  # otherwise atol alone would pass

    compute_next_token_loss(logits[:, :-1], tokens[:, 1:]).backward()
    reference(tokens, labels=tokens).loss.backward()
    expected_grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_grads.pop(name), rtol=1e-4, atol=1e-6, msg=name)
    assert not expected_grads


def test_projections_of_one_hidden_state_get_one_tensor_object():
    model, inputs = Llama(CONFIG), {}
    for name, module in model.model.layers[0].named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, operands, name=name: inputs.update({name: operands[0]}))
    model(torch.zeros(1, 8, dtype=torch.long))
    assert inputs["self_attn.q_proj"] is inputs["self_attn.k_proj"] is inputs["self_attn.v_proj"]
    assert inputs["mlp.gate_proj"] is inputs["mlp.up_proj"]


def test_flops_count_every_linear_and_attention():
    linear_weights = sum(m.weight.numel() for m in Llama(CONFIG).modules() if isinstance(m, nn.Linear))
    attention = 2 * 2 * 3 * CONFIG.n_layers * CONFIG.dim * 128  # q @ k and p @ v, 2 FLOPs each, backward twice
    assert count_training_flops_per_token(CONFIG, 128) == 6 * linear_weights + attention


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)], ids=["llama 3.1 8B", "llama 3.2 1B"])
def test_scaled_frequencies_are_those_of_transformers(factor, head_dim):
    model = Model(dim=head_dim * 4, rope_scaling_factor=factor)
    config = LlamaConfig(**make_hf_config(model, dtype="float32", usage={"max_position_embeddings": 131072}))
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert attention_factor == 1
    plain = model.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    scaled = scale_frequencies(plain, model.rope_scaling)
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)
    slowed = plain / scaled
    assert (slowed == 1).any()
    assert (slowed > 0.999 * factor).any()
    assert ((slowed > 1.01) & (slowed < 0.99 * factor)).any()

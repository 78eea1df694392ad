"""Train in float8, write the codes of the forward for inference engines, and load them back to train on."""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quaver import convert_to_float8_training
from quaver.export import iter_float8_weights, load_float8, save_float8

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **sizes))
convert_to_float8_training(model, config="rowwise", module_filter_fn=lambda module, name: "lm_head" not in name)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.arange(64).view(2, 32)
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()

with tempfile.TemporaryDirectory() as folder:
    print(save_float8(model, Path(folder) / "served"))
    trainable = LlamaForCausalLM(model.config)
    trainable.load_state_dict(dict(load_float8(Path(folder) / "served", dtype=torch.float32)))
    print("loss", trainable(input_ids=tokens, labels=tokens).loss.item())

weights = iter_float8_weights(model)  # for an inference engine, tensor by tensor
for name, tensor in weights:
    if "layers.0.self_attn.q_proj" in name:
        print(name, tensor.dtype, list(tensor.shape))

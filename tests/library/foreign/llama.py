"""A small Llama and a mixture of experts of transformers, their data, and a training loop written by hand."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from quaver import convert_to_float8_training

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
BATCHES = 6


class Tokens(torch.utils.data.Dataset):
    """Sequences of 16 tokens, two to a batch."""

    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, i):
        tokens = (torch.arange(16) * (i + 3) + i) % 128
        return {"input_ids": tokens, "labels": tokens}


def not_the_head(module, name):
    return "lm_head" not in name and "lora" not in name


def llama(recipe=None):
    """The same weights at each call; converted, but for its head, if a recipe is given."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **SIZES))
    return model if recipe is None else convert_to_float8_training(model, config=recipe, module_filter_fn=not_the_head)


def mixture():
    """The same weights at each call."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    config = Qwen3MoeConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **SIZES, **experts)
    return Qwen3MoeForCausalLM(config)


def batches():
    return torch.utils.data.DataLoader(Tokens(), batch_size=2)


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def train_by_hand(
    model,
    optimizer=None,
    backward=torch.Tensor.backward,
    *,
    rank=None,
    every=1,
    before=lambda model: None,
    after=lambda model: None,
    only=range(BATCHES),
):
    """The losses of the batches in `only`, whose gradients are accumulated over `every` of them.

    Args:
        rank: which of two takes its sequence of each batch; None for both sequences.
        before: called with the model before each step of the optimizer.
        after: called with the model after it.
    """
    optimizer, losses = optimizer or optimizer_of(model), []
    for index, batch in enumerate(batches()):
        if index not in only:
            continue
        if rank is not None:
            batch = {name: part[rank : rank + 1] for name, part in batch.items()}
        loss = model(**batch).loss
        backward(loss / every)
        if (index + 1) % every == 0:
            before(model)
            optimizer.step()
            optimizer.zero_grad()
            after(model)
        losses.append(loss.item())
    return losses

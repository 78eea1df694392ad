"""Defines a small Llama and a mixture of transformers, their data, and a training loop written by hand."""

from contextlib import nullcontext

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from quaver import Float8Linear, convert_to_float8_training, float8_scaling_state

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
BATCHES = 4


class Tokens(torch.utils.data.Dataset):
    """Sequences of 16 tokens, two to a batch."""

    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, i):
        tokens = (torch.arange(16) * (i + 3) + i) % 128
        return {"input_ids": tokens, "labels": tokens}


def is_not_head(module, name):
    return "lm_head" not in name and "lora" not in name


def convert(model, recipe):
    """Convert all linears but the head and adapters."""
    return convert_to_float8_training(model, config=recipe, module_filter_fn=is_not_head)


def llama(recipe=None, layers=2):
    """Return a model with the same weights at each call; converted, but for its head, if a recipe is given."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **sizes))
    return model if recipe is None else convert(model, recipe)


def mixture():
    """Return a model with the same weights at each call."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    config = Qwen3MoeConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **SIZES, **experts)
    return Qwen3MoeForCausalLM(config)


def batches(rank=None):
    """Return batches of two sequences; for a rank, of the one sequence that it takes."""
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=2)
    if rank is None:
        return loader
    return [{name: part[rank : rank + 1] for name, part in batch.items()} for batch in loader]


def build_optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def list_float8_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def get_scales(model):
    return float8_scaling_state(model).state_dict()


def copy_weights(model):
    """Return copies of the parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def get_values(model):
    """Return the state dict of a model, frozen weights dequantized."""
    return {
        name: tensor.to_high_precision() if hasattr(tensor, "to_high_precision") else tensor
        for name, tensor in model.state_dict().items()
    }


def train_by_hand(
    model,
    optimizer=None,
    backward=torch.Tensor.backward,
    *,
    rank=None,
    every=1,
    before=lambda model: None,
    after=lambda model: None,
    within_a_step=nullcontext,
    only=range(BATCHES),
):
    """Train, and return the losses of the batches in `only`, whose gradients are accumulated over `every` of them.

    Args:
        rank: which of two takes its sequence of each batch; None for both sequences.
        before: called with the model before each step of the optimizer.
        after: called with the model after each step.
        within_a_step: returns the context manager for batches that do not end a step.
    """
    optimizer, losses = optimizer or build_optimizer(model), []
    for index, batch in enumerate(batches(rank)):
        if index not in only:
            continue
        ends_step = (index + 1) % every == 0
        with nullcontext() if ends_step else within_a_step():
            loss = model(**batch).loss
            backward(loss / every)
        if ends_step:
            before(model)
            optimizer.step()
            optimizer.zero_grad()
            after(model)
        losses.append(loss.item())
    return losses


def sharded(model, mesh=None):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}


def build_adapted(recipe, order="convert, then adapt"):
    """Return a Llama with adapters, converted before or after they are added; these and the head are not converted."""
    import peft  # some tests run without it

    torch.manual_seed(1)
    if order == "convert, then adapt":
        return peft.get_peft_model(llama(recipe), peft.LoraConfig(**LORA))
    return convert(peft.get_peft_model(llama(), peft.LoraConfig(**LORA)), recipe)

"""LoRA on a frozen float8 base against LoRA on the bfloat16 base: losses, gradients, memory, merging.

    python -m benchmarks.frozen_lora                    # a Llama of the debug model's size, on the standard library

The base is trained on one module of the library, the adapters on another. Prints a table, whose
numbers docs/fine-tuning.md quotes.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path

import peft
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quaver import FrozenFloat8Linear, freeze_to_float8
from quaver.recipes.sqnr import compute_sqnr_db

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
BASES = ("bfloat16", "float32", "blockwise", "mxfp8", "rowwise", "tensorwise")


def make_batches(name: str, steps: int) -> list[Tensor]:
    """Return [4, 129] bytes of a module of the standard library for each step."""
    text = torch.frombuffer(bytearray((Path(statistics.__file__).parent / name).read_bytes()), dtype=torch.uint8)
    starts = torch.randint(len(text) - 129, (steps, 4), generator=torch.Generator().manual_seed(0))
    return [torch.stack([text[start : start + 129] for start in row]).long() for row in starts]


def train(model: torch.nn.Module, steps: list[Tensor], lr: float) -> list[float]:
    """Train the model, and return the loss of each step."""
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr), []
    for tokens in steps:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compute_gradients(model: torch.nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the adapters by name."""
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def add_adapters(pretrained: torch.nn.Module, base: str, **options: object) -> peft.PeftModel:
    """Return a copy of `pretrained` with new adapters, which have the same values for every base."""
    model = copy.deepcopy(pretrained).to(torch.float32 if base == "float32" else torch.bfloat16)
    if base not in ("float32", "bfloat16"):
        before = model.get_memory_footprint()
        freeze_to_float8(model, config=base, module_filter_fn=lambda module, name: name != "lm_head")
        saved = sum(module.weight.numel() for module in model.modules() if isinstance(module, FrozenFloat8Linear))
        assert before - model.get_memory_footprint() == saved
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", **options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-steps", type=int, default=150, help="training steps of the base")
    parser.add_argument("--steps", type=int, default=60, help="training steps of the adapters")
    options = parser.parse_args()
    torch.manual_seed(0)
    pretrained = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, use_cache=False, **SIZES))
    train(pretrained, make_batches("argparse.py", options.base_steps), 2e-3)
    held_out = make_batches("typing.py", 1)[0]
    print("| base | bytes of its linears | loss | largest difference | adapters' gradients | merging | merged logits |")
    print("|---|---|---|---|---|---|---|")
    of_bfloat16: tuple[list[float], dict[str, Tensor]] | None = None
    for base in BASES:
        # lora_B starts at zero, which makes the gradients of lora_A zero. Here both start at random.
        grads = compute_gradients(add_adapters(pretrained, base, init_lora_weights=False), held_out)
        model = add_adapters(pretrained, base)
        linears = [module for module in model.modules() if isinstance(module, FrozenFloat8Linear)]
        share = sum(linear.weight.nbytes for linear in linears) / max(sum(2 * x.weight.numel() for x in linears), 1)
        losses = train(model, make_batches("_pydecimal.py", options.steps), 5e-4)
        of_bfloat16 = of_bfloat16 or (losses, grads)
        with torch.no_grad():
            logits = model.eval()(input_ids=held_out).logits
            merged = model.merge_and_unload()(input_ids=held_out).logits
        apart = max(abs(loss / of_base - 1) for loss, of_base in zip(losses, of_bfloat16[0], strict=True))
        decibels = [compute_sqnr_db(of_bfloat16[1][name], grad) for name, grad in grads.items()]
        writes = [linear.weight.requantized_sqnr_db for linear in linears]
        print(
            f"| {base} | {f'{share:.4f}' if linears else '1'} | {losses[0]:.3f} -> {statistics.mean(losses[-5:]):.3f} "
            f"| {apart:.2%} | {min(decibels):.1f}, median {statistics.median(decibels):.1f} dB "
            f"| {f'{min(writes):.1f} dB' if writes else '-'} | {compute_sqnr_db(logits, merged):.1f} dB |",
            flush=True,
        )


if __name__ == "__main__":
    main()

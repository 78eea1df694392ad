"""Roles of linears in a transformers or PEFT model: output heads, adapters and routers stay in high precision.

An output head is what a model says it is (`get_output_embeddings`, or a child called lm_head or lm_heads), and what
leads out of the blocks: a linear that is in no block and outside of the base model, or registered after its last block.
A block is an item of an nn.ModuleList that has linears and a norm. Everything inside a head is a head, such as the
copies and base layers that PEFT makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

HEAD = "output head"
ADAPTER = "adapter"
ROUTER = "router: its rounding errors would send tokens to other experts"
_LEADS_OUT = f"{HEAD}: it leads out of the blocks"
_HEAD_NAMES = ("lm_head", "lm_heads")


def roles_of_linears(model: nn.Module) -> dict[str, str]:
    """By the name of a linear of `model`, why it stays in high precision; the others are left out."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    roles = {name: ROUTER for name in linears if _is_router(model, name)}
    roles |= {name: ADAPTER for name in linears if _is_adapter(model, name)}
    heads = _heads(model)
    return roles | {name: heads[name] for name in linears if name in heads and name not in roles}


def _heads(root: nn.Module) -> dict[str, str]:
    """The names of the modules of output heads, with the reason."""
    says: dict[str, str] = {}
    leads_out: dict[str, str] = {}
    names = {id(module): name for name, module in root.named_modules()}
    outermost = ""
    for name, module in root.named_modules():
        embeddings = getattr(module, "get_output_embeddings", None)
        given = [embeddings()] if callable(embeddings) else []
        given += [getattr(module, each) for each in _HEAD_NAMES if isinstance(getattr(module, each, None), nn.Module)]
        for head in given:
            if id(head) in names:
                says |= dict.fromkeys(_below(head, names[id(head)]), HEAD)
        if isinstance(module, PreTrainedModel):
            is_inner = outermost and f"{name}.".startswith(outermost)
            outermost = outermost if is_inner else f"{name}."
            if not is_inner or isinstance(module, GenerationMixin):
                leads_out |= dict.fromkeys(_leading_out(module, name), _LEADS_OUT)
    return leads_out | says


def _leading_out(model: PreTrainedModel, name: str) -> Iterator[str]:
    """The modules of `model`, called `name`, in no block, and outside of its base model or after the last block."""
    base, in_blocks = model.base_model, _modules_in_blocks(model)
    inside, in_blocks_of_base = set(base.modules()), _modules_in_blocks(base)
    modules = list(model.named_modules(prefix=name))
    last = max((index for index, (_, child) in enumerate(modules) if child in in_blocks_of_base), default=len(modules))
    for index, (child_name, child) in enumerate(modules):
        if child not in in_blocks and (child not in inside or index > last):
            yield child_name


def _modules_in_blocks(model: nn.Module) -> set[nn.Module]:
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return {module for items in lists for item in items if _is_block(item) for module in item.modules()}


def _is_block(module: nn.Module) -> bool:
    kinds = [type(each).__name__ for each in module.modules()]
    has_linears = any(isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D" for each in module.modules())
    return has_linears and any("norm" in kind.lower() for kind in kinds)


def _is_adapter(model: nn.Module, name: str) -> bool:
    """Whether PEFT added the linear: beside the base layer of a tuner, or as the encoder of a prompt."""
    for parent, part in _parents(model, name):
        is_beside_base = isinstance(getattr(parent, "base_layer", None), nn.Module) and part != "base_layer"
        if is_beside_base or (part == "prompt_encoder" and hasattr(parent, "peft_config")):
            return True
    return False


def _is_router(model: nn.Module, name: str) -> bool:
    """Whether a linear is called router, or is the gate next to experts; a gated MLP may have a gate, too."""
    return any(
        part == "router" or (part == "gate" and hasattr(parent, "experts")) for parent, part in _parents(model, name)
    )


def _parents(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Each module on the way to `name`, with the name of its child on that way."""
    for part in name.split(".") if name else ():
        yield model, part
        model = getattr(model, part)


def _below(module: nn.Module, name: str) -> Iterator[str]:
    return (each for each, _ in module.named_modules(prefix=name))

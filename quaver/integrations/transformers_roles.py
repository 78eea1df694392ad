"""Roles of linears in a transformers or PEFT model: output heads, adapters and routers stay in high precision.

A model declares its output heads (`get_output_embeddings`, or a child with a name of conversion/roles.py). A linear
outside of all blocks is a head, too, if it is outside of the base model or registered after its last block. A block is
an item of an nn.ModuleList that has linears and a norm. Modules inside a head, such as the copies and base layers that
PEFT makes of it, are heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from quaver.conversion.roles import HEAD_NAMES, is_router

HEAD = "output head"
ADAPTER = "adapter"
ROUTER = "router: its rounding errors would send tokens to other experts"
_LEADS_OUT = f"{HEAD}: it leads out of the blocks"


def find_linear_roles(model: nn.Module) -> dict[str, str]:
    """Return the reason why each linear with a role stays in high precision, by name."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    roles = {name: ROUTER for name in linears if any(is_router(*step) for step in _walk_path(model, name))}
    roles |= {name: ADAPTER for name in linears if _is_adapter(model, name)}
    heads = _find_heads(model)
    return roles | {name: heads[name] for name in linears if name in heads and name not in roles}


def _find_heads(root: nn.Module) -> dict[str, str]:
    """Return the names of output heads and of the modules inside, with the reason."""
    declared: dict[str, str] = {}
    leads_out: dict[str, str] = {}
    names = {id(module): name for name, module in root.named_modules()}
    outermost = ""
    for name, module in root.named_modules():
        embeddings = getattr(module, "get_output_embeddings", None)
        heads = [embeddings()] if callable(embeddings) else []
        children = (getattr(module, head, None) for head in HEAD_NAMES)
        heads += [child for child in children if isinstance(child, nn.Module)]
        for head in heads:
            if id(head) in names:
                declared |= {name_below: HEAD for name_below, _ in head.named_modules(prefix=names[id(head)])}
        if isinstance(module, PreTrainedModel):
            is_inner = outermost and f"{name}.".startswith(outermost)
            outermost = outermost if is_inner else f"{name}."
            if not is_inner or isinstance(module, GenerationMixin):
                leads_out |= dict.fromkeys(_iter_modules_after_blocks(module, name), _LEADS_OUT)
    return leads_out | declared


def _iter_modules_after_blocks(model: PreTrainedModel, name: str) -> Iterator[str]:
    """Yield the modules outside of all blocks that are outside of the base model or after its last block."""
    base, in_blocks = model.base_model, _find_modules_in_blocks(model)
    inside, in_blocks_of_base = set(base.modules()), _find_modules_in_blocks(base)
    modules = list(model.named_modules(prefix=name))
    last = max((index for index, (_, child) in enumerate(modules) if child in in_blocks_of_base), default=len(modules))
    for index, (child_name, child) in enumerate(modules):
        if child not in in_blocks and (child not in inside or index > last):
            yield child_name


def _find_modules_in_blocks(model: nn.Module) -> set[nn.Module]:
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return {module for children in lists for child in children if _is_block(child) for module in child.modules()}


def _is_block(module: nn.Module) -> bool:
    class_names = [type(child).__name__ for child in module.modules()]
    has_linears = "Conv1D" in class_names or any(isinstance(child, nn.Linear) for child in module.modules())
    return has_linears and any("norm" in class_name.lower() for class_name in class_names)


def _is_adapter(model: nn.Module, name: str) -> bool:
    """Return whether PEFT added the linear: beside the base layer of a tuner, or as the encoder of a prompt."""
    for parent, part in _walk_path(model, name):
        is_beside_base = isinstance(getattr(parent, "base_layer", None), nn.Module) and part != "base_layer"
        if is_beside_base or (part == "prompt_encoder" and hasattr(parent, "peft_config")):
            return True
    return False


def _walk_path(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules above `name` from the root down, with the name of the next child."""
    for part in name.split(".") if name else ():
        yield model, part
        model = getattr(model, part)

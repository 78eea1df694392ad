"""Finds converted float8 modules that did not run, or whose forward was replaced."""

from __future__ import annotations

from torch import nn

from quaver.conversion.active_experts import ActiveExperts
from quaver.linear.float8_module import Float8Module
from quaver.linear.last_run import has_run, may_have_run
from quaver.linear.module import Float8Linear


def find_idle_modules(model: nn.Module) -> dict[str, str]:
    """Return why float8 linears and experts of `model` did not run while others or their parameters trained.

    Parameters trained if one has a gradient that is newer than the module. Experts in a list are left out, because they
    may still wait for their first token.
    """
    modules = model.named_modules()
    float8 = {name: module for name, module in modules if isinstance(module, Float8Module)}
    trained_at = max((module._last_run.trained_at for module in float8.values()), default=0)
    occasions = {
        name: "while others trained" if module._last_run.created_at < trained_at else "while its parameters trained"
        for name, module in float8.items()
        if not may_have_run(module) and (module._last_run.created_at < trained_at or _has_new_grad(module))
    }
    if not occasions:
        return {}
    experts = ActiveExperts(model)
    return {
        name: f"converted, but it did not run {occasion}: {_explain_idle(float8[name])}"
        for name, occasion in occasions.items()
        if experts.count_linear(name) == 1
    }


def _has_new_grad(module: Float8Module) -> bool:
    has_grad = any(weight.grad is not None for weight in module.parameters(recurse=False))
    return has_grad and not module._last_run.had_grad


def _explain_idle(module: Float8Module) -> str:
    if "forward" in vars(module):
        return "the forward that replaced its own does not call the original"
    return "nothing called it; its parent may read its weight instead, for example in F.linear"


def explain_replaced_forward(module: Float8Module) -> str:
    """Return a warning that the forward of a float8 module was replaced, or "".

    A module that ran since gives no warning, because its new forward calls the original. Neither do experts whose
    forward a plan for expert parallelism replaced.
    """
    if "forward" not in vars(module) or has_run(module) or getattr(module, "external_dispatcher", None) is not None:
        return ""
    ran = "" if module._last_run.device is None else ", and it has not run since"
    return (
        f"its forward was replaced on the instance{ran}: it runs in float8 only if the replacement calls the original "
        "forward; run a training step to find out"
    )


def explain_missing_weight(module: nn.Module) -> str:
    """Return an error if `module` is a Float8Linear without a weight, else ""."""
    if not isinstance(module, Float8Linear) or getattr(module, "weight", None) is not None:
        return ""
    return (
        "converted, but its weight was deleted: the code that removed it (for example, a LyCORIS adapter) multiplies "
        "instead"
    )

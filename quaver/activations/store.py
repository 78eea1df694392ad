"""`store_activations_in_float8`: lets modules store what they save for backward as float8 codes.

    store_activations_in_float8(model)
    store_activations_in_float8(model, modules=["*.mlp", "*.input_layernorm"])

By default these modules store:

    norms                         classes whose names end in Norm, Norm1d, Norm2d or Norm3d
    activation functions          classes of torch.nn and of transformers
    attention and feed-forward    the nearest module around two or more linears, and modules of experts

Linears inside these modules save what they saved before. hooks.py describes which tensors are stored, and partition.py
which are in compiled code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from quaver.activations.hooks import STORED_BY_KEY, ActivationStorage, StoringClass, skip_conversion, store_tensors
from quaver.kernels.operation import library
from quaver.linear.class_change import ForwardWrapper, has_wrapper, unwrap_forward, wrap_forward
from quaver.linear.module import Float8Linear
from quaver.recipes.scale_layout import BLOCK_SIZES
from quaver.runtime.errors import check_is_module
from quaver.runtime.module_names import iter_enclosing_modules, quote_module_name
from quaver.runtime.slow_paths import report_slow_path
from quaver.torch_private.tracing import is_exporting

_NORM_CLASS = re.compile(r"Norm(\d[dD])?$")
_ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")


def store_activations_in_float8(
    model: nn.Module, *, modules: Iterable[str] | None = None, block_size: int = 128
) -> list[str]:
    """Let modules of `model` store their saved activations in float8, in place.

    Forward results do not change. The backward reads values of e4m3 codes (a mantissa of 3 bits) with one scale for
    `block_size` elements. `activation_report` lists the stored tensors and their errors. Call it after the conversion
    to float8 and after adapters are added (the inputs of linears that are added later would be stored), before
    `compile` and `fully_shard`. Each module's class becomes a subclass with the same name and signature; names,
    parameters and the state_dict stay. Exported and traced programs store nothing.

    Args:
        modules: a pattern of module names as in `fnmatch`, or several, such as ["*.mlp"]; None for norms, activation
            functions, attention, feed-forwards and experts.
        block_size: 32 or 128. A block has one byte per element, and 4 bytes for its scale.

    Returns:
        The names of the modules that store.

    Raises:
        ValueError: another block size; a pattern that matches no module that can store; a model without default
            modules; a module that stores already, or whose forward was replaced on the instance.
        RuntimeError: torch._inductor.config.custom_partitioner_fn is another partitioner. The model is then unchanged.
    """
    check_is_module(model, argument="model")
    lengths = sorted(columns for rows, columns in BLOCK_SIZES if rows == 1)
    if block_size not in lengths:
        raise ValueError(f"block_size: expected one of {', '.join(map(str, lengths))}, got {block_size!r}")
    chosen = find_default_modules(model) if modules is None else _match_modules(model, modules)
    if not chosen:
        raise ValueError(
            f"expected norms, activation functions, attention or feed-forwards in {type(model).__name__}, got none; "
            'name the modules that store, for example modules=["encoder.*"]'
        )
    matmuls = _find_matmuls(chosen.values())
    for name, module in chosen.items():
        if has_wrapper(module, _Storing):
            raise ValueError(f"{quote_module_name(name)} stores its activations in float8 already")
    for name, module in model.named_modules():
        is_wrapped = name in chosen or (module in matmuls and not isinstance(module, Float8Linear))
        if is_wrapped and "forward" in vars(module):
            raise ValueError(
                f"{quote_module_name(name)} overrides `forward` on the instance, which bypasses storing; patch the "
                "class instead, or name other modules"
            )
    _install_storing_partitioner()
    for name, module in chosen.items():
        wrap_forward(module, _Storing())
        module._activation_storage = ActivationStorage(name, block_size)  # type: ignore[assignment]
    for matmul in matmuls:
        wrap_forward(matmul, _Skipping())
    return list(chosen)


def _install_storing_partitioner() -> None:
    """Install the partitioner for the graphs that are compiled from now on. Raises RuntimeError."""
    from quaver.activations.partition import StoringPartitioner  # imports the compiler
    from quaver.torch_private.compiler import install_partitioner

    install_partitioner(StoringPartitioner())


def stop_storing_activations(model: nn.Module) -> None:
    """Undo `store_activations_in_float8`.

    `torch._inductor.config.custom_partitioner_fn` stays set, for other models: it partitions graphs of modules that
    do not store as Inductor does.
    """
    for module in model.modules():
        unwrap_forward(module, _Storing)
        unwrap_forward(module, _Skipping)
        vars(module).pop("_activation_storage", None)


def find_default_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` that store by default, by name; see the top of the file."""
    modules = dict(model.named_modules())
    linears = (name for name, module in modules.items() if isinstance(module, nn.Linear))
    linear_count = Counter(next(iter_enclosing_modules(name, modules), "") for name in linears)
    return {
        name: module
        for name, module in modules.items()
        if _is_norm(module)
        or (type(module).__module__ in _ACTIVATION_MODULES and not _has_matrix(module))
        or (name and (linear_count[name] > 1 or _is_experts(module)))
    }


def _match_modules(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    modules, chosen = dict(model.named_modules()), {}
    given = list(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, str) else [patterns]
    if not given or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(f"modules: expected patterns of names, got {patterns!r}; None chooses the default modules")
    for pattern in given:
        matched = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        if not matched:
            names = ", ".join(list(modules)[1:4])
            raise ValueError(f"modules: {pattern!r} matches no module; names are, for example, {names}")
        can_store = {name: module for name, module in matched.items() if not _is_matmul(module)}
        if not can_store:
            raise ValueError(
                f"modules: {pattern!r} matches only linears, convolutions and embeddings, whose inputs are not stored "
                "in float8"
            )
        chosen.update(can_store)
    return chosen


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _is_norm(module: nn.Module) -> bool:
    return _NORM_CLASS.search(type(module).__name__) is not None


def _is_experts(module: nn.Module) -> bool:
    stacked = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return stacked and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d | nn.Bilinear)


def _is_matmul(module: nn.Module) -> bool:
    """Return whether `module` is a linear, a convolution or an embedding: it has a matrix and no child modules."""
    if _is_norm(module) or _is_experts(module):
        return False
    return _has_matrix(module) and not list(module.children())


def _find_matmuls(modules: Iterable[nn.Module]) -> set[nn.Module]:
    descendants = {child for module in modules for child in module.modules() if not has_wrapper(child, _Skipping)}
    return {child for child in descendants if _is_matmul(child)}


# Ops that mark where an annotation begins and ends in a graph. The keys of the compiler's caches do not include
# annotations, so without these ops graphs that store differently would have the same key. Nothing reads their results.
library.define("begin_annotation(str module, int block_size) -> Tensor")
library.define("end_annotation() -> Tensor")
library.impl("begin_annotation", lambda module, block_size: torch.empty(0), "CompositeExplicitAutograd")
library.impl("end_annotation", lambda: torch.empty(0), "CompositeExplicitAutograd")


@torch.library.register_fake("quaver::begin_annotation", lib=library)
def _fake_begin(module: str, block_size: int) -> Tensor:
    from quaver.torch_private.compiler import get_traced_backend

    backend = get_traced_backend()
    if module and backend not in (None, "inductor"):
        report_slow_path(
            "stored activations of another backend",
            f"torch.compile with backend={backend!r} does not store activations in float8: only Inductor does",
        )
    elif module:
        try:
            _install_storing_partitioner()  # for an unpickled module, or if the setting was cleared since
        except RuntimeError as error:
            report_slow_path(
                "stored activations of another partitioner", f"compiled code does not store activations: {error}"
            )
    return torch.empty(0)


torch.library.register_fake("quaver::end_annotation", lambda: torch.empty(0), lib=library)


def _run_annotated(storing_class: StoringClass | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward that the compiler traces and annotate its nodes for partition.py."""
    torch.ops.quaver.begin_annotation(*(storing_class or ("", 0)))
    with torch.fx.traceback.annotate({STORED_BY_KEY: storing_class}):
        result = forward(*args, **kwargs)
    torch.ops.quaver.end_annotation()
    return result


@dataclass(frozen=True)
class _Storing(ForwardWrapper):
    """Stores what the forward saves for backward."""

    def make_forward(self, cls: type[nn.Module]) -> Callable[..., Any]:
        def stored(module: Any, *args: Any, **kwargs: Any) -> Any:
            storage: ActivationStorage = module._activation_storage
            if not torch.is_grad_enabled() or _is_exporting_or_tracing():
                return cls.forward(module, *args, **kwargs)
            if torch.compiler.is_compiling():
                return _run_annotated((cls.__name__, storage.block_size), cls.forward, module, *args, **kwargs)
            with store_tensors(storage, args, kwargs):
                return cls.forward(module, *args, **kwargs)

        return stored


@dataclass(frozen=True)
class _Skipping(ForwardWrapper):
    """Stops enclosing modules from converting a matmul's saved tensors.

    Float8 linears tell the hooks which tensors to skip (linear/saved_tensors.py), until they are converted back.
    """

    def make_forward(self, cls: type[nn.Module]) -> Callable[..., Any]:
        is_float8 = issubclass(cls, Float8Linear)

        def skipped(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_float8 or _is_exporting_or_tracing():
                return cls.forward(module, *args, **kwargs)
            if torch.compiler.is_compiling():
                return _run_annotated(None, cls.forward, module, *args, **kwargs)
            with skip_conversion():
                return cls.forward(module, *args, **kwargs)

        return skipped


def _is_exporting_or_tracing() -> bool:
    """Return whether torch.export or torch.jit.trace records the code, to run it without a backward and quaver."""
    return is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined]

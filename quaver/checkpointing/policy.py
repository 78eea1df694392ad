"""Activation checkpointing that knows float8: what a block saves for its backward, and what it recomputes.

    apply_activation_checkpointing(model.layers, mode="selective")

A checkpointed module saves its inputs. `full` recomputes everything else in the backward; `selective` with "op"
everything but the results that a policy saves:

    saved:      one matmul in two, attention, reduce-scatters, amaxes
    recomputed: the last matmul, pointwise results, casts to float8

Matmuls are counted alike in every precision, so a float8 block saves what the bfloat16 block saves, and its amaxes: a
few numbers, each of which spares a read of a whole tensor. The results of `abs` before them are as large as the tensors
themselves, unsharded weights included: saving one is the classic way to make float8 need more memory than bfloat16.
`also_keep` and `never_keep` change the policy, and can cause that mistake; `quaver memory --vs` shows its cost.

[Note: which matmuls] A recomputation ends before the last matmul, whose result nothing in the block's backward reads.
Saving it would be waste, the widest result of a Llama block of seven matmuls whose first, third, fifth and seventh are
saved. So matmuls are counted from the end, which an eager block knows from its previous forward. Its first forward
counts from the beginning, as compiled code does, where Inductor saves nothing that is not read.

[Note: what a policy counts] A policy looks results up by counting the calls of each operation
(torch.utils.checkpoint), so a block must issue the same operations in its forward and in its recomputation. Casts are
functions of their operands, and persistent scales record maxima, so repeating them changes nothing; the cache of a
shared activation belongs to one dispatch mode (linear/shared_input.py). What FSDP2's hooks run inside a block is hidden
from policies (torch_private/fsdp.py), because a recomputation gathers weights differently, or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import quaver.experts.gemm
import quaver.kernels.exact_mm
import quaver.kernels.native_blocks  # noqa: F401 - these define the operations below
from quaver.linear.shared_input import RECOMPUTED_HOOKS
from quaver.torch_private.dispatch import OpOverload, OpOverloadPacket, has_kernel
from quaver.torch_private.fsdp import hide_from_policies
from quaver.torch_private.policies import policy_contexts

MODES = ("none", "full", "selective", "memory_budget")

_aten = torch.ops.aten

MATMULS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_mm.default,
        torch.ops.quaver.exact_float8_mm.default,
        torch.ops.quaver.native_block_mm.default,
        torch.ops.quaver.grouped_mm.default,
        _aten._grouped_mm.default,
        _aten._scaled_grouped_mm.default,
    }
)
"""The matmuls of linears, in every precision: one in two is saved."""

_KEPT_NAMES = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "_c10d_functional.reduce_scatter_tensor",
    "aten.amax",
    "aten.max",  # the overload that reduces everything
)


def _operation(name: str) -> Any:
    namespace, _, packet = name.partition(".")
    return getattr(getattr(torch.ops, namespace), packet).default


KEPT = frozenset(_operation(name) for name in _KEPT_NAMES)
"""Always saved: attention and reduce-scatters for what they cost, amaxes because they are a few numbers."""


class PolicyChanges(NamedTuple):
    """How a policy differs from the one at the top of the file; operators in both are not saved."""

    also_keep: frozenset[Any] = frozenset()
    never_keep: frozenset[Any] = frozenset()


NO_CHANGES = PolicyChanges()


def apply_activation_checkpointing(
    modules: Iterable[nn.Module],
    *,
    mode: str = "selective",
    selective_ac_option: str = "op",
    memory_budget: float = 0.5,
    preserve_rng_state: bool = True,
    also_keep: Iterable[str] = (),
    never_keep: Iterable[str] = (),
) -> None:
    """Make `modules`, in place, save less between forward and backward.

    Eager results stay the same bit for bit; compiled ones as far as the compiler fuses, and so rounds, alike.
    Call it after the conversion to float8 and tensor parallelism, before `compile` and `fully_shard`. A module keeps
    its identity, its name, its parameters and its state_dict; only its class becomes a subclass of what it was.

    Args:
        modules: the blocks of a model, in order.
        mode: "none": nothing changes. "full": each module saves its inputs only. "selective": see
            `selective_ac_option`. "memory_budget": the compiler decides; the modules must be compiled after this call.
        selective_ac_option: "op": every module, by the policy at the top of the file; or a number n of at least 1 as a
            string: every n-th module as in "full", the others not at all.
        memory_budget: with mode "memory_budget", the share of what could be saved that is saved: 1 for all of it, 0 for
            inputs only. It is set for all that this process compiles from now on. Where float8 is multiplied exactly
            (quaver.linear.gemm), the compiler takes those matmuls for cheap ones, and below 1 saves less than it might.
            Torch compiles no attention of mode "selective" then: set the budget to 1 before.
        preserve_rng_state: recompute with the random numbers of the forward. Modules without dropout can do without.
        also_keep: with mode "selective" and option "op", operators whose results the policy saves besides its own,
            such as "aten.silu"; see `named_operations`.
        never_keep: operators whose results it does not save, although it would.
    Raises:
        ValueError: an unknown mode, option or operator, an operator to keep that has no result of its own (see
            `operations_to_keep`) or that no policy reads, a budget outside 0 to 1, or a module that is checkpointed
            already.
    """
    modules = list(modules)
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    changes = PolicyChanges(operations_to_keep(also_keep), named_operations(never_keep))
    if any(changes) and (mode != "selective" or selected_every(selective_ac_option) is not None):
        raise ValueError(
            "also_keep and never_keep must be empty unless mode is selective and selective_ac_option is op, got "
            f"operators with mode {mode!r} and option {selective_ac_option!r}"
        )
    if mode == "memory_budget":
        _set_memory_budget(memory_budget)
    if mode in ("none", "memory_budget"):
        return
    every = 1 if mode == "full" else selected_every(selective_ac_option)
    by_policy = every is None
    chosen = modules if every is None else modules[every - 1 :: every]
    for module in chosen:
        if isinstance(module, _Checkpointed):
            raise ValueError(f"this {type(module).__name__} is checkpointed already")
    for module in chosen:
        # mypy compares nn.Module's __hash__ with that of its class
        module.__class__ = _checkpointed_class(type(module), by_policy, preserve_rng_state, changes)  # type: ignore[arg-type]


def selected_every(selective_ac_option: str) -> int | None:
    """n of the option "n", None for "op". Raises ValueError for anything else."""
    if selective_ac_option == "op":
        return None
    if not (selective_ac_option.isdecimal() and int(selective_ac_option) >= 1):
        raise ValueError(
            f'selective_ac_option must be "op" or a number of at least 1 as a string, got {selective_ac_option!r}'
        )
    return int(selective_ac_option)


def named_operations(names: Iterable[str]) -> frozenset[Any]:
    """The operators of these names: "aten.abs" for all of its overloads, "aten.abs.default" for one.

    Raises:
        ValueError: a name is no operator's.
    """
    return frozenset(overload for name in names for overload in _overloads(name))


def operations_to_keep(names: Iterable[str]) -> frozenset[Any]:
    """The operators of these names whose results a policy can save.

    Raises:
        ValueError: a name is no operator's, or of an operator whose saved result a recomputation could not use: a view,
            the argument that it wrote to, random numbers that later operators would then draw again, or nothing,
            because the operator is made of others, which alone a policy sees.
    """
    kept: set[Any] = set()
    for name in names:
        overloads = [each for each in _overloads(name) if has_kernel(each)]
        reasons = {each: _obstacle(each) for each in overloads}
        kept.update(each for each, reason in reasons.items() if not reason)
        if all(reasons.values()):
            raise ValueError(
                f"expected an operator whose result can be saved, such as aten.silu; got {name!r}, which "
                f"{next(iter(reasons.values()), 'has no kernel')}"
            )
    return frozenset(kept)


def _obstacle(operation: Any) -> str:
    """Why a policy cannot save the result of an operator; "" where it can."""
    schema = operation._schema
    if has_kernel(operation, "CompositeImplicitAutograd"):
        return "is made of other operators; name those, as aten.mm for aten.linear"
    if schema.is_mutable:
        return "writes to its arguments, as its recomputation must"
    if any(each.alias_info for each in schema.returns):
        return "returns a view of its argument; name the operator that made what it views"
    if not any("Tensor" in str(each.type) for each in schema.returns):
        return "returns no tensor"
    if torch.Tag.nondeterministic_seeded in operation.tags:
        return "draws random numbers, and its recomputation must draw them again, so that later operators get theirs"
    return ""


def _overloads(name: str) -> list[Any]:
    found: Any = torch.ops
    parts = name.split(".")
    for part in parts:
        found = getattr(found, part, None)
    if len(parts) == 2 and isinstance(found, OpOverloadPacket):
        return [getattr(found, overload) for overload in found.overloads()]
    if len(parts) == 3 and isinstance(found, OpOverload):
        return [found]
    raise ValueError(
        f"expected the name of an operator that torch knows, such as aten.abs or aten.abs.default, got {name!r}"
    )


class MatmulCount:
    """How many matmuls the last forward of a block had; see [Note: which matmuls]."""

    def __init__(self) -> None:
        self.matmuls = 0


def selective_checkpoint_contexts(
    changes: PolicyChanges = NO_CHANGES, count: MatmulCount | None = None
) -> tuple[Any, Any]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint`: the policy at the top of the file, for one forward.

    Args:
        changes: to that policy.
        count: of the module that is checkpointed, the same one for each of its forwards; see [Note: which matmuls].
    """
    hide_from_policies()
    return policy_contexts(_policy(changes, count or MatmulCount()))


def _recompute_contexts() -> tuple[Any, Any]:
    """A policy that saves nothing, for compiled blocks: torch 2.11 recomputes no autograd.Function without a policy.

    Can go with torch 2.11.
    """
    hide_from_policies()
    return policy_contexts(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)


def _policy(changes: PolicyChanges, count: MatmulCount) -> Callable[..., CheckpointPolicy]:
    """The policy of one forward of one block, which counts its matmuls."""
    seen = {False: 0, True: 0}  # by is_recompute: torch 2.11 calls the policy in the recomputation as well
    last = count.matmuls

    def decide(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = operation in KEPT or operation in changes.also_keep
        if operation in MATMULS:
            seen[ctx.is_recompute] += 1
            count.matmuls = seen[False]
            saves = saves or (last - seen[ctx.is_recompute]) % 2 == 1
        saves = saves and operation not in changes.never_keep and not _draws(operation, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call, of one of `KEPT`, draws random numbers: attention with dropout.

    Its recomputation must draw them again: without it, the dropout after it would get another mask than in the forward.
    """
    place = _place_of_dropout(operation)
    return place is not None and bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


@functools.cache
def _place_of_dropout(operation: Any) -> int | None:
    names = [each.name for each in operation._schema.arguments] if isinstance(operation, OpOverload) else []
    return names.index("dropout_p") if "dropout_p" in names else None


class _Checkpointed:
    """Marks the classes that `_checkpointed_class` makes."""


def _with_hooks(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    before, after = module._forward_pre_hooks.get(RECOMPUTED_HOOKS), module._forward_hooks.get(RECOMPUTED_HOOKS)
    if before is None or after is None:
        return forward

    def call(*args: Any, **kwargs: Any) -> Any:
        before(module, args)
        try:
            return forward(*args, **kwargs)
        finally:
            after(module, args, None)

    return call


@functools.cache
def _checkpointed_class(
    cls: type[nn.Module], by_policy: bool, preserve_rng_state: bool, changes: PolicyChanges
) -> type[nn.Module]:
    """A subclass of `cls` whose forward is checkpointed.

    A module around the block would put its own name into every name below it; a function in place of its forward would
    go on calling the original's after a deepcopy. FSDP2 changes classes for the same reasons.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}

    def compiled_contexts() -> tuple[Any, Any]:  # made here, because torch 2.11 cannot take its variables apart
        return selective_checkpoint_contexts(changes) if by_policy else _recompute_contexts()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def block(*args: Any, **kwargs: Any) -> Any:
            return cls.forward(self, *args, **kwargs)

        if torch.compiler.is_compiling():
            return checkpoint(block, *args, context_fn=compiled_contexts, **options, **kwargs)
        recomputed = _with_hooks(self, block)
        if by_policy:
            count = self.__dict__.setdefault("_matmul_count", MatmulCount())
            contexts = functools.partial(selective_checkpoint_contexts, changes, count)
            return checkpoint(recomputed, *args, context_fn=contexts, **options, **kwargs)
        return checkpoint(recomputed, *args, **options, **kwargs)

    return type(f"Checkpointed{cls.__name__}", (_Checkpointed, cls), {"forward": forward, "__module__": cls.__module__})


def _set_memory_budget(memory_budget: float) -> None:
    if not 0 <= memory_budget <= 1:
        raise ValueError(f"memory_budget must be from 0 to 1, got {memory_budget}")
    from quaver.torch_private.compiler import set_activation_memory_budget  # imports the compiler

    set_activation_memory_budget(memory_budget)

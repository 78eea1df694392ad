"""Activation checkpointing with float8: what a block saves for its backward, and what it recomputes.

    apply_activation_checkpointing(model.layers, mode="selective")

A checkpointed module saves its inputs. `full` recomputes everything else in the backward. `selective` with "op"
recomputes everything except the results that a policy saves:

    saved:      every second matmul, attention, reduce-scatters, amaxes
    recomputed: the last matmul, pointwise results, casts to float8

A policy counts matmuls alike in every precision. So a float8 block saves the results that a bfloat16 block saves, and
its amaxes. An amax is a few numbers, and saving it avoids another read of the tensor. Never save the result of the
`abs` before an amax. It is as large as the tensor, which may be an unsharded weight, and float8 then needs more memory
than bfloat16. `also_save` and `never_save` change the policy and can cause that mistake.

[Note: which matmuls] A recomputation ends before the last matmul, because the block's backward does not read its
result. Saving that result would waste memory. Counting from the first matmul would save it in a Llama block, which has
seven matmuls. So matmuls are counted from the last one. An eager block knows their number from its previous forward,
and counts from the first matmul in its first forward. Compiled code always counts from the first: Inductor does not
save results that nothing reads.

[Note: what a policy counts] A policy finds a saved result by counting the calls of its op (torch.utils.checkpoint). A
block must therefore issue the same ops in its forward and in its recomputation. A repeated cast has the same result,
because it depends only on its operands; persistent scales record maxima, which a repetition does not change. The cache
of a shared activation belongs to one dispatch mode (linear/shared_input.py). The ops of FSDP2's hooks inside a block
are hidden from policies (torch_private/fsdp.py), because a recomputation gathers weights differently, or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import quaver.experts.gemm
import quaver.kernels.exact_mm
import quaver.kernels.native_mm  # noqa: F401 - these define the ops below
from quaver.linear.class_change import ForwardWrapper, has_wrapper, wrap_forward
from quaver.linear.shared_input import SHARED_INPUT_HOOK_KEY
from quaver.runtime.warnings import warn_user
from quaver.torch_private.dispatch import OpOverload, OpOverloadPacket, has_kernel
from quaver.torch_private.fsdp import hide_fsdp_ops_from_checkpoint_policies
from quaver.torch_private.functional_collectives import REDUCE_SCATTER
from quaver.torch_private.policies import make_policy_contexts

CHECKPOINT_MODES = ("none", "full", "selective", "memory_budget")

_aten = torch.ops.aten

MATMUL_OPS = frozenset(
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
"""The matmuls of linears in every precision. Every second one is saved."""

SAVED_OPS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        REDUCE_SCATTER,
        _aten.amax.default,
        _aten.max.default,  # the overload that reduces everything
    }
)
"""Ops whose results are always saved: attention and reduce-scatters are expensive, amaxes are small."""


class PolicyChanges(NamedTuple):
    """Changes to the policy at the top of the file. The results of operators in both sets are not saved."""

    also_save: frozenset[Any] = frozenset()
    never_save: frozenset[Any] = frozenset()

    @classmethod
    def parse(cls, also_save: Iterable[str], never_save: Iterable[str]) -> PolicyChanges:
        """Make an instance from names of operators. Raises ValueError."""
        return cls(find_savable_operators(also_save), find_operators(never_save))


NO_CHANGES = PolicyChanges()


def apply_activation_checkpointing(
    modules: Iterable[nn.Module],
    *,
    mode: str = "selective",
    selective_ac_option: str | None = None,
    memory_budget: float | None = None,
    preserve_rng_state: bool = True,
    also_save: Iterable[str] = (),
    never_save: Iterable[str] = (),
) -> None:
    """Checkpoint `modules` in place, so that they save less between forward and backward.

    Results are bit-identical in eager code. In compiled code they are if the compiler fuses the same ops, because
    fusion changes rounding. Call it after the conversion to float8 and tensor parallelism, before `compile` and
    `fully_shard`. Each module's class becomes a subclass with the same name and signature; names, parameters and the
    state_dict stay.

    Args:
        modules: the blocks of a model, in order.
        mode: "none": nothing changes. "full": each module saves its inputs only. "selective": see
            `selective_ac_option`. "memory_budget": the compiler decides; the modules must be compiled after this call.
        selective_ac_option: with mode "selective". "op" (the default): every module, recomputes everything except
            every second matmul, attention, reduce-scatters and amaxes. A number n of at least 1 as a string: every n-th
            module as in "full", and the others are not checkpointed. If no module is left, a UserWarning says so.
        memory_budget: with mode "memory_budget", the fraction of activations to save, by default 0.5: 1 for all, 0 for
            inputs only. It applies to everything that this process compiles from now on. The compiler counts exact
            float8 matmuls (quaver.linear.gemm) as cheap ops, and below 1 saves less than the budget allows. Below 1
            torch does not compile attention in modules of mode "selective": set the budget to 1 first.
        preserve_rng_state: recompute with the random numbers of the forward. Modules without dropout do not need it.
        also_save: with mode "selective" and option "op", operators whose results are also saved: "aten.silu" names all
            overloads, "aten.silu.default" one.
        never_save: operators whose results are not saved.
    Raises:
        TypeError: `modules` is one module, or holds something else.
        ValueError: the mode, the option or an operator is unknown, or the budget is outside 0 to 1.
        ValueError: the option, the budget or the operators are for another mode.
        ValueError: `also_save` or `never_save` is one string.
        ValueError: the result of an operator cannot be saved, such as a view.
        ValueError: a module is checkpointed already.
    """
    blocks = list(modules) if isinstance(modules, Iterable) else []
    if not isinstance(modules, Iterable) or not all(isinstance(block, nn.Module) for block in blocks):
        raise TypeError(f"modules: expected blocks, such as model.layers, got {type(modules).__name__}")
    for option, names in (("also_save", also_save), ("never_save", never_save)):
        if isinstance(names, str):
            raise ValueError(f"{option}: expected a list of names, got one string; give [{names!r}]")
    also_save, never_save = tuple(also_save), tuple(never_save)
    _check_options(mode, selective_ac_option, memory_budget, PolicyChanges.parse(also_save, never_save))
    if mode == "memory_budget":
        _set_memory_budget(0.5 if memory_budget is None else memory_budget)
    if mode in ("none", "memory_budget"):
        return
    every = 1 if mode == "full" else parse_selective_option(selective_ac_option)
    chosen = dict.fromkeys(blocks if every is None else blocks[every - 1 :: every])  # a shared module once
    if not chosen:
        warn_user(f"nothing is checkpointed: expected at least {every or 1} modules for this option, got {len(blocks)}")
    for module in chosen:
        if has_wrapper(module, Checkpointing):
            raise ValueError(f"this {type(module).__name__} is checkpointed already")
    for module in chosen:
        wrap_forward(module, Checkpointing(every is None, preserve_rng_state, also_save, never_save))


def _check_options(
    mode: str, selective_ac_option: str | None, memory_budget: float | None, changes: PolicyChanges
) -> None:
    if mode not in CHECKPOINT_MODES:
        raise ValueError(f"mode: expected one of {', '.join(CHECKPOINT_MODES)}, got {mode!r}")
    if mode != "selective" and selective_ac_option is not None:
        raise ValueError(
            "selective_ac_option: expected none unless mode is selective, got "
            f"{selective_ac_option!r} with mode {mode!r}"
        )
    if mode != "memory_budget" and memory_budget is not None:
        raise ValueError(
            f"memory_budget: expected none unless mode is memory_budget, got {memory_budget} with mode {mode!r}"
        )
    if any(changes) and (mode != "selective" or parse_selective_option(selective_ac_option) is not None):
        raise ValueError(
            "also_save and never_save: expected none unless mode is selective and selective_ac_option is op, got "
            f"operators with mode {mode!r} and option {selective_ac_option!r}"
        )


def parse_selective_option(selective_ac_option: str | None) -> int | None:
    """Parse the option: n for "n", None for "op" or None. Raises ValueError for any other."""
    if selective_ac_option in (None, "op"):
        return None
    is_number = isinstance(selective_ac_option, str) and selective_ac_option.isdecimal()
    if not is_number or int(selective_ac_option) < 1:
        raise ValueError(
            f'selective_ac_option: expected "op" or a number of at least 1 as a string, got {selective_ac_option!r}'
        )
    return int(selective_ac_option)


def find_operators(names: Iterable[str]) -> frozenset[Any]:
    """Return the operators with these names. "aten.abs" names all overloads, "aten.abs.default" one.

    Raises:
        ValueError: torch has no operator of a name.
    """
    return frozenset(overload for name in names for overload in _find_overloads(name))


def find_savable_operators(names: Iterable[str]) -> frozenset[Any]:
    """Return the operators with these names whose results a policy can save.

    Raises:
        ValueError: torch has no operator of a name, or a recomputation could not use its saved result. The result is a
            view; the op writes to its arguments; it draws random numbers, which later ops would then draw again; or a
            policy does not see it, because it decomposes into other ops.
    """
    savable: set[Any] = set()
    for name in names:
        reasons = {overload: _explain_unsavable(overload) for overload in _find_overloads(name) if has_kernel(overload)}
        savable.update(overload for overload, reason in reasons.items() if not reason)
        if all(reasons.values()):
            raise ValueError(
                f"expected an operator whose result can be saved, such as aten.silu; got {name!r}, which "
                f"{next(iter(reasons.values()), 'has no kernel')}"
            )
    return frozenset(savable)


def _explain_unsavable(operator: Any) -> str:
    """Return the reason why a policy cannot save the result of an operator, or ""."""
    schema = operator._schema
    if has_kernel(operator, "CompositeImplicitAutograd"):
        return "is a composite operator; name the operators that it decomposes into, such as aten.mm for aten.linear"
    if schema.is_mutable:
        return "writes to its arguments, as its recomputation must"
    if any(returned.alias_info for returned in schema.returns):
        return "returns a view of its argument; name the operator that computes the argument"
    if not any("Tensor" in str(returned.type) for returned in schema.returns):
        return "returns no tensor"
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return (
            "draws random numbers, and its recomputation must draw them again, so that later operators draw the same "
            "numbers as in the forward"
        )
    return ""


def _find_overloads(name: str) -> list[Any]:
    operator: Any = torch.ops
    parts = name.split(".") if isinstance(name, str) else []
    for part in parts:
        operator = getattr(operator, part, None)
    if len(parts) == 2 and isinstance(operator, OpOverloadPacket):
        return [getattr(operator, overload) for overload in operator.overloads()]
    if len(parts) == 3 and isinstance(operator, OpOverload):
        return [operator]
    raise ValueError(
        f"expected the name of an operator that torch knows, such as aten.abs or aten.abs.default, got {name!r}"
    )


class MatmulCount:
    """The number of matmuls in the last forward of a block; see [Note: which matmuls]."""

    def __init__(self) -> None:
        self.matmuls = 0


def make_selective_contexts(changes: PolicyChanges = NO_CHANGES, count: MatmulCount | None = None) -> tuple[Any, Any]:
    """Make the contexts of `torch.utils.checkpoint`'s `context_fn` for one forward, with the policy at the top.

    Args:
        changes: changes to that policy.
        count: the matmul count of the checkpointed module, the same object for each forward; see [Note: which matmuls].
    """
    hide_fsdp_ops_from_checkpoint_policies()
    return make_policy_contexts(_make_policy(changes, count or MatmulCount()))


def _make_recompute_contexts() -> tuple[Any, Any]:
    """Make contexts that save nothing. Without them torch 2.11 recomputes no autograd.Function; they can go with it."""
    hide_fsdp_ops_from_checkpoint_policies()
    return make_policy_contexts(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)


def _make_policy(changes: PolicyChanges, count: MatmulCount) -> Callable[..., CheckpointPolicy]:
    """Make the policy of one forward of one block. The policy counts the matmuls of the block."""
    calls = {False: 0, True: 0}  # by is_recompute: torch 2.11 also calls the policy in the recomputation
    matmuls_before = count.matmuls

    def decide(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = operator in SAVED_OPS or operator in changes.also_save
        if operator in MATMUL_OPS:
            calls[ctx.is_recompute] += 1
            count.matmuls = calls[False]
            saves = saves or (matmuls_before - calls[ctx.is_recompute]) % 2 == 1
        saves = saves and operator not in changes.never_save and not _has_dropout(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _has_dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call is attention with dropout.

    It must be recomputed, so that it draws random numbers again and later dropouts get the masks of the forward.
    """
    index = _find_dropout_index(operator)
    return index is not None and bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))


@functools.cache
def _find_dropout_index(operator: Any) -> int | None:
    names = [argument.name for argument in operator._schema.arguments] if isinstance(operator, OpOverload) else []
    return names.index("dropout_p") if "dropout_p" in names else None


def _wrap_in_shared_input_hooks(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Run the module's `SHARED_INPUT_HOOK_KEY` around `forward` in its recomputation too."""
    before = module._forward_pre_hooks.get(SHARED_INPUT_HOOK_KEY)
    after = module._forward_hooks.get(SHARED_INPUT_HOOK_KEY)
    if before is None or after is None:
        return forward

    def call(*args: Any, **kwargs: Any) -> Any:
        before(module, args)
        try:
            return forward(*args, **kwargs)
        finally:
            after(module, args, None)

    return call


@dataclass(frozen=True)
class Checkpointing(ForwardWrapper):
    """Checkpoints the forward.

    A wrapper module would change the names of everything inside, and a forward that is replaced on the instance would
    still be the original's after a deepcopy.
    """

    by_policy: bool
    preserve_rng_state: bool
    also_save: tuple[str, ...] = ()  # names, because operators cannot be pickled
    never_save: tuple[str, ...] = ()

    def make_forward(self, cls: type[nn.Module]) -> Callable[..., Any]:
        by_policy, changes = self.by_policy, PolicyChanges.parse(self.also_save, self.never_save)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.preserve_rng_state}

        def compiled_contexts() -> tuple[Any, Any]:  # not in `checkpointed`: torch 2.11 cannot trace its closure there
            return make_selective_contexts(changes) if by_policy else _make_recompute_contexts()

        def checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            def block(*args: Any, **kwargs: Any) -> Any:
                return cls.forward(module, *args, **kwargs)

            if torch.compiler.is_compiling():
                return checkpoint(block, *args, context_fn=compiled_contexts, **options, **kwargs)
            recomputed = _wrap_in_shared_input_hooks(module, block)
            if by_policy:
                count = module.__dict__.setdefault("_matmul_count", MatmulCount())
                contexts = functools.partial(make_selective_contexts, changes, count)
                return checkpoint(recomputed, *args, context_fn=contexts, **options, **kwargs)
            return checkpoint(recomputed, *args, **options, **kwargs)

        return checkpointed


def _set_memory_budget(memory_budget: float) -> None:
    if not isinstance(memory_budget, int | float) or not 0 <= memory_budget <= 1:
        raise ValueError(f"memory_budget: expected a number from 0 to 1, got {memory_budget!r}")
    from quaver.torch_private.compiler import set_activation_memory_budget  # imports the compiler

    set_activation_memory_budget(memory_budget)

"""The parts of the group `second`: experts, the optimizer, stored activations, CUDA graphs, FSDP2 on one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu_parts.contestants import make_inputs, make_step
from benchmarks.gpu_parts.part_context import Call, PartContext, Row, catch_failures, make_timing_row
from quaver import convert_to_float8_training, float8_grouped_mm
from quaver.activations import store_activations_in_float8
from quaver.lab.bench.block_step import BenchedBlock
from quaver.lab.settings.float8 import BFLOAT16
from quaver.optim import Float8AdamW
from quaver.recipes.config import Float8LinearConfig

EXPERTS = 8


def time_experts(context: PartContext) -> Iterator[Row]:
    """Time forward and backward of grouped matmuls of eight ragged experts, gate and down, one contestant at a time."""
    dim, hidden = context.model.dim, context.model.hidden_dim
    multiply: dict[str, Multiply] = {BFLOAT16: lambda a, b_t, offs: F.grouped_mm(a, b_t, offs=offs)}
    for recipe in ("rowwise", "tensorwise", "blockwise"):
        multiply[f"quaver {recipe}"] = partial(float8_grouped_mm, config=recipe)
    multiply["torchao rowwise"] = _multiply_with_torchao
    for k, n in ((dim, hidden), (hidden, dim)):
        size = f"{context.tokens} x {k} x {n}"
        steps = {name: make_grouped_step(context, k, n, function)[0] for name, function in multiply.items()}
        yield from catch_failures(
            ({"what": name, "size": size}, partial(_time_call, context, step)) for name, step in steps.items()
        )


Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_grouped_step(context: PartContext, k: int, n: int, multiply: Multiply) -> tuple[Call, list[Tensor]]:
    """Return a step of a grouped matmul of ragged experts, and the tensors that get gradients."""
    torch.manual_seed(0)
    a, direction = context.randn(context.tokens, k).requires_grad_(), context.randn(context.tokens, n)
    weight = nn.Parameter(context.randn(EXPERTS, n, k))
    shares = torch.arange(1, EXPERTS + 1, dtype=torch.float64).cumsum(0) / 36  # from 1/36 to 8/36 of the tokens
    ends = ((shares * context.tokens / 16).round() * 16).to(torch.int32).to(context.device)

    def step() -> None:
        a.grad = weight.grad = None
        multiply(a, weight.transpose(1, 2), ends).backward(direction)

    return step, [a, weight]


def _multiply_with_torchao(a: Tensor, b_t: Tensor, offs: Tensor) -> Tensor:
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as multiply

    return multiply(a, b_t, offs, pad_token_groups_for_grouped_mm=False)  # groups are multiples of 16


def _time_call(context: PartContext, call: Call) -> Iterator[Row]:
    yield {"timing": make_timing_row(context.time({"it": call}, rounds=10)["it"])}


def time_optimizers(context: PartContext) -> Iterator[Row]:
    """Time an update of a block's parameters by fused AdamW, and by Float8AdamW with and without `compile`."""
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
        "Float8AdamW": lambda parameters: Float8AdamW(parameters),
        "Float8AdamW, compiled": lambda parameters: Float8AdamW(parameters, compile=True),
    }

    def time_optimizer(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Iterator[Row]:
        step = make_step(context, BFLOAT16, make_inputs(context), compiled=False)
        step()
        yield from _time_call(context, make(list(step.subject.parameters())).step)

    yield from catch_failures(({"what": name}, partial(time_optimizer, make)) for name, make in makers.items())


def time_stored_activations(context: PartContext) -> Iterator[Row]:
    """Time the block with and without activations stored in float8, eager and compiled."""
    for name in (BFLOAT16, "quaver rowwise"):
        for compiled in (False, True):
            for change in (None, store_activations_in_float8):
                how = f"{'compiled' if compiled else 'eager'}, {'keeps' if change is None else 'stores'}"
                rows = partial(
                    _time_step, context, name, compiled=compiled, **({} if change is None else {"change": change})
                )
                yield from catch_failures([({"what": f"{name}, {how}"}, rows)])


def _time_step(context: PartContext, name: str, **options: object) -> Iterator[Row]:
    torch.compiler.reset()
    step = make_step(context, name, make_inputs(context), **options)  # type: ignore[arg-type]
    step.settle()
    yield from _time_call(context, step)


def time_graphs(context: PartContext) -> Iterator[Row]:
    """Time compiled blocks in the default mode and in mode="reduce-overhead", which replays CUDA graphs."""
    for name in (BFLOAT16, "quaver tensorwise", "quaver rowwise"):
        for mode in (None, "reduce-overhead"):
            options = {"compiled": True, "mode": None if context.dry else mode}
            about = {"what": f"{name}, {mode or 'default'}"}
            yield from catch_failures([(about, partial(_time_step, context, name, **options))])


def time_fsdp(context: PartContext) -> Iterator[Row]:
    """Time blocks that FSDP2 shards over one NCCL rank, with and without the float8 all-gather; then run the sanitizer.

    One rank sends nothing, but runs the same copies, casts, events and streams as several ranks, which the sanitizer
    checks.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"init_method": f"file://{folder}/store", "rank": 0, "world_size": 1}
        dist.init_process_group("gloo" if context.dry else "nccl", **options)
        try:
            yield from catch_failures(
                (
                    {"what": f"{name}{', float8 all-gather' if gathers else ''}"},
                    partial(_time_sharded, context, name, gathers),
                )
                for name in (BFLOAT16, "quaver tensorwise", "quaver rowwise_with_tensorwise_weight")
                for gathers in ((False, True) if name != BFLOAT16 else (False,))
            )
            yield from catch_failures([({"what": "sanitizer"}, partial(_run_sanitized, context))])
        finally:
            dist.destroy_process_group()


def _shard(context: PartContext, name: str, *, float8_all_gather: bool, blocks: int) -> Call:
    torch.manual_seed(0)
    mesh = init_device_mesh(context.device.type, (1,))
    with context.device:
        subjects = nn.Sequential(*(BenchedBlock(context.model, context.seq_len) for _ in range(blocks))).to(
            context.device
        )
    recipe = name.partition(" ")[2]
    if recipe:
        config = replace(Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=float8_all_gather)
        convert_to_float8_training(subjects, config=config)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for subject in subjects:
        fully_shard(subject, mesh=mesh, mp_policy=policy)
    fully_shard(subjects, mesh=mesh, mp_policy=policy)
    hidden, direction = make_inputs(context)

    def step() -> None:
        hidden.grad = None
        subjects(hidden).backward(direction)
        subjects.zero_grad(set_to_none=True)

    return step


def _time_sharded(context: PartContext, name: str, float8_all_gather: bool) -> Iterator[Row]:
    step = _shard(context, name, float8_all_gather=float8_all_gather, blocks=4)
    step()
    yield from _time_call(context, step)


def _run_sanitized(context: PartContext) -> Iterator[Row]:
    """A small step under torch.cuda._sanitizer, which raises at the first access that no event orders."""
    step = _shard(PartContext(context.dry), "quaver tensorwise", float8_all_gather=True, blocks=2)
    if not context.dry:
        from torch.cuda._sanitizer import enable_cuda_sanitizer

        enable_cuda_sanitizer()
    step()
    step()
    yield {"races": 0}

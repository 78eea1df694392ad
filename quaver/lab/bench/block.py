"""A transformer block in training: time, tokens per second and memory of a step, per recipe against bfloat16.

A step is forward, backward and fused AdamW of one block of `quaver train` (block_step.py). Each step casts the weights
and updates delayed scales. All precisions of a mode are in memory at once and take turns. Memory is measured in
one more step after the timed steps (quaver/lab/recorder/allocator.py): exactly on a CPU, as the allocator's peak on a
GPU. docs/benchmarks.md defines the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Annotated

import torch
from torch import Tensor

from quaver.lab.bench.block_step import OptimizerStep, make_steps
from quaver.lab.bench.harness import time_alternating
from quaver.lab.bench.options import BenchOptions, ModeOptions, RecipeOptions, Size
from quaver.lab.bench.results import Result, Row, make_contestant_rows
from quaver.lab.bench.shapes import MODEL_NAMES, format_scaled_name, make_model
from quaver.lab.model.llama import list_block_weights
from quaver.lab.recorder.allocator import measure_usage
from quaver.lab.settings import Model
from quaver.lab.settings.fields import AtLeast1, OneOf, setting
from quaver.lab.settings.float8 import BFLOAT16
from quaver.lab.terminal.byte_sizes import format_bytes
from quaver.lab.trainer.memory import count_storage_bytes
from quaver.runtime.devices import is_cuda_device
from quaver.runtime.errors import InputError

_RESIDENT_BYTES_PER_PARAMETER = 16
"""The bytes of a parameter, its gradient and AdamW's two moments, in float32."""


@dataclass(frozen=True)
class BlockBenchmark(ModeOptions, RecipeOptions, BenchOptions):
    """Forward, backward and AdamW of one transformer block, per recipe."""

    model: Annotated[str, OneOf(tuple(MODEL_NAMES))] = setting("debug", "The model of the block.")
    divisor: AtLeast1 = setting(1, "Divide widths and heads by this.")
    tokens: Size = setting(2048, "Tokens in one step.")
    seq_len: AtLeast1 | None = setting(None, "Tokens of a sequence; by default one sequence of --tokens.")
    rounds: AtLeast1 = 10

    case_fields = ("mode",)
    tables = (
        ("precision", "median", "spread", "tokens_per_s", "time_over_bfloat16"),
        ("precision", "resident_bytes", "peak_bytes", "tensor_peak_bytes", "saved_bytes", "peak_over_bfloat16"),
    )

    def check(self) -> None:
        """Raise InputError if the divisor does not divide the heads, or the sequence length the tokens."""
        super().check()
        make_model(self.model, divisor=self.divisor)
        if self.tokens % self.batch[1]:
            raise InputError(f"--tokens: expected a multiple of --seq-len {self.seq_len}, got {self.tokens}")

    @property
    def shape(self) -> Model:
        """The model, with one block."""
        return make_model(self.model, divisor=self.divisor)

    @property
    def batch(self) -> tuple[int, int]:
        """The number of sequences in a step, and their length."""
        seq_len = self.seq_len or self.tokens
        return self.tokens // seq_len, seq_len

    def prepare(self) -> None:
        """Prepare as the base does, and refuse more blocks than fit into a GPU before the first is built.

        Raises:
            InputError: their parameters, gradients and moments take more than the GPU's memory; or as in the base.
        """
        super().prepare()
        if not is_cuda_device(self.torch_device):
            return
        count = 1 + len(self.recipe_names)
        needed = count * _RESIDENT_BYTES_PER_PARAMETER * sum(prod(shape) for _, shape in list_block_weights(self.shape))
        available = torch.cuda.get_device_properties(self.torch_device).total_memory
        if needed > available:
            raise InputError(
                f"{count} blocks with their gradients and optimizers take {format_bytes(needed)}, and this GPU has "
                f"{format_bytes(available)}; name fewer --recipes, or give a --divisor"
            )

    def measure(self) -> Result:
        """Return a row for each mode and precision."""
        name, sequences, seq_len = format_scaled_name(self.model, self.divisor), *self.batch
        sizes = {field: getattr(self.shape, field) for field in ("dim", "n_heads", "n_kv_heads", "hidden_dim")}
        batch = {"sequences": sequences, "seq_len": seq_len, "tokens": self.tokens}
        cases = product([name], [f"{self.tokens} tokens"], self.mode_names)
        sizes_of_case = {"model": {"name": name, **sizes}, "batch": batch}
        return self.run_cases(cases, lambda _name, _tokens, mode: self._make_rows(mode), **sizes_of_case)

    def _make_rows(self, mode: str) -> list[Row]:
        precisions = [BFLOAT16, *(f"quaver {recipe}" for recipe in self.recipe_names)]
        compiled = mode == "compiled"
        steps = make_steps(self.shape, *self.batch, precisions, self.torch_device, compiled=compiled)
        timings = time_alternating(steps, self.torch_device, rounds=self.rounds)
        memory = {precision: _measure_memory(step, self.torch_device) for precision, step in steps.items()}
        rows = []
        for precision, row in make_contestant_rows(timings).items():
            usage = memory[precision]
            per_s = self.tokens / (1e-6 * timings[precision].median_us)
            ratio = usage["peak_bytes"] / memory[BFLOAT16]["peak_bytes"]
            rows.append({"mode": mode, **row, "tokens_per_s": per_s, **usage, "peak_over_bfloat16": ratio})
        return rows

    def format_note(self, result: Result) -> str:
        shape, tokens = result["model"], result["batch"]
        return (
            f"block of {shape['name']}: width {shape['dim']}, {shape['n_heads']} heads ({shape['n_kv_heads']} for keys "
            f"and values), feed-forward {shape['hidden_dim']}; {tokens['sequences']} x {tokens['seq_len']} tokens; "
            "memory in MiB"
        )


def _measure_memory(step: OptimizerStep, device: torch.device) -> Row:
    with measure_usage(device) as measured:
        step(measured.mark)
    states = chain.from_iterable(state.values() for state in step.optimizer.state.values())
    moments = (state for state in states if isinstance(state, Tensor))
    resident = count_storage_bytes(chain(step.block.parameters(), step.block.buffers(), moments))
    usage = measured.usage
    tensor_peak = usage.tensor_peak_bytes
    return {
        "resident_bytes": resident,
        "peak_bytes": resident + usage.peak_bytes,
        "tensor_peak_bytes": None if tensor_peak is None else resident + tensor_peak,
        "saved_bytes": usage.saved_bytes,
    }

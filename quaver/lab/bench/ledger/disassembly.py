"""Compiles Inductor's Triton kernels to machine code for a GPU that this machine lacks, and counts instructions.

triton.compile needs no GPU: triton's wheel contains ptxas, nvdisasm and cuobjdump.

[Note: config] Inductor times a kernel's configs on the GPU and keeps the fastest. Without a GPU, configs that move over
1% more bytes than the best, in sectors of 32 bytes, are dropped. The config that issues the fewest instructions is
chosen among the rest. As in Inductor, configs that spill more than spill_threshold are excluded, unless all do.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch._inductor.runtime import triton_helpers

from quaver.lab.bench.ledger.kernel_layout import KernelLayout
from quaver.torch_private.replacing import replace_attribute

_INSTRUCTION_PATTERN = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_LABEL_PATTERN = re.compile(r"\s*(\.L_x_\d+):")
_FLOAT64_PATTERN = re.compile(r"D(?:FMA|MUL|ADD|SETP)|MUFU\.RCP64H|F2F\.(?:F32\.F64|F64)")


@dataclass(frozen=True)
class Loop:
    """An innermost loop: the instructions of one iteration, and the bytes that a thread loads from global memory."""

    instructions: int
    loaded_bytes: int


class Disassembly(NamedTuple):
    """The instructions of one thread."""

    instructions: Counter[str]
    """The instructions by name. Each counts once, also in a loop."""
    loops: tuple[Loop, ...]
    loaded_bytes: int
    """Bytes that a thread loads from global memory. Each load counts once."""


@dataclass(frozen=True)
class MachineCode:
    """Properties of the machine code of one compiled kernel."""

    config: dict[str, int]
    """Block sizes and warps."""
    registers: int
    spilled_bytes: int
    """Local memory of a thread."""
    instructions: Counter[str]
    loops: tuple[Loop, ...]
    loaded_bytes: int
    """See `Disassembly`, also for `instructions` and `loops`."""
    issued_instructions: int
    """Instructions that all warps of a launch issue. In a loop they count once per iteration."""

    @property
    def float64_instructions(self) -> int:
        return sum(count for name, count in self.instructions.items() if _FLOAT64_PATTERN.match(name))

    def count_instructions_per_element(self, element_bytes: int) -> float:
        """Return the instructions of a thread for each element of `element_bytes` that it loads; 0 if it loads nothing.

        If the kernel has loops that load, only their instructions count.
        """
        loops = [loop for loop in self.loops if loop.loaded_bytes >= element_bytes]
        if loops:
            return sum(loop.instructions * element_bytes / loop.loaded_bytes for loop in loops)
        return self.instructions.total() * element_bytes / self.loaded_bytes if self.loaded_bytes else 0.0


def compile_kernel(source: str, name: str, capability: int) -> MachineCode:
    """Compile one of Inductor's kernels for an NVIDIA GPU of a compute capability, such as 90; see [Note: config].

    Raises:
        ImportError: triton is not installed.
        RuntimeError: the tools of its wheel do not run, or print something else than expected.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(replace_attribute(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(replace_attribute(torch.cuda, "is_available", lambda: True))  # configs of NVIDIA's GPUs
        file = folder / "kernel.py"  # Triton reads the source from a file
        file.write_text(source)
        module = ModuleType("quaver.lab.bench.ledger.kernel")
        module.__file__ = str(file)
        exec(compile(source, str(file), "exec"), vars(module))
        tuner = getattr(module, name)
        layout = KernelLayout.parse(source, tuner.triton_meta["signature"])
        moved = [layout.count_sector_bytes(config.kwargs) for config in tuner.configs]
        best = [config for config, bytes_ in zip(tuner.configs, moved, strict=True) if bytes_ <= 1.01 * min(moved)]
        compiled = [_compile_config(tuner, config, capability, layout, folder) for config in best]
    most_spilled = 4 * int(tuner.inductor_meta.get("spill_threshold", 16))
    accepted = [code for code in compiled if code.spilled_bytes <= most_spilled] or compiled
    return min(accepted, key=lambda code: code.issued_instructions)


def _compile_config(tuner: Any, config: Any, capability: int, layout: KernelLayout, folder: Path) -> MachineCode:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = tuner._create_compile_meta(config)
    compiled = triton.compile(
        ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
        target=GPUTarget("cuda", capability, 32),
        options=tuner._create_compile_options(config, meta),
    )
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    usage = _run_tool(tools / "cuobjdump", "-res-usage", binary)
    registers, stack = (int(_search(rf"{resource}:(\d+)", usage)) for resource in ("REG", "STACK"))
    code = parse_disassembly(_run_tool(tools / "nvdisasm", "-c", binary))
    warps = config.num_warps
    issued_instructions = count_issued_instructions(code, layout, config.kwargs, warps)
    return MachineCode({**config.kwargs, "warps": warps}, registers, stack, *code, issued_instructions)


def count_issued_instructions(code: Disassembly, layout: KernelLayout, sizes: dict[str, int], warps: int) -> int:
    """Return the instructions that all warps of a launch issue.

    The compiler unrolls loops, partly or fully. The number of iterations of a remaining loop follows from the bytes
    that the loops of the source load.
    """
    loading = [loop for loop in code.loops if loop.loaded_bytes]
    loaded_in_loops = sum(loop.loaded_bytes for loop in loading)
    thread_bytes = layout.count_loaded_bytes(sizes) / (32 * warps)
    in_loops = thread_bytes - (code.loaded_bytes - loaded_in_loops)
    iterations = max(1.0, in_loops / loaded_in_loops) if loaded_in_loops else 1.0
    thread_instructions = code.instructions.total() + (iterations - 1) * sum(loop.instructions for loop in loading)
    return round(layout.count_programs(sizes) * warps * thread_instructions)


def _run_tool(tool: Path, *arguments: Any) -> str:
    try:
        process = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{tool.name} of triton's wheel does not run: {error}") from error
    return process.stdout


def _search(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"expected {pattern} in the output of cuobjdump, got {text[:200]!r}")
    return match[1]


def parse_disassembly(text: str) -> Disassembly:
    """Read nvdisasm's output. Only innermost loops are returned."""
    labels: dict[str, int] = {}
    names: list[str] = []
    spans = []
    for line in text.splitlines():
        if label := _LABEL_PATTERN.match(line):
            labels[label[1]] = len(names)
        elif (match := _INSTRUCTION_PATTERN.search(line)) and match[1] != "NOP":
            names.append(match[1])
            target = re.search(r"\.L_x_\d+", match[2]) if match[1].startswith("BRA") else None
            start = labels.get(target[0], len(names)) if target else len(names)
            if start < len(names) - 1:  # the last branch of a program jumps to itself
                spans.append((start, len(names)))
    innermost = [
        (start, stop)
        for start, stop in spans
        if not any(start <= inner[0] and inner[1] <= stop and inner != (start, stop) for inner in spans)
    ]
    loops = tuple(Loop(stop - start, sum(map(_count_loaded_bytes, names[start:stop]))) for start, stop in innermost)
    return Disassembly(Counter(names), loops, sum(map(_count_loaded_bytes, names)))


def _count_loaded_bytes(instruction: str) -> int:
    if not instruction.startswith("LDG"):
        return 0
    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((widths[part] for part in instruction.split(".") if part in widths), 4)

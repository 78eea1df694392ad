"""The machine code of Inductor's Triton kernels for a GPU that this machine lacks, by the tools in triton's wheel.

triton.compile needs no GPU: ptxas is in its wheel, and nvdisasm and cuobjdump beside it.

[Note: config] Inductor times a kernel's configs on the GPU and keeps the fastest. Without one, the config is chosen
that moves the least in sectors of 32 bytes and, of those, issues the least instructions; a config that spills more than
Inductor accepts (spill_threshold) is left out, as Inductor leaves it out.
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
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor.runtime import triton_helpers

from quaver.lab.memory.compiling.kernel_layout import KernelLayout

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_FLOAT64 = re.compile(r"D(?:FMA|MUL|ADD|SETP)|MUFU\.RCP64H|F2F\.(?:F32\.F64|F64)")


@dataclass(frozen=True)
class Loop:
    """An innermost loop: instructions of one turn, and bytes that a thread loads from global memory in it."""

    instructions: int
    loaded_bytes: int


@dataclass(frozen=True)
class MachineCode:
    """The machine code of one compiled kernel, in figures.

    Attributes:
        config: block sizes and warps.
        spilled_bytes: of local memory, of a thread.
        instructions: of a thread, by name, each counted once however often it runs.
        loaded_bytes: that a thread loads from global memory, each load counted once.
        issued: instructions that the warps of one launch issue, loops as often as they turn.
    """

    config: dict[str, int]
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: Counter[str]
    loops: tuple[Loop, ...]
    loaded_bytes: int
    issued: int

    @property
    def float64_instructions(self) -> int:
        """Instructions in float64."""
        return sum(count for name, count in self.instructions.items() if _FLOAT64.match(name))

    def instructions_per_element(self, element_bytes: int) -> float:
        """Instructions of a thread for each element of `element_bytes` that it loads; those of loops, if there are any.

        A kernel that loads nothing has no elements: 0.
        """
        loops = [loop for loop in self.loops if loop.loaded_bytes >= element_bytes]
        if loops:
            return sum(loop.instructions * element_bytes / loop.loaded_bytes for loop in loops)
        return self.instructions.total() * element_bytes / self.loaded_bytes if self.loaded_bytes else 0.0


def compile_kernel(source: str, name: str, capability: int) -> MachineCode:
    """Compile a kernel of Inductor's for an NVIDIA GPU of a compute capability, such as 90; see [Note: config].

    Raises:
        ImportError: triton is not installed.
        RuntimeError: its wheel has no tools.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(patch.object(torch.cuda, "is_available", lambda: True))  # configs of NVIDIA's GPUs
        file = folder / "kernel.py"  # Triton reads the source again
        file.write_text(source)
        module = ModuleType("quaver.lab.memory.kernel")
        module.__file__ = str(file)
        exec(compile(source, str(file), "exec"), vars(module))
        tuner = getattr(module, name)
        layout = KernelLayout.of(source, tuner.triton_meta["signature"])
        moved = [layout.sector_bytes(config.kwargs) for config in tuner.configs]
        best = [config for config, each in zip(tuner.configs, moved, strict=True) if each <= 1.01 * min(moved)]
        made = [_compiled(tuner, config, capability, layout, folder) for config in best]
    spilled = 4 * int(tuner.inductor_meta.get("spill_threshold", 16))
    accepted = [each for each in made if each.spilled_bytes <= spilled] or made
    return min(accepted, key=lambda each: each.issued)


def _compiled(tuner: Any, config: Any, capability: int, layout: KernelLayout, folder: Path) -> MachineCode:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = tuner._create_compile_meta(config)
    made = triton.compile(
        ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
        target=GPUTarget("cuda", capability, 32),
        options=tuner._create_compile_options(config, meta),
    )
    binary = folder / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    usage = _output(tools / "cuobjdump", "-res-usage", binary)
    registers, stack = (int(_found(rf"{word}:(\d+)", usage)) for word in ("REG", "STACK"))
    instructions, loops, loaded = _read(_output(tools / "nvdisasm", "-c", binary))
    warps = config.num_warps
    issued = _issued(instructions.total(), loops, loaded, layout, config.kwargs, warps)
    sizes = {**config.kwargs, "warps": warps}
    return MachineCode(sizes, registers, stack, made.metadata.shared, instructions, loops, loaded, issued)


def _issued(
    total: int, loops: tuple[Loop, ...], loaded: int, layout: KernelLayout, sizes: dict[str, int], warps: int
) -> int:
    """Instructions of all warps of a launch.

    The compiler unrolls loops, in part or whole: what is left of them turns as often as their loads need to load what
    the loops of the source load.
    """
    of_loops = [loop for loop in loops if loop.loaded_bytes]
    in_loops = sum(loop.loaded_bytes for loop in of_loops)
    wanted = layout.loaded_by_program(sizes) / (32 * warps)
    turns = max(1.0, (wanted - (loaded - in_loops)) / in_loops) if in_loops else 1.0
    of_thread = total + (turns - 1) * sum(loop.instructions for loop in of_loops)
    return round(layout.programs(sizes) * warps * of_thread)


def _output(tool: Path, *arguments: Any) -> str:
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{tool.name} of triton's wheel does not run: {error}") from error
    return done.stdout


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"expected {pattern} in the output of cuobjdump, got {text[:200]!r}")
    return match[1]


def _read(text: str) -> tuple[Counter[str], tuple[Loop, ...], int]:
    """Instructions, innermost loops and loaded bytes of a disassembly."""
    labels: dict[str, int] = {}
    names: list[str] = []
    spans = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif (found := _INSTRUCTION.search(line)) and found[1] != "NOP":
            names.append(found[1])
            target = re.search(r"\.L_x_\d+", found[2]) if found[1].startswith("BRA") else None
            start = labels.get(target[0], len(names)) if target else len(names)
            if start < len(names) - 1:  # the last branch of a program jumps to itself
                spans.append((start, len(names)))
    inner = [span for span in spans if not any(other != span and _holds(span, other) for other in spans)]
    loops = tuple(Loop(stop - start, sum(map(_loaded, names[start:stop]))) for start, stop in inner)
    return Counter(names), loops, sum(map(_loaded, names))


def _holds(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _loaded(instruction: str) -> int:
    if not instruction.startswith("LDG"):
        return 0
    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((widths[part] for part in instruction.split(".") if part in widths), 4)

"""Compiles the Triton kernels of a ledger to machine code, for registers, spills and instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quaver.lab.bench.ledger.disassembly import MachineCode, compile_kernel
from quaver.lab.bench.ledger.ledger import Ledger

MACHINE_COLUMNS = (
    "kernel and its config",
    "registers",
    "spilled\nbytes",
    "instructions\nan element",
    "issued\nmillions",
    "float64",
)
CodeBySource = dict[str, MachineCode]
"""Machine code by the source of a kernel."""


def compile_kernels(ledger: Ledger, capability: int, compiled: CodeBySource) -> CodeBySource:
    """Return the machine code of a ledger's large Triton kernels. Compiling a kernel takes seconds.

    Args:
        capability: the compute capability, such as 90.
        compiled: the kernels of other ledgers, which are not compiled again.
    Raises:
        ImportError, RuntimeError: triton or its tools are not installed.
    """
    codes: CodeBySource = {}
    for entry in ledger.entries:
        for kernel in entry.launch.kernels:
            if entry.category != "small" and kernel.source not in codes:
                code = compiled.get(kernel.source) or compile_kernel(kernel.source, kernel.name, capability)
                codes[kernel.source] = code
    return codes


def add_machine_code(ledger: Ledger, codes: CodeBySource) -> Ledger:
    """Return the ledger with the instructions that its kernels issue, which then affect its times."""
    issued = [
        sum(codes[kernel.source].issued_instructions for kernel in entry.launch.kernels if kernel.source in codes)
        for entry in ledger.entries
    ]
    entries = (
        replace(entry, issued_instructions=instructions)
        for entry, instructions in zip(ledger.entries, issued, strict=True)
    )
    return replace(ledger, entries=tuple(entries))


def iter_machine_rows(ledger: Ledger, codes: CodeBySource) -> Iterator[list[str]]:
    """Yield one row per Triton kernel, even if several launches run it."""
    seen = set()
    for entry in ledger.entries:
        largest = max((access.elements for access in entry.launch.reads), default=0)
        element_bytes = sum(access.dtype.itemsize for access in entry.launch.reads if access.elements * 100 > largest)
        for kernel in entry.launch.kernels:
            if kernel.source not in seen and kernel.source in codes:
                seen.add(kernel.source)
                code = codes[kernel.source]
                config = " ".join(f"{name}={value}" for name, value in code.config.items())
                yield [
                    f"{kernel.name}\n{config}",
                    str(code.registers),
                    str(code.spilled_bytes),
                    f"{code.count_instructions_per_element(element_bytes):.1f}",
                    f"{code.issued_instructions / 1e6:,.1f}",
                    str(code.float64_instructions),
                ]

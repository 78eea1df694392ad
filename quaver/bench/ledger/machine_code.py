"""Registers, spills and instructions of the Triton kernels of a ledger."""

from __future__ import annotations

from collections.abc import Iterator

from quaver.bench.ledger.ledger import Ledger
from quaver.memory.compiling.machine_code import compile_kernel

MACHINE_COLUMNS = ("kernel and its config", "registers", "spilled\nbytes", "instructions\nan element", "float64")


def machine_rows(ledger: Ledger, capability: int) -> Iterator[list[str]]:
    """One row a Triton kernel, for a compute capability such as 90; a kernel that several launches run has one.

    Raises:
        ImportError, RuntimeError: triton or its tools are not installed.
    """
    seen = set()
    for entry in ledger.entries:
        largest = max((each.elements for each in entry.launch.reads), default=0)
        element_bytes = sum(each.dtype.itemsize for each in entry.launch.reads if each.elements * 100 > largest)
        for kernel in entry.launch.kernels:
            if kernel.source not in seen and entry.category != "small":
                seen.add(kernel.source)
                code = compile_kernel(kernel.source, kernel.name, capability)
                config = " ".join(f"{name}={value}" for name, value in code.config.items())
                yield [
                    f"{kernel.name}\n{config}",
                    str(code.registers),
                    str(code.spilled_bytes),
                    f"{code.instructions_per_element(element_bytes):.1f}",
                    str(code.float64_instructions),
                ]

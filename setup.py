"""The optional C extension; everything else about the package is in pyproject.toml.

Without a compiler the install succeeds, and quaver computes the same bits in plain PyTorch, more slowly.
"""

import sys

from setuptools import Extension, setup

# No -ffast-math and no contraction: the results are defined to the last bit.
FLAGS = ["-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
# PyTorch for Linux brings the OpenMP runtime that this shares with it, and its threads.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []

setup(
    ext_modules=[
        Extension(
            "quaver._cpu",
            ["quaver/csrc/cpu.c"],
            depends=[f"quaver/csrc/{name}.h" for name in ("adamw", "elements", "lookup", "matmul", "observe", "runs")],
            extra_compile_args=[] if sys.platform == "win32" else FLAGS + OPENMP,
            extra_link_args=OPENMP,
            optional=True,
        )
    ]
)

"""The optional C extension; everything else about the package is in pyproject.toml.

Without a compiler the install succeeds, and quaver computes the same bits in plain PyTorch, more slowly. Built with
QUAVER_EXTENSION=0 in the environment a wheel has no extension and fits every platform; with 1 a build without a
compiler fails.
"""

import os
import sys
import sysconfig

from setuptools import Extension, setup

# No -ffast-math and no contraction: the results are defined to the last bit.
FLAGS = ["-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
# PyTorch for Linux brings the OpenMP runtime that this shares with it, and its threads.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []

# One build for every CPython from 3.11 on, except the free-threaded ones, which have no stable ABI.
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")

WANTED = os.environ.get("QUAVER_EXTENSION", "")
if WANTED not in ("", "0", "1"):
    raise SystemExit(f"QUAVER_EXTENSION: expected 0, 1 or nothing, got {WANTED!r}")

EXTENSION = Extension(
    "quaver._cpu",
    ["quaver/csrc/cpu.c"],
    depends=[f"quaver/csrc/{name}.h" for name in ("adamw", "elements", "lookup", "matmul", "observe", "runs")],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if ABI3 else [],
    py_limited_api=ABI3,
    extra_compile_args=[] if sys.platform == "win32" else FLAGS + OPENMP,
    extra_link_args=OPENMP,
    optional=WANTED != "1",
)

setup(
    ext_modules=[] if WANTED == "0" else [EXTENSION],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if ABI3 and WANTED != "0" else {},
)

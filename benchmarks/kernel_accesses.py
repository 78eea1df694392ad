"""What a Triton kernel that Inductor wrote loads and stores: how many elements, and how many bytes at a time.

Elements are read from the source: an access touches as many as its index takes values, whatever its mask. Widths are
read from PTX, for each tile that Inductor would try.
"""

import ast
import math
import re
from collections import Counter
from dataclasses import dataclass
from unittest.mock import patch

import torch._inductor.config
import triton
from torch._inductor.codecache import PyCodeCache

_WORKSPACE = "ws_ptr"
"""Where the programs of a kernel leave partial sums for one another: a few rows, which are not counted."""
_BITS = re.compile(r"\d+$")
_VECTOR = re.compile(r"\.v([248])\.")


@dataclass(frozen=True)
class Access:
    """One load or store statement of a kernel."""

    pointer: str
    is_store: bool
    elements: int
    element_bytes: int
    again: bool
    """Whether an earlier statement of the kernel has loaded or stored these elements."""
    down_columns: bool
    """Whether a program goes through a whole column of a matrix for it: what it reads again has then left the cache."""

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class Tile:
    """One of the tiles that Inductor lets a measurement choose from."""

    blocks: dict[str, int]
    warps: int
    loads: Counter[int]
    """How many load instructions of how many bytes a thread."""
    stores: Counter[int]


def accesses(source: str) -> list[Access]:
    """The accesses of a kernel, in order.

    Raises:
        ValueError: an index that this does not understand, or sizes that are not in the source.
    """
    kernel = _kernel(source)
    widths = _pointer_widths(kernel)
    indices = _Indices()
    found: list[Access] = []
    for node in _in_order(kernel):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            indices.learn(node.targets[0].id, node.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
            pointer, index = _address(node.args[0])
            if pointer == _WORKSPACE:
                continue
            is_store = ast.unparse(node.func) == "tl.store"
            elements = indices.values_of(index)
            again = not is_store and any((each.pointer, each.elements) == (pointer, elements) for each in found)
            found.append(Access(pointer, is_store, elements, widths[pointer], again, indices.strides_over_loop(index)))
    return found


def reads_or_writes_bytes(source: str) -> bool:
    """Whether a kernel is given elements of one byte, as float8 is."""
    return 1 in _pointer_widths(_kernel(source)).values()


def tiles(name: str, source: str) -> list[Tile]:
    """The tiles of a kernel, compiled for the GPU of Triton's driver (`inductor_for_gpu.as_hopper`)."""
    compiled: list[triton.compiler.CompiledKernel] = []
    real = triton.compile

    def remember(*args: object, **options: object) -> object:
        compiled.append(real(*args, **options))
        return compiled[-1]

    tuner = getattr(PyCodeCache.load(source), name)
    found = []
    with patch.object(triton, "compile", remember), torch._inductor.config.patch(use_static_triton_launcher=False):
        for config in tuner.configs:
            tuner._precompile_config(config)
            ptx = compiled[-1].asm["ptx"]
            found.append(Tile(dict(config.kwargs), config.num_warps, _widths(ptx, "ld"), _widths(ptx, "st")))
    return found


def _kernel(source: str) -> ast.FunctionDef:
    return next(each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef))


def _widths(ptx: str, kind: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for instruction in re.findall(rf"\b{kind}\.global\S*", ptx):
        vector, bits = _VECTOR.search(instruction), _BITS.search(instruction)
        if bits is None:
            raise ValueError(f"expected an access of PTX that ends in its bits, got {instruction!r}")
        found[int(bits[0]) // 8 * (int(vector[1]) if vector else 1)] += 1
    return found


def _pointer_widths(kernel: ast.FunctionDef) -> dict[str, int]:
    """Bytes of an element by pointer, from the signature that Inductor writes into a decorator."""
    for decorator in kernel.decorator_list:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "signature":
                        kinds = ast.literal_eval(value)
                        return {name: _element_bytes(kind) for name, kind in kinds.items() if kind.startswith("*")}
    raise ValueError("expected a kernel with a signature")


def _element_bytes(kind: str) -> int:
    bits = re.search(r"(?:fp|bf|[iu])(\d+)", kind)
    if bits is None:
        raise ValueError(f"expected a pointer to numbers, got {kind!r}")
    return math.ceil(int(bits[1]) / 8)


def _in_order(node: ast.AST) -> list[ast.AST]:
    """All nodes below, a statement's calls before what follows it."""
    return sorted(ast.walk(node), key=lambda each: (getattr(each, "lineno", 0), isinstance(each, ast.Assign)))


def _address(node: ast.expr) -> tuple[str, ast.expr]:
    """The pointer on the left of a sum, and the sum."""
    pointer = node
    while isinstance(pointer, ast.BinOp):
        pointer = pointer.left
    if not isinstance(pointer, ast.Name) or pointer is node:
        raise ValueError(f"expected pointer + index, got {ast.unparse(node)}")
    return pointer.id, node


class _Indices:
    """How many values indices take: `xindex` counts to `xnumel`, others are quotients and remainders of such."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._known: dict[str, tuple[str, str, int]] = {}
        """By variable: the dim that it is made of, how, and how many values it takes."""

    def learn(self, name: str, value: ast.expr) -> None:
        if name.endswith("numel") and isinstance(value, ast.Constant):
            self._sizes[name.removesuffix("numel")] = value.value
        elif name.endswith("index") and name.removesuffix("index") in self._sizes:
            dim = name.removesuffix("index")
            self._known[name] = (dim, dim, self._sizes[dim])
        else:
            part = self._part(value)
            if part is not None:
                self._known[name] = part

    def values_of(self, index: ast.expr) -> int:
        """Of an expression that adds up multiples of indices."""
        parts: dict[str, dict[str, int]] = {}
        self._collect(index, parts)
        return math.prod(min(self._sizes[dim], math.prod(of_dim.values())) for dim, of_dim in parts.items())

    def strides_over_loop(self, index: ast.expr) -> bool:
        """Whether an expression has a multiple of an index that a program counts up, that of a reduction."""
        return any(
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and self._counts(node.right)
            for node in ast.walk(index)
        )

    def _counts(self, node: ast.expr) -> bool:
        part = self._part(node)
        return part is not None and part[0].startswith("r")

    def _collect(self, node: ast.AST, parts: dict[str, dict[str, int]]) -> None:
        part = self._part(node)
        if part is not None:
            dim, how, values = part
            parts.setdefault(dim, {})[how] = values
            return
        for child in ast.iter_child_nodes(node):
            self._collect(child, parts)

    def _part(self, node: ast.AST) -> tuple[str, str, int] | None:
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
            of = self._part(node.left)
            if of is not None and isinstance(node.op, ast.FloorDiv | ast.Mod):
                dim, how, values = of
                divisor = node.right.value
                is_quotient = isinstance(node.op, ast.FloorDiv)
                left = math.ceil(values / divisor) if is_quotient else min(values, divisor)
                return dim, f"({how} {'//' if is_quotient else '%'} {divisor})", left
        return None

"""The saved-tensor hooks that store activations as float8 codes, and the tensors that they do not convert.

    with store_tensors(storage, args, kwargs):      around the forward of one module
        ...

Tensors that autograd saves inside the block are stored in float8. These are not converted:

    other dtypes                 everything that is not float32, bfloat16 or float16
    parameters                   and anything derived from one parameter only, except embedding lookups
    tensors without gradient     masks (no code holds their infinities), tables of rotary embeddings, attention's
                                 logsumexp, the statistics of a norm
    small tensors                fewer elements than a block, or at most 1/8 of the module's largest argument, for
                                 example results of reductions
    what matmuls save            float8 linears save codes already, and other linears keep their inputs

A storage that is saved several times is stored once. The codes are looked up by the position of the tensor's elements
in memory, while they are alive and the tensor's version is unchanged. A write that version counters miss (numpy,
`.data`) between two saves in one forward is missed here too.

Autograd runs the innermost hooks only. So these hooks call the ones around the block, with the codes and scales or with
the tensor that is not converted. Inside an activation checkpoint nothing is stored: almost nothing is saved there, and
the recomputation is in high precision.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from quaver.activations.codes import STORABLE_DTYPES, MemoryLayout, dequantize_activation, quantize_activation
from quaver.kernels.operands import require
from quaver.linear.saved_tensors import HeldTensor, PackHook
from quaver.torch_private.autograd import is_checkpoint_hook, runs_in_backward, top_saved_tensors_hooks
from quaver.torch_private.dtensor import get_local_tensor, is_dtensor, wait_for_local_tensor
from quaver.torch_private.memory import storage_key
from quaver.torch_private.versions import get_version

StoringClass = tuple[str, int]
"""The name of a class whose modules store activations, and their block size."""

STORED_BY_KEY = "stores activations"
"""The key of a `StoringClass`, or None, in `meta["custom"]` of a node of a compiled graph."""

SMALL_TENSOR_RATIO = 8
"""A tensor with at most 1/8 of the elements of the module's largest argument is not converted."""


class ActivationCodes:
    """Codes and scales of consecutive elements of a storage, packed by the outer hooks."""

    __slots__ = ("__weakref__", "_codes", "_layout", "_outer", "_scale", "_source", "_unpack", "bytes")

    def __init__(self, matrix: Tensor, block_size: int, outer: tuple[Any, Any] | None) -> None:
        operand = quantize_activation(matrix, block_size)
        codes, scale, self._layout = operand.data, require(operand.dequant_scale, "the dequant_scale"), operand.layout
        pack: Any = _identity if outer is None else outer[0]
        self._unpack: Any = _identity if outer is None else outer[1]
        self.bytes = codes.nbytes + scale.nbytes
        self._codes, self._scale = pack(codes), pack(scale)
        # Held so that no other hooks can get the same id, and no other storage the same key, while the codes are alive.
        self._outer = outer
        self._source = StorageWeakRef(matrix.untyped_storage())

    def restore(self, dtype: torch.dtype) -> Tensor:
        """Dequantize the matrix to `dtype`."""
        return dequantize_activation(self._unpack(self._codes), self._unpack(self._scale), self._layout, dtype)


def _identity(tensor: Any) -> Any:
    return tensor


_live_codes: weakref.WeakValueDictionary[tuple[Any, ...], ActivationCodes] = weakref.WeakValueDictionary()
"""The codes that are alive, by storage, position in it, version and block size."""


class PackedActivation:
    """The object that the hooks save instead of a tensor. For a DTensor it holds this rank's part."""

    __slots__ = ("_sharding", "codes", "layout")

    def __init__(self, tensor: Tensor, codes: ActivationCodes, layout: MemoryLayout) -> None:
        self.codes, self.layout = codes, layout
        self._sharding = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None

    def unpack(self) -> Tensor:
        """Return the dequantized tensor, with the original shape, dtype and order of strides.

        Raises:
            RuntimeError: in a double backward.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "activations that are stored in float8 do not support double backward: call backward without "
                "create_graph=True, or call stop_storing_activations(model)"
            )
        return self.restore()

    def restore(self) -> Tensor:
        """Do the same as `unpack`, without the check for a double backward."""
        with torch.no_grad():
            local = self.layout.from_matrix(self.codes.restore(self.layout.dtype))
            if self._sharding is None:
                return local
            from torch.distributed.tensor import DTensor  # imported already, since the saved tensor was one

            return DTensor.from_local(local, *self._sharding, run_check=False)


class _PackedByOuterHooks:
    """A tensor that is not converted, packed by the hooks around the block."""

    __slots__ = ("packed", "unpack")

    def __init__(self, tensor: Tensor, outer: tuple[Any, Any]) -> None:
        self.packed = outer[0](tensor)
        self.unpack = functools.partial(outer[1], self.packed)


class ActivationStorage(NamedTuple):
    """How the activations of one module are stored."""

    name: str
    """The name of the module, for reports."""
    block_size: int
    """The number of elements that share a scale, 32 or 128."""


class _StorageObserver(threading.local):
    report: Callable[[str, Tensor, PackedActivation | None], None] | None = None


observer = _StorageObserver()
"""Its `report`, if any, is called with each tensor that is saved in a module that stores (store_report.py)."""


class StoringPackHook(PackHook):
    """The pack hook of one forward of one module; see the top of the file."""

    def __init__(self, storage: ActivationStorage, arguments: Sequence[Tensor], outer: tuple[Any, Any] | None) -> None:
        self.storage, self.outer = storage, outer
        sizes = [get_local_tensor(argument).numel() for argument in arguments if argument.is_floating_point()]
        self.largest_argument = max(sizes, default=0)
        self.excluded_storages: set[int] = set()

    def __call__(self, tensor: Tensor) -> Any:
        stored = None
        if not self.is_skipped(tensor):
            local = wait_for_local_tensor(tensor)
            layout = MemoryLayout(local, self.storage.block_size)
            stored = PackedActivation(tensor, self._quantize_once(local, layout), layout)
        if observer.report is not None:
            observer.report(self.storage.name, tensor, stored)
        if stored is not None:
            return stored
        return HeldTensor(tensor) if self.outer is None else _PackedByOuterHooks(tensor, self.outer)

    def skip(self, tensors: Sequence[Tensor | None]) -> None:
        """Do not convert these tensors, which an autograd function is about to save."""
        self.excluded_storages.update(
            storage_key(wait_for_local_tensor(tensor).untyped_storage()) for tensor in tensors if tensor is not None
        )

    def is_skipped(self, tensor: Tensor) -> bool:
        """Return whether this tensor is not converted; see the top of the file."""
        if not tensor.requires_grad or _skip_depth.depth or _is_derived_from_parameter(tensor):
            return True
        local = wait_for_local_tensor(tensor)
        return (
            local.dtype not in STORABLE_DTYPES
            or local.numel() < self.storage.block_size
            or local.numel() * SMALL_TENSOR_RATIO <= self.largest_argument
            or 0 in local.stride()
            or is_traceable_wrapper_subclass(local)
            or storage_key(local.untyped_storage()) in self.excluded_storages
        )

    def _quantize_once(self, tensor: Tensor, layout: MemoryLayout) -> ActivationCodes:
        with torch.no_grad():
            matrix = layout.to_matrix(tensor.detach())
        block_size = self.storage.block_size
        if not layout.is_dense or tensor.is_inference():
            return ActivationCodes(matrix, block_size, self.outer)
        memory = storage_key(tensor.untyped_storage())
        outer = None if self.outer is None else id(self.outer[0])
        key = (memory, tensor.storage_offset(), matrix.shape, tensor.dtype, get_version(tensor), block_size, outer)
        codes = _live_codes.get(key)
        if codes is None:
            codes = _live_codes[key] = ActivationCodes(matrix, block_size, self.outer)
        return codes


_LOOKUP_NODES = re.compile("Embedding|Index|Gather")


def _is_derived_from_parameter(tensor: Tensor) -> bool:
    """Return whether a chain of ops with one input leads back to a parameter, without a lookup of rows."""
    node: Any = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1 and not _LOOKUP_NODES.search(node.name()):
        node = node.next_functions[0][0]
    return isinstance(tensor if tensor.grad_fn is None else getattr(node, "variable", None), Parameter)


def _unpack(packed: Any) -> Tensor:
    return packed.unpack()


class _SkipDepth(threading.local):
    depth = 0


_skip_depth = _SkipDepth()
"""The nesting depth of modules that save inputs of matmuls in high precision."""


@contextmanager
def skip_conversion() -> Iterator[None]:
    """Do not convert tensors that autograd saves inside the block."""
    _skip_depth.depth += 1
    try:
        yield
    finally:
        _skip_depth.depth -= 1


def store_tensors(
    storage: ActivationStorage, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[Any]:
    """Store tensors that autograd saves inside the block: the forward of a module with these arguments."""
    outer: Any = top_saved_tensors_hooks(True)
    if is_checkpoint_hook(outer) or runs_in_backward():  # a reentrant checkpoint recomputes in its backward
        return nullcontext()
    if outer is not None and isinstance(outer[0], StoringPackHook):
        outer = outer[0].outer
    arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return saved_tensors_hooks(StoringPackHook(storage, arguments, outer), _unpack)

"""The saved-tensor hooks that store activations as float8 codes, and what they leave as it is.

    with storing(storage, args, kwargs):      around the forward of one module
        ...

What autograd saves inside the block is stored in float8, except

    integers, codes                  every dtype but float32, bfloat16 and float16
    parameters                       views, casts and what else was computed from one alone, but for looked up rows
    what requires no gradient        masks, whose infinities no code can hold, tables of rotary embeddings, attention's
                                     logsumexp, the statistics of a norm
    small tensors                    less than a block, or at most an eighth of the elements of the module's largest
                                     argument: what a reduction leaves of a tensor
    what matmuls save                float8 linears have saved their codes, and others keep their inputs

One storage is stored once: the codes are found again by the place of the tensor's elements in memory, for as long as
they are alive and the tensor's version is the same. A write that version counters miss (numpy, `.data`) between two
saves in one forward is missed here too.

Only the innermost hooks of autograd run. So hooks around the block get what would reach them: the codes and scales, and
the tensors that are left as they are. Inside an activation checkpoint nothing is stored: it saves next to nothing, and
recomputes the rest in high precision.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from quaver.checkpointing.codes import DTYPES, MemoryLayout, decode, encode
from quaver.kernels.operands import present
from quaver.linear.saved_tensors import HeldTensor, PackHook, are_of_checkpoint
from quaver.torch_private.autograd import runs_in_backward, top_saved_tensors_hooks
from quaver.torch_private.dtensor import is_dtensor, local_tensor, waited_local_tensor
from quaver.torch_private.memory import storage_key
from quaver.torch_private.versions import version_of

Around = tuple[str, int]
"""The class of a module that stores, and its size of a block."""

STORED_IN = "stores activations"
"""Key in `meta["custom"]` of a node of a compiled graph: the `Around` of the module that stores, or None."""

SMALL = 8
"""A tensor of at most one in so many elements of the module's largest argument is left as it is."""


class StoredCodes:
    """Codes and scales of consecutive elements of a storage, as outer hooks keep them."""

    __slots__ = ("__weakref__", "_codes", "_layout", "_outer", "_scale", "_source", "_unpack", "bytes")

    def __init__(self, matrix: Tensor, block_size: int, outer: tuple[Any, Any] | None) -> None:
        made = encode(matrix, block_size)
        codes, scale, self._layout = made.data, present(made.dequant_scale), made.layout
        pack: Any = _itself if outer is None else outer[0]
        self._unpack: Any = _itself if outer is None else outer[1]
        self.bytes = codes.nbytes + scale.nbytes
        self._codes, self._scale = pack(codes), pack(scale)
        self._outer = outer  # no other hooks get their id while this lives
        self._source = StorageWeakRef(matrix.untyped_storage())  # no other storage gets its key while this lives

    def restored(self, dtype: torch.dtype) -> Tensor:
        """The matrix again, in `dtype`."""
        return decode(self._unpack(self._codes), self._unpack(self._scale), self._layout, dtype)


def _itself(tensor: Any) -> Any:
    return tensor


_known: weakref.WeakValueDictionary[tuple[Any, ...], StoredCodes] = weakref.WeakValueDictionary()
"""By storage, place in it, version and block size, the codes that are alive."""


class StoredTensor:
    """The object that the hooks save in place of a tensor; for a DTensor it has this rank's part."""

    __slots__ = ("_sharding", "codes", "layout")

    def __init__(self, tensor: Tensor, codes: StoredCodes, layout: MemoryLayout) -> None:
        self.codes, self.layout = codes, layout
        self._sharding = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None

    def unpack(self) -> Tensor:
        """The values of the codes, with the tensor's shape, dtype and order of strides.

        Raises:
            RuntimeError: in a double backward.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "activations that are stored in float8 support no double backward: call backward without "
                "create_graph=True, or let modules store none with keep_activations(model)"
            )
        return self.restored()

    def restored(self) -> Tensor:
        """`unpack`, whatever autograd does."""
        with torch.no_grad():
            local = self.layout.tensor_of(self.codes.restored(self.layout.dtype))
            if self._sharding is None:
                return local
            from torch.distributed.tensor import DTensor  # which the saved tensor was

            return DTensor.from_local(local, *self._sharding, run_check=False)


class _Elsewhere:
    """A tensor that outer hooks hold."""

    __slots__ = ("packed", "unpack")

    def __init__(self, tensor: Tensor, outer: tuple[Any, Any]) -> None:
        self.packed = outer[0](tensor)
        self.unpack = functools.partial(outer[1], self.packed)


class Storage:
    """How the activations of one module are stored.

    Args:
        name: of the module, for reports.
        block_size: elements that share a scale, 32 or 128.
    """

    def __init__(self, name: str, block_size: int) -> None:
        self.name, self.block_size = name, block_size


class _StorageObserver(threading.local):
    report: Callable[[str, Tensor, StoredTensor | None], None] | None = None


seen = _StorageObserver()
"""Whom to tell about each tensor that is saved in a module that stores (store_report.py)."""


class Pack(PackHook):
    """The pack hook of one forward of one module; see the top of the file."""

    def __init__(self, storage: Storage, arguments: Sequence[Tensor], outer: tuple[Any, Any] | None) -> None:
        self.storage, self.outer = storage, outer
        self.largest = max((local_tensor(each).numel() for each in arguments if each.is_floating_point()), default=0)
        self.left: set[int] = set()

    def __call__(self, tensor: Tensor) -> Any:
        stored = None
        if not self.leaves(tensor):
            local = waited_local_tensor(tensor)
            layout = MemoryLayout(local, self.storage.block_size)
            stored = StoredTensor(tensor, self._codes_of(local, layout), layout)
        if seen.report is not None:
            seen.report(self.storage.name, tensor, stored)
        if stored is not None:
            return stored
        return HeldTensor(tensor) if self.outer is None else _Elsewhere(tensor, self.outer)

    def leave(self, tensors: Sequence[Tensor | None]) -> None:
        """Leave these as they are, which an autograd function is about to save."""
        self.left.update(
            storage_key(waited_local_tensor(each).untyped_storage()) for each in tensors if each is not None
        )

    def leaves(self, tensor: Tensor) -> bool:
        """Whether this tensor is saved as it is."""
        if not tensor.requires_grad or _in_matmul.depth or _is_of_parameter(tensor):
            return True
        local = waited_local_tensor(tensor)
        return (
            local.dtype not in DTYPES
            or local.numel() < self.storage.block_size
            or local.numel() * SMALL <= self.largest
            or 0 in local.stride()
            or is_traceable_wrapper_subclass(local)
            or storage_key(local.untyped_storage()) in self.left
        )

    def _codes_of(self, tensor: Tensor, layout: MemoryLayout) -> StoredCodes:
        with torch.no_grad():
            matrix = layout.matrix_of(tensor.detach())
        block_size = self.storage.block_size
        if not layout.is_dense or tensor.is_inference():
            return StoredCodes(matrix, block_size, self.outer)
        storage = storage_key(tensor.untyped_storage())
        outer = None if self.outer is None else id(self.outer[0])
        key = (storage, tensor.storage_offset(), matrix.shape, tensor.dtype, version_of(tensor), block_size, outer)
        codes = _known.get(key)
        if codes is None:
            codes = _known[key] = StoredCodes(matrix, block_size, self.outer)
        return codes


_LOOKUPS = re.compile("Embedding|Index|Gather")


def _is_of_parameter(tensor: Tensor) -> bool:
    node: Any = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1 and not _LOOKUPS.search(node.name()):
        node = node.next_functions[0][0]
    return isinstance(tensor if tensor.grad_fn is None else getattr(node, "variable", None), Parameter)


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.unpack()
    return tensor


class _Depth(threading.local):
    depth = 0


_in_matmul = _Depth()
"""How many modules around the code that runs now save inputs of matmuls in high precision."""


@contextmanager
def leaving() -> Iterator[None]:
    """Leave what autograd saves inside the block as it is."""
    _in_matmul.depth += 1
    try:
        yield
    finally:
        _in_matmul.depth -= 1


def storing(storage: Storage, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
    """Store what autograd saves inside the block, the forward of a module with these arguments."""
    outer: Any = top_saved_tensors_hooks(True)
    if are_of_checkpoint(outer) or runs_in_backward():  # a reentrant checkpoint recomputes in its backward
        return nullcontext()
    if outer is not None and isinstance(outer[0], Pack):
        outer = outer[0].outer
    arguments = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    return saved_tensors_hooks(Pack(storage, arguments, outer), _unpack)

"""Reports the activations that a step stores in float8: each tensor, its bytes before and after, and the error."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from quaver.checkpointing.hooks import StoredCodes, StoredTensor, leaving, seen
from quaver.recipes.scaling import decibels
from quaver.recipes.scaling import sqnr_db as cast_sqnr_db
from quaver.torch_private.dtensor import is_dtensor, local_tensor
from quaver.torch_private.memory import storage_key


@dataclass(frozen=True)
class SavedActivation:
    """One tensor that autograd saved in a module that stores."""

    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes_before: int
    """Bytes of its storage; of several views of one storage each has its own, the first one the rest, too."""
    bytes_after: int
    sqnr_db: float | None
    """20 log10(norm(tensor) / norm(tensor - values of its codes)); None for a tensor that is left as it is."""


@dataclass(frozen=True)
class ActivationReport:
    """The tensors that a forward saved, and what storing them costs in gradients."""

    saved: tuple[SavedActivation, ...]
    gradient_sqnr_db: dict[str, float]
    """By block (the names up to the first number in them), of all its gradients against those of a step that stores
    nothing."""

    @property
    def bytes_before(self) -> int:
        """The bytes that the modules would save if they stored nothing in float8."""
        return sum(each.bytes_before for each in self.saved)

    @property
    def bytes_after(self) -> int:
        """The bytes that the modules save, codes and scales included."""
        return sum(each.bytes_after for each in self.saved)

    def __str__(self) -> str:
        width = max((len(each.module) for each in self.saved), default=0)
        lines = [_line(each, width) for each in self.saved if each.bytes_before or each.bytes_after]
        lines.append(f"{self.bytes_before:,} bytes are {self.bytes_after:,} in float8")
        lines += [f"gradients of {name or 'the rest'}: {db:.1f} dB" for name, db in self.gradient_sqnr_db.items()]
        return "\n".join(lines)


def activation_report(model: nn.Module, step: Callable[[], object]) -> ActivationReport:
    """Run `step` twice, without and with storing, and report what autograd saved and how gradients differ.

    Every rank of a model with DTensors calls it: what is saved is of this rank, gradients are of all.

    Args:
        model: after `store_activations_in_float8`, in eager code.
        step: runs forward and backward of the same batch at each call. Gradients are restored after it.

    Raises:
        ValueError: nothing was saved in a module that stores: the model stores nothing, its code is compiled, or all of
            it is inside activation checkpoints, which save next to nothing.
    """
    parameters = dict(model.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    saved: list[SavedActivation] = []
    try:
        with leaving():
            exact = _gradients(parameters, step)
        with _recording(saved, parameters.values()):
            stored = _gradients(parameters, step)
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
    if not saved:
        raise ValueError(
            "expected a step that saves activations in float8, but no module that stores saved anything: call "
            "store_activations_in_float8 first, and report in eager code, outside of activation checkpoints (compiled "
            "code is stored by Inductor alone, where shapes are static)"
        )
    return ActivationReport(tuple(saved), _by_block(exact, stored))


def _gradients(parameters: dict[str, nn.Parameter], step: Callable[[], object]) -> dict[str, Tensor]:
    for parameter in parameters.values():
        parameter.grad = None
    devices = {parameter.device for parameter in parameters.values() if parameter.is_cuda}
    with torch.random.fork_rng(devices=[device.index for device in devices]):
        step()
    return {name: each.grad for name, each in parameters.items() if each.grad is not None}


@contextmanager
def _recording(saved: list[SavedActivation], parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    known: dict[int, StorageWeakRef] = {}  # weak references keep the keys of storages that are gone from others
    for parameter in parameters:  # a linear saves an alias of its weight
        storage = local_tensor(parameter).untyped_storage()
        known[storage_key(storage)] = StorageWeakRef(storage)
    codes_known: set[StoredCodes] = set()
    first_views: dict[int, tuple[int, int]] = {}  # by storage: the line of its first view, and the view's own bytes
    views_known: set[tuple[object, ...]] = set()

    def report(module: str, tensor: Tensor, stored: StoredTensor | None) -> None:
        local = local_tensor(tensor)
        storage = local.untyped_storage()
        key = storage_key(storage)
        view = key, local.storage_offset(), local.shape, local.stride()
        bytes_before = 0 if key in known else storage.nbytes()
        if bytes_before:
            first_views[key] = len(saved), local.nbytes
        elif key in first_views and view not in views_known:  # as q, k and v of one matmul
            line, own = first_views[key]
            first = saved[line]
            bytes_before = min(local.nbytes, first.bytes_before - own)
            is_left = stored is None and first.sqnr_db is None
            saved[line] = replace(
                first,
                bytes_before=first.bytes_before - bytes_before,
                bytes_after=first.bytes_after - (bytes_before if is_left else 0),
            )
        views_known.add(view)
        known.setdefault(key, StorageWeakRef(storage))
        bytes_after, sqnr_db = bytes_before, None
        if stored is not None:
            bytes_after = 0 if stored.codes in codes_known else stored.codes.bytes
            codes_known.add(stored.codes)
            sqnr_db = cast_sqnr_db(local_tensor(tensor), local_tensor(stored.restored()))
        saved.append(SavedActivation(module, tuple(tensor.shape), tensor.dtype, bytes_before, bytes_after, sqnr_db))

    seen.report = report
    try:
        yield
    finally:
        seen.report = None


def _by_block(exact: dict[str, Tensor], stored: dict[str, Tensor]) -> dict[str, float]:
    names = defaultdict(list)
    for name in exact:
        parts = name.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        names["" if number is None else ".".join(parts[: number + 1])].append(name)
    signal = {name: _norm(each) for name, each in exact.items()}
    noise = {name: _norm(each.double() - stored[name].double()) for name, each in exact.items()}
    return {
        block: decibels(*(math.hypot(*(of[name] for name in of_block)) for of in (signal, noise)))
        for block, of_block in names.items()
    }


def _norm(tensor: Tensor) -> float:
    """The norm over all ranks' parts of a DTensor. A block can have gradients that are DTensors, and others."""
    norm = tensor.detach().double().norm()
    return (norm.full_tensor() if is_dtensor(norm) else norm).item()


def _line(saved: SavedActivation, width: int) -> str:
    shape = " x ".join(map(str, saved.shape))
    dtype = str(saved.dtype).removeprefix("torch.")
    error = "as it is" if saved.sqnr_db is None else f"{saved.sqnr_db:.1f} dB"
    return f"{saved.module:{width}}  {shape:22} {dtype:14} {saved.bytes_before:14,} {saved.bytes_after:14,}  {error}"

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

from quaver.activations.hooks import ActivationCodes, PackedActivation, observer, skip_conversion
from quaver.recipes.sqnr import compute_sqnr_db, to_decibels
from quaver.torch_private.dtensor import get_local_tensor, is_dtensor
from quaver.torch_private.memory import storage_key


@dataclass(frozen=True)
class SavedActivation:
    """One tensor that autograd saved in a module that stores."""

    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes_before: int
    """The bytes of its storage. If a storage has several views, each counts its bytes, and the first also the rest."""
    bytes_after: int
    sqnr_db: float | None
    """20 log10(norm(tensor) / norm(tensor - dequantized)); None for a tensor that is not converted."""


@dataclass(frozen=True)
class ActivationReport:
    """The tensors that a forward saved, and the error in gradients from storing them."""

    saved: tuple[SavedActivation, ...]
    gradient_sqnr_db: dict[str, float]
    """The SQNR of each block's gradients against a step that stores nothing in float8. A block is named by the module
    name up to its first number."""

    @property
    def bytes_before(self) -> int:
        """The bytes that the modules would save if they stored nothing in float8."""
        return sum(activation.bytes_before for activation in self.saved)

    @property
    def bytes_after(self) -> int:
        """The bytes that the modules save, codes and scales included."""
        return sum(activation.bytes_after for activation in self.saved)

    def __str__(self) -> str:
        width = max((len(activation.module) for activation in self.saved), default=0)
        with_bytes = [activation for activation in self.saved if activation.bytes_before or activation.bytes_after]
        lines = [_format_line(activation, width) for activation in with_bytes]
        lines.append(f"{self.bytes_before:,} bytes before, {self.bytes_after:,} bytes with float8")
        lines += [f"gradients of {name or 'the rest'}: {db:.1f} dB" for name, db in self.gradient_sqnr_db.items()]
        return "\n".join(lines)


def activation_report(model: nn.Module, step: Callable[[], object]) -> ActivationReport:
    """Run `step` twice, without and with storing, and report what autograd saved and how gradients differ.

    Every rank of a model with DTensors must call it. The report lists this rank's tensors, and errors of full
    gradients.

    Args:
        model: a model after `store_activations_in_float8`, in eager code.
        step: a function that runs forward and backward of the same batch at each call. Gradients are restored after it.

    Raises:
        ValueError: no module that stores saved a tensor. The model stores nothing, its code is compiled, or all of it
            is inside activation checkpoints.
    """
    parameters = dict(model.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    saved: list[SavedActivation] = []
    try:
        with skip_conversion():
            exact = _compute_gradients(parameters, step)
        with _record_saved(saved, parameters.values()):
            stored = _compute_gradients(parameters, step)
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
    gradient_sqnr_db = _compare_by_block(exact, stored)  # a collective: before an error that only some ranks raise
    if not saved:
        raise ValueError(
            "expected a step that saves activations in float8, but no module that stores saved anything: call "
            "store_activations_in_float8 first, and report in eager code, outside of activation checkpoints"
        )
    return ActivationReport(tuple(saved), gradient_sqnr_db)


def _compute_gradients(parameters: dict[str, nn.Parameter], step: Callable[[], object]) -> dict[str, Tensor]:
    for parameter in parameters.values():
        parameter.grad = None
    devices = {parameter.device for parameter in parameters.values() if parameter.is_cuda}
    with torch.random.fork_rng(devices=[device.index for device in devices]):
        step()
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


@contextmanager
def _record_saved(saved: list[SavedActivation], parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    counted: dict[int, StorageWeakRef] = {}  # with weak references, so that no later storage gets the same key
    for parameter in parameters:  # a linear saves an alias of its weight
        storage = get_local_tensor(parameter).untyped_storage()
        counted[storage_key(storage)] = StorageWeakRef(storage)
    counted_codes: set[ActivationCodes] = set()
    first_views: dict[int, tuple[int, int]] = {}  # by storage: the index of its first view in `saved`, and its bytes
    counted_views: set[tuple[object, ...]] = set()

    def report(module: str, tensor: Tensor, stored: PackedActivation | None) -> None:
        local = get_local_tensor(tensor)
        storage = local.untyped_storage()
        key = storage_key(storage)
        view = key, local.storage_offset(), local.shape, local.stride()
        bytes_before = 0 if key in counted else storage.nbytes()
        if bytes_before:
            first_views[key] = len(saved), local.nbytes
        elif key in first_views and view not in counted_views:  # for example q, k and v of one matmul
            index, first_bytes = first_views[key]
            first = saved[index]
            bytes_before = min(local.nbytes, first.bytes_before - first_bytes)
            is_unconverted = stored is None and first.sqnr_db is None
            saved[index] = replace(
                first,
                bytes_before=first.bytes_before - bytes_before,
                bytes_after=first.bytes_after - (bytes_before if is_unconverted else 0),
            )
        counted_views.add(view)
        counted.setdefault(key, StorageWeakRef(storage))
        bytes_after, sqnr_db = bytes_before, None
        if stored is not None:
            bytes_after = 0 if stored.codes in counted_codes else stored.codes.bytes
            counted_codes.add(stored.codes)
            sqnr_db = compute_sqnr_db(get_local_tensor(tensor), get_local_tensor(stored.restore()))
        saved.append(SavedActivation(module, tuple(tensor.shape), tensor.dtype, bytes_before, bytes_after, sqnr_db))

    observer.report = report
    try:
        yield
    finally:
        observer.report = None


def _compare_by_block(exact: dict[str, Tensor], stored: dict[str, Tensor]) -> dict[str, float]:
    names_by_block = defaultdict(list)
    for name in exact:
        parts = name.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        names_by_block["" if number is None else ".".join(parts[: number + 1])].append(name)
    signal = {name: _compute_norm(gradient) for name, gradient in exact.items()}
    noise = {name: _compute_norm(gradient.double() - stored[name].double()) for name, gradient in exact.items()}
    return {
        block: to_decibels(*(math.hypot(*(norms[name] for name in names)) for norms in (signal, noise)))
        for block, names in names_by_block.items()
    }


def _compute_norm(tensor: Tensor) -> float:
    norm = tensor.detach().double().norm()
    return (norm.full_tensor() if is_dtensor(norm) else norm).item()


def _format_line(saved: SavedActivation, width: int) -> str:
    shape = " x ".join(map(str, saved.shape))
    dtype = str(saved.dtype).removeprefix("torch.")
    error = "unchanged" if saved.sqnr_db is None else f"{saved.sqnr_db:.1f} dB"
    return f"{saved.module:{width}}  {shape:22} {dtype:14} {saved.bytes_before:14,} {saved.bytes_after:14,}  {error}"

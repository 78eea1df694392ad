"""The peak memory of one rank of a run, for hundreds of layouts: from two shallow models where that is exact.

peak_of(config, ranks=256).bytes      # as quaver memory predicts it, to the byte
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quaver.checkpointing.policy import selected_every
from quaver.lab.memory.faking.gpu import predicting_for
from quaver.lab.memory.predict import Prediction
from quaver.lab.memory.runs.predict import predict_depths, predict_memory, with_depth
from quaver.lab.plan.depths import (
    BLOCK,
    AtPlace,
    Depths,
    NotLinearError,
    check_micro_batches,
    depths_of,
    highest_of_whole,
)
from quaver.lab.plan.workers import in_processes
from quaver.lab.recorder.recorder import CATEGORIES
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import resolve
from quaver.lab.trainer.run_setup import make_models

_MICRO_BATCHES = 3
"""Further ones repeat the last: they add their tokens."""


@dataclass(frozen=True)
class Peak:
    """The peak memory of a training step of the first rank."""

    bytes: int
    by_category: dict[str, int]
    """Bytes at the peak, in the order of CATEGORIES, without empty ones."""
    phase: str
    module: str
    """The module that reaches the peak; empty for none."""
    depths: tuple[int, ...] = ()
    """The depths that were predicted; empty for the whole model."""
    why_whole: str = ""
    """Why the whole model was predicted."""

    @property
    def is_extrapolated(self) -> bool:
        """Whether it follows from shallow models."""
        return bool(self.depths)


def peak_of(config: TrainConfig, ranks: int = 1, *, device: str = "cuda") -> Peak:
    """The peak of `predict_memory(config, ranks)`, to the byte.

    It is that of two shallow models, extrapolated, or of the whole one where a check fails that shallow models
    determine it ([Note: linear in depth] in depths.py).

    Args:
        device: "cuda" or "cpu", as in `quaver.lab.memory.faking.gpu.predicting_for`.
    Raises:
        ValueError, OSError: the run itself would refuse its model or its ranks.
        NotImplementedError: something cannot be predicted.
    """
    with predicting_for(device):
        try:
            return _peak_of_fewer(config, ranks)
        except NotLinearError as error:
            return _peak(predict_memory(config, ranks).prediction, why_whole=str(error))


def _peak_of_fewer(config: TrainConfig, ranks: int) -> Peak:
    """The peak of a run from one with fewer blocks and micro-batches, or with as many blocks if they are few."""
    fewer, left_out_bytes = _with_few_micro_batches(config, ranks)
    depths = _depths(config)
    if not depths:
        prediction = predict_memory(fewer, ranks).prediction
        if left_out_bytes:
            check_micro_batches(prediction)
        return _with_inputs(_peak(prediction, why_whole="too few equal blocks"), left_out_bytes)
    with closing(predict_depths(fewer, ranks, [each.shallow for each in depths])) as predicted:
        predictions = _checked((each.prediction for each in predicted), has_three=bool(left_out_bytes))
        of, (place, highest) = _first_linear(predictions, depths)
    categories = {name: count for name, count in zip(CATEGORIES, highest.categories, strict=True) if count}
    module = highest.module if place.block < 0 else BLOCK.sub(f"layers.{place.block}", highest.module)
    peak = Peak(highest.bytes, categories, place.phase, module, (of.shallow, of.deep))
    return _with_inputs(peak, left_out_bytes)


def _first_linear(predictions: Iterator[Prediction], depths: Sequence[Depths]) -> tuple[Depths, AtPlace]:
    """The first pair of neighbouring depths that determines the whole model, and its highest place."""
    before, reason = next(predictions), NotLinearError("too few equal blocks")
    for pair, prediction in zip(depths, predictions, strict=False):
        try:
            return pair, highest_of_whole(before, prediction, pair)
        except NotLinearError as error:
            before, reason = prediction, error
    raise reason


def _checked(predictions: Iterator[Prediction], *, has_three: bool) -> Iterator[Prediction]:
    """`predictions`; those of three micro-batches in place of more are checked."""
    for prediction in predictions:
        if has_three:
            check_micro_batches(prediction)
        yield prediction


def _peak(prediction: Prediction, *, why_whole: str) -> Peak:
    place = prediction.phase_of_peak, prediction.module_of_peak
    return Peak(prediction.peak_bytes, prediction.by_category, *place, why_whole=why_whole)


def _with_inputs(peak: Peak, more_bytes: int) -> Peak:
    """`peak` with more bytes of tokens, which a step holds from its begin to its end."""
    if not more_bytes:
        return peak
    inputs = peak.by_category.get("inputs", 0) + more_bytes
    return replace(peak, bytes=peak.bytes + more_bytes, by_category=peak.by_category | {"inputs": inputs})


def _with_few_micro_batches(config: TrainConfig, ranks: int) -> tuple[TrainConfig, int]:
    """`config` with at most _MICRO_BATCHES micro-batches, and the bytes of the tokens of those left out."""
    resolved, layout = resolve(config, rank=0, world_size=ranks)
    training, count = resolved.training, layout.micro_batches(resolved.training)
    left_out = max(0, count - _MICRO_BATCHES)
    if not left_out:
        return config, 0
    size = training.global_batch_size // count * _MICRO_BATCHES
    tensors = 3 if config.data.document_mask else 2  # tokens, targets, documents
    token_bytes = tensors * torch.int64.itemsize
    left_out_bytes = left_out * training.local_batch_size * training.seq_len * token_bytes
    return replace(config, training=replace(training, global_batch_size=size)), left_out_bytes


def _depths(config: TrainConfig) -> list[Depths]:
    """Neighbouring depths, whose models have the blocks of the whole one, but for some in the middle."""
    checkpoint = config.activation_checkpoint
    every = selected_every(checkpoint.selective_ac_option) if checkpoint.mode == "selective" else None
    signatures = _signatures(config)
    depths = depths_of(signatures, every or 1)
    for each in depths:
        first = each.before
        expected = signatures[:first] + signatures[first + each.whole - each.shallow :]
        try:
            found = _signatures(with_depth(config, each.shallow))
        except ValueError as error:
            raise NotLinearError(f"the model cannot have {each.shallow} blocks: {error}") from error
        if found != expected:
            raise NotLinearError(f"with {each.shallow} blocks some are unlike those of the whole model")
    return depths


def _signatures(config: TrainConfig) -> list[object]:
    """For each block what its memory depends on, besides the whole config: the kinds and settings of its modules."""
    model = next(iter(make_models(config, torch.device("cpu")).by_name.values()))
    return [_signature(block) for block in model.blocks()]


def _signature(block: nn.Module) -> list[object]:
    own = ("config", "float8_config", "feeds_float8")
    return [
        (name, type(module), module.extra_repr(), *(vars(module).get(each) for each in own))
        for name, module in block.named_modules()
    ]


# ---- many runs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """Why a run has no peak: the trainer refuses it, or it cannot be predicted."""

    reason: str
    """One line."""


Outcome = Peak | Refusal
_Request = tuple[TrainConfig, int, str, tuple[Any, ...]]

_NOT_READ: dict[str, tuple[str, ...]] = {
    "training": ("steps", "max_norm", "seed", "nonfinite", "max_nonfinite_steps"),
    "optimizer": ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "expert_bias_rate"),
    "model": ("norm_eps", "rope_theta"),
}
"""Numbers that a step computes with, and its memory does not depend on."""

_SECTIONS = ("model", "training", "parallelism", "activation_checkpoint", "optimizer", "float8")
"""Sections that a step reads; of others only `data.document_mask`."""

_remembered: dict[str, Outcome] = {}


def peaks_of(
    configs: Iterable[TrainConfig], ranks: int, *, device: str = "cuda", processes: int = 2
) -> Generator[Outcome, None, None]:
    """Yield `peak_of` of each config, or why it has none, in their order.

    What was predicted in this process before is remembered, by `memory_key`. The workers end with the iterator.

    Args:
        configs: each is asked for when a worker is free.
        processes: workers with one thread each; 1 for none but this process.
    Raises:
        RuntimeError: a worker died, or failed with an error that is no refusal.
    """
    keys: deque[str] = deque()  # of the outcomes to yield
    waiting: list[str] = []

    def requests() -> Iterator[_Request]:
        for config in configs:
            key = memory_key(config, ranks, device)
            keys.append(key)
            if key not in _remembered and key not in waiting:
                waiting.append(key)
                yield config, ranks, device, _torch_settings()

    with closing(in_processes(_outcome, requests(), processes)) as outcomes:
        for number, outcome in outcomes:
            _remembered[waiting[number]] = outcome
            while keys and keys[0] in _remembered:
                yield _remembered[keys.popleft()]
    yield from (_remembered[key] for key in keys)


def memory_key(config: TrainConfig, ranks: int, device: str) -> str:
    """The dependencies of `peak_of`: the same text for runs with the same peak.

    Sections that no step reads are left out, and numbers that a step only computes with (_NOT_READ); torch's version
    and the settings of this process that choose its operators are in it.
    """
    mesh: object = None
    with suppress(ValueError):  # a refusal has a key of its own
        config, mesh = resolve(config, rank=0, world_size=ranks)
    sections = {name: vars(getattr(config, name)).copy() for name in _SECTIONS}
    for section, names in _NOT_READ.items():
        for name in names:
            del sections[section][name]
    if mesh is not None:
        del sections["parallelism"]["data_parallel_shard_degree"]  # it may be -1
    return repr((sections, mesh, config.data.document_mask, ranks, device, torch.__version__, _torch_settings()))


def _outcome(request: _Request) -> Outcome:
    """The peak of a request, in a worker or in this process."""
    config, ranks, device, (dtype, precision, is_deterministic, only_warns) = request
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
    try:
        return peak_of(config, ranks, device=device)
    except (ValueError, NotImplementedError, OSError) as error:
        return Refusal(" ".join(str(error).split()))


def _torch_settings() -> tuple[Any, ...]:
    """Settings of torch in this process, which workers take over."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.get_default_dtype(), torch.get_float32_matmul_precision(), is_deterministic, only_warns

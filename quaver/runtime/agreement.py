"""Raises errors on every rank, so that no rank hangs in a collective.

Collectives match by their order. A rank that has one layer fewer, or another recipe, issues different collectives, and
the job hangs or reads garbage. So before the first exchange for a set of layers the ranks compare digests of their
descriptions. They exchange the descriptions only if the digests differ.

An action on one rank, such as writing a file, can fail while the other ranks wait in the next collective. So every rank
learns at once whether it succeeded.
"""

from __future__ import annotations

import hashlib
import logging
import math
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from quaver.runtime.process_group import has_process_group

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_SILENT_WAIT = timedelta(seconds=30)


def check_ranks_agree(lines: Sequence[str], *groups: ProcessGroup | None, subject: str) -> None:
    """Raise on every rank of `groups` unless all have the same `lines`.

    A rank compares the lines in one group after the other, for example with the ranks of FSDP2, then with the ranks of
    tensor parallelism. A disagreement in one group is compared in the next ones, too, so that their ranks also raise.

    Args:
        lines: a description, one line for each thing that must be the same.
        groups: None for the world.
        subject: what the lines describe, for the error message.
    Raises:
        RuntimeError: the lines differ. The message quotes the first line that each of two ranks has alone, with the
            ranks' numbers in the world.
    """
    disagreement = ""
    for group in groups:
        disagreement = _find_disagreement(lines, group, subject, disagreement) or disagreement
    if disagreement:
        raise RuntimeError(disagreement)


def _find_disagreement(
    lines: Sequence[str], group: ProcessGroup | None, subject: str, earlier_disagreement: str
) -> str:
    """Compare `lines` and the disagreement in an earlier group; return "" if both are the same on every rank."""
    if dist.get_backend(group) == "fake":  # one process without other ranks, perhaps under FakeTensorMode
        return ""
    digest = compute_digest("\n".join([*lines, earlier_disagreement]))
    bounds = torch.tensor([-digest, digest], dtype=torch.int64, device=find_collective_device(group))
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
    if bounds[0] == -bounds[1]:
        return ""
    gathered: list[tuple[list[str], str]] = [([], "")] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (list(lines), earlier_disagreement), group)
    ranks = dist.get_process_group_ranks(group)
    first_lines = gathered[0][0]
    for rank, (rank_lines, rank_earlier) in zip(ranks, gathered, strict=True):
        if rank_earlier:
            return rank_earlier
        if rank_lines != first_lines:
            first_has = _describe_difference(first_lines, rank_lines)
            rank_has = _describe_difference(rank_lines, first_lines)
            return f"ranks disagree about {subject}: rank {ranks[0]} has {first_has}, rank {rank} has {rank_has}"
    return f"ranks disagree about {subject}"


def compute_digest(text: str) -> int:
    """Return 63 bits of the SHA-256 of `text`, which ranks compare as an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _describe_difference(lines: Sequence[str], others: Sequence[str]) -> str:
    """Quote the first of `lines` that `others` lacks, or of equal ones in another order, and count the rest."""
    missing = list((Counter(lines) - Counter(others)).elements())
    if not missing and len(lines) == len(others):
        missing = [line for line, other in zip(lines, others, strict=True) if line != other]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return repr(missing[0]) + more if missing else "nothing"


def find_collective_device(group: ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the collectives of `group` accept: the CPU if they do, else their first device.

    All ranks get the same type, whatever their models hold. `group`: None for all ranks.
    """
    types = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in types else types[0])


_agreed_fingerprints: WeakKeyDictionary[object, dict[str, list[Any]]] = WeakKeyDictionary()
"""The fingerprints that `check_ranks_agree_once` has checked, by owner and `subject`."""


def check_ranks_agree_once(
    owner: object,
    fingerprint: list[Any],
    describe: Callable[[], Sequence[str]],
    find_groups: Callable[[], Sequence[ProcessGroup]],
    *,
    subject: str,
    find_others: Callable[[], dict[Any, Any]] = dict,
) -> None:
    """Call `check_ranks_agree` the first time, and `check_ranks_agree_after_change` when `fingerprint` changes.

    Each rank decides by its own `fingerprint` whether to enter the collective.

    Args:
        owner: the object that is compared, such as a module; it is not kept alive.
        fingerprint: values that change whenever the lines do; must not refer to `owner`, which would then stay alive.
        describe: returns the lines.
        find_groups: returns the groups. Without one, nothing is compared yet, and the next call asks again.
        find_others: returns the other owners that the lines describe, with their fingerprints.
    Raises:
        RuntimeError: the errors of `check_ranks_agree`; `fingerprint` changed on some ranks only.
    """
    agreed = _agreed_fingerprints.get(owner, {})
    if agreed.get(subject) == fingerprint:
        return
    if groups := find_groups():
        check = check_ranks_agree_after_change if subject in agreed else check_ranks_agree
        check(describe(), *groups, subject=subject)
        for compared, its_fingerprint in {**find_others(), owner: fingerprint}.items():
            _agreed_fingerprints.setdefault(compared, {})[subject] = its_fingerprint


def check_ranks_agree_after_change(
    lines: Sequence[str], *groups: ProcessGroup, subject: str, event: str | None = None
) -> None:
    """Call `check_ranks_agree` after a change on this rank, which the other ranks may not have made.

    The ranks first wait for each other in the store of each group. The collective of a rank that changed alone would be
    matched with another one of the other ranks; it raises instead, and the others fail when it ends.

    Args:
        event: a clause that says what changed, by default that the lines did.
    Raises:
        RuntimeError: the errors of `check_ranks_agree` and of `wait_at_store_barrier`.
    """
    for group in groups:
        wait_at_store_barrier(group, event or f"{subject} changed", advice=_ADVICE)
    check_ranks_agree(lines, *groups, subject=subject)


_ADVICE = (
    "change modules, weights, configs and loaded scales on all ranks between the same two steps. Compiled linears "
    "report no change: compile all ranks or none"
)


def wait_at_store_barrier(group: ProcessGroup, event: str, *, advice: str) -> None:
    """Wait until every rank of `group` has called this as often, without a collective. After 30 s the log says so.

    Args:
        event: a clause that says what happened on this rank, by which the store counts the calls.
        advice: how to do it on all ranks, for the error message.
    Raises:
        RuntimeError: not every rank called within half the time limit of the store. This call then does not count, so
            that a later one can still succeed.
    """
    if dist.get_backend(group) == "fake":  # its store holds nothing
        return
    store, num_ranks = group.get_group_store(), dist.get_world_size(group)
    counter_key = f"quaver: calls: {event}"
    calls = _add_to_counter(store, counter_key, 1)
    round_number = -(-calls // num_ranks)
    round_key = f"quaver: all ranks, time {round_number}: {event}"
    if calls % num_ranks == 0:
        store.set(round_key, "")
    try:
        _wait_for_key(store, round_key, event)
    except dist.DistStoreError as error:
        # The last rank may have called since. Then no rank is missing, and this one goes on, as the others do.
        if _add_to_counter(store, counter_key, -1, limit=round_number * num_ranks) < round_number * num_ranks:
            raise RuntimeError(
                f"{event} on rank {dist.get_rank()}, and not every rank reported it: {advice}"
            ) from error


def _wait_for_key(store: Any, key: str, event: str) -> None:
    """Wait for `key` up to half the time limit of the store, and log the `event` if that takes long.

    Raises:
        DistStoreError: nobody set `key`.
    """
    limit = store.timeout / 2
    silent = min(limit, _SILENT_WAIT)
    try:
        _wait(store, key, silent)
    except dist.DistStoreError:
        if silent == limit:
            raise
        logger.warning("rank %s waits for the other ranks: %s", dist.get_rank(), event)
        _wait(store, key, limit - silent)


def _wait(store: Any, key: str, limit: timedelta) -> None:
    try:
        store.wait([key], limit)
    except dist.DistNetworkError:
        raise
    except RuntimeError as error:  # the time limit of a FileStore raises no DistStoreError
        raise dist.DistStoreError(str(error)) from error


def _add_to_counter(store: Any, key: str, number: int, *, limit: float = math.inf) -> int:
    """Add `number` to a counter that is below `limit`, in one atomic step, and return its value.

    The stored text ends with the rank, because two ranks may store the same number.
    """
    current = store.compare_set(key, "", "0").decode()
    while (value := int(current.split()[0])) < limit:
        changed = f"{value + number} by rank {dist.get_rank()}"
        current = store.compare_set(key, current, changed).decode()
        if current == changed:
            return value + number
    return value


def run_on_every_rank(action: Callable[[], _T], group: ProcessGroup | None = None) -> list[_T]:
    """Run `action` on every rank and return the results by rank. If it raises on any rank, raise on all of them.

    Every rank of `group`, by default the world, must call this. Without a process group there is one rank.

    Args:
        action: returns a result that can be pickled.
    Raises:
        Exception: the exception of the lowest rank that failed, on every rank. If it cannot be pickled, other ranks
            raise a RuntimeError with its text.
    """
    if not has_process_group():
        return [action()]
    result: _T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        failure = error
    rank = dist.get_rank(group)
    outcomes: list[tuple[Any, Exception | None]] = [(None, None)] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (result, failure if failure is None else _make_picklable(failure, rank)), group)
    failures = {index: error for index, (_, error) in enumerate(outcomes) if error is not None}
    if failures:
        first = min(failures)
        raise failure if failure is not None and first == rank else failures[first]
    return [outcome for outcome, _ in outcomes]


def run_on_first_rank(action: Callable[[], object], group: ProcessGroup | None = None) -> None:
    """Run `action` on the first rank of `group`; if it raises, raise on every rank, as `run_on_every_rank` does."""

    def run_if_first() -> None:
        if not has_process_group() or dist.get_rank(group) == 0:
            action()

    run_on_every_rank(run_if_first, group)


def _make_picklable(error: Exception, rank: int) -> Exception:
    """Return a copy of `error` to send, or a RuntimeError with its text if pickle fails. A note names the rank."""
    try:
        sent: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a third-party exception class may raise anything
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    sent.add_note(f"raised on rank {rank}")
    return sent

"""The ranks of a run: their agreement on the input, and their process group.

Bad input must end every rank with the same exit code and one line on the terminal. torchrun kills all ranks when one
fails, so a rank that exits early hides its own message. Therefore the ranks first exchange errors in the launcher's
key-value store, and none continues or exits before all have read the verdict. Then they create the process group.
"""

import functools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from quaver.runtime.devices import MissingDeviceError, get_cuda_device, is_cuda_device
from quaver.runtime.errors import InputError

STORE_TIMEOUT_S = 300
"""How long a rank waits for the others to reach the launcher's store; imports from a cold disk are slow."""

INPUT_TIMEOUT_S = 3600
"""How long the first rank waits for the others to check their input: as long as a host whose cache lacks the tokens
waits for the process that makes them (LOCK_TIMEOUT_S of data/cache.py, which imports more than `quaver doctor` has)."""

_POLL_S = 0.1


@dataclass(frozen=True)
class Refusal:
    """The reason why a run does not start."""

    message: str
    is_write_error: bool = False
    """Whether a rank cannot write, for want of space for example; otherwise it had bad input."""


@dataclass
class Ranks:
    """This process among the ranks of a run: one of several if a launcher set torchrun's environment variables."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher_pid: int = field(default_factory=os.getppid, repr=False)
    """The process that started this one."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files and the terminal."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is only one process, which needs no process group."""
        return self.world_size == 1

    def choose_device(self, device: torch.device) -> torch.device:
        """Return this rank's device of the type of `device`, and make it the current one. Raises MissingDeviceError."""
        if not is_cuda_device(device) or self.is_alone:
            return device
        count = torch.cuda.device_count()
        if self.local_rank >= count:
            raise MissingDeviceError(
                f"local rank {self.local_rank} needs a GPU of its own, but torch sees {count} on this machine; "
                f"start {count} ranks on it, or choose --training.device cpu"
            )
        torch.cuda.set_device(self.local_rank)
        return get_cuda_device(self.local_rank)

    def agree_on_refusal(self, refusal: Refusal | None = None, fingerprint: str = "") -> Refusal | None:
        """Return the first `refusal` of all ranks, on every rank; None if no rank has one.

        Every rank must call it, before the process group exists. The run is refused, too, if a rank's `fingerprint`
        differs from rank 0's, because the rank read another config or other data, and if a rank is `INPUT_TIMEOUT_S`
        later than rank 0. If a rank does not read the answer, rank 0 refuses the run by itself.

        Raises:
            TimeoutError: on another rank, if rank 0 does not answer for twice as long.
        """
        if self.is_alone:
            return refusal
        store = self._make_next_store()
        if self.is_first:
            verdict = refusal or self._collect_verdict(store, fingerprint)
            store.set("verdict", _encode_refusal(verdict))
            keys = [f"verdict read by {rank}" for rank in range(1, self.world_size)]
            if not _wait_for_keys(store, keys, STORE_TIMEOUT_S) and verdict is None:
                late = ", ".join(key.removeprefix("verdict read by ") for key in keys if not store.check([key]))
                verdict = Refusal(f"waited {STORE_TIMEOUT_S} s for rank {late}, which checked its input and then ended")
        else:
            store.set(f"input of {self.rank}", f"{fingerprint}\n{_encode_refusal(refusal)}")
            if not _wait_for_keys(store, ["verdict"], 2 * INPUT_TIMEOUT_S):
                raise TimeoutError(_describe_late_rank(0, 2 * INPUT_TIMEOUT_S))
            verdict = _decode_refusal(store.get("verdict").decode())
            store.set(f"verdict read by {self.rank}", "")
        return verdict

    def _collect_verdict(self, store: Store, fingerprint: str) -> Refusal | None:
        deadline = time.monotonic() + INPUT_TIMEOUT_S
        for rank in range(1, self.world_size):
            if not _wait_for_keys(store, [f"input of {rank}"], deadline - time.monotonic()):
                return Refusal(_describe_late_rank(rank, INPUT_TIMEOUT_S))
            other_fingerprint, _, text = store.get(f"input of {rank}").decode().partition("\n")
            if refusal := _decode_refusal(text):
                return replace(refusal, message=f"rank {rank}: {refusal.message}")
            if other_fingerprint != fingerprint:
                problem = "read another config or other data than rank 0; give every rank the same files"
                return Refusal(f"rank {rank} {problem}")
        return None

    def _make_next_store(self) -> Store:
        """Return a part of the launcher's store for one agreement, because a process may train more than once."""
        store = open_store(self.rank, self.world_size)
        return PrefixStore(f"quaver/{store.add(f'quaver/agreements of rank {self.rank}', 1)}", store)

    @contextmanager
    def open_process_group(self, device: torch.device, timeout_seconds: int) -> Iterator[None]:
        """Run the block with a process group: NCCL on CUDA, gloo on CPU; none for a single process.

        The ranks leave together, so that none exits while another writes. An exception in the block may be on one rank
        only: it leaves at once, and the launcher ends the other ranks.
        """
        if self.is_alone:
            yield
            return
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=self._make_next_store(),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
        yield
        dist.barrier()
        dist.destroy_process_group()

    def holds_on_any(self, condition: bool, device: torch.device) -> bool:
        """Return whether `condition` holds on any rank."""
        return condition if self.is_alone else bool(self.all_reduce(torch.tensor(int(condition), device=device)))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` in place over all ranks, bit-identical on every rank, and return it."""
        if not self.is_alone:
            dist.all_reduce(values)
        return values

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, by rank."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def read_ranks() -> Ranks:
    """Return the ranks that RANK, LOCAL_RANK and WORLD_SIZE describe, as torchrun sets them. Raises InputError."""
    world_size = _read_variable("WORLD_SIZE", default=1, minimum=1)
    if world_size == 1:
        return Ranks()
    rank = _read_variable("RANK", below=world_size)
    local_rank = _read_variable("LOCAL_RANK", default=rank, below=world_size)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise InputError(f"environment variable {name} must be set with WORLD_SIZE = {world_size}; use torchrun")
    # After a restart torchrun's store still has the addresses of the ranks that ended (torch 2.13).
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and _read_variable(
        "TORCHELASTIC_MAX_RESTARTS", default=0
    ):
        raise InputError(
            "torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment, and the c10d "
            "rendezvous: ranks that are started again would look for those that ended"
        )
    return Ranks(rank, local_rank, world_size)


def _encode_refusal(refusal: Refusal | None) -> str:
    return json.dumps(refusal and asdict(refusal))


def _decode_refusal(text: str) -> Refusal | None:
    fields = json.loads(text)
    return fields and Refusal(**fields)


def _wait_for_keys(store: Store, keys: list[str], seconds: float) -> bool:
    """Return whether the keys are set within `seconds`. It polls, because Ctrl-C does not interrupt `Store.wait`."""
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _describe_late_rank(rank: int, seconds: int) -> str:
    return (
        f"waited {seconds} s for rank {rank} to check its input and make its tokens; run `quaver prepare-data` once "
        "for each data.cache_folder, on each host that has its own"
    )


def _read_variable(name: str, *, default: int | None = None, minimum: int = 0, below: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    is_in_range = text.isdecimal() and int(text) >= minimum and (below is None or int(text) < below)
    if not is_in_range:
        end = "" if below is None else f" and below WORLD_SIZE = {below}"
        raise InputError(
            f"environment variable {name} must be an integer from {minimum}{end}, got {text!r}; "
            "start the ranks with torchrun, or unset WORLD_SIZE"
        )
    return int(text)


def open_store(rank: int, world_size: int) -> Store:
    """Return the launcher's store, or a store that rank 0 hosts if the launcher has none."""
    return _open_store_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank, world_size)


@functools.cache  # rank 0 can host a store at an address once
def _open_store_at(_address: str, _port: str, rank: int, world_size: int) -> Store:
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=STORE_TIMEOUT_S)))
    return store

"""Runs a function on every rank of a gloo process group, in processes that serve one test after another.

    results = run(4, function, *arguments)        # function(*arguments) on 4 ranks; one result per rank, in rank order
    @on_ranks(4) before `def test_...`            # the body of the test runs on each of 4 ranks

The function must be defined at the top level of a module, and its arguments and results must be picklable. Each pytest
process has one pool of ranks per world size. Each call, and each collective in it, has a time limit. After a failure
the pool is replaced, because the collectives of its ranks may be out of step.
"""

import atexit
import functools
import gc
import importlib
import inspect
import os
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh

from tests.isolated import forkserver

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
AFTER_A_FAILURE_S = 20.0

_pools = {}
_meshes = {}


class RanksError(AssertionError):
    """Ranks raised, died or hung: `messages` has a traceback or a reason per rank, None for a rank that returned."""

    def __init__(self, messages, function):
        self.messages = messages
        failed = "\n".join(f"rank {rank}: {message}" for rank, message in enumerate(messages) if message)
        super().__init__(f"{function.__qualname__} in {os.environ.get('PYTEST_CURRENT_TEST', 'no test')}\n{failed}")


def run(world_size, function, *arguments, timeout=180.0, collective_timeout=None):
    """Call `function(*arguments)` on `world_size` ranks and return their results.

    Raises:
        RanksError: a rank raises, dies, or does not end within `timeout` seconds.
    """
    if collective_timeout is not None:  # the time limit of a process group is fixed when it is made
        pool = _Pool(world_size, timedelta(seconds=collective_timeout))
        try:
            return pool.call(function, arguments, timeout)
        finally:
            pool.close()
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size, COLLECTIVE_TIMEOUT)
    try:
        return pool.call(function, arguments, timeout)
    except BaseException:
        _pools.pop(world_size).close()
        raise


def on_ranks(world_size=None, **options):
    """Return a decorator that makes a test whose body runs on each rank, with pytest's arguments.

    Args:
        world_size: the number of ranks; None for the test's argument `ranks`.
        options: keyword arguments of `run`.
    """

    def decorate(function):
        @functools.wraps(function)
        def test(**arguments):
            named = inspect.signature(function).parameters
            run(world_size or arguments["ranks"], function, *(arguments[name] for name in named), **options)

        test.on_each_rank = function  # type: ignore[attr-defined]
        return test

    return decorate


def refusal(function, *arguments):
    """Return the type and message of the error that `function` raises, or "no error".

    Called on each rank, it keeps the pool, which an error that leaves the test would replace.
    """
    try:
        function(*arguments)
    except BaseException as error:  # noqa: BLE001 - the test compares its message
        return f"{type(error).__name__}: {error}"
    return "no error"


class _Pool:
    def __init__(self, world_size, collective_timeout):
        context = forkserver()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on any free port
        self.connections, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, self.store.port, collective_timeout, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def call(self, function, arguments, timeout):
        for connection in self.connections:
            connection.send((function.__module__, function.__qualname__, arguments))
        deadline = time.monotonic() + timeout
        results = [None] * len(self.connections)
        messages = [f"no answer within {timeout} s"] * len(self.connections)
        pending = set(self.connections)
        while pending and (ready := wait(pending, max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                pending.remove(connection)
                rank = self.connections.index(connection)
                try:
                    results[rank], messages[rank] = connection.recv()
                except EOFError:
                    messages[rank] = "the process died"
                if messages[rank]:  # the other ranks may wait for it
                    deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
        if any(messages):
            raise RanksError(messages, function)
        return results

    def close(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)


@atexit.register
def close_pools():
    """End all ranks. Under coverage.py they first end by themselves, which writes the lines that they ran."""
    pools = [_pools.popitem()[1] for _ in range(len(_pools))]
    if "coverage" in sys.modules:
        for connection in [connection for pool in pools for connection in pool.connections]:
            connection.close()
        for process in [process for pool in pools for process in pool.processes]:
            process.join(10)
    for pool in pools:
        pool.close()


def _serve(rank, world_size, port, collective_timeout, connection):
    import torch
    import torch.distributed as dist

    gc.freeze()  # a collection would visit, and so copy, everything that was imported before the fork
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    store = TCPStore("127.0.0.1", port, timeout=collective_timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=collective_timeout)
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            return
        _destroy_groups()
        try:
            call = getattr(importlib.import_module(module), name)
            call = getattr(call, "on_each_rank", call)
            gc.collect()
            gc.freeze()  # as in tests/conftest.py
            torch.manual_seed(0)
            result, message = call(*arguments), None
        except BaseException:  # noqa: BLE001 - raised again in the test's process
            result, message = None, traceback.format_exc()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        connection.send((result, message))


def get_cached_mesh(shape, names=None):
    """Return the mesh of this shape. All tests on a pool share it, its groups and what DTensor cached for it."""
    if (shape, names) not in _meshes:
        _meshes[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape, names]


def _destroy_groups():
    """Destroy the groups that the last test made: each has three threads, one of which wakes 100 times a second.

    A destroyed group keeps its threads while a mesh holds it, and DTensor's caches hold meshes forever. Filling these
    caches again takes most of the time of a step of Adam. They therefore stay if there is no group besides the default
    group, which meshes of all ranks along one axis use, and the groups of `get_cached_mesh`.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    kept = {dist.group.WORLD, *(group for mesh in _meshes.values() for group in mesh.get_all_groups())}
    groups = [group for group in dist.distributed_c10d._world.pg_map if group not in kept]
    if not groups:
        return
    for group in groups:
        dist.destroy_process_group(group)
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()

"""Runs a function on every rank of a gloo process group, in processes that serve one test after another.

    results = run(4, function, *arguments)        # function(*arguments) on 4 ranks; one result per rank, in rank order
    @on_ranks(4) before `def test_...`            # the body of the test runs on each of 4 ranks

The function is defined at the top level of a module; its arguments and results can be pickled. Each pytest process has
one pool of ranks per world size. A call has a time limit, and so has each collective in it. After a failure the pool is
replaced, because the collectives of its ranks may be out of step.
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
        RanksError: if a rank raises, or does not end within `timeout` seconds.
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
    """Make a test whose body runs on each rank, with pytest's arguments.

    Args:
        world_size: the number of ranks; None for the test's argument `ranks`.
        options: of `run`.
    """

    def decorate(function):
        @functools.wraps(function)
        def test(**arguments):
            named = inspect.signature(function).parameters
            run(world_size or arguments["ranks"], function, *(arguments[name] for name in named), **options)

        test.on_each_rank = function
        return test

    return decorate


def refusal(function, *arguments):
    """The message of the error that `function` must raise; called on each rank, where it leaves the pool as it is."""
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
def _close_all():
    for pool in _pools.values():
        pool.close()


def _serve(rank, world_size, port, collective_timeout, connection):
    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported before the fork: a collection visits, and so copies, all of it
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


def mesh_of(shape, names=None):
    """The mesh of this shape, with the groups that all tests on this pool share, and what DTensor inferred for it."""
    if (shape, names) not in _meshes:
        _meshes[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape, names]


def _destroy_groups():
    """End what groups the test before has made: three threads each, one of which wakes 100 times a second.

    A destroyed group keeps its threads while a mesh holds it, and DTensor's caches hold meshes for ever. To fill them
    again takes a step of Adam most of its time: they are kept where all meshes have the groups of `mesh_of`, or the
    default group, as those of all ranks along one axis.
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

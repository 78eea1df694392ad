"""Calls a function in a process of its own, for tests whose failure may crash the process."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

PRELOAD = ["torch._inductor.compile_fx", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "quaver"]
"""What the server from which these processes and the ranks of the distributed tests are forked imports once."""


def forkserver() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def isolated(function: Callable, *args: object) -> None:
    """Call `function(*args)`; fail if it raises or if a signal kills its process."""
    context = forkserver()
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sending, function, args))
    process.start()
    sending.close()
    try:
        error = receiving.recv()
    except EOFError:
        error = None
    process.join()
    assert process.exitcode >= 0, f"killed by signal {-process.exitcode}"
    assert error == "", error


def _call(sending: Connection, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        function(*args)
        sending.send("")
    except BaseException:  # noqa: BLE001 - raised again by the parent
        sending.send(traceback.format_exc())

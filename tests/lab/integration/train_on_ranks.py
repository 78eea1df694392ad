"""Runs several `quaver train` runs on the ranks of tests/ranks.py, as if torchrun had started each."""

import io
import itertools
import os
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from quaver.lab.cli import main
from quaver.lab.model.llama import Block
from quaver.lab.runs import ranks
from quaver.lab.trainer import run_end
from tests.ranks import run

LIMIT_S = 240
TINY = [
    *("--model.dim=32", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.hidden_dim=64"),
    *("--training.seq_len=32", "--training.local_batch_size=2", "--training.global_batch_size=8"),
    *("--training.device=cpu", "--training.mixed_precision_param=float32", "--training.steps=3"),
    *("--lr_scheduler.warmup_steps=1", "--validation.freq=3", "--validation.steps=4", "--metrics.log_freq=1"),
    "--checkpoint.no-enable",  # test_resume.py saves and loads on ranks
]

_launches = itertools.count()


@dataclass
class Results:
    """Of the runs on one number of ranks: what all ranks printed, and how each rank ended each run."""

    stdout: str
    stderr: str
    ended: list[dict[str, tuple[int, int]]]
    """By rank and name: the exit code, and the number of process groups that the run made."""


def compile_quickly(block: Block, **options: object) -> None:
    """Trace forward and backward as `training.compile` does, but generate no code: seconds instead of a minute."""
    nn.Module.compile(block, backend="aot_eager", **options)


def train_here(cases: list[tuple[str, list[str]]], prefix: str) -> tuple[dict[str, tuple[int, int]], str, str]:
    """Run `quaver train` for each case as a rank of torchrun does, with the process group that there is."""
    launcher = {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    launcher |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    groups, ended = [], {}
    output, error = io.StringIO(), io.StringIO()

    def make_group(*args: object, **options: object) -> None:
        if args[:1] != ("fake",):  # in which set_up_run parallelizes a model that reduces in float8
            groups.append(args)

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, launcher))
        stack.enter_context(patch.object(ranks, "open_store", lambda rank, world_size: store))
        stack.enter_context(patch.object(dist, "init_process_group", make_group))
        stack.enter_context(patch.object(dist, "destroy_process_group", lambda: None))
        stack.enter_context(patch.object(Block, "compile", compile_quickly))
        # Drawing takes as long as three steps.
        stack.enter_context(patch.object(run_end, "draw_curves", lambda *paths, **_: paths[-1].touch()))
        stack.enter_context(redirect_stdout(output))
        stack.enter_context(redirect_stderr(error))
        for name, argv in cases:
            groups.clear()
            try:
                code = main(["train", *argv])
            except SystemExit as stopped:
                code = stopped.code
            torch.compiler.reset()
            ended[name] = (code, len(groups))
    return ended, output.getvalue(), error.getvalue()


def train_on_ranks(ranks: int, cases: list[tuple[str, list[str]]]) -> Results:
    """Run `quaver train *argv` for each (name, argv) on each rank. `training.compile` generates no code."""
    prefix = f"train_on_ranks {next(_launches)}"  # keys of the pool's store are set once
    ended, output, error = zip(*run(ranks, train_here, cases, prefix, timeout=LIMIT_S), strict=True)
    return Results("".join(output), "".join(error), list(ended))

"""What torchrun starts for test_train_distributed.py: several `quaver train` runs in one process, to start it once.

Reads a JSON list of [name, words] and writes, for each and for each rank, `name.RANK.json` beside it: the exit code,
and whether a process group was made.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from quaver.cli import main
from quaver.trainer.model import Block


def _compile_quickly(block: Block, **options: object) -> None:
    """Trace forward and backward as `training.compile` does, but generate no code: seconds instead of a minute."""
    nn.Module.compile(block, backend="aot_eager", **options)


def _keep_process_group(groups: list[str]) -> None:
    """Make the process group once, and note the wish for one: DTensor caches the mesh of an operation it has seen."""
    init = dist.init_process_group

    def init_once(*args: object, **kwargs: object) -> None:
        groups.append("made")
        if not dist.is_initialized():
            init(*args, **kwargs)

    dist.init_process_group = init_once
    dist.destroy_process_group = lambda: None


def run(name: str, words: list[str], folder: Path, groups: list[str]) -> None:
    groups.clear()
    try:
        code = main(["train", *words])
    except SystemExit as stopped:
        code = stopped.code
    torch.compiler.reset()
    result = {"code": code, "groups": len(groups)}
    (folder / f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    Block.compile = _compile_quickly
    asked: list[str] = []
    _keep_process_group(asked)
    cases = Path(sys.argv[1])
    for case_name, case_words in json.loads(cases.read_text()):
        run(case_name, case_words, cases.parent, asked)

"""Starts `quaver` in forked processes, with flags with which a step takes milliseconds and a text to train on."""

import socket

from tests.isolated import Forked

TINY = [
    *("--model.dim=32", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.hidden_dim=48"),
    *("--training.seq_len=32", "--training.local_batch_size=2", "--training.device=cpu"),
    *("--validation.freq=1000000", "--validation.steps=2", "--metrics.log_freq=1"),
]
TEXT = "to be or not to be, that is the question\n" * 200


def quaver(argv: list[str], **surroundings: object) -> Forked:
    """Start `quaver *argv`."""
    return Forked(_main, argv, **surroundings)


def quaver_on_ranks(
    ranks: int, argv: list[str], *, others: list[str] = (), environment: dict[str, str] | None = None, **surroundings
) -> list[Forked]:
    """Start `quaver *argv` on several ranks without torchrun. Ranks above 0 also get the arguments `others`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = {**(environment or {}), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [
        quaver([*argv, *(others if rank else [])], environment={**launcher, "RANK": str(rank)}, **surroundings)
        for rank in range(ranks)
    ]


def _main(argv: list[str]) -> int:
    from quaver.lab.cli import main

    return main(argv)

"""The `quaver` command: one file per verb, imported when it is asked for."""

import os
import sys
from importlib.metadata import version

from quaver.cli.dispatch import dispatch

VERBS = {
    "train": "train a Llama in float8, alone or beside its bfloat16 twin",
    "doctor": "say what this machine can do, by trying it",
    "bench": "time float8 against bfloat16: casts, matmuls, linears, blocks, training",
    "profile": "where the time of a linear or a block goes: traces, and kernels by group",
    "memory": "predict the memory of a run's training step, and what is alive at its peak",
    "prepare-data": "make the tokens of a run ahead of it, and count them",
    "convert": "weights from Hugging Face's Llama, and to it",
}


def main(argv: list[str] | None = None) -> int:
    """Run `quaver VERB ...` and return its exit code: 0 done, 2 bad input, 130 Ctrl-C; verbs add others.

    Args:
        argv: words after the program's name; those of the process when None.
    """
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--version"]:
        print(f"quaver {version('quaver')}")
        return 0
    usage = "quaver VERB [options]      quaver VERB --help      quaver --version"
    try:
        return dispatch(__name__, VERBS, words, kind="command", usage=usage)
    except KeyboardInterrupt:
        print("quaver: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141

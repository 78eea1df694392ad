"""The `quaver` command: one file per verb, imported when it is asked for."""

import difflib
import importlib
import os
import sys
from importlib.metadata import version

VERBS = {
    "train": "train a Llama in float8, alone or beside its bfloat16 twin",
    "doctor": "say what this machine can do, by trying it",
    "bench": "time a linear in float8 against bfloat16",
    "prepare-data": "make the tokens of a run ahead of it, and count them",
    "convert": "weights from Hugging Face's Llama, and to it",
}


def main(argv: list[str] | None = None) -> int:
    """Run `quaver VERB ...` and return its exit code: 0 done, 2 bad input, 130 Ctrl-C; verbs add others.

    Args:
        argv: words after the program's name; those of the process when None.
    """
    words = sys.argv[1:] if argv is None else argv
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help"):
        _print_help()
        return 0 if words else 2
    if verb == "--version":
        print(f"quaver {version('quaver')}")
        return 0
    if verb not in VERBS:
        nearest = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose from {', '.join(VERBS)}"
        print(f"quaver: error: unknown command {verb!r}; {hint}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(f"quaver.cli.{verb.replace('-', '_')}").run(words[1:])
    except KeyboardInterrupt:
        print("quaver: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _print_help() -> None:
    print("usage: quaver VERB [options]      quaver VERB --help      quaver --version\n")
    for verb, summary in VERBS.items():
        print(f"  {verb:<12} {summary}")

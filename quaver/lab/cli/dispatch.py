"""Finds the verb of a command line, or prints the verbs or the nearest one."""

import difflib

from quaver.lab.cli.errors import EXIT_BAD_INPUT, print_error


def find_verb(verbs: dict[str, str], argv: list[str], *, kind: str, usage: str) -> str:
    """Return the verb that `argv` begins with.

    Args:
        verbs: each verb and its summary.
        argv: the verb and its arguments.
        kind: the word for a verb in errors, such as "command".
        usage: the first line of the help.
    Raises:
        SystemExit: after printing the help or an error.
    """
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help"):
        print(f"usage: {usage}\n")
        for name, summary in verbs.items():
            print(f"  {name:<12} {summary}")
        raise SystemExit(0 if argv else EXIT_BAD_INPUT)
    if verb in verbs:
        return verb
    nearest = difflib.get_close_matches(verb, verbs, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose from {', '.join(verbs)}"
    print_error(f"unknown {kind} {verb!r}; {hint}")
    raise SystemExit(EXIT_BAD_INPUT)

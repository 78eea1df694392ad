"""From a word to the file of its verb, imported when it is asked for."""

import difflib
import importlib

from quaver.cli.errors import print_error


def dispatch(package: str, verbs: dict[str, str], words: list[str], *, kind: str, usage: str) -> int:
    """Run the verb that `words` begin with and return its exit code; help, or 2 for a word that is no verb.

    Args:
        package: where each verb has a module of its name, "_" for "-", with `run(argv) -> exit code`.
        verbs: what there is, and a summary of each.
        words: the verb and its own arguments.
        kind: what a verb is called in an error, such as "command".
        usage: the first line of the help.
    """
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help"):
        print(f"usage: {usage}\n")
        for name, summary in verbs.items():
            print(f"  {name:<12} {summary}")
        return 0 if words else 2
    if verb not in verbs:
        nearest = difflib.get_close_matches(verb, verbs, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose from {', '.join(verbs)}"
        print_error(f"unknown {kind} {verb!r}; {hint}")
        return 2
    return importlib.import_module(f"{package}.{verb.replace('-', '_')}").run(words[1:])

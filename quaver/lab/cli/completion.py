"""`quaver completion`: a script for bash and zsh that completes verbs, flags and values with choices.

The words are those of each verb's --help. They stand in the script, because starting Python at each Tab takes seconds.
"""

import io
import os
import re
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from quaver.lab.bench.working import working
from quaver.lab.cli import VERBS, main
from quaver.lab.cli.errors import EXIT_BAD_INPUT, print_error
from quaver.lab.settings.fields import Settings
from quaver.lab.settings.flags import parse_options

_PLAIN = {"COLUMNS": "10000", "NO_COLOR": "1"}
"""Environment in which help breaks no line, and has no escape codes."""
_FLAG = re.compile(r"^  (?:-\w, )?(--[\w.-]+)(?: (.*))?$", re.MULTILINE)
"""An option in the help of a verb, with its value or the choices of it."""
_VERB = re.compile(r"^  (\w[\w-]*) +\S", re.MULTILINE)
"""A verb in the help of a command that has some; such a help has no options."""


@dataclass(frozen=True)
class Completion(Settings):
    """Print a script that completes words of `quaver` in bash and zsh.

    eval "$(quaver completion)" in the file that your shell starts with, or write it to a file there.
    """


def run(argv: list[str]) -> int:
    """Print the script."""
    try:
        parse_options(Completion, argv, prog="quaver completion")
    except ValueError as error:
        print_error(str(error))
        return EXIT_BAD_INPUT
    with working("reading the help of each verb"):
        text = script()
    print(text)
    return 0


def script() -> str:
    """The script: a function of the shell with one case for each verb, and one for each flag with choices.

    Where no word fits, the shell completes files.
    """
    cases: list[str] = []
    choices: dict[str, list[str]] = {}
    for verb in VERBS:
        words, values = _words_of([verb])
        cases.append(f"        {verb}) words='{' '.join(words)}' ;;")
        choices |= {f"{verb}:{flag}": of_flag for flag, of_flag in values.items()}
    cases += [f"        {flag}) words='{' '.join(of_flag)}' ;;" for flag, of_flag in choices.items()]
    return f"""\
[ -n "$ZSH_VERSION" ] && autoload -U +X compinit bashcompinit && compinit && bashcompinit
_quaver() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" verb="${{COMP_WORDS[1]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words flag
    case "$word" in  # zsh leaves a flag and its value in one word
        --*=*) before="${{word%%=*}}" flag="${{word%%=*}}=" word="${{word#*=}}" ;;
    esac
    [ "$word" = "=" ] && word=""
    [ "$before" = "=" ] && before="${{COMP_WORDS[COMP_CWORD-2]}}"
    [ "$COMP_CWORD" = 1 ] && verb="" before=""
    _quaver_words "$verb:$before"
    [ -z "$words" ] && _quaver_words "$verb"
    COMPREPLY=($(compgen -P "$flag" -W "$words" -- "$word"))
}}
_quaver_words() {{
    case "$1" in
        "") words='{" ".join(VERBS)}' ;;
{chr(10).join(cases)}
    esac
}}
complete -o default -F _quaver quaver"""


def _words_of(verb: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The verbs and flags that may follow `verb`, and the choices of those flags that have some."""
    flags, verbs = _flags_and_verbs(verb)
    for each in verbs:
        flags |= _flags_and_verbs([*verb, each])[0]
    return [*verbs, *flags], {flag: values for flag, values in flags.items() if values}


def _flags_and_verbs(verb: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    with redirect_stdout(io.StringIO()) as printed, patch.dict(os.environ, _PLAIN):
        main([*verb, "--help"])
    text = printed.getvalue()
    flags = {
        flag: value.strip("[].").replace(" ", "").split("|") if "|" in value else []
        for flag, value in _FLAG.findall(text)
    }
    return flags, [] if flags else _VERB.findall(text)

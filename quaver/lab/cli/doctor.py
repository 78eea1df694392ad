"""`quaver doctor`: what this machine can do, without the extra `quaver[train]`; other options need its parser."""

from quaver.lab.cli.doctor_machine import print_machine


def run(argv: list[str]) -> int:
    """Print what this machine can do; 0 if every recipe runs on every device, 1 if one does not."""
    if set(argv) <= {"--json", "--no-compile"}:
        return print_machine(as_json="--json" in argv, try_compile="--no-compile" not in argv)
    from quaver.lab.cli import doctor_options

    return doctor_options.run(argv)

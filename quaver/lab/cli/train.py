"""`quaver train [CONFIG.toml] [--section.field value ...]`, in one process or in each that torchrun starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quaver.lab.cli.dry_run import DryRunOptions, iter_views, plan_run
from quaver.lab.cli.errors import (
    BAD_INPUT_ERRORS,
    EXIT_ALARM,
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_NONFINITE,
    EXIT_NOT_WRITTEN,
    choose_exit_code,
    print_error,
    report_bad_input,
)
from quaver.lab.cli.run_config import print_settings_turned_off
from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.ranks import Ranks, Refusal, read_ranks
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.runs.status import RunStatus
from quaver.lab.settings.config_file import Sections, TrainFlags, load_config, parse_arguments
from quaver.lab.settings.flags import exit_if_help, split_options
from quaver.lab.terminal.console import print_views
from quaver.lab.trainer.nonfinite import NonFiniteError
from quaver.lab.trainer.run_setup import RunSetup, set_up_run
from quaver.lab.trainer.train import train
from quaver.lab.trainer.training_run import build_run
from quaver.runtime.errors import InputError, NotWrittenError, describe_error


@dataclass
class _Agreement:
    """The fingerprint of this rank's input, which the ranks compare after the block that sets it."""

    fingerprint: str = ""


@dataclass(frozen=True)
class Train(DryRunOptions, TrainFlags):
    """Train a Llama in float8. Flags win over CONFIG.toml."""


def main(argv: list[str]) -> int:
    """Train, and return the exit code, which is the same on all ranks; only the first rank prints.

    Returns:
        0 when finished; 2 for bad input; 3 for a non-finite loss; 4 if a file such as a checkpoint cannot be written;
        5 if an alarm stopped the run; 130 after Ctrl-C or SIGTERM.
    """
    with report_bad_input():
        ranks = read_ranks()
    if "--help" in argv or "-h" in argv:
        if ranks.is_first:
            exit_if_help(Train, argv, prog="quaver train [CONFIG.toml]")
        return 0
    with _agree_on_input(ranks):
        options, run_flags = split_options(DryRunOptions, argv, prog="quaver train")
    if options.dry_run:
        with _agree_on_input(ranks):
            planned = plan_run(run_flags, options.ranks or ranks.world_size) if ranks.is_first else None
        if planned is not None:
            print_views(iter_views(planned))
        return 0
    with _agree_on_input(ranks) as agreement:
        config_path, flags = parse_arguments(run_flags, Train)
        setup = set_up_run(load_config(config_path, flags), ranks)
        agreement.fingerprint = setup.fingerprint
    folder = None
    try:
        with _agree_on_input(ranks):
            folder = RunFolder.open(setup.config) if ranks.is_first else None
        with ranks.open_process_group(setup.device, setup.config.comm.train_timeout_seconds):
            return _train(setup, folder, config_path, flags)
    except KeyboardInterrupt:
        if ranks.is_first:
            raise
        return EXIT_INTERRUPTED
    finally:
        if folder is not None:
            folder.release()


@contextmanager
def _agree_on_input(ranks: Ranks) -> Iterator[_Agreement]:
    """Wait for all ranks at the end of the block. If one had bad input, print one line and raise SystemExit on all.

    The ranks also compare the fingerprints that the block sets.
    """
    agreement = _Agreement()
    refusal = error = None
    try:
        yield agreement
    except (*BAD_INPUT_ERRORS, CheckpointError) as bad:
        error = bad
        refusal = Refusal(describe_error(bad), is_write_error=choose_exit_code(bad) == EXIT_NOT_WRITTEN)
    try:
        verdict = ranks.agree_on_refusal(refusal, agreement.fingerprint)
    except TimeoutError as late:  # of the first rank, which therefore prints nothing
        print_error(late)
        raise SystemExit(EXIT_BAD_INPUT) from late
    if verdict:
        if ranks.is_first:
            print_error(verdict.message)
        raise SystemExit(EXIT_NOT_WRITTEN if verdict.is_write_error else EXIT_BAD_INPUT) from error


def _train(setup: RunSetup, folder: RunFolder | None, config_path: Path | None, flags: Sections) -> int:
    try:
        training_run = build_run(setup, folder)
        if setup.ranks.is_first:
            print_settings_turned_off(config_path, flags)
        summary = train(training_run)
    except (NonFiniteError, CheckpointError, NotWrittenError, InputError) as error:
        if setup.ranks.is_first:
            print_error(error)
        return EXIT_NONFINITE if isinstance(error, NonFiniteError) else choose_exit_code(error)
    return {RunStatus.INTERRUPTED: EXIT_INTERRUPTED, RunStatus.ALARM: EXIT_ALARM}.get(summary["status"], 0)

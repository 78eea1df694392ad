"""`quaver report RUNS [--html FILE]`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from quaver.lab.cli.errors import report_bad_input
from quaver.lab.output_file import Output, check_outputs, replace_output
from quaver.lab.report.facts import describe_health, list_facts
from quaver.lab.report.page import write_report
from quaver.lab.report.run import RunData, read_runs
from quaver.lab.runs.file_names import NUMERICS_FILE, RUN_FILES
from quaver.lab.settings.fields import NotNegative, Settings, UserPath, argument, setting
from quaver.lab.settings.flags import parse_options
from quaver.lab.terminal.console import print_views
from quaver.lab.terminal.counts import format_count
from quaver.lab.terminal.progress import show_progress
from quaver.lab.terminal.tables import make_table
from quaver.runtime.errors import InputError

_DEFAULT_PAGE = "report.html"


@dataclass(frozen=True)
class ReportOptions(Settings):
    """Show what happened in a run, whether its float8 numerics are healthy, and if not, which layer and since when:
    as a page that needs no network, and in a few lines here. Several runs stand side by side.
    """

    runs: tuple[UserPath, ...] = argument("folders of quaver train, or numerics.jsonl files of quaver.monitor")
    html: UserPath | None = setting(None, "File of the page; report.html in the folder of the first run by default.")
    top: NotNegative = setting(10, "Alarms to print of each run.")

    def check(self) -> None:
        """Raise InputError if a run is given twice, or by a file of its folder other than numerics.jsonl."""
        paths: set[Path] = set()
        for run_path in self.runs:
            path = Path(run_path).resolve()
            if path in paths:
                raise InputError(f"RUNS must be different runs, got {run_path!r} twice")
            if path.is_file() and path.name in RUN_FILES and path.name != NUMERICS_FILE:
                folder = str(Path(run_path).parent)
                raise InputError(
                    f"{run_path!r} is a file of a run, not its {NUMERICS_FILE}; give its folder {folder!r}"
                )
            paths.add(path)


def main(argv: list[str]) -> int:
    """Print and write the report; returns 0 when done, 2 for bad input, 4 if a file cannot be written."""
    with report_bad_input():
        options = parse_options(ReportOptions, argv, prog="quaver report RUNS")
        paths = [Path(path) for path in options.runs]
        with show_progress("reading runs"):
            runs = read_runs(paths)
        first = paths[0] if paths[0].is_dir() else paths[0].parent
        page = first / _DEFAULT_PAGE if options.html is None else Path(options.html)
        check_outputs(Output(page, "--html", "HTML page"))
    print_views(iter_views(runs, options.top))
    with show_progress(f"writing {page}"), replace_output(page, "--html") as partial:
        write_report(partial, runs)
    print(f"saved {page}")
    return 0


def iter_views(runs: Sequence[RunData], top: int) -> Iterator[str | Table]:
    """Yield a headline per run, a table of facts with a column per run, and a table of alarms per run."""
    for run_data in runs:
        yield f"{run_data.label}: {describe_health(run_data)}"
        yield from (f"{run_data.label}: {note}" for note in run_data.notes)
    facts = [dict(list_facts(run_data)) for run_data in runs]
    names = dict.fromkeys(name for run_facts in facts for name in run_facts)
    labels = [run_data.label for run_data in runs]
    rows = ([name, *(run_facts.get(name, "") for run_facts in facts)] for name in names)
    yield make_table(None, ("", *labels), rows=rows, wrapped=labels)
    yield from (_make_alarm_table(run_data, top) for run_data in runs if run_data.alarms and top)


def _make_alarm_table(run_data: RunData, top: int) -> Table:
    rows = []
    for alarm in run_data.alarms[:top]:
        until = "" if alarm["until"] is None else f" to {alarm['until']:,}"
        rows.append((f"{alarm['since']:,}{until}", alarm["rule"], alarm["message"], "\n".join(alarm["remedies"])))
    more = f", the first {top:,}" if len(run_data.alarms) > top else ""
    title = f"{format_count(len(run_data.alarms), 'alarm')} of {run_data.label}{more}"
    columns = ("since step", "rule", "what", "what would help")
    return make_table(title, columns, rows=rows, wrapped=columns[2:])

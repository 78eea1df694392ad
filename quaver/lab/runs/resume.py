"""Decides whether a run resumes, from which checkpoint and with which changed settings, or refuses the resume."""

import shlex
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quaver.lab.runs.checkpoint_folder import CheckpointFolder
from quaver.lab.runs.file_names import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.runs.status import RunStatus, read_summary
from quaver.lab.settings import Checkpoint, TrainConfig, require
from quaver.lab.settings.config_file import load_config
from quaver.lab.settings.fields import expand_user
from quaver.lab.terminal.counts import format_count

RUN_FOLDER_SETTINGS = ("job.name", "job.dump_folder")
"""Settings that name the run folder, which may be moved."""


def will_resume(config: TrainConfig) -> bool:
    """Return whether the run continues from one of its checkpoints, so that it does not read initial weights."""
    if config.checkpoint.resume != "auto":
        return config.checkpoint.resume == "must"
    path = expand_user(config.job.dump_folder) / config.job.name / config.checkpoint.folder
    return bool(CheckpointFolder(path).list_steps())


def find_resume_state(
    path: Path, config: TrainConfig, names: Collection[str]
) -> tuple[int | None, dict[str, list[Any]]]:
    """Return the step to resume from, None for a new run, and the settings that change. Writes nothing.

    Args:
        path: the run folder, which need not exist.
        names: the files and folders in it.
    Raises:
        FileExistsError: the folder has files or recorded steps already, and the run does not resume.
        FileNotFoundError: there is no checkpoint to resume from.
        InputError: the model or the initial weights differ from the run's.
    """
    is_run = CONFIG_FILE in names
    step = _find_resume_step(path, config.checkpoint, is_run=is_run)
    if names and (config.checkpoint.resume == "never" or not is_run):
        raise FileExistsError(_describe_refusal(path, config.checkpoint))
    begins_again = is_run and step is None and _begins_again(path, config.checkpoint)
    return step, _find_changes(path, config) if begins_again or step is not None else {}


def _find_resume_step(path: Path, config: Checkpoint, *, is_run: bool) -> int | None:
    """Return the step of the checkpoint to resume from, None for a new run."""
    if config.resume == "never":
        return None
    steps = CheckpointFolder(path / config.folder).list_steps() if is_run else []
    if config.load_step != -1:
        if config.load_step not in steps:
            folder, available = str(path / config.folder), ", ".join(map(str, steps)) or "none"
            raise FileNotFoundError(
                f"checkpoint.load_step must be a step that {folder!r} has, got {config.load_step}; its steps are "
                f"{available}"
            )
        return config.load_step
    if not steps and config.resume == "must":
        problem = f"has no complete checkpoint in {config.folder!r}" if is_run else "is not a run folder"
        remedy = "give another job.name" if is_run else "start the run without --resume"
        if is_run and (recorded := load_config(path / CONFIG_FILE).checkpoint.folder) != config.folder:
            remedy = f"give checkpoint.folder = {recorded!r}, that of the run"
        raise FileNotFoundError(f"{str(path)!r} {problem}, so there is nothing to resume; {remedy}")
    return steps[-1] if steps else None


def _begins_again(path: Path, config: Checkpoint) -> bool:
    """Return whether the run, which has no checkpoint in config.folder, has recorded steps, which its start removes.

    Raises FileExistsError for a run that did not end before its first checkpoint: its checkpoints are elsewhere, off or
    gone.
    """
    metrics = path / METRICS_FILE
    steps = len({record["step"] for record in read_json_lines(metrics)}) if metrics.is_file() else 0
    if not steps:
        return False
    recorded, end = load_config(path / CONFIG_FILE).checkpoint, read_summary(path / SUMMARY_FILE)
    if recorded.folder != config.folder:
        remedy = f"give checkpoint.folder = {recorded.folder!r}, or another job.name"
    elif not (recorded.enable and config.enable):
        remedy = "with checkpoint.enable = false give another job.name"
    elif end is not None and end["status"] is RunStatus.FINISHED:
        remedy = "the run is finished; give another job.name"
    else:
        return True
    raise FileExistsError(
        f"{str(path)!r} has {format_count(steps, 'recorded step')} and no checkpoint in {config.folder!r}; {remedy}"
    )


def _describe_refusal(path: Path, config: Checkpoint) -> str:
    if config.resume != "never":
        return f"the folder {str(path)!r} is no run: it has files but no {CONFIG_FILE}; give another job.name"
    can_resume = (path / CONFIG_FILE).exists() and CheckpointFolder(path / config.folder).list_steps()
    remedy = f"resume it with --resume {shlex.quote(str(path))}" if can_resume else "remove it"
    return f"the run folder {str(path)!r} has files already; give another job.name or {remedy}"


def remove_resume_settings(config: TrainConfig) -> TrainConfig:
    """Return `config` without the settings of this resume, so that the file starts a new run like this one."""
    return replace(config, checkpoint=replace(config.checkpoint, resume="never", load_step=-1))


def _find_changes(path: Path, config: TrainConfig) -> dict[str, list[Any]]:
    recorded = load_config(path / CONFIG_FILE)
    recorded_sections, sections = asdict(remove_resume_settings(recorded)), asdict(remove_resume_settings(config))
    changed_settings = {
        f"{section}.{name}": [recorded_sections[section][name], value]
        for section, values in sections.items()
        for name, value in values.items()
        if f"{section}.{name}" not in RUN_FOLDER_SETTINGS and recorded_sections[section][name] != value
    }
    for name, (old, new) in changed_settings.items():
        expected = f"{old!r}, that of the run in {str(path)!r}"
        require(not name.startswith("model."), name, expected, new, "start a new run")
    recorded_path, initial_path = recorded.checkpoint.initial_load_path, config.checkpoint.initial_load_path
    expected = f"{recorded_path!r}, from which the run in {str(path)!r} began"
    is_same = initial_path == recorded_path
    require(is_same, "checkpoint.initial_load_path", expected, initial_path, "its checkpoint has the weights")
    return changed_settings

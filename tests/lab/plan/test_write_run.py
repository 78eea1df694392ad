"""Tests that a plan's written config reads back equal and its launch files start the run."""

import os
import re
import subprocess
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaver.lab.cli import main
from quaver.lab.plan.launchers import LAUNCH_TEMPLATES
from quaver.lab.plan.write_run import format_config, write_run
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.config_file import load_config
from quaver.lab.settings.fields import get_base_type, get_choices, get_field_types
from tests.lab.trainer.runs import CONFIGS, with_settings
from tests.thinned import at_night

PATHS = {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}
RANKS = {"llama3_70b": 256, "llama3_405b": 512, "llama3_debug": 1, "llama3_debug_mixture": 1}
"""8 for others."""
BY_TYPE = {
    bool: st.booleans(),
    int: st.integers(-1, 64) | st.integers(-(2**63), 2**63 - 1),
    float: st.floats(),
    str: st.text(max_size=8),
}


def load_and_change(name: str = "llama3_8b", **sections: dict[str, object]) -> TrainConfig:
    return with_settings(load_config(PATHS[name]), **sections)


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Valid configs: some settings of the default one take other values, where the trainer does not refuse them."""
    config = TrainConfig()
    for _ in range(draw(st.integers(0, 12))):
        name = draw(st.sampled_from(list(get_field_types(TrainConfig))))
        section = getattr(config, name)
        field = draw(st.sampled_from(fields(section))).name
        hint = get_field_types(type(section))[field]
        value = draw(st.sampled_from(get_choices(hint)) if get_choices(hint) else make_values(get_base_type(hint)))
        try:
            config = replace(config, **{name: replace(section, **{field: value})})
        except ValueError:
            continue
    return config


def make_values(kind: object) -> st.SearchStrategy[object]:
    return BY_TYPE[kind] if kind in BY_TYPE else st.lists(BY_TYPE[str], max_size=3).map(tuple)


@pytest.mark.parametrize("examples", [40, pytest.param(2000, marks=pytest.mark.nightly)])
def test_a_config_reads_back_equal(examples, tmp_path):
    @settings(max_examples=examples, deadline=None, derandomize=examples < 1000)
    @given(configs(), st.text())
    def check(config: TrainConfig, comment: str) -> None:
        (tmp_path / "config.toml").write_bytes(format_config(config, comment).encode())
        assert load_config(tmp_path / "config.toml") == config

    check()


@pytest.mark.parametrize("name", ["llama3_debug", *at_night((name,) for name in PATHS if name != "llama3_debug")])
def test_a_written_run_would_run(name, tmp_path):
    ranks = RANKS.get(name, 8)
    path, *_ = write_run(load_and_change(name), ranks, 8, tmp_path / "run.toml", comment="chosen")
    assert main(["train", str(path), "--dry-run", "--ranks", str(ranks)]) == 0


@pytest.mark.parametrize("name", PATHS)
def test_a_file_has_the_settings_that_are_no_defaults_below_its_comment(name, tmp_path):
    config, defaults = load_and_change(name), TrainConfig()
    path, *_ = write_run(config, RANKS.get(name, 8), 8, tmp_path / "run.toml", comment="from a plan\n\n1,234 tokens/s")
    top, _, toml = path.read_text().partition("\n\n")
    assert top == "# from a plan\n#\n# 1,234 tokens/s"
    assert load_config(path) == config
    written = tomllib.loads(toml)
    assert list(written) == [section for section in get_field_types(TrainConfig) if section in written] != []
    for section, values in written.items():
        assert [key for key in values if getattr(getattr(defaults, section), key) == values[key]] == []


FAKES = {
    "torchrun": 'printf "%s\\0" "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@"',
    "srun": 'shift; exec "$@"',  # without its own flag
    "scontrol": 'printf "%s\\n" host0 host1',
}


def capture_torchrun_arguments(script: Path, folder: Path, **environment: str) -> list[str]:
    """Two variables of the environment in which a launch file starts torchrun, and torchrun's arguments."""
    for name, line in FAKES.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / name).chmod(0o755)
    environment |= {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.run([script.absolute(), "--training.steps=7"], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.split("\0")[:-1]


@pytest.mark.parametrize(("ranks", "hosts", "gpus"), [(16, 2, 8), (8, 1, 8), (3, 1, 3)])
def test_launch_files_start_the_run(ranks, hosts, gpus, tmp_path, monkeypatch):
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    name = "-it's $(1) run.toml"
    config = load_and_change(comm={"train_timeout_seconds": 900})
    files = write_run(config, ranks, 8, Path(name), comment="")
    assert [path.name for path in files] == [
        name,
        *(name.removesuffix(".toml") + suffix for suffix in LAUNCH_TEMPLATES),
    ]
    _, shell, slurm, jobset = files
    run = ["train", f"./{name}", "--job.name=it-s-1-run", "--checkpoint.resume=auto"]
    fixed = [f"--nnodes={hosts}", f"--nproc-per-node={gpus}", "--max-restarts=3", "--rdzv-backend=c10d"]

    def check(arguments: list[str], endpoint: str, conf: str) -> None:
        at = arguments.index("quaver")
        flags = arguments[: at - 1]
        if "=" not in flags[0]:
            flags = list(map("=".join, zip(flags[::2], flags[1::2], strict=True)))
        assert flags[:4] == fixed
        assert flags[4] == f"--rdzv-endpoint={endpoint}"
        assert flags[6].startswith(f"--rdzv-conf=join_timeout={conf}")
        assert arguments[at + 1 :] == run

    monkeypatch.setenv("HEAD", "host9:1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "host[0-1]")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    for script, endpoint in ((shell, "host9:1"), (slurm, "host0:29400")):
        shared, save_seconds, *arguments, more = capture_torchrun_arguments(script, tmp_path)
        assert (shared, save_seconds, more) == ("1", "270", "--training.steps=7")
        check(arguments, endpoint, "900")
    assert ("${HEAD:?}" in shell.read_text()) == (hosts > 1)
    lines = slurm.read_text().splitlines()
    assert {f"#SBATCH --nodes={hosts}", f"#SBATCH --gpus-per-node={gpus}", "#SBATCH --signal=TERM@300"} <= set(lines)

    job = yaml.safe_load(jobset.read_text())["spec"]
    (host,) = job["replicatedJobs"]
    spec = host["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    # As Kubernetes does.
    expand = lambda reference: reference[1][:1].strip("(")  # noqa: E731
    arguments = [re.sub(r"\$(\$|\(\w+\))", expand, word) for word in container["args"]]
    check(arguments, "it-s-1-run-host-0-0.it-s-1-run:29400", "900")
    assert spec["parallelism"] == spec["completions"] == hosts
    assert container["resources"]["limits"] == {"nvidia.com/gpu": gpus}
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    pod = spec["template"]["spec"]
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert job["network"]["enableDNSHostnames"]


def test_one_host_needs_no_head_and_a_run_keeps_its_name(tmp_path):
    config = load_and_change(job={"name": "Über 9"}, checkpoint={"resume": "must"})
    _, shell, *_ = write_run(config, 8, 8, tmp_path / "run.toml", comment="")
    arguments = capture_torchrun_arguments(shell, tmp_path)
    assert "localhost:0" in arguments
    assert arguments[arguments.index("train") :] == ["train", str(tmp_path / "run.toml"), "--training.steps=7"]


@pytest.mark.parametrize(
    ("ranks", "gpus_per_node", "name", "message"),
    [
        (12, 8, "run.toml", "expected GPUs that are a multiple of the 8 of a node, or at most as many, got 12;"),
        (8, 8, "run.yaml", "expected a config whose name ends with .toml, got"),
        (8, 8, "a\nb.toml", "expected a path of a config with printable characters, got"),
        (1, 8, "run.toml", "float8.enable_fsdp_float8_all_gather must be false where no weight is sharded"),
    ],
)
def test_runs_that_launchers_or_the_trainer_cannot_start_are_refused(ranks, gpus_per_node, name, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        write_run(load_and_change(), ranks, gpus_per_node, tmp_path / name, comment="")
    assert not list(tmp_path.iterdir())


def test_other_files_are_left_alone(tmp_path):
    def write(steps: int) -> list[Path]:
        return write_run(load_and_change(training={"steps": steps}), 8, 8, tmp_path / "new" / "run.toml", comment="")

    files = write(2000)
    times = [path.stat().st_mtime_ns for path in files]
    assert write(2000) == files
    assert [path.stat().st_mtime_ns for path in files] == times
    files[0].unlink()
    files[-1].write_text("edited")
    with pytest.raises(FileExistsError, match=r"run.jobset.yaml' exists already, with another content; give another"):
        write(2000)
    assert not files[0].exists()

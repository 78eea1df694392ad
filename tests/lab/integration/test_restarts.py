"""torchrun starts ranks again that were killed, and the run ends as if nothing had happened, to the bit."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten_with_path

from quaver.lab.plan.write_run import write_run
from quaver.lab.runs.checkpoint_folder import CheckpointFolder
from quaver.lab.settings.config_file import load_config, parse_arguments
from tests.command_line import TEXT, TINY, quaver_on_ranks
from tests.lab.trainer.runs import read_steps
from tests.steps import assert_same

LIMIT_S, STEPS, INTERVAL = 400, 60, 5
pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the ranks of a host")


class Hosts:
    """Two agents of torchrun with one rank each, on this machine, as on two hosts with a shared disk."""

    def __init__(self, folder: Path, name: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        text = folder / "text.txt"
        text.write_text(TEXT)
        self.run, self.folder, self.agents = folder / "runs" / name, folder, {}
        self.argv = [
            *(*TINY, f"--data={text}", "--float8.enable_fsdp_float8_all_gather"),
            *("--lr_scheduler.schedule=constant", "--lr_scheduler.warmup_steps=3", f"--training.steps={STEPS}"),
            *(f"--checkpoint.interval={INTERVAL}", "--checkpoint.resume=auto", f"--job.dump_folder={folder / 'runs'}"),
        ]
        config = load_config(*parse_arguments([*self.argv, f"--job.name={name}"]))
        _, self.script, *_ = write_run(config, 2, 1, folder / "a plan.toml", comment="")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where torchrun is
        self.environment = {**os.environ, "HEAD": f"127.0.0.1:{port}", "PATH": path}
        for host in range(2):
            self.start(host)

    def start(self, host: int) -> None:
        log = (self.folder / f"{self.run.name}_{host}.log").open("a")
        # HEAD is an address of both.
        conf = {"RDZV_CONF": f"keep_alive_interval=1,is_host={str(host == 0).lower()}"}
        self.agents[host] = subprocess.Popen([self.script], stdout=log, stderr=log, env=self.environment | conf)
        log.close()

    def find_rank(self, host: int) -> int:
        """Return the process of the host's rank; the agent has no other child."""
        pid = self.agents[host].pid
        (rank,) = (int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return rank

    def wait_for_step(self, step: int) -> int:
        """Wait for a checkpoint of `step` or a later one, and return its step."""
        deadline = time.monotonic() + LIMIT_S
        while not (steps := CheckpointFolder(self.run / "checkpoint").list_steps()) or steps[-1] < step:
            assert all(agent.poll() is None for agent in self.agents.values()), self.read_logs()
            assert time.monotonic() < deadline, self.read_logs()
            time.sleep(0.005)
        return steps[-1]

    def finish(self) -> None:
        for agent in self.agents.values():
            assert agent.wait(LIMIT_S) == 0, self.read_logs()

    def kill(self) -> None:
        """End what a failed test leaves."""
        for agent in self.agents.values():
            agent.terminate()
            agent.wait(LIMIT_S)

    def read_logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def hosts(tmp_path):
    started = Hosts(tmp_path, "killed")
    yield started
    started.kill()


def read_numbers(run: Path) -> list[tuple[int, float, float]]:
    records = read_steps(run / "metrics.jsonl")
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def load_last_checkpoint(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint, whole, without random states: a start draws numbers, and no step does.

    Files of equal tensors may have another order inside.
    """
    dcp_to_torch_save(CheckpointFolder(run / "checkpoint").get_path(STEPS) / "tensorwise", run / "whole.pt")
    state, _ = tree_flatten_with_path(torch.load(run / "whole.pt", weights_only=False))
    return {str(path): value for path, value in state if isinstance(value, torch.Tensor) and "rng" not in str(path)}


@pytest.mark.nightly
def test_a_killed_rank_and_a_killed_agent_change_nothing(hosts, tmp_path):
    step = hosts.wait_for_step(INTERVAL)
    os.kill(hosts.find_rank(1), signal.SIGKILL)
    step = hosts.wait_for_step(step + 2 * INTERVAL)
    hosts.agents[1].kill()
    hosts.agents[1].wait()
    hosts.start(1)  # as the scheduler of a cluster does
    assert step < STEPS
    hosts.finish()

    whole = quaver_on_ranks(2, ["train", *hosts.argv, "--job.name=whole"])
    assert [rank.finished().returncode for rank in whole] == [0, 0]
    assert hosts.read_logs().count("resumed ") == 2, hosts.read_logs()
    assert [step for step, *_ in read_numbers(hosts.run)] == list(range(1, STEPS + 1))
    assert read_numbers(hosts.run) == read_numbers(tmp_path / "runs" / "whole")
    expected = load_last_checkpoint(tmp_path / "runs" / "whole")
    assert expected
    assert_same(load_last_checkpoint(hosts.run), expected)
    assert json.loads((hosts.run / "summary.json").read_text())["status"] == "finished"

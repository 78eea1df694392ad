"""Makes the files that start a run on a cluster: a shell script with torchrun, Slurm, and Kubernetes with JobSet.

The templates are in launch/. examples/launch/ has the files of two runs.
"""

import json
import re
import shlex
from importlib.resources import files
from pathlib import Path

from quaver.lab.settings import TrainConfig
from quaver.runtime.errors import InputError

LAUNCH_TEMPLATES = {".torchrun.sh": "torchrun.sh", ".slurm.sbatch": "slurm.sbatch", ".jobset.yaml": "jobset.yaml"}
"""Endings of the launch files, with their templates."""

GRACE_SECONDS = 300
"""The time from SIGTERM to the end of a job, in which a run finishes its step and saves a checkpoint."""
SAVE_SECONDS = GRACE_SECONDS - 30
"""The time from SIGTERM until torchrun kills its ranks, so that torchrun ends before the job."""
JOIN_SECONDS = 600
"""The time in which all hosts must join, torchrun's default."""
CPUS_PER_GPU = 8
"""A DGX H100 has 14 cores for each GPU; the rest is the host's."""
_MAX_NAME_LENGTH = 40
"""Kubernetes adds the names of the job and of the pod, and takes 63 characters."""


def make_launch_files(config: TrainConfig, ranks: int, gpus_per_node: int, path: Path) -> dict[str, str]:
    """Return the texts of the launch files by their endings. `path` is the path of the config when they run.

    The run resumes by itself: it gets a name and checkpoint.resume = auto, unless `config` sets them.

    Raises:
        InputError: `ranks` do not fill hosts of `gpus_per_node` GPUs, or a command cannot contain `path`.
    """
    if not str(path).isprintable():
        raise InputError(f"expected a path of a config with printable characters, got {str(path)!r}")
    hosts, gpus = split_into_hosts(ranks, gpus_per_node)
    name = _make_dns_label(config.job.name or path.stem)
    arguments = [path.as_posix() if path.as_posix()[0] != "-" else f"./{path.as_posix()}"]
    arguments += [] if config.job.name else [f"--job.name={name}"]
    arguments += ["--checkpoint.resume=auto"] if config.checkpoint.resume == "never" else []
    values = {
        "name": name,
        "hosts": hosts,
        "gpus": gpus,
        "cpus": CPUS_PER_GPU * gpus,
        "head": "${HEAD:-localhost:0}" if hosts == 1 else "${HEAD:?}",
        # A host that comes back may wait for ranks that a collective still holds.
        "join_seconds": max(JOIN_SECONDS, config.comm.train_timeout_seconds),
        "grace_seconds": GRACE_SECONDS,
        "save_seconds": SAVE_SECONDS,
    }
    return {suffix: _fill_template(template, arguments, values) for suffix, template in LAUNCH_TEMPLATES.items()}


def split_into_hosts(ranks: int, gpus_per_node: int) -> tuple[int, int]:
    """Return the number of hosts of a run of `ranks`, and the number of GPUs that it takes on each."""
    if ranks <= gpus_per_node:
        return 1, ranks
    if ranks % gpus_per_node:
        expected = f"a multiple of the {gpus_per_node} of a node, or at most as many"
        raise InputError(f"expected GPUs that are {expected}, got {ranks}; torchrun starts equally many on each node")
    return ranks // gpus_per_node, gpus_per_node


def _fill_template(template: str, arguments: list[str], values: dict[str, object]) -> str:
    text = files(__package__).joinpath("launch", template).read_text(encoding="utf-8")
    if template.endswith(".yaml"):
        item = re.search(r"\n *- (?=\{\{arguments\}\})", text)
        written = (item[0] if item else "").join(map(_format_yaml, arguments))
    else:
        written = shlex.join(arguments)
    values = {**values, "arguments": written}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), text)


def _format_yaml(word: str) -> str:
    """Return a word of a container's command as a YAML string. Kubernetes replaces $(NAME), and reads $$ as $."""
    word = word.replace("$", "$$")
    return word if re.fullmatch(r"[\w./=-]+", word, re.ASCII) else json.dumps(word, ensure_ascii=False)


def _make_dns_label(name: str) -> str:
    """Turn the name of a run into a Kubernetes name, which is also a word for shells and Slurm."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (label if label[:1].isalpha() else f"quaver-{label}")[:_MAX_NAME_LENGTH].strip("-")

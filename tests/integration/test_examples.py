"""Every example runs, fits in 50 lines, and prints something; the notebook's cells run from top to bottom."""

import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from tests.isolated import Forked

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NOTEBOOK = FOLDER / "quickstart.ipynb"
LAUNCHERS = sorted((FOLDER / "launch").iterdir())


def execute(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    assert len(path.read_text().splitlines()) < 50
    done = Forked(execute, path).finished()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_are_examples():
    assert EXAMPLES


def cells(kind: str) -> list[str]:
    """The notebook's cells of a kind. They hold no magic commands, so plain Python runs them, without Jupyter."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_runs():
    done = Forked(exec, "\n".join(cells("code")), {"__name__": "__main__"}).finished()
    assert done.returncode == 0, done.stderr
    assert "2 of 3 matmul weights in float8" in done.stdout
    # Printed by the training in both precisions, and by the monitor.
    losses = re.search(r"^step 199 +high precision (\S+) +float8 (\S+)$", done.stdout, re.MULTILINE)
    assert float(losses[1]) < 2
    assert float(losses[2]) == pytest.approx(float(losses[1]), abs=0.1)
    assert "equal to a model that loaded the state dict: True" in done.stdout
    assert re.search(r"^4 +grad_weight +result +\d\d\.\d dB$", done.stdout, re.MULTILINE)


def test_the_notebook_stores_no_output():
    """Stored outputs age unseen, and make the diff of a change unreadable."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)


def test_the_notebooks_links_lead_to_files():
    links = re.findall(r"\]\((\S+)\)", "\n".join(cells("markdown")))
    assert links
    assert [link for link in links if not (FOLDER / link).exists()] == []


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_launchers_of_hosts_let_ranks_start_again(path):
    text = path.read_text()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in text
    assert "c10d" in text
    if path.suffix != ".yaml":
        subprocess.run(["bash", "-n", path], check=True)


def test_the_pods_of_a_jobset_find_each_other():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((FOLDER / "launch" / "jobset.yaml").read_text())
    name, (hosts,) = job["metadata"]["name"], job["spec"]["replicatedJobs"]
    spec = hosts["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    nodes = f"--nnodes={spec['parallelism']}"
    assert spec["parallelism"] == spec["completions"]
    assert {nodes, f"--rdzv-endpoint={name}-{hosts['name']}-0-0.{name}:29400"} <= set(container["args"])
    assert job["spec"]["network"]["enableDNSHostnames"]

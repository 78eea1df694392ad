"""Every example runs, fits in 50 lines, and prints something; the notebook's cells run from top to bottom."""

import json
import re
import runpy
from pathlib import Path

import pytest

from quaver.lab.plan.launchers import make_launch_files
from quaver.lab.settings.config_file import load_config
from tests.isolated import Forked

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
assert EXAMPLES
NOTEBOOK = FOLDER / "quickstart.ipynb"


def run_example(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints(path):
    assert len(path.read_text().splitlines()) < 50
    process = Forked(run_example, path).finished()
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip()


def read_cells(kind: str) -> list[str]:
    """Return the notebook's cells of a kind. They hold no magic commands, so plain Python runs them."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_runs():
    process = Forked(exec, "\n".join(read_cells("code")), {"__name__": "__main__"}).finished()
    assert process.returncode == 0, process.stderr
    assert "2 of 3 matmul weights in float8" in process.stdout
    # Printed by the training in both precisions, and by the monitor.
    losses = re.search(r"^step 199 +high precision (\S+) +float8 (\S+)$", process.stdout, re.MULTILINE)
    assert float(losses[1]) < 2
    assert float(losses[2]) == pytest.approx(float(losses[1]), abs=0.1)
    assert "equal to a model that loaded the state dict: True" in process.stdout
    assert re.search(r"^4 +grad_weight +result +\d\d\.\d dB$", process.stdout, re.MULTILINE)


def test_the_notebook_stores_no_output():
    """Stored outputs age unseen, and make the diff of a change unreadable."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)


def test_the_notebooks_links_lead_to_files():
    links = re.findall(r"\]\((\S+)\)", "\n".join(read_cells("markdown")))
    assert links
    assert [link for link in links if not (FOLDER / link).exists()] == []


@pytest.mark.parametrize(
    ("name", "suffix", "config", "ranks"),
    [
        ("eight_h100.sh", ".torchrun.sh", "llama3_8b_8xh100", 8),
        ("two_hosts.sh", ".torchrun.sh", "llama3_8b", 16),
        ("slurm.sbatch", ".slurm.sbatch", "llama3_70b", 1024),
        ("jobset.yaml", ".jobset.yaml", "llama3_70b", 1024),
    ],
)
def test_launchers_are_the_files_that_a_plan_writes(name, suffix, config, ranks):
    path = Path("train_configs") / f"{config}.toml"
    texts = make_launch_files(load_config(FOLDER.parent / path), ranks, 8, path)
    assert (FOLDER / "launch" / name).read_text() == texts[suffix]

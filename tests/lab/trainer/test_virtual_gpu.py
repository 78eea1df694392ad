"""Tests the trainer on a virtual GPU: a resumed run has the bits of an uninterrupted one."""

import numpy as np
import pytest

pytest.importorskip("triton")

from quaver.lab.cli import main
from tests.command_line import TEXT
from tests.lab.trainer.runs import read_steps
from tests.library.kernels.triton_kernels import interpreting_process
from tests.virtual_gpu import virtual_gpu

SMALL = [
    *("--model.dim=64", "--model.n_layers=1", "--model.hidden_dim=96", "--model.n_heads=2", "--model.n_kv_heads=1"),
    *("--model.vocab_size=256", "--training.seq_len=32", "--training.local_batch_size=2", "--training.device=cuda"),
    *("--validation.freq=1000", "--validation.steps=1", "--lr_scheduler.warmup_steps=2", "--metrics.log_freq=1"),
    "--lr_scheduler.schedule=constant",
]


def train_and_resume(folder, *argv):
    """Return the numbers of a resumed run and of an uninterrupted one, and the vendor's matmuls."""
    text = folder / "text.txt"
    text.write_text(TEXT * 2)
    argv = [*SMALL, *argv, f"--data={text}", f"--job.dump_folder={folder}", "--checkpoint.interval=2"]
    with virtual_gpu("h100") as card, np.errstate(all="ignore"):
        assert main(["train", *argv, "--job.name=a", "--training.steps=2"]) == 0
        assert main(["train", f"--resume={folder / 'a'}", "--training.steps=3"]) == 0
        assert main(["train", *argv, "--job.name=b", "--training.steps=3"]) == 0
    steps = [read_steps(folder / name / "metrics.jsonl") for name in "ab"]
    return [[(r["step"], r["loss"], r["grad_norm"]) for r in records] for records in steps], dict(card.calls)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "matmul"), [("tensorwise", "tensorwise"), ("rowwise", "rowwise"), ("delayed", "tensorwise")]
)
def test_a_run_on_a_card_goes_on_to_the_bit(tmp_path, recipe, matmul):
    with interpreting_process() as call:
        (resumed, whole), calls = call(train_and_resume, tmp_path, f"--float8.recipe_name={recipe}")
    assert resumed == whole
    assert [step for step, *_ in whole] == [1, 2, 3]
    assert calls["_scaled_mm", matmul] > 3 * 3 * 7

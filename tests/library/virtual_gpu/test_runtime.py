"""A virtual GPU beyond its matmuls: what a captured CUDA graph may hold, and the trainer on a card."""

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from quaver import convert_to_float8_training, monitor
from quaver.lab.cli import main
from quaver.lab.runs.json_lines import read_metrics
from quaver.runtime.devices import simulate_capture
from tests.reference import BLOCK_RECIPES, RECIPES
from tests.thinned import at_night
from tests.virtual_gpu import virtual_gpu
from tests.virtual_gpu.runtime import capturing

SMALL = [
    *("--model.dim=64", "--model.n_layers=1", "--model.hidden_dim=96", "--model.n_heads=2", "--model.n_kv_heads=1"),
    *("--model.vocab_size=256", "--training.seq_len=32", "--training.local_batch_size=2", "--training.device=cuda"),
    *("--validation.freq=1000", "--validation.steps=1", "--lr_scheduler.warmup_steps=2", "--metrics.log_freq=1"),
    "--lr_scheduler.schedule=constant",
]


def _step(module, input):
    output = module(input)
    output.backward(torch.ones_like(output))


def _captured(recipe):
    """Train a linear under capture, after a step outside; the errors of a first matmul and of a monitor there."""
    with virtual_gpu("h100"), np.errstate(all="ignore"):
        module = nn.Linear(32, 48).bfloat16()
        module = convert_to_float8_training(module, config=recipe)
        input = torch.randn(16, 32).bfloat16()
        errors = []
        with capturing(), pytest.raises(RuntimeError, match="CUDA graph") as error:
            _step(module, input)
        errors.append(str(error.value))
        _step(module, input)
        with capturing():
            _step(module, input)
        with monitor(module):
            _step(module, input)
            # Its number of the step lies on the host, which `capturing` takes for the device's.
            with simulate_capture(), pytest.raises(RuntimeError, match="CUDA graph") as error:
                _step(module, input)
        errors.append(str(error.value))
    return errors


@pytest.mark.parametrize("recipe", ["tensorwise", *at_night((each,) for each in (*RECIPES[1:], *BLOCK_RECIPES))])
def test_a_captured_step_reads_nothing_on_the_host(interpreter, recipe):
    first, monitored = interpreter(_captured, recipe)
    assert "run a step before the capture" in first
    assert "close the monitor" in monitored


def test_a_read_on_the_host_raises_while_a_graph_is_captured():
    total = torch.ones(2).sum()
    with virtual_gpu("h100"), capturing(), pytest.raises(RuntimeError, match="read on the host"):
        total.item()


def _trained(folder, *words):
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 400)
    words = [*SMALL, *words, f"--data={text}", f"--job.dump_folder={folder}", "--checkpoint.interval=2"]
    with virtual_gpu("h100") as card, np.errstate(all="ignore"):
        assert main(["train", *words, "--job.name=a", "--training.steps=2"]) == 0
        assert main(["train", f"--resume={folder / 'a'}", "--training.steps=3"]) == 0
        assert main(["train", *words, "--job.name=b", "--training.steps=3"]) == 0
    numbers = [
        [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(folder / name / "metrics.jsonl") if "loss" in r]
        for name in "ab"
    ]
    return numbers, dict(card.calls)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "matmul"), [("tensorwise", "tensorwise"), ("rowwise", "rowwise"), ("delayed", "tensorwise")]
)
def test_a_run_on_a_card_goes_on_to_the_bit(interpreter, tmp_path, recipe, matmul):
    (resumed, whole), calls = interpreter(_trained, tmp_path / recipe, f"--float8.recipe_name={recipe}")
    assert resumed == whole
    assert [step for step, *_ in whole] == [1, 2, 3]
    assert calls["_scaled_mm", matmul] > 3 * 3 * 7

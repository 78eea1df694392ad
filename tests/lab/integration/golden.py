"""Records the first losses of the debug model, per recipe, on a text that is the same everywhere.

`python -m tests.lab.integration.golden` records them for this type of machine and keeps those of other types. Use it
only for a change that is meant to change numbers, and say so in its commit.
"""

import functools
import json
import platform
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from quaver.kernels import cpu
from quaver.lab.settings import Checkpoint
from quaver.lab.settings.config_file import load_config
from quaver.lab.trainer.training_run import prepare_run
from quaver.recipes.config import Float8LinearRecipeName

FILE = Path(__file__).with_name("golden_losses.json")
DEBUG = Path(__file__).parents[3] / "train_configs" / "llama3_debug.toml"
BFLOAT16 = "bfloat16"
NAMES = (BFLOAT16, *(name.value for name in Float8LinearRecipeName))
STEPS = 20


def describe_machine() -> str:
    """Return what the last bits depend on: the instructions that torch and quaver use, and torch's version."""
    torch_version = torch.__version__.split("+")[0]
    has_tiles = torch.cpu._is_amx_tile_supported() if hasattr(torch.cpu, "_is_amx_tile_supported") else False
    instructions = torch.backends.cpu.get_cpu_capability() + (" AMX" if has_tiles else "")
    if cpu.HAS_MM:
        instructions += " BF16"
    elif not torch.cpu._is_avx512_bf16_supported():
        instructions += " without BF16"  # a library that has no such instructions multiplies in another order
    return f"{platform.machine()} {instructions}, torch {torch_version}, 1 thread"


@functools.cache
def make_text() -> str:
    """Return about 300 kB of words from a Markov chain; Python's generator is the same in every version."""
    rng = random.Random(8)
    words = ["".join(rng.choices("aeioubcdfghlmnprst", k=rng.randint(2, 8))) for _ in range(400)]
    follows = {word: rng.choices(words, k=6) for word in words}
    lines, word = [], words[0]
    for _ in range(5000):
        line = []
        for _ in range(10):
            word = rng.choice(follows[word])
            line.append(word)
        lines.append(" ".join(line))
    return "\n".join(lines) + "\n"


def compute_losses(name: str, folder: Path, steps: int = STEPS) -> list[float]:
    """Train for `steps` steps, all of them in the warm-up, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (folder / "text.txt").write_text(make_text())
        config = load_config(DEBUG)
        float8 = replace(config.float8, enable_float8_linear=name != BFLOAT16)
        if name != BFLOAT16:
            float8 = replace(float8, recipe_name=name)
        config = replace(
            config,
            job=replace(config.job, name=name, dump_folder=str(folder / "runs")),
            training=replace(config.training, steps=steps, device="cpu"),
            # Those of the recorded losses; the config has others.
            optimizer=replace(config.optimizer, lr=1.5e-3),
            lr_scheduler=replace(config.lr_scheduler, warmup_steps=40),
            data=replace(config.data, path=str(folder / "text.txt")),
            float8=float8,
            checkpoint=Checkpoint(enable=False),
        )
        run = prepare_run(config)
        run.folder.release()
        (model,), training = run.models, config.training
        step_batches = (run.data.make_step_batches(training, step * training.step_batch_size) for step in range(steps))
        return [model.train_step(step, batches).loss for step, batches in enumerate(step_batches, start=1)]
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        by_name = {}
        for name in NAMES:
            (Path(temporary) / name).mkdir()
            by_name[name] = [loss.hex() for loss in compute_losses(name, Path(temporary) / name)]
    FILE.write_text(json.dumps({**recorded, describe_machine(): by_name}, indent=1) + "\n")

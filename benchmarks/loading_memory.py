"""Peak memory of `from_pretrained` with a `QuaverConfig`, on a CPU: python -m benchmarks.loading_memory

Each row is a process that loads a random Llama from shards of 100 MB. Anonymous memory is sampled every millisecond; it
leaves out the mapped pages of the files, which the system can drop. MALLOC_MMAP_THRESHOLD_ makes glibc return freed
tensors. By default it keeps many for reuse: 294 and 386 MB in the frozen rows.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from subprocess import run

import torch

ROWS = {
    "high precision": ("hp", "None"),
    'high precision, `QuaverConfig("rowwise")`': ("hp", 'QuaverConfig("rowwise")'),
    "high precision, `QuaverConfig(frozen=True)`": ("hp", "QuaverConfig(frozen=True)"),
    'float8, `QuaverConfig("rowwise")`': ("fp8", 'QuaverConfig("rowwise")'),
    "float8, `QuaverConfig(frozen=True)`": ("fp8", "QuaverConfig(frozen=True)"),
}


def anonymous_mb() -> float:
    """Return the anonymous memory of this process in MB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6


def load(folder: str, text: str) -> None:
    """Load the folder in bfloat16, and print the anonymous memory that this adds at its peak and at the end."""
    from transformers import AutoModelForCausalLM

    from quaver.integrations.transformers import QuaverConfig

    config = eval(text, {"QuaverConfig": QuaverConfig})
    tiny = AutoModelForCausalLM.from_pretrained(f"{folder}-tiny", quantization_config=config, dtype="bfloat16")
    del tiny  # imports take memory, too, which is not the model's
    before, samples, is_done = anonymous_mb(), [0.0], threading.Event()

    def sample() -> None:
        while not is_done.is_set():
            samples.append(anonymous_mb())
            time.sleep(0.001)

    thread = threading.Thread(target=sample)
    thread.start()
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype="bfloat16")
    is_done.set()
    thread.join()
    print(max(samples) - before, anonymous_mb() - before, model.num_parameters())


def make(folder: Path) -> None:
    """Write the model, and a tiny one, in high precision and in float8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from quaver.export import save_float8
    from quaver.integrations.transformers import prepare_model_for_float8

    for suffix, layers, width in (("-tiny", 1, 128), ("", 12, 1024)):
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        model = LlamaForCausalLM._from_config(LlamaConfig(vocab_size=8192, **sizes), dtype=torch.bfloat16)
        model.save_pretrained(folder / f"hp{suffix}", max_shard_size="100MB")
        prepare_model_for_float8(model, "blockwise")
        save_float8(model, folder / f"fp8{suffix}", format="fp8", max_shard_bytes=100_000_000)


def main() -> None:
    if len(sys.argv) > 1:
        load(*sys.argv[1:])
        return
    with tempfile.TemporaryDirectory() as name:
        make(Path(name))
        size = {kind: sum(f.stat().st_size for f in Path(name, kind).glob("*.safetensors")) for kind in ("hp", "fp8")}
        print(f"files: {size['hp'] / 1e6:.0f} MB in bfloat16, {size['fp8'] / 1e6:.0f} MB in float8, shards of 100 MB")
        print("| folder, `quantization_config` | peak, MB | held, MB |\n|---|---|---|")
        for row, (kind, text) in ROWS.items():
            command = [sys.executable, "-m", "benchmarks.loading_memory", str(Path(name, kind)), text]
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
            done = run(command, capture_output=True, check=True, text=True, env=environment)
            peak, held, _ = done.stdout.split()[-3:]
            print(f"| {row} | {float(peak):.0f} | {float(held):.0f} |")


if __name__ == "__main__":
    main()

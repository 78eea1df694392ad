"""`import quaver` and one linear on a CPU import little besides torch; counted, since a time would be flaky."""

import subprocess
import sys

SLOW = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
SLOW += ["torch._dynamo", "torch._inductor", "torch.onnx", "sympy"]
"""Modules that take PyTorch as long to import as all others together."""
OPTIONAL = [
    "quaver.lab",
    "transformers",
    "filelock",
    "matplotlib",
    "pydantic",
    "rich",
    "safetensors",
    "tomli_w",
    "xxhash",
]

STEP = """
import torch
from quaver import cast_weights_once, conversion_report, convert_to_float8_training, convert_to_high_precision

for recipe in ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"):
    model = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(128, 128)), config=recipe)
    with cast_weights_once(model):
        model(torch.randn(32, 128)).sum().backward()
    str(conversion_report(model))
    model.load_state_dict(model.state_dict())
    convert_to_high_precision(model)
"""

PRINT_IMPORTED = f"import sys; print(*[name for name in {[*SLOW, *OPTIONAL]} if name in sys.modules])"


def test_imports_nothing_slow_besides_torch():
    parts = ("import torch, torch.nn", "import quaver", STEP)
    program = "\n".join(f"{part}\n{PRINT_IMPORTED}" for part in parts)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    by_torch, by_quaver, by_steps = (set(line.split()) for line in ran.stdout.splitlines())
    assert by_quaver <= by_torch
    assert by_steps <= by_torch

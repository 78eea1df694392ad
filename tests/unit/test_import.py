"""`import quaver` and one linear on a CPU import little besides torch; counted, since a time would be flaky."""

import subprocess
import sys

SLOW = [
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch._inductor",
    "torch.onnx",
    "sympy",
]
"""What takes PyTorch as long to import as all the rest of it."""

OPTIONAL = ["filelock", "matplotlib", "pydantic", "rich", "safetensors", "tomli_w", "xxhash", "transformers"]

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

PRINT_IMPORTED = f"import sys; print(*[name for name in {SLOW + OPTIONAL} if name in sys.modules])"


def imported_by(program):
    """Those modules of SLOW and OPTIONAL that a fresh interpreter has imported after `program`."""
    ran = subprocess.run(
        [sys.executable, "-c", f"{program}\n{PRINT_IMPORTED}"], capture_output=True, text=True, check=True, timeout=300
    )
    return set(ran.stdout.split())


def test_imports_nothing_slow_besides_torch():
    torchs = imported_by("import torch, torch.nn")
    for program in ("import quaver", STEP):
        assert imported_by(program) <= torchs, program


def test_what_is_asked_for_is_imported():
    names = "Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput"
    assert "torch.distributed.tensor" in imported_by(f"from quaver import {names}")

"""Applies the diffs of docs/extending.md to a copy of the package and tests that they train."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quaver
from tests.thinned import at_night

ROOT = Path(quaver.__file__).parent
DIFF = re.compile(r"```diff\n(.*?)```", re.S)

TRAIN = """
import sys
from dataclasses import replace

import torch
from torch import nn
from quaver import conversion_report, convert_to_float8_training, float8_grouped_mm, freeze_to_float8
from quaver import use_float8_primary_weights
from quaver.linear.sharding import check_can_be_sharded
from quaver.experts.module import Float8Experts
from quaver.export.formats import make_weight_format
from quaver.linear.backends import predict_scale_kind
from tests.mixture import make_mixture
from quaver.recipes.config import CastConfig, Float8LinearConfig, ScalingGranularity
from quaver.linear.quantize import Quantizer
from quaver.roofline.cost import compute_operand_cast_costs
from quaver.recipes.scaling import dequantize
from tests.reference import sqnr_db

segments = CastConfig(scaling_granularity=ScalingGranularity.SEGMENTS, target_dtype=torch.float8_e4m3fn)
config = Float8LinearConfig(cast_config_input=segments, cast_config_weight=segments, cast_config_grad_output=segments)
torch.manual_seed(0)


def dequantized(casts, hp):
    for operand in Quantizer(casts, hp.dtype)(hp, row=True, column=True):
        yield dequantize(operand.data.contiguous(), operand.dequant_scale, layout=operand.layout).double()


def train_one_step(config, *backends):
    linear = nn.Linear(200, 150, dtype=torch.bfloat16)
    model = convert_to_float8_training(nn.Sequential(linear), config=config)
    input = (torch.randn(130, 200) * torch.logspace(-3, 3, 200)).bfloat16().requires_grad_()
    grad_output = (torch.randn(130, 150) * torch.logspace(-3, 3, 150)).bfloat16()
    for compute in (model, *(torch.compile(model, fullgraph=True, backend=backend) for backend in backends)):
        input.grad = linear.weight.grad = None
        output = compute(input)
        output.backward(grad_output)
        (i_row, i_column), (w_row, w_column), (g_row, g_column) = (
            dequantized(casts, hp.detach())
            for casts, hp in zip(config.casts, (input, linear.weight, grad_output), strict=True)
        )
        for result, exact in (
            (output, i_row @ w_row.t() + linear.bias.double()),
            (input.grad, g_row @ w_column),
            (linear.weight.grad, g_column.t() @ i_column),
        ):
            assert sqnr_db(exact, result.double()) > 45, sqnr_db(exact, result.double())  # bfloat16 results
    assert i_row.shape == input.shape and sqnr_db(input.double(), i_row) > 28
    return linear, model, input


blocks = {"scaling_granularity": ScalingGranularity.BLOCKWISE, "target_dtype": torch.float8_e4m3fn}
lines, squares = CastConfig(**blocks, block_size=(1, 64)), CastConfig(**blocks, block_size=(64, 64))
block_config = Float8LinearConfig(cast_config_input=lines, cast_config_weight=squares, cast_config_grad_output=lines)
linear, model, _ = train_one_step(block_config)
assert "blockwise 64 x 64" in str(conversion_report(model))
frozen = freeze_to_float8(nn.Sequential(nn.Linear(200, 150)), config=block_config)[0].weight
assert (frozen.granularity, tuple(frozen.dequant_scale.shape)) == ("blockwise 64 x 64", (3, 4))
experts = convert_to_float8_training(make_mixture(layers=1), config=block_config)
assert any(isinstance(module, Float8Experts) for module in experts.modules())
assert predict_scale_kind(lines, squares) is None

linear, model, input = train_one_step(config, *sys.argv[1:])
assert "segments" in str(conversion_report(model))

# Features that depend on the elements that share a scale refuse a granularity that does not name them.


def assert_refused(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (NotImplementedError, ValueError) as error:
        assert "share a scale" in str(error) and len(str(error).splitlines()) == 1, error
    else:
        raise AssertionError(function)


primary = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), config=config)
experts = make_mixture(layers=1)
convert_to_float8_training(experts, config=config)
assert not any(isinstance(module, Float8Experts) for module in experts.modules())
assert "share a scale" in str(conversion_report(experts))
assert_refused(replace, config, enable_fsdp_float8_all_gather=True)
assert_refused(check_can_be_sharded, linear, 0, 2)
assert_refused(make_weight_format, "compressed-tensors", config)
assert_refused(make_weight_format, "fp8", config)
assert_refused(freeze_to_float8, nn.Sequential(nn.Linear(64, 64)), config=config)
assert_refused(use_float8_primary_weights, primary, torch.optim.SGD(primary.parameters(), lr=0.1))
ends = torch.tensor([2, 4], dtype=torch.int32)
assert_refused(float8_grouped_mm, input[:, :64], torch.randn(2, 64, 64).bfloat16(), ends, config=config)
assert_refused(compute_operand_cast_costs, config.casts.input)
assert predict_scale_kind(segments, segments) is None
assert segments.short_str() == "dyn_seg_e4m3"
"""


def _apply(diff: str, root: Path) -> list[str]:
    """Apply the hunks of a diff, each of which matches one place, and return the files."""
    files = re.split(r"^--- a/\S+\n\+\+\+ b/(\S+)\n", diff, flags=re.M)[1:]
    for name, hunks in zip(files[::2], files[1::2], strict=True):
        path = root / name
        for hunk in hunks.split("@@\n")[1:]:
            lines = hunk.splitlines()
            before, after = ("\n".join(line[1:] for line in lines if line[:1] in signs) for signs in (" -", " +"))
            text = path.read_text()
            assert text.count(before) == 1, (name, before)
            path.write_text(text.replace(before, after))
    return files[::2]


@pytest.mark.parametrize("backends", [(), *at_night([(("aot_eager", "inductor"),)])])
def test_each_diff_touches_one_file_a_table(tmp_path, backends):
    page = (ROOT.parent / "docs" / "extending.md").read_text()
    shutil.copytree(ROOT, tmp_path / "quaver", ignore=shutil.ignore_patterns("__pycache__"))
    changed = [_apply(diff, tmp_path) for diff in DIFF.findall(page)]
    assert changed == [["quaver/recipes/scale_layout.py"], ["quaver/recipes/cast_config.py", "quaver/kernels/cast.py"]]
    # A cache of its own, because other tests compile kernels of the same names at the same time; and of the environment
    # only what a shell has: with the variables of a whole test run the compiler links without the C++ library.
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    environment |= {"PYTHONPATH": f"{tmp_path}:{ROOT.parent}", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAIN, *backends]
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    if process.returncode:
        pytest.fail(process.stderr[-3000:])

"""quaver in torchtitan, which cannot stand next to this environment's datasets: installed without dependencies.

The programs below test what torchtitan 0.3 does with a linear: the config tree, `build`, `init_states` after meta-init,
and DTensors by `sharding_config` are its own code. Its Trainer needs a GPU and a newer torch than 2.13 in few places;
titan_trainer.py replaces these and runs it.
"""

import json
import math
import os
import subprocess
import sys

import pytest

PACKAGES = {
    "0.3": ["torchtitan==0.3.0", "spmd_types==0.2.3", "torchdata==0.11.0", "torch_checkpointing==0.1.1"],
    "0.2": ["torchtitan==0.2.2", "torchdata==0.11.0"],
}
EXTRA = ["tomli", "einops", "tyro", "docstring_parser", "typeguard"]

CONVERTER = """
from dataclasses import replace
import torch
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.llama3 import llama3_configs
from quaver import Float8Linear, assert_float8_training, convert_to_high_precision
from quaver.recipes.config import resolve_config
from quaver.integrations.torchtitan import Float8LinearConverter

def config():
    made = llama3_configs["debugmodel"](attn_backend="flex")
    made.layers = made.layers[:2]
    return made

def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}

def float8(model):
    return {name for name, module in linears(model).items() if isinstance(module, Float8Linear)}

original = config()
for _, linear, _, _ in original.traverse(Linear.Config):
    linear.sharding_config = object()
converted = Float8LinearConverter.Config(recipe_name=RECIPE, emulate=True).build().convert(original)
assert all(linear.sharding_config is not None for _, linear, _, _ in converted.traverse(Linear.Config))
for _, linear, _, _ in converted.traverse(Linear.Config):
    linear.sharding_config = None

with torch.device("meta"):
    model = converted.build()
model.verify_module_protocol()
model.to_empty(device="cpu")
for parameter in model.parameters():
    torch.nn.init.constant_(parameter, float("nan"))
torch.manual_seed(0)
model.init_states(buffer_device="cpu")
assert all(parameter.isfinite().all() for parameter in model.parameters()), "init_states left a parameter out"
assert float8(model) == set(linears(model)) - {"lm_head"}, float8(model)
config_of = {each.config for each in linears(model).values() if isinstance(each, Float8Linear)}
assert config_of == {replace(resolve_config(RECIPE), emulate=True)}
assert_float8_training(model, torch.optim.SGD(model.parameters(), 0.1))

from torchtitan.components.lora import LoRAConverter
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.models.utils import validate_converter_order
of_lora = LoRAConverter.Config(rank=4, target_modules=["w1", "w2", "wo"])
assert has_quantization(converted) and not has_quantization(config())
adapted = of_lora.build().convert(Float8LinearConverter.Config(recipe_name=RECIPE).build().convert(config())).build()
adapted.verify_module_protocol()
adapted.init_states(buffer_device="cpu")
w1 = adapted.layers["0"].feed_forward.w1
assert isinstance(w1, Float8Linear) and w1.lora_b.weight.requires_grad and not w1.weight.requires_grad
w1(torch.randn(2, 16, 256)).sum().backward()
assert w1.backend == "exact" and w1.lora_b.weight.grad is not None
try:
    validate_converter_order([of_lora, Float8LinearConverter.Config()])
except ValueError as error:
    assert "must be applied before" in str(error), error
else:
    raise AssertionError("LoRA came first")

plain = config().build()
torch.manual_seed(0)
plain.init_states(buffer_device="cpu")
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
assert model.state_dict().keys() == plain.state_dict().keys()
gathering = Float8LinearConverter.Config(recipe_name=RECIPE, enable_fsdp_float8_all_gather=True)
gathered = linears(gathering.build().convert(config()).build()).values()
assert all(each.config.enable_fsdp_float8_all_gather for each in gathered if isinstance(each, Float8Linear))
linear, plain_linear = (each.layers["0"].feed_forward.w1 for each in (model, plain))
x = torch.randn(2, 16, 256, requires_grad=True)
linear(x).sum().backward()
assert linear.weight.grad.isfinite().all() and not torch.equal(linear(x), plain_linear(x))
convert_to_high_precision(model)
assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]

try:
    Float8LinearConverter.Config(filter_fqns=["layers", "lm_head"]).build().convert(config())
except ValueError as error:
    assert str(error).startswith("0 of "), error
else:
    raise AssertionError("nothing was converted, and nothing said so")
try:
    Float8LinearConverter.Config(recipe_name="delayed").build().convert(config())
except ValueError as error:
    assert "expected one that scales dynamically, got delayed" in str(error), error
else:
    raise AssertionError("delayed scaling was accepted")

overridden = config()
entry = ("quaver.integrations.torchtitan.float8_linear", {"recipe_name": "tensorwise"})
lines = apply_overrides(OverrideConfig(imports=[entry]), overridden)
assert float8(overridden.build()) == float8(converted.build()), lines
print("converter works")
"""

EXPERTS = """
import torch
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss import gptoss_configs
from torchtitan.models.qwen3 import qwen3_configs
from quaver import conversion_report, float8_linear
from quaver.experts.grouped_mm_method import Float8GroupedMM, to_float8_grouped_mm
from quaver.recipes.config import resolve_config
from quaver.integrations.torchtitan import Float8GroupedExpertsConverter, Float8LinearConverter

for configs, name in ((qwen3_configs, "debugmodel_moe"), (gptoss_configs, "debugmodel")):
    config = configs[name](attn_backend="flex", moe_comm_backend="standard")
    Float8GroupedExpertsConverter.Config(recipe_name=RECIPE, pad_multiple=16).build().convert(config)
    assert has_quantization(config)
    Float8LinearConverter.Config(recipe_name=RECIPE).build().convert(config)
    with torch.device("meta"):
        model = config.build()
    experts = [module for module in model.modules() if hasattr(module, "_grouped_mm")]
    assert experts and all(isinstance(each, Float8GroupedMM) for each in experts)
    model.verify_module_protocol()
    layers = {layer.name: layer.converted for layer in conversion_report(model).layers}
    assert all(each for name, each in layers.items() if "experts.w" in name or "experts.mlp" in name), layers

torch.manual_seed(0)
plain = GroupedExperts.Config(dim=64, hidden_dim=96, num_experts=3).build()
for parameter in plain.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
x, counts = torch.randn(50, 64, requires_grad=True), torch.tensor([20, 0, 30])
expected = plain(x, counts)
float8 = to_float8_grouped_mm(plain, resolve_config(RECIPE))
out = float8(x, counts)
out.sum().backward()
assert float8.w1_EFD.grad.isfinite().all() and not torch.equal(out, expected)
parts, w1, w2, w3 = [], *(w.bfloat16() for w in (plain.w1_EFD, plain.w2_EDF, plain.w3_EFD))
for expert, tokens in ((0, x[:20]), (2, x[20:])):
    tokens = tokens.bfloat16()
    gate, up = (float8_linear(tokens, w[expert], config=RECIPE) for w in (w1, w3))
    parts.append(float8_linear(torch.nn.functional.silu(gate) * up, w2[expert], config=RECIPE))
assert torch.equal(out, torch.cat(parts).float())
print("experts work")
"""

SHIM = """
from types import SimpleNamespace as S
from quaver.integrations import torchao as shim
shim.install()
import torch
from torchtitan.components.quantization.float8 import Float8LinearConverter
from quaver import Float8Linear
section = S(recipe_name=None, filter_fqns=["head"], emulate=True, enable_fsdp_float8_all_gather=True,
            precompute_float8_dynamic_scale_for_fsdp=True)
job = S(quantize=S(linear=S(float8=section)), compile=S(enable=False, components=[]), model=S(converters=[]))
converter = Float8LinearConverter(job, S(dp_shard_enabled=False))
model = torch.nn.ModuleDict({"w1": torch.nn.Linear(32, 32), "head": torch.nn.Linear(32, 32)})
converter.convert(model)
converter.post_optimizer_hook(model)
assert isinstance(model["w1"], Float8Linear) and not isinstance(model["head"], Float8Linear)
print("shim works")
"""


def run_with(version, arguments, folder):
    """Run python with torchtitan of a version, installed into a folder of its own."""
    target = str(folder / "site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target]
    command = [*install, *PACKAGES[version], *EXTRA]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if installed.returncode:
        pytest.skip(f"pip cannot install torchtitan: {installed.stderr.strip().splitlines()[-1:]}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), target])}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_the_converter_and_the_override_of_0_3(recipe, tmp_path):
    assert "converter works" in run_with("0.3", ["-c", f"RECIPE = {recipe!r}\n{CONVERTER}"], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_the_experts_of_0_3(recipe, tmp_path):
    assert "experts work" in run_with("0.3", ["-c", f"RECIPE = {recipe!r}\n{EXPERTS}"], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_of_0_3(ranks, tmp_path):
    """By FSDP2, with and without a float8 gather, and by tensor parallelism: as in bfloat16, and no MFU."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run_with("0.3", [*launch, "tests/library/foreign/titan_trainer.py", str(tmp_path / "runs.json")], tmp_path)
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert len(runs) == (3 if ranks == 1 else 8)
    bfloat16 = {run["tp"]: run for run in runs if run["recipe"] is None}
    assert all(run["mfu"] and not run["float8"] for run in bfloat16.values())
    for run in (run for run in runs if run["recipe"]):
        expected = bfloat16[run["tp"]]["losses"]
        assert len(expected) == 3
        assert expected[-1] < expected[0] - 0.2
        assert all(map(math.isfinite, run["losses"])), run
        assert run["losses"] != expected, run
        assert run["losses"] == pytest.approx(expected, abs=0.02), (run, expected)
        assert (run["float8"], run["high precision"], run["backends"]) == (10, ["lm_head"], ["exact"]), run
        assert (run["gathers float8"], run["mfu"]) == (run["gather"], False), run


@pytest.mark.nightly
def test_the_converter_of_0_2_runs_on_quaver_with_the_shim(tmp_path):
    assert "shim works" in run_with("0.2", ["-c", SHIM], tmp_path)

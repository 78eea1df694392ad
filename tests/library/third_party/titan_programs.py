"""Checks torchtitan, which test_torchtitan.py installs: `python -m ...titan_programs CHECK [RECIPE]`."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quaver import Float8Linear, assert_float8_training, conversion_report, convert_to_high_precision, float8_linear
from quaver.recipes.config import resolve_config


def llama_config():
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    return config


def list_linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def list_float8_names(model):
    return {name for name, module in list_linears(model).items() if isinstance(module, Float8Linear)}


def get_w1(model):
    return model.layers["0"].feed_forward.w1


def check_converter(recipe):
    """The config tree, `build` on the meta device, `init_states`, and the way back."""
    from torchtitan.models.common.linear import Linear

    from quaver.integrations.torchtitan import Float8LinearConverter

    original = llama_config()
    for _, linear, _, _ in original.traverse(Linear.Config):
        linear.sharding_config = object()
    converted = Float8LinearConverter.Config(recipe_name=recipe, emulate=True).build().convert(original)
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
    assert list_float8_names(model) == set(list_linears(model)) - {"lm_head"}, list_float8_names(model)
    configs = {model.get_submodule(name).config for name in list_float8_names(model)}
    assert configs == {replace(resolve_config(recipe), emulate=True)}
    assert_float8_training(model, torch.optim.SGD(model.parameters(), 0.1))

    plain = llama_config().build()
    torch.manual_seed(0)
    plain.init_states(buffer_device="cpu")
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert model.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(2, 16, 256, requires_grad=True)
    get_w1(model)(x).sum().backward()
    assert get_w1(model).weight.grad.isfinite().all()
    assert not torch.equal(get_w1(model)(x), get_w1(plain)(x))
    names = list_float8_names(model)
    convert_to_high_precision(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    check_other_ways_to_convert(recipe, names)
    check_lora(recipe)


def check_other_ways_to_convert(recipe, names):
    """A float8 gather, an override in place of the converter, and what is refused."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    from quaver.integrations.torchtitan import Float8LinearConverter

    gathering = Float8LinearConverter.Config(recipe_name=recipe, enable_fsdp_float8_all_gather=True)
    model = gathering.build().convert(llama_config()).build()
    assert all(model.get_submodule(name).config.enable_fsdp_float8_all_gather for name in list_float8_names(model))
    with pytest.raises(ValueError, match="^0 of "):
        Float8LinearConverter.Config(filter_fqns=["layers", "lm_head"]).build().convert(llama_config())
    with pytest.raises(ValueError, match="expected one that scales dynamically, got delayed"):
        Float8LinearConverter.Config(recipe_name="delayed").build().convert(llama_config())
    overridden = llama_config()
    entry = ("quaver.integrations.torchtitan.float8_linear", {"recipe_name": "tensorwise"})
    lines = apply_overrides(OverrideConfig(imports=[entry]), overridden)
    assert list_float8_names(overridden.build()) == names, lines


def check_lora(recipe):
    """LoRA on converted linears, in this order alone."""
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.components.quantization.utils import has_quantization
    from torchtitan.models.utils import validate_converter_order

    from quaver.integrations.torchtitan import Float8LinearConverter

    lora = LoRAConverter.Config(rank=4, target_modules=["w1", "w2", "wo"])
    converted = Float8LinearConverter.Config(recipe_name=recipe).build().convert(llama_config())
    assert has_quantization(converted)
    assert not has_quantization(llama_config())
    adapted = lora.build().convert(converted).build()
    adapted.verify_module_protocol()
    adapted.init_states(buffer_device="cpu")
    w1 = get_w1(adapted)
    assert isinstance(w1, Float8Linear)
    assert w1.lora_b.weight.requires_grad
    assert not w1.weight.requires_grad
    w1(torch.randn(2, 16, 256)).sum().backward()
    assert conversion_report(w1).layers[0].backend == "exact"
    assert w1.lora_b.weight.grad is not None
    with pytest.raises(ValueError, match="must be applied before"):
        validate_converter_order([lora, Float8LinearConverter.Config()])


def check_experts(recipe):
    from torchtitan.components.quantization.utils import has_quantization
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.gpt_oss import gptoss_configs
    from torchtitan.models.qwen3 import qwen3_configs

    from quaver.experts.grouped_mm_method import Float8GroupedMM, to_float8_grouped_mm
    from quaver.integrations.torchtitan import Float8GroupedExpertsConverter, Float8LinearConverter

    for configs, name in ((qwen3_configs, "debugmodel_moe"), (gptoss_configs, "debugmodel")):
        config = configs[name](attn_backend="flex", moe_comm_backend="standard")
        Float8GroupedExpertsConverter.Config(recipe_name=recipe, pad_multiple=16).build().convert(config)
        assert has_quantization(config)
        Float8LinearConverter.Config(recipe_name=recipe).build().convert(config)
        with torch.device("meta"):
            model = config.build()
        experts = [module for module in model.modules() if hasattr(module, "_grouped_mm")]
        assert experts
        assert all(isinstance(module, Float8GroupedMM) for module in experts)
        model.verify_module_protocol()
        stacks = [layer for layer in conversion_report(model).layers if "experts.w" in layer.name]
        stacks += [layer for layer in conversion_report(model).layers if "experts.mlp" in layer.name]
        assert all(layer.converted for layer in stacks), stacks

    torch.manual_seed(0)
    plain = GroupedExperts.Config(dim=64, hidden_dim=96, num_experts=3).build()
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, counts = torch.randn(50, 64, requires_grad=True), torch.tensor([20, 0, 30])
    high_precision = plain(x, counts)
    float8 = to_float8_grouped_mm(plain, resolve_config(recipe))
    out = float8(x, counts)
    out.sum().backward()
    assert float8.w1_EFD.grad.isfinite().all()
    assert not torch.equal(out, high_precision)
    parts, w1, w2, w3 = [], *(weight.bfloat16() for weight in (plain.w1_EFD, plain.w2_EDF, plain.w3_EFD))
    for expert, tokens in ((0, x[:20].bfloat16()), (2, x[20:].bfloat16())):
        gate, up = (float8_linear(tokens, weight[expert], config=recipe) for weight in (w1, w3))
        parts.append(float8_linear(torch.nn.functional.silu(gate) * up, w2[expert], config=recipe))
    assert torch.equal(out, torch.cat(parts).float())


def check_shim():
    from quaver.integrations import torchao as shim

    shim.install()
    from torchtitan.components.quantization.float8 import Float8LinearConverter

    flags = ("emulate", "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
    section = SimpleNamespace(recipe_name=None, filter_fqns=["head"], **dict.fromkeys(flags, True))
    job = SimpleNamespace(
        quantize=SimpleNamespace(linear=SimpleNamespace(float8=section)),
        compile=SimpleNamespace(enable=False, components=[]),
        model=SimpleNamespace(converters=[]),
    )
    converter = Float8LinearConverter(job, SimpleNamespace(dp_shard_enabled=False))
    model = torch.nn.ModuleDict({"w1": torch.nn.Linear(32, 32), "head": torch.nn.Linear(32, 32)})
    converter.convert(model)
    converter.post_optimizer_hook(model)
    assert list_float8_names(model) == {"w1"}


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print(sys.argv[1], "passed")

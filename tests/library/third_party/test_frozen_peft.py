"""Tests PEFT and transformers on a base that `freeze_to_float8` stored in float8."""

import peft
import pytest
import torch

from quaver import FrozenFloat8Linear, conversion_report, freeze_to_float8
from quaver.linear.frozen_weight import FrozenFloat8Weight
from tests.library.third_party.checkpoints import compute_logits
from tests.library.third_party.hf_trainer import checkpointing, get_losses, trained
from tests.library.third_party.llama import batches, build_optimizer, is_not_head, llama, train_by_hand
from tests.reference import sqnr_db
from tests.steps import assert_same
from tests.thinned import at_night, thinned

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
CONFIGS = ("blockwise", "mxfp8", "tensorwise", "rowwise")
STORED = {"blockwise": "blockwise 128 x 128", "mxfp8": "blockwise 32 x 32"}
CONFIG = pytest.mark.parametrize("config", CONFIGS)
EPOCHS = 4


def build_base(config=None):
    """Return a Llama in bfloat16; its linears but the head are frozen in float8 if a config is given."""
    model = llama().to(torch.bfloat16)
    return model if config is None else freeze_to_float8(model, config=config, module_filter_fn=is_not_head)


def build_adapted(config=None, **options):
    model = build_base(config)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA, **options))


def train(model):
    """Train, and return the losses of EPOCHS over the same batches."""
    return [loss for _ in range(EPOCHS) for loss in train_by_hand(model.train())]


def compute_gradients(model):
    """Return the gradients of the adapters in the first batch, by name."""
    model(**next(iter(batches()))).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture(scope="module")
def losses_in_bfloat16():
    """Return the losses of LoRA on the bfloat16 base."""
    return train(build_adapted())


@pytest.mark.parametrize("config", ["blockwise", "tensorwise", *at_night([("mxfp8",), ("rowwise",)])])
def test_lora_follows_lora_on_the_bfloat16_base(config, losses_in_bfloat16):
    model = build_adapted(config)
    weights = [module.weight for module in model.modules() if isinstance(module, FrozenFloat8Linear)]
    codes = [weight.data_fp8.clone() for weight in weights]
    assert len(codes) == 14
    losses = train(model)
    assert sum(losses_in_bfloat16[-4:]) < 0.998 * sum(losses_in_bfloat16[:4])
    assert max(abs(a / b - 1) for a, b in zip(losses, losses_in_bfloat16, strict=True)) < 5e-3
    assert_same([weight.data_fp8 for weight in weights], codes)


@CONFIG
def test_gradients_of_adapters_are_as_good_as_the_format(config):
    """Adapters that start at random, since at zero the gradients of lora_A are zero.

    On the way to a gradient are at most 28 matmuls of the base, each with two quantized operands, whose noise is
    independent: 28.9 dB of one (22.9 where gradients are e5m2), less 10 log10(56).
    """
    expected = compute_gradients(build_adapted(init_lora_weights=False))
    actual = compute_gradients(build_adapted(config, init_lora_weights=False))
    floor = (22.9 if config == "tensorwise" else 28.9) - 17.5
    assert set(actual) == set(expected)
    worst = min((sqnr_db(expected[name], actual[name]), name) for name in expected)
    assert worst[0] > floor, worst


@CONFIG
def test_adapters_start_as_on_the_bfloat16_base(config):
    """PEFT casts an adapter to the dtype of the base weight and back: onto the float8 grid if that is float8."""
    frozen, plain = (dict(model.named_parameters()) for model in (build_adapted(config), build_adapted()))
    adapters = [name for name in plain if "lora_A" in name]
    assert adapters
    for name in adapters:
        assert frozen[name].dtype is torch.float32
        assert frozen[name].equal(plain[name])
        assert not frozen[name].equal(frozen[name].to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(("config", "kind"), thinned(CONFIGS, ["lora", "dora"], together=1))
def test_merging_quantizes_again_and_reports_the_error(config, kind):
    model = build_adapted(config, use_dora=kind == "dora")
    losses = train_by_hand(model)
    assert all(loss > 0 for loss in losses)
    expected = compute_logits(model)
    merged = model.merge_and_unload()
    assert sqnr_db(expected, compute_logits(merged)) > 15
    reasons = {layer.name: layer.reason for layer in conversion_report(merged).layers}
    targets = [name for name in reasons if name.rpartition(".")[2] in LORA["target_modules"]]
    others = [name for name in reasons if name not in targets and "lm_head" not in name]
    assert (len(targets), len(others)) == (8, 6)
    assert all("quantized again after a write at" in reasons[name] for name in targets)
    assert all(reasons[name] == f"frozen, stored in {STORED.get(config, config)} e4m3" for name in others)
    for name in targets:
        weight = merged.get_submodule(name).weight
        assert type(weight) is FrozenFloat8Weight
        assert 25 < weight.requantized_sqnr_db < 40


def test_safe_merge_and_unmerge_keep_the_outputs():
    model = build_adapted("blockwise")
    train_by_hand(model)
    expected = compute_logits(model)
    model.merge_adapter(safe_merge=True)
    assert sqnr_db(expected, compute_logits(model)) > 15
    model.unmerge_adapter()
    assert sqnr_db(expected, compute_logits(model)) > 15


def test_trainer_trains_as_a_loop_by_hand(tmp_path):
    losses, model = train_by_hand(build_adapted("blockwise")), build_adapted("blockwise")
    options = {"max_grad_norm": 0, "save_strategy": "steps", **checkpointing(use_reentrant=False)}
    run = trained(tmp_path, model, optimizers=(build_optimizer(model), None), **options)
    assert get_losses(run) == pytest.approx(losses, abs=2e-4)  # logged with four digits
    assert list(tmp_path.glob("checkpoint-*/adapter_model.safetensors"))


def test_adapters_are_not_frozen():
    with pytest.raises(ValueError, match="requires a gradient and other weights do not: call freeze_to_float8 before"):
        freeze_to_float8(build_adapted(), module_filter_fn=lambda module, name: "lm_head" not in name)
    late, early = freeze_to_float8(build_adapted(), module_filter_fn=is_not_head), build_adapted("blockwise")
    assert train_by_hand(late) == train_by_hand(early)


def test_modules_to_save_train_in_high_precision_or_say_why_not():
    with pytest.raises(RuntimeError, match="frozen float8 weight cannot require a gradient.*module_filter_fn"):
        peft.get_peft_model(build_base("blockwise"), peft.LoraConfig(**LORA, modules_to_save=["gate_proj"]))
    model = peft.get_peft_model(build_base("blockwise"), peft.LoraConfig(**LORA, modules_to_save=["lm_head"]))
    head = model.get_parameter("base_model.model.lm_head.modules_to_save.default.weight")
    before = head.detach().clone()
    train_by_hand(model)
    assert not head.equal(before)

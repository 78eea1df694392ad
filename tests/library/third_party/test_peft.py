"""Tests PEFT on a converted model, and the conversion of a PEFT model."""

import copy

import peft
import pytest
import torch

from quaver import convert_to_float8_training, freeze_to_float8
from tests.library.third_party.checkpoints import compute_logits
from tests.library.third_party.llama import LORA, build_adapted, is_not_head, list_float8_names, llama, train_by_hand
from tests.library.third_party.table import proves
from tests.thinned import at_night, thinned


@proves("PEFT", "adapters before", "adapters after")
@pytest.mark.parametrize("recipe", ["tensorwise", *at_night([("rowwise",), ("rowwise_with_gw_hp",)])])
def test_the_order_of_conversion_and_adapters_does_not_matter(recipe):
    first, second = (build_adapted(recipe, order) for order in ("convert, then adapt", "adapt, then convert"))
    for wrapped, converted in zip(first.parameters(), second.parameters(), strict=True):
        converted.data.copy_(wrapped)
    assert list_float8_names(first) == list_float8_names(second)
    assert len(list_float8_names(first)) == 14
    assert not any("lora" in name for name in list_float8_names(first))
    assert train_by_hand(first) == train_by_hand(second)


@proves("PEFT", "merge")
def test_merging_gives_the_float8_model_of_the_merged_weights():
    model = build_adapted("tensorwise")
    train_by_hand(model)
    merged, expected = model.merge_and_unload(), llama("tensorwise")
    expected.load_state_dict(merged.state_dict())
    assert len(list_float8_names(merged)) == 14
    assert torch.equal(compute_logits(merged), compute_logits(expected))


TARGETS = {"target_modules": LORA["target_modules"]}
ADAPTERS = {
    **{name: peft.LoraConfig(**LORA, init_lora_weights=name) for name in ("pissa", "olora")},
    "dora": peft.LoraConfig(**LORA, use_dora=True),
    "head trains": peft.LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "adalora": peft.AdaLoraConfig(total_step=10, **TARGETS),
    "ia3": peft.IA3Config(task_type="CAUSAL_LM"),
    "loha": peft.LoHaConfig(r=4, **TARGETS),
    "lokr": peft.LoKrConfig(r=4, **TARGETS),
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "fourier": peft.FourierFTConfig(n_frequency=10, **TARGETS),
    "oft": peft.OFTConfig(r=0, oft_block_size=16, **TARGETS),
    "boft": peft.BOFTConfig(boft_block_size=8, **TARGETS),
    "hra": peft.HRAConfig(r=4, **TARGETS),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.mark.parametrize(("kind", "is_frozen"), thinned(ADAPTERS, [True, False], together=1))
def test_other_adapters_train_and_load(kind, is_frozen, tmp_path):
    def build():
        model = llama(layers=1)
        freeze_or_convert = freeze_to_float8 if is_frozen else convert_to_float8_training
        return freeze_or_convert(model, config="rowwise", module_filter_fn=is_not_head)

    torch.manual_seed(1)
    if is_frozen and kind == "hra":  # which needs the transposed weight
        with pytest.raises(NotImplementedError, match=r"has no views in high precision.*call to_high_precision\(\)"):
            train_by_hand(peft.get_peft_model(build(), ADAPTERS[kind]), only=[0])
        return
    model = peft.get_peft_model(build(), ADAPTERS[kind])
    before = copy.deepcopy([p for p in model.parameters() if p.requires_grad])
    assert all(loss > 0 for loss in train_by_hand(model, only=range(2)))
    after = [p for p in model.parameters() if p.requires_grad]
    assert any(not torch.equal(new, old) for new, old in zip(after, before, strict=True))
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build(), tmp_path)
    assert torch.equal(compute_logits(loaded), compute_logits(model))


@proves("PEFT", "compile")
@pytest.mark.nightly
def test_compilation_changes_no_loss():
    eager, compiled = build_adapted("rowwise"), build_adapted("rowwise")
    losses = train_by_hand(torch.compile(compiled, backend="aot_eager", fullgraph=True))
    assert losses == pytest.approx(train_by_hand(eager), rel=1e-4)

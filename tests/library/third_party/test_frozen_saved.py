"""Tests that other libraries save and load a frozen float8 base in high precision."""

from functools import partial

import accelerate
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_model, save_model
from transformers import AutoModelForCausalLM

from quaver import convert_to_high_precision, freeze_to_float8
from quaver.runtime.slow_paths import list_slow_paths
from tests.library.third_party.llama import is_not_head
from tests.steps import assert_same
from tests.thinned import thinned

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"vocab_size": 32, "num_key_value_heads": 2, "use_cache": False}
KINDS = ("llama", "mixtral")


def build_plain(kind):
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16()
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=2, **SIZES)).bfloat16()


def build_frozen(kind, recipe="tensorwise"):
    return freeze_to_float8(build_plain(kind), config=recipe, module_filter_fn=is_not_head)


def assert_same_codes(model, expected):
    for name, weight in expected.named_parameters():
        if hasattr(weight, "data_fp8"):
            assert_same(model.get_parameter(name).data_fp8, weight.data_fp8, name)
            assert_same(model.get_parameter(name).dequant_scale, weight.dequant_scale, name)


def save_by_trainer(model, folder):
    transformers.Trainer(model, transformers.TrainingArguments(folder, report_to=[], use_cpu=True)).save_model()


def merge_and_save(model, folder):
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # its delta is 0
    model.merge_and_unload().save_pretrained(folder)


SAVE = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="20KB"),
    "a state_dict": lambda model, folder: model.save_pretrained(folder, state_dict=model.state_dict()),
    "Trainer": save_by_trainer,
    "merged": merge_and_save,
}


@pytest.mark.parametrize(("way", "kind"), thinned(SAVE, KINDS, together=1))
def test_from_pretrained_reads_what_was_saved(way, kind, tmp_path):
    expected = convert_to_high_precision(build_frozen(kind)).state_dict()
    SAVE[way](build_frozen(kind), tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.bfloat16)
    assert not any(info.values()), info
    assert_same(loaded.state_dict(), expected)


def save_by_accelerate(model, folder):
    accelerate.Accelerator(cpu=True).save_model(model, folder)


def save_one_more(model, folder):
    torch.save({**model.state_dict(), "more": torch.ones(1)}, folder / "x")


def read_torch(model, folder, strict=True):
    model.load_state_dict(torch.load(folder / "x", weights_only=True), strict=strict)


def read_dcp(model, folder):
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)


WRITE_AND_READ = {
    "torch": (lambda model, folder: torch.save(model.state_dict(), folder / "x"), read_torch),
    "safetensors": (lambda model, to: save_model(model, to / "x"), lambda model, to: load_model(model, to / "x")),
    "accelerate": (save_by_accelerate, accelerate.load_checkpoint_in_model),
    "DCP": (lambda model, folder: dcp.save(model.state_dict(), checkpoint_id=folder), read_dcp),
    "strict=False": (save_one_more, partial(read_torch, strict=False)),
}


@pytest.mark.parametrize("way", WRITE_AND_READ)
def test_a_state_dict_is_read_by_a_plain_model_and_by_a_frozen_one(way, tmp_path):
    write, read = WRITE_AND_READ[way]
    model, plain, frozen = build_frozen("llama"), build_plain("llama"), build_frozen("llama")
    write(model, tmp_path)
    torch.nn.init.normal_(plain.model.layers[0].mlp.up_proj.weight)
    read(plain, tmp_path)
    read(frozen, tmp_path)
    assert_same_codes(frozen, model)
    assert_same(plain.state_dict(), convert_to_high_precision(model).state_dict())


def offload_to_cpu(model, folder):
    accelerate.cpu_offload(model, torch.device("cpu"))


def offload_to_disk(model, folder):
    accelerate.disk_offload(model, folder, torch.device("cpu"))


def dispatch(model, folder):
    """As a device map of a GPU and the CPU does, which asks for the memory of what is offloaded."""
    weights = {name: value.to("cpu") for name, value in model.state_dict().items()}
    options = {"execution_device": torch.device("cpu"), "offload": True, "weights_map": weights, "tied_params_map": {}}
    accelerate.hooks.attach_align_device_hook(model, **options)


@pytest.mark.parametrize(
    ("offload", "recipe", "kind"),
    thinned([offload_to_cpu, offload_to_disk, dispatch], ["tensorwise", "rowwise", "blockwise"], KINDS, together=1),
)
def test_accelerate_offloads_a_frozen_base(offload, recipe, kind, tmp_path):
    model, tokens = build_frozen(kind, recipe), torch.arange(16).view(2, 8)
    expected = model(tokens).logits
    offload(model, tmp_path)
    for _ in range(2):
        assert all(parameter.is_meta for parameter in model.parameters())
        assert_same(model(tokens).logits, expected)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert_same(model(tokens).logits, expected)
    if offload is offload_to_disk:  # it stores values
        assert any("as Accelerate's disk offload stores them" in path for path in list_slow_paths())
    else:
        assert_same_codes(model, build_frozen(kind, recipe))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_prepares_a_frozen_base(kind):
    """Frozen weights present float32, as all other parameters do, and keep their codes."""
    model = prepare_model_for_kbit_training(build_frozen(kind), use_gradient_checkpointing=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_same_codes(model, build_frozen(kind))
    tokens = torch.arange(8).view(1, 8)
    assert_same(model(tokens).logits, build_frozen(kind).float()(tokens).logits)

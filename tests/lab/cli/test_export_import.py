"""Tests what `quaver export` of a Hugging Face folder and `quaver import` print, and that bad input is one line."""

import json
import logging
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from quaver import convert_to_float8_training
from quaver.export import load_float8, save_float8, set_kv_scales
from quaver.lab.cli import export, main
from quaver.lab.runs.checkpoint_folder import read_record, write_record
from quaver.runtime.errors import InputError
from tests.library.export.models import saved

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def folder(tmp_path):
    """Return a Hugging Face folder in high precision."""
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_export_says_what_was_written(folder, tmp_path, capsys):
    options = ["--recipe=tensorwise", "--measure-tokens=16", "--dtype=float32"]
    assert main(["export", str(folder), str(tmp_path / "out"), *options]) == 0
    printed = capsys.readouterr().out
    assert "7 float8 weights of the recipe tensorwise in the format compressed-tensors" in printed
    assert "weights have other codes than in training; the largest loss is" in printed
    assert json.loads((tmp_path / "out" / "quaver_export.json").read_text())["logits"]["tokens"] == 16
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype is torch.float32


def test_export_takes_the_scales_of_a_kv_cache_from_a_float8_folder(folder, tmp_path, run_refused):
    model = convert_to_float8_training(LlamaForCausalLM.from_pretrained(folder), config="rowwise")
    save_float8(model, tmp_path / "without")
    scales = {f"model.layers.0.self_attn.{leaf}": 2.0 for leaf in ("k_scale", "v_scale")}
    set_kv_scales(model, scales)
    save_float8(model, tmp_path / "with")
    export = ["export", str(folder), str(tmp_path / "out"), "--recipe=rowwise", "--kv-scales"]
    nowhere = ["export", tmp_path / "nowhere", *export[2:]]  # refused before the source is read
    assert "--kv-scales must be a folder with scales of a KV cache" in run_refused(*nowhere, tmp_path / "without")
    assert main([*export, str(tmp_path / "with")]) == 0
    assert load_float8(tmp_path / "out").kv_scales == scales


def test_own_scales_are_refused_where_scales_are_not_per_tensor(folder, tmp_path, run_refused):
    argv = ["export", folder, tmp_path / "out", "--own-scales", "--recipe"]
    for recipe in ("rowwise", "blockwise"):
        assert "--own-scales must be its default, False, unless a folder's" in run_refused(*argv, recipe)
    assert main([*map(str, argv), "tensorwise"]) == 0


def test_import_says_what_was_written(tmp_path, capsys):
    folder = saved(tmp_path / "float8")
    assert main(["import", str(folder), str(tmp_path / "out"), "--dtype=float32", "--max-shard-size=5KB"]) == 0
    assert "6 float8 weights dequantized to float32" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_bad_input_is_one_line(tmp_path, run_refused):
    folder = saved(tmp_path / "float8")
    assert "is quantized already" in run_refused("export", folder, tmp_path / "out", "--recipe=rowwise")
    argv = (tmp_path / "nowhere", tmp_path / "out", "--recipe=rowwise", "--max-shard-size=much")
    assert "--max-shard-size must be a size" in run_refused("export", *argv)
    argv = (folder / "model.safetensors", tmp_path / "out.safetensors", "--max-shard-size=1GB")
    assert "--max-shard-size must be its default" in run_refused("import", *argv)
    assert "config.json': expected a folder or a .safetensors file" in run_refused(
        "import", folder / "config.json", "out"
    )
    (folder / "config.json").unlink()
    assert "has no config.json" in run_refused("import", folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["float8"]


CANNOT = "transformers cannot build the model of .*: "
DAMAGES = {
    "wrong type": ("config.json", {"hidden_size": "32"}, f"{CANNOT}Strict.*Field 'hidden_size' expected int"),
    "unknown name": ("config.json", {"hidden_act": "nope"}, f"{CANNOT}KeyError: 'nope'"),
    "division by zero": ("config.json", {"num_attention_heads": 0}, f"{CANNOT}ZeroDivisionError"),
    "unhashable": ("config.json", {"model_type": ["llama"], "auto_map": {}}, "brings the code of its model"),
    "other shape": ("config.json", {"vocab_size": 48}, r"lm_head.weight: expected \[48, 32\].*got \[64, 32\]"),
    "tokenizer": ("tokenizer_config.json", None, "tokenizer_config.json': expected a JSON object: .*download it again"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_source_is_one_line(damage, folder, tmp_path, run_refused):
    name, change, message = DAMAGES[damage]
    (folder / name).write_text("{" if change is None else json.dumps(json.loads((folder / name).read_text()) | change))
    assert re.search(message, run_refused("export", folder, tmp_path / "out", "--recipe=rowwise"))
    assert not (tmp_path / "out").exists()


def test_what_torchao_logs_at_its_import_is_hidden(folder, tmp_path, monkeypatch, caplog):
    """The real import happens once in a process, so that this logs its lines."""

    def open_source(*args, **options):
        logging.getLogger("torchao").warning("Failed to load %s", "_C.so")
        logging.getLogger("torchao").warning("anything else")
        raise InputError("no model")

    monkeypatch.setattr(export, "open_huggingface_source", open_source)
    with pytest.raises(SystemExit):
        main(["export", str(folder), str(tmp_path / "out"), "--recipe=rowwise"])
    assert caplog.messages == ["anything else"]
    assert not logging.getLogger("torchao").filters


def test_biases_that_a_folder_lacks_are_named(folder, tmp_path, caplog):
    """A reader of the export would initialize them."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mlp_bias": True}))
    assert main(["export", str(folder), str(tmp_path / "out"), "--recipe=rowwise"]) == 0
    assert "got none for model.layers.0.mlp.gate_proj.bias" in caplog.text


@pytest.mark.parametrize("section", [{"config": {"float8": 7}}, {"conversion_report": {"layers": [{"name": 7}]}}])
def test_a_damaged_section_of_a_checkpoint_is_one_line(section, folder, tmp_path, run_refused):
    assert main(["convert", "hf-to-quaver", str(folder), str(tmp_path / "checkpoint")]) == 0
    record = read_record(tmp_path / "checkpoint")
    record["config"] |= section.pop("config", {})
    write_record(tmp_path / "checkpoint", record | section)
    assert "checkpoint.json' is damaged: con" in run_refused("export", tmp_path / "checkpoint", tmp_path / "out")


def test_a_name_that_leaves_no_room_for_a_partial_folder_is_refused_before_the_work(folder, tmp_path, run_refused):
    for length in (247, 255, 256):
        line = run_refused("export", tmp_path / "nowhere", tmp_path / ("n" * length), "--recipe=rowwise")
        assert line.endswith(f"expected a name of at most 246 bytes, got {length}")
    assert main(["export", str(folder), str(tmp_path / ("n" * 246)), "--recipe=rowwise"]) == 0

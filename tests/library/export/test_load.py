"""Tests that `import_float8` and `load_float8` dequantize codes, and that bad input is refused and leaves nothing."""

import errno
import json
import re
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quaver import FrozenFloat8Linear, convert_to_high_precision
from quaver.export import import_float8, load_float8, load_frozen, save_float8
from quaver.runtime.errors import InputError, NotWrittenError
from tests.library.export.models import PROJECTIONS, Tiny, saved, tiny
from tests.steps import assert_same


def test_import_writes_a_folder_to_train_from(tmp_path):
    folder = saved(tmp_path / "out")
    (folder / "tokenizer.json").write_text("{}")
    stated = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(stated))
    (folder / "quaver_export.json").unlink()  # which has the digest of the file before
    assert import_float8(folder, tmp_path / "hp", dtype=torch.float32, max_shard_bytes=5000) == 6
    config = json.loads((tmp_path / "hp" / "config.json").read_text())
    assert config == {"model_type": "tiny", "torch_dtype": "float32"}
    assert (tmp_path / "hp" / "tokenizer.json").exists()
    index = json.loads((tmp_path / "hp" / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted((tmp_path / "hp").glob("*.safetensors"))
    modes = {file.stat().st_mode for file in (*files, tmp_path / "hp" / "config.json")}
    assert len(modes) == 1, "safetensors alone writes files that only their owner may read"
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = load_float8(folder, dtype=torch.float32)
    assert stored.keys() == index.keys()
    assert_same(stored, expected)


def test_a_suffix_is_no_evidence_of_a_scale(tmp_path):
    """Scales of activations and of caches have a quantized module beside them; other tensors are the model's."""
    folder, others = saved(tmp_path / "out"), ["altup.correct_output_scale", "norm.input_scale", "lm_head.k_scale"]
    scales = ["layer.q_proj.input_scale", "layer.o_proj.output_scale", "layer.k_scale", "layer.prob_scale"]
    (folder / "quaver_export.json").unlink()
    change_tensors(folder, {name: torch.ones(1) for name in (*others, *scales)})
    loaded = load_float8(folder)
    assert set(loaded) == {*tiny().state_dict(), *others}
    assert loaded.kv_scales == {"layer.k_scale": 1.0}


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))


def change_tensors(folder, changes):
    """Replace tensors of a folder, or remove those that are None."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def remove_quantization(folder):
    (folder / "config.json").write_text("{}")
    change_tensors(folder, HIGH_PRECISION)


def use_blocks_with_other_scales(folder):
    change_config(folder, quant_method="fp8", weight_block_size=[128, 128])
    change_tensors(folder, {SCALE: torch.ones(31, 1)})


def point_outside(folder):
    (folder / "model.safetensors").rename(folder.parent / "away.safetensors")
    index = {"weight_map": {"norm.weight": "../away.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lose_a_shard(folder):
    """Name a file in the index that is not there, as after a download that stopped early."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = dict.fromkeys(load_file(folder / "a.safetensors"), "a.safetensors")
    index = {"weight_map": {**names, "more.weight": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


WEIGHT, SCALE = "layer.q_proj.weight", "layer.q_proj.weight_scale"
INT8 = {"a": {"weights": {"type": "int", "num_bits": 8}}}
NO_BLOCKS = {"quant_method": "fp8", "weight_block_size": [0, 64]}
HIGH_PRECISION = {f"layer.{name}.weight{leaf}": None for name in PROJECTIONS for leaf in ("", "_scale")}
TENSORS = {
    f"{WEIGHT} (F8_E4M3): expected one scale, got none": {SCALE: None},
    f"the scale of {WEIGHT} [32, 32]: expected [1], [32, 1], [1, 32] or one per block whose rows and columns are "
    "powers of two and divide it, got [31, 1]; give the block size as weight_block_size in config.json": {
        SCALE: torch.ones(31, 1)
    },
    f"the scale of {WEIGHT} has an inf or a NaN": {SCALE: torch.full((32, 1), torch.nan)},
    f"the scale of {WEIGHT}: expected F32, BF16, F16, F8_E8M0 or U8, got torch.int32": {SCALE: torch.ones(32, 1).int()},
    f"{WEIGHT} (F8_E4M3): expected one scale, got {SCALE}, layer.q_proj.scale": {"layer.q_proj.scale": torch.ones(1)},
    f"{WEIGHT} has a NaN": {WEIGHT: torch.full((32, 32), torch.nan).to(torch.float8_e4m3fn)},
    f"{WEIGHT} (U8); quaver reads weights in F8_E4M3 or F8_E5M2": {WEIGHT: torch.ones(32, 16, dtype=torch.uint8)},
    f"scales without a float8 weight: {SCALE}": {WEIGHT: torch.ones(32, 32)},
    "expected float8 weights for quant_method 'compressed-tensors' of config.json, got none": HIGH_PRECISION,
}
CONFIGS = {
    "quant_method in config.json is 'awq'; quaver reads weights in F8": {"quant_method": "awq"},
    "expected 8-bit floats with one scale per tensor, channel, block, group, got {'type'": {"config_groups": INT8},
    "config_groups in config.json: expected an object": {"config_groups": None},
    "weights are those of a rotated": {"transform_config": {"config_groups": {}}},
    "blocks in config.json: expected [rows, columns], such as [128, 128], got [0, 64]": NO_BLOCKS,
}
BAD = {
    **{message: partial(change_tensors, changes=changes) for message, changes in TENSORS.items()},
    **{message: partial(change_config, **changes) for message, changes in CONFIGS.items()},
    "expected float8 weights, got only high precision": remove_quantization,
    "has no config.json": lambda folder: (folder / "config.json").unlink(),
    "[32, 32]: expected [1], [32, 1], [1, 32] or [1, 1] (128 x 128 blocks), got [31, 1]": use_blocks_with_other_scales,
    "../away.safetensors', which is not there": point_outside,
    "expected model.safetensors, or shards and model.saf": lambda folder: (folder / "model.safetensors").unlink(),
    "b.safetensors', which is not there; download it again": lose_a_shard,
    "is damaged": cut,
}
"""The message for each change of a folder."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("export") / "out")


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_and_leaves_nothing(message, exported, tmp_path):
    folder, model = Path(shutil.copytree(exported, tmp_path / "in")), Tiny()
    (folder / "quaver_export.json").unlink()  # which has the digests of the files
    BAD[message](folder)
    for load in (lambda: import_float8(folder, tmp_path / "out"), lambda: load_frozen(model, folder)):
        with pytest.raises((OSError, ValueError, NotImplementedError), match=re.escape(message)):
            load()
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    assert not any(isinstance(module, FrozenFloat8Linear) for module in model.modules())


def test_a_folder_is_compared_with_its_digests(exported, tmp_path):
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    load_float8(folder)
    record = json.loads((folder / "quaver_export.json").read_text())
    assert set(record["sha256"]) == {"README.md", "config.json", "model.safetensors"}
    assert record["recipe"] == "rowwise"
    change_tensors(folder, {"norm.weight": torch.zeros(32)})
    with pytest.raises(ValueError, match=r"differ from their sha256 in quaver_export.json: model.safetensors"):
        load_float8(folder)
    (folder / "README.md").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks files that quaver_export.json names: README.md"):
        load_float8(folder)


def test_an_error_leaves_nothing_and_an_existing_folder_stays(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match="lm_head.weight has an inf or a NaN"):
        save_float8(model, tmp_path / "out", config={})
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match="exists already"):
        save_float8(tiny(), tmp_path, config={})
    with pytest.raises(ValueError, match="config: expected the content of config.json"):
        save_float8(tiny(), tmp_path / "out")


WEIGHTS = "model.safetensors", "other.safetensors", "model.safetensors.index.json"
COPIED = {
    **{f"such as config.json, got .*{name}": [name] for name in (*WEIGHTS, "config.json", "README.md")},
    "expected one vocab.json, got .*vocab.json' and .*vocab.json": ["vocab.json", "again/vocab.json"],
    "is not a file": ["again"],
}


@pytest.mark.parametrize("message", COPIED)
def test_files_that_would_replace_others_are_refused_before_the_work(message, tmp_path):
    source = tmp_path / "source"
    (source / "again").mkdir(parents=True)
    files = [source / name for name in COPIED[message]]
    for file in files:
        if not file.is_dir():
            file.write_text("{}")
    with pytest.raises((InputError, FileNotFoundError), match=message):
        saved(tmp_path / "out", files=files, make_hp_model=pytest.fail)
    with pytest.raises(FileExistsError, match="source' exists already"):
        saved(source, make_hp_model=pytest.fail)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("number", [0, -1, "5GB"])
@pytest.mark.parametrize("option", ["max_shard_bytes", "measure_tokens"])
def test_numbers_below_1_are_refused_before_the_work(option, number, tmp_path):
    with pytest.raises(ValueError, match=f"^{option}: expected an integer, 1 or more, got {number!r}$"):
        saved(tmp_path / "out", make_hp_model=pytest.fail, **{option: number})
    with pytest.raises(ValueError, match="^max_shard_bytes: expected an integer, 1 or more, got"):
        import_float8(tmp_path, tmp_path / "out", max_shard_bytes=number)


def test_the_change_of_the_logits_is_measured(tmp_path):
    folder = saved(tmp_path / "out", make_hp_model=lambda: convert_to_high_precision(tiny()), measure_tokens=32)
    logits = json.loads((folder / "quaver_export.json").read_text())["logits"]
    assert logits["tokens"] == 32
    assert 15 < logits["sqnr_db"] < 60
    assert f"SQNR {logits['sqnr_db']:.2f} dB" in (folder / "README.md").read_text()


def test_the_measurement_refuses_the_exported_model(tmp_path):
    model = convert_to_high_precision(tiny())
    with pytest.raises(InputError, match="^make_hp_model: .* got the exported model; return copy"):
        save_float8(model, tmp_path / "out", recipe="rowwise", config={}, make_hp_model=lambda: model)
    assert model.training


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (RuntimeError("mask?"), InputError, r"Tiny does not take tokens alone \(mask\?\)$"),
        (torch.OutOfMemoryError("no room"), torch.OutOfMemoryError, "^no room$"),
    ],
)
def test_errors_of_the_measured_model_are_raised(error, raised, message, tmp_path):
    model = convert_to_high_precision(tiny())
    model.forward = Mock(side_effect=error)
    with pytest.raises(raised, match=message):
        saved(tmp_path / "out", make_hp_model=lambda: model)
    with pytest.raises(InputError, match="^the logits cannot be measured: Linear has no nn.Embedding"):
        saved(tmp_path / "out", make_hp_model=lambda: nn.Linear(32, 32))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_full_disk_leaves_nothing(name, exported, tmp_path, monkeypatch):
    """The disk has no room from one of the files on."""
    folder = Path(shutil.copytree(exported, tmp_path / "in"))
    (folder / "tokenizer.json").write_text("{}")

    def fail_when_full(write, position):
        def write_or_fail(*arguments, **options):
            file = Path(arguments[position])
            if ".out.partial" in str(file) and name in (file.name, "model.safetensors"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*arguments, **options)

        return write_or_fail

    monkeypatch.setattr("safetensors.torch.save_file", fail_when_full(save_file, 1))
    monkeypatch.setattr(Path, "write_text", fail_when_full(Path.write_text, 0))
    monkeypatch.setattr(shutil, "copyfile", fail_when_full(shutil.copyfile, 1))
    with pytest.raises(NotWrittenError, match=r"^(cannot write )?'.*/out': .*No space left on device$"):
        import_float8(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]

"""Tests weights whose last blocks are cut, as DeepSeek-V3's `kv_a_proj_with_mqa` (576 x 7168), out and back in."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quaver import convert_to_float8_training, freeze_to_float8
from quaver.conversion.freeze import make_blockwise_config
from quaver.export import import_float8, load_float8, load_frozen, save_float8
from quaver.recipes.scaling import dynamic_cast_blocks
from tests.reference import lowest_sqnr_db
from tests.steps import assert_same, train

ROWS, COLUMNS = 192, 200
SCALE = {"fp8": "weight_scale_inv", "compressed-tensors-block": "weight_scale"}
FORMAT = pytest.mark.parametrize("format", SCALE)


def build_ragged():
    """Return two linears, the same at each call. Rows and columns of the first, ROWS x COLUMNS, differ in magnitude."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Linear(ROWS, 8, bias=False))
    with torch.no_grad():
        weight = model[0].weight
        weight.mul_(torch.logspace(-1, 1, ROWS)[:, None]).mul_(torch.logspace(1, -1, COLUMNS))
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function that returns the folder of a format, and its tensors."""
    root = tmp_path_factory.mktemp("export")

    @functools.cache
    def export(format):
        model = freeze_to_float8(build_ragged(), config=make_blockwise_config(power_of_2=False))
        save_float8(model, root / format, config={}, format=format)
        return root / format, load_file(root / format / "model.safetensors")

    return export


@FORMAT
def test_values_are_codes_times_the_scales_of_their_blocks(format, exported, tmp_path):
    folder, stored = exported(format)
    loaded = load_float8(folder, dtype=torch.float32)
    import_float8(folder, tmp_path / "hp", dtype=torch.float32)
    imported = load_file(tmp_path / "hp" / "model.safetensors")
    for name in ("0.weight", "1.weight"):
        codes, scale = stored[name], stored[name.replace("weight", SCALE[format])]
        rows, columns = codes.shape
        values = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        assert loaded[name].equal(values)
        assert imported[name].equal(values)


@FORMAT
def test_the_codes_of_training_are_quantized_again_in_blocks(format, tmp_path):
    for recipe in ("rowwise", "tensorwise"):
        frozen = freeze_to_float8(build_ragged(), config=recipe)
        written = save_float8(frozen, tmp_path / recipe, config={}, format=format)
        assert set(written.requantized) == {"0", "1"}
        assert all(cost.stored_db > lowest_sqnr_db(3, 3) for cost in written.requantized.values())
        assert load_file(tmp_path / recipe / "model.safetensors")[f"0.{SCALE[format]}"].shape == (2, 2)


@FORMAT
def test_the_export_says_which_weights_are_ragged(format, tmp_path, caplog):
    save_float8(freeze_to_float8(build_ragged()), tmp_path / "out", config={}, format=format)
    warnings = [record.getMessage() for record in caplog.records if record.name == "quaver.export.save"]
    assert len(warnings) == (format == "fp8")  # transformers reads these wrong without a GPU
    assert all(line.startswith("0, 1: a dimension is not a multiple of 128") for line in warnings)
    assert json.loads((tmp_path / "out" / "quaver_export.json").read_text())["ragged"] == ["0", "1"]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "incomplete last blocks, because a dimension is not a multiple of 128: 0, 1." in card


@FORMAT
def test_scales_of_whole_blocks_alone_are_refused(format, exported, tmp_path):
    folder, tensors = exported(format)
    scales = {f"0.{SCALE[format]}": torch.ones(ROWS // 128, COLUMNS // 128)}
    save_file(tensors | scales, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"0.weight \[192, 200\]: .* \[2, 2\] \(128 x 128 blocks\), got \[1, 1\]"):
        load_float8(tmp_path)


@FORMAT
def test_training_goes_on_from_an_export_to_the_bit(format, tmp_path):
    """Values of powers of two are exact in bfloat16, and their blocks are quantized to the same values again."""
    trained = convert_to_float8_training(build_ragged().bfloat16(), config="blockwise")
    written = save_float8(trained, tmp_path / "out", config={}, format=format)
    assert not written.requantized
    resumed = build_ragged().bfloat16()
    resumed.load_state_dict(load_float8(tmp_path / "out", dtype=torch.bfloat16))
    convert_to_float8_training(resumed, config="blockwise")
    input = torch.linspace(-1, 1, 3 * COLUMNS).view(3, COLUMNS).bfloat16().requires_grad_()
    results = []
    for model in (trained, resumed, load_frozen(build_ragged().bfloat16(), tmp_path / "out")):
        output = model(input)
        results.append((output, *torch.autograd.grad(output.sum(), [input])))
    assert_same(results[1:], [results[0]] * 2)


@FORMAT
def test_training_goes_on_from_float32_scales_with_the_codes_of_the_file(format, exported):
    """The layout of DeepSeek's and Qwen's checkpoints: the largest code of a block is 448, so its scale comes again."""
    folder, stored = exported(format)
    values = load_float8(folder, dtype=torch.float32)
    for name in ("0.weight", "1.weight"):
        codes, _, scale = dynamic_cast_blocks(values[name], torch.float8_e4m3fn)
        assert codes.view(torch.uint8).equal(stored[name].view(torch.uint8))
        torch.testing.assert_close(scale, stored[name.replace("weight", SCALE[format])], rtol=2**-22, atol=0)
    model = build_ragged()
    model.load_state_dict(values)
    convert_to_float8_training(model, config=make_blockwise_config(power_of_2=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, [torch.linspace(-1, 1, 3 * COLUMNS).view(3, COLUMNS)] * 5)
    assert losses[-1] < 0.9 * losses[0]

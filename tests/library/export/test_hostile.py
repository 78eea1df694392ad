"""Tests that a damaged or invented file of a float8 checkpoint is read, or refused with one line."""

import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from quaver.export import load_float8
from quaver.export.companion_files import RECORD_FILE
from quaver.export.files import CONFIG_JSON, INDEX_FILE, SINGLE_FILE

WEIGHTS = {"a.weight": torch.ones(32, 16).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(32, 1)}
WEIGHTS |= {"norm.weight": torch.ones(16)}
GROUPS = {"g": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}, "input_activations": None}}
QUANTIZATION = {"quant_method": "compressed-tensors", "config_groups": GROUPS}
GOOD = {CONFIG_JSON: json.dumps({"quantization_config": QUANTIZATION}).encode(), SINGLE_FILE: save(WEIGHTS)}

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS | st.sampled_from(["fp8", "a.weight"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def objects(*keys: str) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.sampled_from(keys), VALUES)


def encoded(values: st.SearchStrategy[object]) -> st.SearchStrategy[bytes]:
    texts = values.map(json.dumps).map(str.encode)
    deep = st.integers(1, 10**5).map(lambda depth: b'{"quantization_config":' * depth)
    return texts | st.binary(max_size=20) | deep


def mutated(content: bytes) -> st.SearchStrategy[bytes]:
    def change(changes: list[tuple[int, int]], length: int) -> bytes:
        changed = bytearray(content)
        for place, value in changes:
            changed[place] = value
        return bytes(changed[:length])

    places = st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=4)
    return st.builds(change, places, st.integers(0, len(content)) | st.just(len(content)))


GROUPS_OF_A_CONFIG = VALUES | st.dictionaries(st.text(max_size=2), objects("weights", "input_activations") | VALUES)
CONFIGS = st.builds(lambda groups: {**QUANTIZATION, "config_groups": groups}, GROUPS_OF_A_CONFIG)
CONFIGS |= objects("quant_method", "weight_block_size", "config_groups") | VALUES
FILES: dict[str, st.SearchStrategy[bytes]] = {
    CONFIG_JSON: encoded(st.fixed_dictionaries({"quantization_config": CONFIGS})) | mutated(GOOD[CONFIG_JSON]),
    SINGLE_FILE: mutated(GOOD[SINGLE_FILE]),
    INDEX_FILE: encoded(objects("weight_map", "metadata")),
    "quaver_export.json": encoded(
        st.fixed_dictionaries({"sha256": objects(CONFIG_JSON, SINGLE_FILE, "..", "") | VALUES})
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("examples", [60, pytest.param(50_000, marks=[pytest.mark.nightly, pytest.mark.timeout(0)])])
def test_any_file_of_a_float8_checkpoint_is_read_or_refused(examples, name, tmp_path):
    for path, content in GOOD.items():
        (tmp_path / path).write_bytes(content)
    if name == INDEX_FILE:  # which is read if there is no single file
        (tmp_path / SINGLE_FILE).rename(tmp_path / "a.safetensors")

    @settings(max_examples=examples, deadline=None, derandomize=examples < 1000)
    @given(FILES[name])
    def load_one(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        message = ""
        try:
            dict(load_float8(tmp_path))
        except (OSError, ValueError, NotImplementedError) as error:
            message = str(error)
        assert "\n" not in message

    if name == RECORD_FILE:
        load_one = example(b'{"sha256": {"\\n": null}}')(load_one)
    assert set(dict(load_float8(tmp_path))) == {"a.weight", "norm.weight"}
    load_one()


def test_control_characters_in_a_name_are_refused(tmp_path):
    (tmp_path / CONFIG_JSON).write_bytes(GOOD[CONFIG_JSON])
    (tmp_path / SINGLE_FILE).write_bytes(save({"a\x1b]0;title\x07\nb.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match="is not printable; download it again"):
        load_float8(tmp_path)


def test_a_target_that_is_no_regular_expression_is_refused(tmp_path):
    groups = {"g": {**GROUPS["g"], "targets": ["re:("]}}
    config = {"quantization_config": {**QUANTIZATION, "config_groups": groups}}
    (tmp_path / CONFIG_JSON).write_text(json.dumps(config))
    (tmp_path / SINGLE_FILE).write_bytes(GOOD[SINGLE_FILE])
    with pytest.raises(ValueError, match="targets in config.json: '\\(' is no regular expression"):
        load_float8(tmp_path)

"""Tests that a file defines a GPU that quaver has no numbers of."""

import pytest

from quaver.lab.plan.device_file import read_device_spec

WHOLE = """
name = "H20"
bfloat16_tflops = 148
float8_tflops = 296.0
memory_gb_per_s = 4000
memory_gb = 103.0
multiprocessors = 78
link_gb_per_s = 450
"""


def test_a_device_of_a_file(tmp_path):
    (tmp_path / "h20.toml").write_text(WHOLE)
    spec = read_device_spec(tmp_path / "h20.toml")
    assert (spec.name, spec.float8_tflops, spec.multiprocessors, spec.block_length) == ("H20", 296.0, 78, None)


@pytest.mark.parametrize(
    ("change", "message"),
    {
        "memory_gb = 103.0": ("", "memory_gb is missing"),
        "multiprocessors = 78": ("multiprocessors = 7.5", "multiprocessors: expected a number above 0, got 7.5"),
        'name = "H20"': ("name = 20", "name: expected text, got 20"),
        '"H20"': ('"h100"', "name: expected the name of another GPU, got 'h100', whose rates are known"),
        "link_gb_per_s = 450": ("link_gb_per_s = -1", "link_gb_per_s: expected a number above 0, got -1"),
        "float8_tflops = 296.0": ("float8_tflops = true", "float8_tflops: expected a number above 0, got True"),
        "bfloat16_tflops = 148": ("bfloat16_tflops = ", "expected TOML"),
        "memory_gb_per_s = 4000": ("memory_gb_per_s = 4000\nwatts = 1", "got watts"),
    }.items(),
)
def test_what_is_no_device_is_refused(change, message, tmp_path):
    old, (new, expected) = change, message
    (tmp_path / "gpu.toml").write_text(WHOLE.replace(old, new))
    with pytest.raises(ValueError, match=expected):
        read_device_spec(tmp_path / "gpu.toml")

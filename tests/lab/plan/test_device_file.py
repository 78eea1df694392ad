"""Tests that a file defines a GPU that quaver has no numbers of."""

import os
import re

import pytest

from quaver.lab.plan.device_file import read_device_spec
from quaver.runtime.errors import InputError

WHOLE = """
name = "H20"
bfloat16_tflops = 148
float8_tflops = 296.0
memory_gb_per_s = 4000
memory_gb = 103.0
multiprocessors = 78
link_gb_per_s = 450
"""


def test_a_device_is_read_from_a_file(tmp_path):
    (tmp_path / "h20.toml").write_text(WHOLE)
    spec = read_device_spec(tmp_path / "h20.toml")
    assert (spec.name, spec.float8_tflops, spec.multiprocessors, spec.block_length) == ("H20", 296.0, 78, None)


@pytest.mark.parametrize(
    ("change", "message"),
    {
        "memory_gb = 103.0": ("", "memory_gb is missing"),
        "multiprocessors = 78": (
            "multiprocessors = 7.5",
            "multiprocessors must be an integer of 1 to 100,000, got 7.5",
        ),
        'name = "H20"': ("name = 20", "name must be printable text, got 20"),
        'name = "H2': (r'name = "\u001b[31m', r"name must be printable text, got '\x1b[31m0'"),
        'H20"': ('"', "name must be printable text, got ''"),
        '"H20"': ('"h100"', "name must be that of a GPU whose rates quaver does not know, got 'h100'"),
        "450": ("1e-300", "link_gb_per_s must be a number of 0.1 to 1,000,000, got 1e-300"),
        "296.0": ("true", "float8_tflops must be a number of 0.1 to 1,000,000, got True"),
        "bfloat16_tflops = 148": ("bfloat16_tflops = ", "expected TOML"),
        "memory_gb_per_s = 4000": ("memory_gb_per_s = 4000\nwatts = 1", "got watts"),
        "103.0": ("1e300", "memory_gb must be a number of 0.1 to 1,000,000, got 1e+300"),
        "= 78": ("= 78\nblock_length = 64", "block_length must be one of 32, 128, got 64"),
    }.items(),
)
def test_what_is_no_device_is_refused(change, message, tmp_path):
    old, (new, expected) = change, message
    (tmp_path / "gpu.toml").write_text(WHOLE.replace(old, new))
    with pytest.raises(InputError, match=re.escape(expected)):
        read_device_spec(tmp_path / "gpu.toml")


@pytest.mark.timeout(60)
def test_a_fifo_is_refused_and_not_read(tmp_path):
    os.mkfifo(tmp_path / "gpu.toml")
    with pytest.raises(InputError, match="expected a TOML file, which is a regular file"):
        read_device_spec(tmp_path / "gpu.toml")

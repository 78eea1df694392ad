"""Tests that text is parsed as sizes in bytes."""

import pytest

from quaver.lab.terminal.byte_sizes import parse_bytes

SIZES = {"80GiB": 80 * 2**30, "80GB": 80 * 10**9, "1.5 tib": 3 * 2**39, " 7 kB ": 7000, "12B": 12, "1000": 1000}


def test_sizes_are_parsed_with_decimal_and_binary_units():
    assert {text: parse_bytes(text) for text in SIZES} == SIZES


NO_SIZES = ["", "GiB", "80 G", "-1GiB", "0", "0.1", "80GiB of it", "1e3", "nan", "80Gb", "8 Tib", "9" * 400]


@pytest.mark.parametrize("text", NO_SIZES)
def test_text_that_is_not_a_size_is_refused(text):
    with pytest.raises(ValueError, match="--fit must be a size above 0 such as 80GiB"):
        parse_bytes(text, "--fit")

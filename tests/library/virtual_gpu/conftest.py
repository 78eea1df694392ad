"""Provides a process whose Triton interprets, for all files of this folder."""

import pytest

from tests.library.kernels.triton_kernels import interpreting_process


@pytest.fixture(scope="package")
def interpreter():
    with interpreting_process() as call:
        yield call

"""The process of a file's tests whose Triton interprets."""

import pytest

from tests.library.kernels.triton_kernels import interpreting_process


@pytest.fixture(scope="module")
def interpreter():
    with interpreting_process() as call:
        yield call

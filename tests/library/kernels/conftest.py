"""Provides threads for the C extension, and a process whose Triton interprets."""

from collections.abc import Iterator

import pytest
import torch

from quaver.kernels import cpu


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set torch's number of threads, and let quaver's matmul use them for matrices of any size."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(cpu, "MIN_THREADED_MM_PRODUCTS", 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def interpreter():
    from tests.library.kernels.triton_kernels import interpreting_process  # imports triton

    with interpreting_process() as call:
        yield call

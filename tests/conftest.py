"""One thread per test process, seeds, and the GPU marker."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_state():
    """The same random numbers for each test, and no compiled code of an earlier one."""
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

"""One thread per test process, seeds, and the GPU marker."""

import pytest
import torch
import torch._functorch.config as compiler_config

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_state():
    """The same random numbers for each test, and no compiled code of an earlier one."""
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture
def memory_budget_restored():
    """The compiler's memory budget as it was; pytest's monkeypatch would take it out of torch's config for good."""
    with compiler_config.patch(activation_memory_budget=1.0):
        yield


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

"""The tests for a GPU pass on a virtual one: one case of each test in every run, and at least 95% of all at night.

Files outside FILES run at night: tests/library/kernels/test_triton_cast.py runs the kernels of test_triton_cast.py in
every run, and test_trainer.py is about what only a card records.
"""

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.library.kernels.triton_kernels import patch_the_language_once, process
from tests.thinned import at_night

FILES = "test_native.py", "test_features.py", "test_delayed.py", "test_linear_kernels.py", "test_distributed.py"
AT_NIGHT = "activations_are_stored", "fsdp_with_float8_all_gather", "tensor_and_sequence_parallel"
"""Each case casts for seconds. test_ranks.py has FSDP2 and tensor parallelism in every run."""


class Cases:
    """Keeps the first cases of each test, and counts how they end."""

    def __init__(self, most):
        self.most, self.passed, self.failed, self.skipped = most, 0, [], Counter()

    def pytest_collection_modifyitems(self, items):
        counts = Counter()
        for item in list(items):
            counts[item.location[0], item.originalname] += 1
            if self.most is not None and counts[item.location[0], item.originalname] > self.most:
                items.remove(item)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped[report.longrepr[2]] += 1
        elif report.when == "call":
            self.passed += 1


def run(files, most):
    patch_the_language_once()
    cases = Cases(most)
    folder = Path(__file__).parents[2] / "gpu"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "0"]
    if most:
        options += ["-k", f"not ({' or '.join(AT_NIGHT)})"]
    pytest.main([*(str(folder / name) for name in files or [""]), *options], plugins=[cases])
    return cases.passed, cases.failed, dict(cases.skipped)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("card", "files", "most"), [("h100", FILES, 1), *at_night((card, (), None) for card in ("h100", "b200"))]
)
def test_tests_for_a_gpu_pass_on_the_virtual_one(card, files, most):
    with process(TRITON_INTERPRET="1", QUAVER_VIRTUAL_GPU=card) as call:
        passed, failed, skipped = call(run, files, most)
    assert failed == []
    assert all("only a GPU can say" in reason for reason in skipped), skipped
    assert passed >= 20
    assert most or passed >= 0.95 * (passed + sum(skipped.values())), (passed, skipped)

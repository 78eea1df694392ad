"""quaver bench host: what it counts."""

import torch

from quaver.bench.host import count_operations


def test_operations_are_counted_by_name():
    a = torch.zeros(2, 3)
    assert count_operations(lambda: (a + 1 + a).t()) == {"aten.add.Tensor": 2, "aten.t.default": 1}

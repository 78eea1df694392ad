"""quaver bench host: what it counts, and its rows."""

import torch

from quaver.bench.host import Host, count_operations


def test_operations_are_counted_by_name():
    a = torch.zeros(2, 3)
    assert count_operations(lambda: (a + 1 + a).t()) == {"aten.add.Tensor": 2, "aten.t.default": 1}


def test_rows():
    result = Host(recipes=("tensorwise",), modes=("eager",), torchao="no", device="cpu", rounds=2).measure()
    plain, float8 = result["rows"]
    assert (plain["library"], float8["library"], float8["recipe"]) == ("bfloat16", "quaver", "tensorwise")
    assert plain["operations_by_name"]["aten.mm.default"] == 3
    assert float8["operations_by_name"]["quaver.exact_float8_mm.default"] == 3
    for row in (plain, float8):
        assert row["operations"] == sum(row["operations_by_name"].values())
        assert row["kernels"] is None
        assert row["time_over_bfloat16"] == row["timing"]["median_us"] / plain["timing"]["median_us"]

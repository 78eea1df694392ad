"""quaver bench host, and the traces that it and quaver profile read."""

import json

import pytest
import torch

from quaver.bench.host import Host, count_operations
from quaver.bench.trace import count_kernels, read_trace, record_trace

CPU = torch.device("cpu")


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


def test_a_trace_of_a_cpu_is_read_with_its_nesting(tmp_path):
    a = torch.randn(64, 64)

    def call():
        with torch.profiler.record_function("outer"):
            a.mm(a)

    trace = record_trace(call, CPU, tmp_path / "trace.json.gz")
    mm = next(each for each in trace.ranges if each.name == "aten::mm")
    assert mm.names_outwards()[:2] == ["aten::mm", "outer"]
    outer = mm.parent
    assert outer.self_us == pytest.approx(outer.end_us - outer.start_us - (mm.end_us - mm.start_us))
    assert trace.kernels == []
    assert count_kernels(call, CPU) is None


def _event(category, name, start, duration, thread=1, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "args": args}


def test_kernels_belong_to_the_range_that_launched_them(tmp_path):
    events = [
        _event("user_annotation", "quaver::cast", 0, 10),
        _event("cpu_op", "aten::mul", 2, 5),
        _event("cuda_runtime", "cudaLaunchKernel", 3, 1, correlation=7),
        _event("cuda_runtime", "cudaLaunchKernel", 20, 1, correlation=8),
        _event("kernel", "elementwise", 30, 4, thread=99, correlation=7),
        _event("kernel", "late", 40, 6, thread=99, correlation=8),
        _event("gpu_user_annotation", "quaver::cast", 30, 4, thread=99),
        {"ph": "i", "name": "instant", "ts": 0},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(path)
    known, unknown = trace.kernels
    assert known.launched_in.names_outwards() == ["aten::mul", "quaver::cast"]
    assert (known.us, unknown.us, unknown.launched_in) == (4, 6, None)

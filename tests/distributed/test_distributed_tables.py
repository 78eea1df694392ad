"""docs/distributed.md: its tables are those of the recorded run, and its code runs on 2 ranks."""

import json
import re
from unittest import mock

import pytest
from torch import nn

from benchmarks.distributed import DOCS, LLAMA_3_8B, RESULTS, linear_shapes, scale_bytes, tables
from benchmarks.record import fill
from tests.distributed.ranks import run


@pytest.fixture
def results():
    return json.loads(RESULTS.read_text())


def test_the_tables_are_those_of_the_recorded_run(results):
    text = DOCS.read_text()
    assert fill(text, tables(results)) == text, "run python -m benchmarks.distributed --update-docs"


def test_another_figure_would_be_noticed(results):
    text = DOCS.read_text()
    results["fsdp"][-1]["unsharded_bytes_per_element"] += 1
    assert fill(text, tables(results)) != text


def test_a_page_without_a_table_is_an_error(results):
    with pytest.raises(ValueError, match="table: fsdp"):
        fill("no markers", tables(results))


def test_the_arithmetic_for_llama_3_8b():
    shapes = linear_shapes(**LLAMA_3_8B)
    elements = sum(n * k for n, k in shapes)
    assert f"the {elements:,} linear weights" in DOCS.read_text()
    assert scale_bytes("tensorwise", shapes) == 4 * 7 * 32


def _run_code(code):
    with mock.patch("torch.distributed.init_process_group"), mock.patch.object(nn.Module, "compile"):
        exec(compile(code, str(DOCS), "exec"), {"__name__": "docs"})


def test_the_code_runs():
    """Without the compiler, which would take most of the time."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL))
    assert code.count("fully_shard(") > 4
    run(2, _run_code, code)

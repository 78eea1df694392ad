"""What is counted of generated kernels, and how two runs of a benchmark on a GPU are compared."""

import json

import pytest

from benchmarks import gpu

pytest.importorskip("triton")

from benchmarks.kernel_accesses import Access, accesses, reads_or_writes_bytes

TWO_READS_DOWN_COLUMNS = """
@triton_heuristics.reduction(
    size_hints={'x': 256, 'r0_': 512},
    triton_meta={'signature': {'in_ptr0': '*bf16', 'in_ptr1': '*fp32', 'out_ptr1': '*fp8e4nv', 'n': 'i32'}, 'd': P()},
)
@triton.jit
def triton_red_fused_0(in_ptr0, in_ptr1, ws_ptr, out_ptr1, xnumel, r0_numel, XBLOCK : tl.constexpr):
    xnumel = 256
    r0_numel = 512
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    x0 = xindex
    x1 = (xindex % 64)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_2 = r0_index
        tmp0 = tl.load(in_ptr0 + (x0 + 256*r0_2), r0_mask & xmask, other=0.0).to(tl.float32)
        tmp1 = tl.load(in_ptr1 + (x1), xmask)
    tmp2 = tl.load(in_ptr1 + (0))
    tl.store(ws_ptr + (x0), tmp2)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_2 = r0_index
        tmp3 = tl.load(in_ptr0 + (x0 + 256*r0_2), r0_mask & xmask, other=0.0).to(tl.float32)
        tl.store(out_ptr1 + (r0_2 + 512*x0), tmp3, r0_mask & xmask)
"""


def test_accesses_of_a_kernel():
    matrix = 256 * 512
    assert accesses(TWO_READS_DOWN_COLUMNS) == [
        Access("in_ptr0", False, matrix, 2, again=False, down_columns=True),
        Access("in_ptr1", False, 64, 4, again=False, down_columns=False),
        Access("in_ptr1", False, 1, 4, again=False, down_columns=False),
        Access("in_ptr0", False, matrix, 2, again=True, down_columns=True),
        Access("out_ptr1", True, matrix, 1, again=False, down_columns=False),
    ]
    assert reads_or_writes_bytes(TWO_READS_DOWN_COLUMNS)
    assert not reads_or_writes_bytes(TWO_READS_DOWN_COLUMNS.replace("fp8e4nv", "bf16"))


def test_quotients_and_remainders_of_one_index_are_counted_once():
    flat = """
@heuristics(triton_meta={'signature': {'in_ptr0': '*i1', 'in_ptr1': '*i64'}})
def kernel(in_ptr0, in_ptr1, xnumel):
    xnumel = 1000
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    x0 = (xindex % 10)
    x1 = ((xindex // 10) % 20)
    x2 = xindex // 200
    tmp0 = tl.load(in_ptr0 + (x0 + 16*x1 + 320*x2), xmask)
    tmp1 = tl.load(in_ptr1 + (x0 + 16*x2), xmask)
"""
    assert [(each.elements, each.element_bytes) for each in accesses(flat)] == [(1000, 1), (50, 8)]
    with pytest.raises(ValueError, match=r"expected pointer \+ index, got 7 \+ x0"):
        accesses(flat.replace("in_ptr0 + (", "7 + x0 + ("))


def _write(folder, name, times):
    """A benchmark's file: by shape and recipe the 10th percentile, median and 90th percentile; bfloat16 takes 200."""
    rows = [
        {"shape": shape, "mode": mode, "library": library, "recipe": recipe, "time_over_bfloat16": median / 200}
        | {"timing": {"median_us": median, "p10_us": low, "p90_us": high}}
        for (shape, recipe, mode, library), (low, median, high) in times.items()
    ]
    (folder / f"gpu_{name}.json").write_text(json.dumps({"rows": rows}))


def test_which_casts_were_faster(tmp_path):
    compiled = ("compiled", "quaver")
    of_compiler = {
        ("a", "rowwise"): (100, 102, 104),
        ("a", "tensorwise"): (100, 102, 104),
        ("b", "rowwise"): (90, 91, 92),
    }
    of_kernels = {("a", "rowwise"): (95, 96, 97), ("a", "tensorwise"): (99, 101, 103), ("b", "rowwise"): (98, 99, 100)}
    others = {("a", "rowwise", "eager", "quaver"): (1, 1, 1), ("a", "rowwise", "compiled", "torchao"): (1, 1, 1)}
    _write(tmp_path, "linear", others | {(*key, *compiled): value for key, value in of_compiler.items()})
    assert gpu.compare_casts(tmp_path, "linear") == []  # the other part has left nothing
    _write(tmp_path, "linear_kernels", {(*key, *compiled): value for key, value in of_kernels.items()})
    rows = gpu.compare_casts(tmp_path, "linear")
    assert [(row["shape"], row["recipe"], row["faster"]) for row in rows] == [
        ("a", "rowwise", "kernels"),
        ("a", "tensorwise", "alike"),
        ("b", "rowwise", "compiler"),
    ]
    assert gpu.in_words(rows[0]) == (
        "compiled casts, a, rowwise: time / bfloat16 compiler 0.510, kernels 0.480; faster: kernels"
    )
    assert gpu.in_words(rows[1]).endswith("neither is faster")


def test_parts_that_compare_casts_differ_in_nothing_else(tmp_path):
    parts = {part.name: part for part in gpu.parts(tmp_path)}
    pairs = [name for name in parts if f"{name}_kernels" in parts]
    assert pairs == ["linear_llama8b", "block_llama8b"]
    for name in pairs:
        plain, kernels = parts[name], parts[f"{name}_kernels"]
        assert plain.environment == {"QUAVER_KERNELS_IN_COMPILED_CODE": "0"}
        assert kernels.environment == {"QUAVER_KERNELS_IN_COMPILED_CODE": "1"}
        assert kernels.words[:-3] == plain.words[:-1]
        assert kernels.words[-2:] == ["--modes", "compiled"]


def test_a_part_runs_in_its_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("QUAVER_KERNELS_IN_COMPILED_CODE", raising=False)
    program = "import os; print('casts:', os.environ.get('QUAVER_KERNELS_IN_COMPILED_CODE'))"
    todo = [
        gpu.Part("one", ["-c", program], 60, {"QUAVER_KERNELS_IN_COMPILED_CODE": "1"}),
        gpu.Part("two", ["-c", program], 60),
    ]
    outcomes = gpu.run_all(todo, tmp_path)
    assert all(not outcome["failure"] for outcome in outcomes.values())
    assert (tmp_path / "gpu_one.log").read_text() == "casts: 1\n"
    assert (tmp_path / "gpu_two.log").read_text() == "casts: None\n"

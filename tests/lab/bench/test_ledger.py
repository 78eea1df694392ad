"""Counts what compiled float8 does on a GPU, without one; ledger_counts.toml has one table of counts a case."""

import json
import tomllib
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from quaver.kernels import triton_amax, triton_cast, triton_copy
from quaver.kernels.native_mm import ScaleKind
from quaver.kernels.operands import BlockCast
from quaver.lab.bench.ledger import counting
from quaver.lab.bench.ledger.counting import ModuleConfig, make_ledger
from quaver.lab.bench.ledger.disassembly import Disassembly, Loop, count_issued_instructions
from quaver.lab.bench.ledger.entries import list_entries
from quaver.lab.bench.ledger.kernel_layout import KernelLayout
from quaver.lab.bench.ledger.kernels import count_float64_operations
from quaver.lab.bench.ledger.launches import BufferAccess, CompiledGraph, Launch, TritonKernel
from quaver.lab.bench.ledger.ledger import Ledger
from quaver.lab.bench.ledger.machine_code import add_machine_code, compile_kernels
from quaver.lab.bench.ledger.table import iter_findings
from quaver.lab.bench.ledger.times import predict_entry_seconds, sum_milliseconds
from quaver.lab.cli import bench_ledger as ledger_cli
from quaver.lab.cli.bench_ledger import LedgerOptions
from quaver.lab.settings import Model
from quaver.lab.settings.flags import parse_options
from quaver.roofline.cost import KERNEL_LAUNCH_S, predict_linear_cost
from quaver.roofline.device_specs import find_device_spec
from quaver.roofline.matmul import predict_matmul_seconds
from quaver.roofline.scaled_matmul import get_scales_share
from tests.library.kernels.triton_kernels import counting_launches, interpreting_process

BLOCK = Model(dim=256, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=768)
EXPERTS = Model(dim=256, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=256, n_experts=8, top_k=2, n_shared_experts=1)
WORK = {
    "linear": ModuleConfig(BLOCK, 2, 512, part="linear"),
    "block": ModuleConfig(BLOCK, 2, 512),
    "experts": ModuleConfig(EXPERTS, 2, 512),
    "autocast": ModuleConfig(BLOCK, 2, 512, autocast=True),
}
M, K, N = 1024, 256, 768

COUNTS = tomllib.loads(Path(__file__).with_name("ledger_counts.toml").read_text())
ALWAYS = [("linear", "quaver tensorwise"), ("linear", "quaver delayed")]
CASES = [
    pytest.param(part, name, marks=() if (part, name) in ALWAYS else pytest.mark.nightly, id=f"{part} {name}")
    for part, names in COUNTS.items()
    for name in names
]

count_case = cache(lambda part, name: make_ledger(WORK[part], name, "B200" if "mxfp8" in name else "H200"))


def access(size, stride, dtype=torch.float8_e4m3fn):
    return BufferAccess("codes", size, stride, dtype, size[0] * size[-1] * dtype.itemsize)


ROWS, COLUMNS, PART = access((M, N), (N, 1)), access((M, N), (1, M)), access((M, N), (2 * N, 1))
TOKEN_SCALES, GROUP_ENDS = access((M, 1), (1, 1), torch.float32), access((8,), (1,), torch.int32)


def count_operator(operator, reads, write, is_backward=False):
    launch = Launch(operator, (), tuple(reads), (write,), (), "", {}, False)
    graphs = (CompiledGraph(is_backward, (launch,), (), ""),)
    return Ledger("made", "H200", list_entries(graphs, 0), graphs)


@pytest.mark.parametrize(("part", "name"), CASES)
def test_counts_are_the_recorded_ones(part, name):
    assert count_case(part, name).list_counts() == COUNTS[part][name], "if they are right, edit ledger_counts.toml"


def test_an_amax_and_a_cast_of_a_gradient_equal_arithmetic():
    """grad_output [M, N] in bfloat16: the amax reads it; one operation reads it again and writes both layouts."""
    backward = [entry for entry in count_case("linear", "quaver tensorwise").entries if entry.is_backward]
    (amax,) = (e for e in backward if e.category == "amax" and e.launch.reads[0].elements == M * N)
    assert amax.read_bytes == 2 * M * N
    assert amax.written_bytes == sum(write.dtype.itemsize * write.elements for write in amax.launch.writes)
    assert amax.written_bytes < M * N / 100
    assert amax.name.startswith(("triton_red_fused", "triton_per_fused"))
    (cast,) = (e for e in backward if e.category == "casts" and any(r.elements == M * N for r in e.launch.reads))
    e5m2 = torch.float8_e5m2
    assert [(write.dtype, write.stride) for write in cast.launch.writes] == [(e5m2, (N, 1)), (e5m2, (1, M))]
    assert cast.written_bytes == 2 * M * N
    assert 0 <= cast.read_bytes - 2 * M * N <= 8  # and the scale


def test_matmuls_and_saved_bytes_equal_arithmetic():
    """Three products of 2 M K N, and what a linear saves: its input's codes with their scale."""
    counted = count_case("linear", "quaver tensorwise")
    assert [e.flops for e in counted.select("float8 matmul")] == [2 * M * K * N] * 3
    assert sorted(e.moved_bytes - 8 for e in counted.select("float8 matmul")) == sorted(
        [M * K + K * N + 2 * M * N, M * N + K * N + 2 * M * K, M * N + M * K + 2 * K * N]
    )
    (input,) = (tensor for graph in counted.graphs for tensor in graph.saved if tensor.elements == M * K)
    assert input.is_float8


def test_each_kernel_has_its_source_line_and_the_operations_that_it_fuses():
    entries = count_case("linear", "quaver tensorwise").entries
    assert all(".py:" in entry.location for entry in entries)
    (amax,) = (e for e in entries if e.category == "amax" and not e.is_backward and e.launch.reads[0].elements == M * K)
    assert "up_proj" in amax.location
    assert {"abs", "amax"} & set(amax.fuses)


def test_quantization_reads_a_tensor_at_most_three_times_and_surplus_stores_are_counted():
    counted = count_case("linear", "quaver tensorwise")
    assert max(counted.quantization_reads.values()) == 3  # an amax, and a cast for each layout
    assert sum(map(len, counted.stores.values())) == counted.num_surplus_stores + len(
        {(name, tensor.stride) for name, stored in counted.stores.items() for tensor in stored}
    )


TWO_LOOPS = """
    xnumel = 4096
    r0_numel = 16384
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (x0 + 4096*r0_1), None).to(tl.float32)
    tmp2 = tmp1.to(tl.float64)
    tmp3 = tmp2 * tmp2
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp4 = tl.load(in_ptr0 + (x0 + 4096*r0_1), None).to(tl.float32)
        tmp5 = tmp4 * tmp3
        tmp6 = tl.load(in_ptr1 + (r0_1), None)
"""


def test_columns_are_read_again_in_a_second_loop():
    """A reduction along rows finds in a cache what it has read or stored."""
    kernel = TWO_LOOPS.replace("tl.load(in_ptr1 + (r0_1)", "tl.load(out_ptr0 + (r0_1)")
    tile = BufferAccess("tile", (M, N), (N, 1), torch.bfloat16, 2 * M * N)
    stored = replace(tile, name="stored")
    pointers = {"tile": "in_ptr0", "stored": "out_ptr0"}
    for hint, expected in (("OUTER", (4 * M * N, 0)), ("INNER", (0, 4 * M * N))):
        source = f"reduction_hint=ReductionHint.{hint}\n{kernel}"
        launch = Launch("", (TritonKernel("two_loops", source, pointers, 0),), (tile,), (stored,), (), "", {}, True)
        (entry,) = list_entries([CompiledGraph(False, (launch,), (), "")], l2_bytes=0)
        assert (entry.reread_bytes, entry.cached_bytes) == expected
        assert entry.moved_bytes == 4 * M * N + entry.reread_bytes


def test_float64_is_counted_once_a_column_or_once_an_element():
    columns = """
    xnumel = 4096
    r0_numel = 16384
    x0 = xindex
    tmp1 = tl.load(in_ptr0 + (x0), None)
    tmp2 = tmp1.to(tl.float64)
    tmp3 = tmp2 + tmp2
    tmp4 = tmp3.to(tl.float32)
    """
    assert count_float64_operations(columns) == 2 * 4096
    assert count_float64_operations(columns.replace("(x0)", "(x0 + 4096*r0_1)")) == 2 * 4096 * 16384
    assert count_float64_operations(columns.replace("float64", "float32")) == 0
    reduced = columns.replace("tmp2 = tmp1", "tmp1 = triton_helpers.max2(tmp1, 1)[:, None]\n    tmp2 = tmp1")
    assert count_float64_operations(reduced.replace("(x0)", "(x0 + 4096*r0_1)")) == 2 * 4096


@pytest.mark.parametrize(("recipe", "gpu"), [("mxfp8", "H200"), ("blockwise", "B200")])
def test_a_recipe_that_the_gpu_does_not_multiply_is_refused(recipe, gpu):
    message = f"{recipe}: no float8 matmul of {gpu} takes .* operands would be widened"
    with pytest.raises(NotImplementedError, match=message):
        make_ledger(WORK["linear"], f"quaver {recipe}", gpu)


def count_launches_in_triton():
    """By operation, the kernels of one call: Triton's, and PyTorch's fills."""
    hp, group, e4m3 = torch.ones(32, 48), torch.arange(32) // 16, torch.float8_e4m3fn
    calls = {
        "quaver.cast_rowwise": lambda: triton_cast.cast_rowwise(hp, e4m3, True, True, False),
        "quaver.cast_blockwise": lambda: triton_cast.cast_blockwise(
            hp, BlockCast(e4m3, True, True, False, 128, 128, "")
        ),
        "quaver.group_amax": lambda: triton_amax.group_amax(hp, group, 2),
        "quaver.to_column_major": lambda: triton_copy.to_column_major(hp.to(e4m3)),
    }
    launches = {}
    for name, call in calls.items():
        with counting_launches() as kernels, torch.profiler.profile() as profile:
            assert call() is not None
        fills = sum(event.count for event in profile.key_averages() if event.key == "aten::zero_")
        launches[name] = kernels.total() + fills
    return launches


@pytest.mark.nightly
def test_operations_in_triton_launch_what_the_ledger_counts():
    with interpreting_process() as call:
        launched = call(count_launches_in_triton)
    reads = [access((32, 48), (48, 1), torch.bfloat16)]
    assert launched == {name: count_operator(name, reads, ROWS).num_launches for name in launched}


@pytest.mark.parametrize(("rows", "results", "reads", "launches"), [(M, 6, 1, 1), (M - 1, 6, 2, 2), (M - 1, 4, 1, 1)])
def test_odd_sizes_are_cast_in_blocks_twice(rows, results, reads, launches):
    """This holds where each direction has its own scales, which are six results, not for four of square blocks."""
    operand = access((rows, N), (N, 1), torch.bfloat16)
    writes = (*[access((rows, N), (N, 1))] * results, *[access((0,), (1,))] * (6 - results))
    launch = Launch("quaver.cast_blockwise", (), (operand,), writes, (), "", {}, False)
    (entry,) = list_entries([CompiledGraph(False, (launch,), (), "")], l2_bytes=0)
    assert (entry.read_bytes, entry.num_launches) == (reads * operand.moved_bytes, launches)


def test_the_time_of_a_bfloat16_linear_is_the_rooflines():
    spec = find_device_spec("H200")
    times = sum_milliseconds(count_case("linear", "bfloat16"), spec)
    assert sum(times.values()) / 1e3 == pytest.approx(predict_linear_cost(M, K, N, "tensorwise", spec).bfloat16.total_s)
    assert times["bfloat16 matmul"] > 3e3 * KERNEL_LAUNCH_S


@pytest.mark.parametrize(
    ("operator", "codes", "is_strided"),
    [
        ("quaver.to_column_major", ROWS, False),
        ("quaver.to_column_major_after", ROWS, False),
        ("quaver.to_column_major", PART, True),
        ("aten.clone", ROWS, True),
    ],
)
def test_a_copy_runs_at_bandwidth_unless_it_is_atens(operator, codes, is_strided):
    spec, gradient = find_device_spec("H200"), access((M, N), (N, 1), torch.bfloat16)
    ledger = count_operator(operator, [codes, gradient] if operator.endswith("after") else [codes], COLUMNS)
    assert (ledger.num_copies, ledger.num_strided_copies, ledger.overhead_bytes) == (1, int(is_strided), 2 * M * N)
    seconds = M * N * 7.4e-12 if is_strided else 2 * M * N / (4800e9 * 0.85)
    assert sum_milliseconds(ledger, spec)["copies"] == pytest.approx(1e3 * (seconds + KERNEL_LAUNCH_S))
    assert any("aten's strided copy of bytes 1 times" in line for line in iter_findings(ledger)) is is_strided


def test_matmuls_of_blocks_and_experts_copy_what_does_not_lie_along_the_contracted_dim():
    scales = [access(size, (size[1], 1), torch.float32) for size in ((M, 6), (6, M))]
    result = access((M, M), (M, 1), torch.bfloat16)
    for operands, copies, strided in (
        ((ROWS, access((N, M), (1, N))), 0, 0),
        ((COLUMNS, access((N, M), (M, 1))), 2, 0),
        ((PART, access((N, M), (1, N))), 1, 1),
    ):
        ledger = count_operator("quaver.native_block_mm", [*operands, *scales], result)
        assert (ledger.num_copies, ledger.num_strided_copies) == (copies, strided)
        assert ledger.num_launches == copies + 2  # rows' scales are transposed
        assert ledger.count_bytes("copies") == copies * 2 * M * N
    ragged = access((1000, 700), (700, 1)), access((700, 250), (250, 1))
    ragged_scales = [access(size, (size[1], 1), torch.float32) for size in ((1000, 6), (6, 250))]
    result = access((1000, 250), (250, 1), torch.bfloat16)
    ledger = count_operator("quaver.native_block_mm", [*ragged, *ragged_scales], result)
    assert (ledger.num_copies, ledger.num_strided_copies) == (3, 0)  # pads of both, and b along K
    assert ledger.num_launches == 11  # a pad is two kernels; rows' scales are completed and transposed in one copy
    weights, tokens = access((8 * K, N), (N, 1)), access((M, K), (K, 1))
    scale = [TOKEN_SCALES, TOKEN_SCALES, GROUP_ENDS]
    for operands, result, is_backward, copies in (
        ((ROWS, weights), (M, K), False, 0),
        ((tokens, weights), (M, N), True, 1),
        ((ROWS, tokens), (8, N, K), True, 2),
    ):
        written = access(result, (1,) * len(result), torch.bfloat16)
        ledger = count_operator("quaver.grouped_mm", [*operands, *scale], written, is_backward)
        assert (ledger.num_copies, ledger.num_strided_copies) == (copies, 0)
        blocks = [access((M, 6), (6, 1), torch.float32)] * 2
        ledger = count_operator("quaver.grouped_mm", [*operands, *blocks, GROUP_ENDS], written, is_backward)
        assert not ledger.num_copies


@pytest.mark.parametrize(
    ("operator", "scale", "kind"),
    [
        ("aten._scaled_mm", (1, 1), ScaleKind.TENSORWISE),
        ("aten._scaled_mm", (M, 1), ScaleKind.ROWWISE),
        ("quaver.native_block_mm", (M, 6), ScaleKind.BLOCKS_OF_128),
        ("quaver.native_block_mm", (M, 24), ScaleKind.BLOCKS_OF_32),
    ],
)
def test_a_matmul_has_the_rate_of_its_scales(operator, scale, kind):
    """The formulas of linears and of the planner have the same rate."""
    spec, b = find_device_spec("H200"), access((N, M), (1, N))
    result = access((M, M), (M, 1), torch.bfloat16)
    scales = [access(size, (size[1], 1), torch.float32) for size in (scale, scale[::-1])]
    milliseconds = sum_milliseconds(count_operator(operator, [ROWS, b, *scales], result), spec)["float8 matmul"]
    share = get_scales_share(kind, spec)
    expected = predict_matmul_seconds(M, N, M, spec, in_float8=True, by_shape=False, scales_share=share)
    assert milliseconds == pytest.approx(1e3 * (expected + KERNEL_LAUNCH_S), rel=1e-2)


TRANSPOSED = """
    ynumel = 4096
    xnumel = 1024
    tmp0 = tl.load(in_ptr0 + (x1 + 1024*y0), xmask)
    tl.store(out_ptr0 + (y0 + 4096*x1), tmp1, xmask)
"""


def test_programs_of_a_launch_share_a_tensor():
    """A config with narrow tiles moves whole sectors for a part of each; loops turn as often as their loads need."""
    layout = KernelLayout.parse(TRANSPOSED, {"in_ptr0": "*bf16", "out_ptr0": "*fp8e4nv"})
    square, flat = {"XBLOCK": 64, "YBLOCK": 64}, {"XBLOCK": 1024, "YBLOCK": 1}
    assert [layout.count_sector_bytes(config) for config in (square, flat)] == [2 + 1, 2 + 32]
    assert [layout.count_programs(config) for config in (square, flat)] == [16 * 64, 4096]
    assert layout.count_loaded_bytes(square) == 64 * 64 * 2
    columns = KernelLayout.parse(TWO_LOOPS, {"in_ptr0": "*bf16", "in_ptr1": "*fp32"})
    tile = {"XBLOCK": 64, "R0_BLOCK": 8}
    assert columns.count_programs(tile) == 64
    assert columns.count_loaded_bytes(tile) == (2 + 2 + 4) * 64 * 16384
    loaded = columns.count_loaded_bytes(tile) // 128  # of a thread
    whole = Disassembly(Counter({"FADD": 100}), (), loaded)
    assert count_issued_instructions(whole, columns, tile, warps=4) == 64 * 4 * 100
    unrolled = whole._replace(loops=(Loop(40, loaded // 16),), loaded_bytes=loaded // 16)
    assert count_issued_instructions(unrolled, columns, tile, warps=4) == 64 * 4 * (100 + 15 * 40)


def test_no_time_is_below_what_bytes_and_instructions_take():
    """A kernel's time is the larger of both, and a tensor core's rate is not exceeded."""
    spec = find_device_spec("H200")
    for entry in count_case("linear", "quaver tensorwise").entries:
        seconds, issued = predict_entry_seconds(entry, spec), replace(entry, issued_instructions=10**9)
        assert seconds > entry.moved_bytes / (spec.memory_gb_per_s * 1e9)
        assert seconds > entry.flops / (1e12 * (spec.float8_tflops or 0))
        issuing = 1e9 / (4 * 132 * 1.83e9) + entry.num_launches * KERNEL_LAUNCH_S
        assert predict_entry_seconds(issued, spec) == max(seconds, issuing)


@pytest.mark.nightly
def test_machine_code_is_of_the_config_that_would_be_chosen():
    """Every large kernel has instructions, and none spills more than Inductor accepts."""
    counted = count_case("linear", "quaver tensorwise")
    codes = compile_kernels(counted, 90, {})
    priced = add_machine_code(counted, codes)
    assert all(
        entry.issued_instructions for entry in priced.entries if entry.launch.kernels and entry.category != "small"
    )
    assert all(code.spilled_bytes <= 64 for code in codes.values())


@pytest.mark.parametrize(("words", "sizes"), [([], (8, 512)), (["--sequences", "2", "--seq-len", "8192"], (2, 8192))])
def test_sizes_on_the_command_line_override_a_files(words, sizes, tmp_path):
    (tmp_path / "run.toml").write_text("[training]\nlocal_batch_size = 8\nseq_len = 512\n")
    options = parse_options(LedgerOptions, ["--model", str(tmp_path / "run.toml"), *words], prog="quaver bench ledger")
    module_config = options.make_module_config()
    assert (module_config.sequences, module_config.seq_len) == sizes


def test_the_command_prints_and_writes(monkeypatch, tmp_path, run_quaver):
    monkeypatch.setattr(ledger_cli, "make_ledger", lambda module_config, name, gpu: count_case("linear", name))
    output = tmp_path / "ledger.json"
    words = ["--model", "debug", "--part", "linear", "--recipe", "tensorwise", "--kernels", "--output", output]
    printed = run_quaver("bench", "ledger", *words)
    for part in ("linear of debug", "bfloat16", "tensorwise", "Counted:", "Modeled:", "cudnn, at its"):
        assert part in printed
    assert "in a layout that is stored already" not in printed  # of no operand
    written = json.loads(output.read_text())
    assert [entry["name"] for entry in written["ledgers"]] == ["bfloat16", "quaver tensorwise"]
    tensorwise = written["ledgers"][1]
    assert sum(kernel["launches"] for kernel in tensorwise["kernels"]) == tensorwise["launches"]
    names = {name for counted in tensorwise["categories"].values() for name in counted["kernels"]}
    assert names
    assert names == {kernel["name"] for kernel in tensorwise["kernels"] if kernel["name"].startswith("triton_")}
    assert output.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


def test_the_ledger_without_triton_is_refused(run_refused, monkeypatch):
    monkeypatch.setattr(counting, "find_spec", lambda name: None)
    assert "triton is not installed" in run_refused("bench", "ledger")

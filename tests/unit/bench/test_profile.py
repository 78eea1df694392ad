"""quaver profile: what belongs to which group, the sums of its table, and the command from end to end."""

import gzip
import json

import pytest
import torch

import quaver.distributed  # noqa: F401 - registers quaver::cast_with_agreed_scale
from quaver.bench.groups import GROUPS, group_of_kernel, group_of_ranges
from quaver.bench.profile import BACKWARD, FORWARD, Profile, sums_of
from quaver.bench.trace import Kernel, Range, Trace
from quaver.cli import main
from quaver.kernels import cpu

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (["aten::mm", "aten::matmul", "aten::linear"], "gemm"),
        (["aten::copy_", "aten::_to_copy", "aten::to"], "cast"),
        (["aten::copy_", "aten::clone", "aten::contiguous"], "transpose"),
        (["aten::copy_", "aten::add_"], "other"),
        (["aten::amax", "quaver::amax", "quaver::cast"], "amax"),
        (["aten::mul", "quaver::cast", "forward"], "cast"),
        (["aten::copy_", "aten::contiguous", "quaver::cast"], "cast"),
        (["aten::copy_", "aten::contiguous", "quaver::gemm"], "transpose"),
        (["aten::fill_", "aten::zeros", "quaver::gemm"], "gemm"),
        (["quaver::cast_tensorwise", "## Call CompiledFxGraph ##"], "cast"),
        (["graph_0_cpp_fused__to_copy_add_view_1", "forward"], "other"),
        (["aten::_flash_attention_forward", "aten::scaled_dot_product_attention"], "other"),
        (["forward"], "other"),
        ([], "other"),
    ],
)
def test_the_group_of_ranges(names, group):
    assert group_of_ranges(names) == group


def test_every_registered_cast_is_a_cast():
    """Compiled code calls the operations, which have no phase around them."""
    registered = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    casts = {name for name in registered if name.startswith("quaver::cast")}
    assert {"quaver::cast_tensorwise", "quaver::cast_rowwise", "quaver::cast_with_agreed_scale"} <= casts
    assert {group_of_ranges([name, "## Call CompiledFxGraph ##", "forward"]) for name in casts} == {"cast"}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm90<cutlass::gemm::kernel>>", "gemm"),
        ("triton_tem_fused_mm_0", "gemm"),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, cutlass::bfloat16_t>>",
            "other",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128_4x1x1", "other"),
        ("triton_red_fused_abs_amax_0", "amax"),
        ("graph_2_cpp_fused_abs_max_0", "amax"),
        ("graph_2_cpp_fused__to_copy_abs_clamp_div_max_mul_reciprocal_3", "cast"),
        ("triton_poi_fused__to_copy_clamp_mul_reciprocal_1", "cast"),
        ("triton_red_fused__to_copy_abs_amax_clamp_mul_0", "cast"),
        ("triton_poi_fused__to_copy_0", "cast"),
        ("triton_poi_fused__to_copy_mul_silu_2", "other"),
        ("triton_poi_fused_clone_t_3", "transpose"),
        ("triton_poi_fused__scaled_mm_5", "transpose"),
        ("triton_poi_fused__scaled_mm__to_copy_clamp_mul_t_5", "cast"),
        ("_amax_if_unknown", "amax"),
        ("_cast", "cast"),
        ("_cast_rows", "cast"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "other"),
        ("Memset (Device)", "other"),
    ],
)
def test_the_group_of_a_kernel(name, group):
    assert group_of_kernel(name) == group


def test_kernels_on_a_gpu_are_grouped_by_the_range_that_launched_them_or_by_name():
    forward = Range(FORWARD, 1, 0, 100)
    cast = Range("quaver::cast", 1, 10, 20, parent=forward)
    kernels = [
        Kernel("elementwise", 6.0, cast),
        Kernel("elementwise", 2.0, cast),
        Kernel("nvjet_tst", 30.0, forward),
        Kernel("triton_poi_fused_clone_t_3", 2.0, Range("backward of something", 2, 200, 300)),
    ]
    row = sums_of(Trace([forward, cast], kernels), 2, is_cuda=True)
    assert row["total_us"] == 20.0
    assert row["group_us"] == {"gemm": 15.0, "cast": 4.0, "amax": 0, "transpose": 1.0, "other": 0}
    assert row["group_share"]["cast"] == 0.2
    longest, second, third = row["work"]
    assert longest == {
        "name": "nvjet_tst",
        "group": "gemm",
        "direction": FORWARD,
        "calls": 0.5,
        "us": 15.0,
        "share": 0.75,
    }
    assert (second["name"], second["group"], second["calls"], second["share"]) == ("elementwise", "cast", 1.0, 0.2)
    assert third["direction"] == BACKWARD
    with pytest.raises(RuntimeError, match="the profiler saw no kernels of this GPU"):
        sums_of(Trace([forward, cast], []), 2, is_cuda=True)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    small = {"divisor": 4, "tokens": 128, "seq_len": 64, "device": "cpu", "output": str(folder)}
    return folder, Profile(**small, recipes=("tensorwise", "delayed"), torchao="no", repeats=2).measure()


def test_sums_of_the_table(profiled):
    _, result = profiled
    for row in result["rows"]:
        assert set(row["group_us"]) == set(GROUPS)
        assert sum(row["group_us"].values()) == pytest.approx(row["total_us"])
        assert sum(row["group_share"].values()) == pytest.approx(1)
        assert sum(each["us"] for each in row["work"]) == pytest.approx(row["total_us"])
        assert all(each["us"] >= 0 for each in row["work"])
        assert row["group_us"]["gemm"] > 0
    assert result["batch"]["tokens"] == 128


def test_a_linear_has_the_matmuls_and_casts_that_it_should(profiled):
    plain, *float8 = profiled[1]["rows"]
    calls = {each["name"]: each["calls"] for each in plain["work"] if each["direction"] == FORWARD}
    assert calls["aten::mm"] == 1
    for row in float8:
        phases = {
            (each["direction"], each["name"]): each["calls"] for each in row["work"] if "quaver::" in each["name"]
        }
        assert (phases[FORWARD, "quaver::gemm"], phases[BACKWARD, "quaver::gemm"]) == (1, 2)
        if cpu.AVAILABLE:
            assert (phases[FORWARD, "quaver::cast"], phases[BACKWARD, "quaver::cast"]) == (2, 2)


def test_traces_are_chrome_traces(profiled):
    folder, result = profiled
    for row in result["rows"]:
        events = json.loads(gzip.decompress((folder / row["trace"]).read_bytes()))["traceEvents"]
        assert sum(event.get("name") == FORWARD and event.get("ph") == "X" for event in events) == 2


def test_the_command_writes_traces_and_a_summary(tmp_path, capsys):
    words = ["profile", "block", "--divisor", "4", "--tokens", "64", "--seq-len", "32", "--recipes", "rowwise"]
    words += ["--device", "cpu", "--repeats", "1", "--torchao", "no", "--output", str(tmp_path / "new")]
    assert main(words) == 0
    summary = json.loads((tmp_path / "new" / "profile-block.json").read_text())
    assert [row["trace"] for row in summary["rows"]] == [
        "block-eager-bfloat16.json.gz",
        "block-eager-quaver-rowwise.json.gz",
    ]
    assert {"benchmark", "environment", "complete", "model", "batch", "kind", "rows"} == set(summary)
    printed = capsys.readouterr().out
    assert all(group in printed for group in GROUPS)

"""Tests make gpu without a GPU: what it would run, how it runs it, and what it says where there is none."""

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts import __main__ as gpu_parts
from benchmarks.gpu_parts import categories, gradients
from benchmarks.gpu_parts.part_context import catch_failures
from quaver.lab.settings.config_file import load_config, parse_arguments
from quaver.lab.settings.flags import split_flags


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(gpu.ROOT / "benchmarks" / "gpu.py")]
    environment = {**os.environ, "OUT": str(tmp_path / "out")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"make gpu needs a GPU, and torch {torch.__version__} sees none on this machine\n"
    assert not (tmp_path / "out").exists()


def test_parts_and_groups_are_chosen_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.main(["matmuls", "matmul"]) == 2
    message = "make gpu: unknown part 'matmul'; choose from quiet, tests, second, doctor"
    assert capsys.readouterr().err.startswith(message)
    ran = []
    monkeypatch.setattr(gpu, "run", lambda argv, limit_s, log: ran.append(argv) or "exit code 1")
    assert gpu.main(["tests", "kernels", "rates"]) == 1
    assert [argv[2] for argv in ran] == ["rates", "kernels", "-q"]  # in the order of the plan, tests last
    assert "FAILED: rates (exit code 1), kernels (exit code 1), tests (exit code 1)" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "gpu.json").read_text())["parts"]) == {"rates", "kernels", "tests"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.log"]
    assert gpu.main([]) == 1
    parts = "doctor, rates, gradients, kernels, blocks, attention, eager, matmuls, tests"
    assert capsys.readouterr().out.startswith(f"9 parts, at most 870 s: {parts}")


def test_every_group_but_the_second_fits_in_ten_minutes_with_a_minute_to_spare(tmp_path):
    groups = gpu.make_parts(tmp_path)
    for group in (groups["quiet"], groups["tests"], *([part] for part in groups["second"])):
        assert sum(part.seconds for part in group) <= 9 * 60
    names = [part.name for group in groups.values() for part in group]
    assert len(set(names)) == len(names)
    own = {part.argv[2] for group in groups.values() for part in group if part.argv[1] == "benchmarks.gpu_parts"}
    assert own == set(gpu_parts.PARTS)
    dry = gpu.make_parts(tmp_path, dry=True)
    assert {part.name for group in dry.values() for part in group} == own


EVERY_PART = [part for group in gpu.make_parts(gpu.ROOT).values() for part in group]


@pytest.mark.parametrize("part", EVERY_PART, ids=lambda part: part.name)
def test_every_command_is_understood(part):
    spec = importlib.util.find_spec(part.argv[1])
    assert spec
    assert spec.submodule_search_locations is None or importlib.util.find_spec(f"{spec.name}.__main__")
    if spec.name != "quaver":
        return
    verb, *argv = part.argv[2:]
    if verb == "doctor":
        assert argv == ["--json"]
        return
    if verb == "bench":
        kind = argv.pop(0)
        benchmark = getattr(importlib.import_module(f"quaver.lab.bench.{kind}"), f"{kind.capitalize()}Benchmark")
        values, argv = split_flags(benchmark, argv)
        assert benchmark(**values).device == "cuda"
    if argv:
        config_path, flags = parse_arguments(argv)
        assert load_config(gpu.ROOT / config_path, flags).model.dim == 2048


def test_wrong_gradients_stop_the_timings_and_nothing_else(tmp_path, monkeypatch):
    ran = []

    def run(argv, limit_s, log):
        ran.append(argv[2])  # of doctor, too: python -m quaver doctor
        return {"gradients": "exit code 3", "kernels": "exit code 3"}.get(argv[2], "")

    monkeypatch.setattr(gpu, "run", run)
    groups = gpu.make_parts(tmp_path)
    outcomes = gpu.run_all([*groups["quiet"], *groups["tests"]], tmp_path)
    assert ran == ["doctor", "rates", "gradients", "-q"]
    assert outcomes["blocks"]["failure"] == "not run: gradients are wrong"
    gpu.run_all(groups["quiet"], tmp_path)
    assert list(json.loads((tmp_path / "gpu.json").read_text())["parts"]) == [part.name for part in groups["quiet"]]
    ran.clear()
    gpu.run_all(groups["quiet"][3:], tmp_path)
    assert ran == ["kernels", "blocks", "attention", "eager", "matmuls"]


def run_part(part, tmp_path):
    assert gpu_parts.main([part, "--dry", "--output", str(tmp_path / "rows.json")]) == 0
    results = json.loads((tmp_path / "rows.json").read_text())
    assert results["complete"]
    assert results["dry"]
    assert results["environment"]["command"].split()[:3] == ["python", "-m", "benchmarks.gpu_parts"]
    return results["rows"]


def test_the_cheap_parts_run_dry(tmp_path):
    first = ["copy, first", "matmul bfloat16, first", "matmul float8, first"]
    assert [row["what"] for row in run_part("rates", tmp_path)][1:4] == first
    rows = run_part("matmuls", tmp_path)
    assert len(rows) == 8 * 9 + 2
    assert [row["equal_to_the_rule"] for row in rows[-2:]] == [1.0, 1.0]
    assert rows[-1]["card_db"] > rows[-2]["card_db"]


PARTS = ["kernels", "gradients", "blocks", "attention", "eager", "optimizers", "stored", "graphs", "fsdp"]


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_the_other_parts_run_dry(part, tmp_path):
    rows = run_part(part, tmp_path)
    assert all(row.get("timing", {"median_us": 1})["median_us"] > 0 for row in rows)
    if part == "gradients":
        assert all(row["beside_eager_db"] > row["beside_bfloat16_db"] > gradients.MIN_SQNR_DB for row in rows)
    if part == "blocks":
        assert rows[-1]["by_category"]["float8 matmul"]["ms"] > 0


@pytest.mark.nightly
def test_experts_run_dry_but_for_torchao_which_needs_triton(tmp_path):
    assert gpu_parts.main(["experts", "--dry", "--output", str(tmp_path / "rows.json")]) == 1
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["what"] for row in rows if "error" in row} == {"torchao rowwise"}


def test_an_interrupted_part_keeps_its_rows_and_a_row_that_fails_the_others(tmp_path, monkeypatch):
    def yield_and_fail():
        yield {"value": 1.0}
        raise ValueError("no such kernel")

    def run_and_interrupt(context):
        good = ({"what": "good"}, lambda: iter([{"value": 2.0}]))
        yield from catch_failures([({"what": "bad"}, yield_and_fail), good])
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu_parts.PARTS, "rates", run_and_interrupt)
    path = tmp_path / "rows.json"
    assert gpu_parts.main(["rates", "--dry", "--output", str(path)]) == gpu_parts.EXIT_INTERRUPTED
    results = json.loads(path.read_text())
    assert not results["complete"]
    error = {"what": "bad", "error": "ValueError: no such kernel"}
    assert results["rows"] == [{"what": "bad", "value": 1.0}, error, {"what": "good", "value": 2.0}]
    monkeypatch.setitem(gpu_parts.PARTS, "rates", lambda context: iter(results["rows"]))
    assert gpu_parts.main(["rates", "--dry", "--output", str(path)]) == 1
    monkeypatch.setitem(gpu_parts.PARTS, "rates", lambda context: iter([{"what": "wrong", "is_wrong": True}, error]))
    assert gpu_parts.main(["rates", "--dry", "--output", str(path)]) == gpu.EXIT_WRONG_GRADIENTS


def test_gradients_that_a_kernel_spoils_are_wrong():
    good = [torch.randn(64, 64), torch.randn(8)]
    assert gradients.compute_lowest_db(good, [gradient * (1 + 1e-3) for gradient in good]) == pytest.approx(60, abs=0.1)
    assert gradients.compute_lowest_db(good, [good[0].t(), good[1]]) < gradients.MIN_SQNR_DB
    assert gradients.compute_lowest_db(good, [torch.zeros(64, 64), good[1]]) == pytest.approx(0)
    for bad in ([good[0], good[1] * float("nan")], good[:1], []):
        assert not gradients.compute_lowest_db(good, bad) >= gradients.MIN_SQNR_DB


ELEMENTWISE = "void at::native::elementwise_kernel<128, 4, at::native"


@pytest.mark.parametrize(
    ("kernel", "category"),
    [
        ("nvjet_tss_128x256_64x4_1x2_h_bz_coopA_NNT", "bfloat16 matmul"),
        ("nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT", "float8 matmul"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128", "float8 matmul"),
        (f"void cutlass::device_kernel<{200 * 'x'}cutlass::float_e4m3_t, cutlass::multiplies>", "float8 matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>", "bfloat16 matmul"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        (f"{ELEMENTWISE}::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda", "copies"),
        (f"{ELEMENTWISE}::gpu_kernel_impl_nocast<at::native::BinaryFunctor<c10::BFloat16>>", "hp"),
        (f"{ELEMENTWISE}::float8_copy_kernel_cuda::lambda(c10::Float8_e4m3fn)", "casts"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "small"),
        ("triton_red_fused_abs_amax_transpose_1", "fused by Inductor"),
        ("_group_amax", "amax"),
        ("_cast_rowwise", "casts"),
        ("_column_major", "copies"),
        ("something_else", "other"),
    ],
)
def test_kernels_have_categories(kernel, category):
    assert categories.find_category(kernel) == category


def test_a_ledger_stands_beside_the_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(categories, "LEDGER", tmp_path / "ledger.json")
    kernels = [{"name": "triton_red_fused_1", "us": 1500.0, "count": 3}, {"name": "triton_2", "us": 500.0, "count": 1}]
    assert categories.sum_by_category(kernels, "quaver rowwise") == {"fused by Inductor": {"ms": 2.0, "launches": 4}}
    counted = {"casts": {"launches": 2, "kernels": ["triton_0", "triton_red_fused_1"]}}
    ledger = {"name": "quaver rowwise", "milliseconds": {"casts": 1.25}, "categories": counted}
    categories.LEDGER.write_text(json.dumps({"ledgers": [ledger]}))
    assert categories.sum_by_category(kernels, "quaver rowwise") == {
        "casts": {"ms": 1.5, "launches": 3, "predicted_ms": 1.25, "predicted_launches": 2},
        "fused by Inductor": {"ms": 0.5, "launches": 1},
    }
    assert "casts" not in categories.sum_by_category(kernels, "quaver delayed")


def test_the_recorded_ledger_names_the_kernels_of_each_category():
    recorded = json.loads(categories.LEDGER.read_text())["ledgers"]
    assert [ledger["name"] for ledger in recorded if not ledger["categories"]["hp"]["kernels"]] == []


def test_a_part_that_fails_or_takes_too_long_is_named_and_the_others_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "GRACE_S", 6)  # a busy machine takes seconds to start and to interrupt Python
    saves_at_interrupt = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('saved')"
    parts = [
        gpu.GpuPart("good", ["-c", "print('{\"value\": 1}')"], 9),
        gpu.GpuPart("bad", ["-c", "raise SystemExit(3)"], 0),
        gpu.GpuPart("slow", ["-c", saves_at_interrupt], 0),
        gpu.GpuPart("last", ["-c", "print('still here')"], 10),
    ]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell that runs make gpu with &
    try:
        outcomes = gpu.run_all(parts, tmp_path)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [outcome["failure"] for outcome in outcomes.values()][:2] == ["", "exit code 3"]
    assert outcomes["slow"]["failure"].startswith("stopped after ")
    assert "saved" in (tmp_path / "gpu.log").read_text()
    assert outcomes["last"]["failure"] == ""
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["good"]["result"] == {"value": 1}
    assert "still here" in capsys.readouterr().out
    json.dumps(outcomes)


def test_a_part_that_ignores_the_interrupt_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_S", 1)
    stubborn = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)\nprint('ended')"
    outcome = gpu.run_all([gpu.GpuPart("stubborn", ["-c", stubborn], 2)], tmp_path)
    assert outcome["stubborn"]["failure"] == "stopped after 2 s"
    assert "ended" not in (tmp_path / "gpu.log").read_text().splitlines()

"""Tests the list of benchmarks of quaver bench, one run from end to end, and one-line errors."""

import json
from functools import partial
from itertools import product

import pytest
import torch

from quaver.lab.bench.cast import COPY_LIBRARY
from quaver.lab.cli import main
from quaver.lab.runs.provenance import describe_measurement


def check_linear(rows):
    assert [row["library"] for row in rows] == ["bfloat16", "quaver"]


def check_cast(rows, kinds=("delayed",)):
    """Every cast has its contestants and the same codes; rates come from the floor and the median."""
    contestants = [(COPY_LIBRARY, ""), ("quaver", "eager"), ("quaver", "compiled"), ("PyTorch", "compiled")]
    expected = [(kind, *contestant) for kind in kinds for contestant in contestants]
    assert [(row["cast"], row["library"], row["mode"]) for row in rows] == expected
    copies = {row["cast"]: row for row in rows if row["library"] == COPY_LIBRARY}
    for row in rows:
        assert row["same_codes"] is (None if row["library"] == COPY_LIBRARY else True)
        moved = row["floor_bytes_per_element"] * 64 * 128
        assert row["gb_per_s"] == pytest.approx(moved / row["timing"]["median_us"] / 1e3)
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / copies[row["cast"]]["gb_per_s"])
        assert row["input_copies"] > 1


def check_gemm(rows):
    expected = list(product(["output", "grad_input", "grad_weight"], ["bfloat16", "tensorwise", "rowwise"]))
    assert [(row["gemm"], row["contestant"]) for row in rows] == expected
    baselines_us = {row["gemm"]: row["timing"]["median_us"] for row in rows if row["contestant"] == "bfloat16"}
    for row in rows:
        time_us = row["timing"]["median_us"]
        assert row["time_over_bfloat16"] == pytest.approx(time_us / baselines_us[row["gemm"]])
        assert row["tflops_per_s"] == pytest.approx(2 * 32 * 48 * 64 / time_us / 1e6)
        assert row["share_of_peak"] is row["fast_accumulation"] is None


def check_host(rows):
    plain, float8 = rows
    assert (plain["library"], float8["library"], float8["recipe"]) == ("bfloat16", "quaver", "tensorwise")
    assert plain["operations_by_name"]["aten.mm.default"] == 3
    assert float8["operations_by_name"]["quaver.exact_float8_mm.default"] == 3
    for row in rows:
        assert row["operations"] == sum(row["operations_by_name"].values())
        assert row["kernels"] is None
        assert row["time_over_bfloat16"] == row["timing"]["median_us"] / plain["timing"]["median_us"]


def check_block(rows):
    """Ratios, and memory counted to the byte."""
    plain, *float8 = rows
    assert [(row["library"], row["recipe"]) for row in float8] == [("quaver", "tensorwise"), ("quaver", "delayed")]
    assert (plain["library"], plain["time_over_bfloat16"], plain["peak_over_bfloat16"]) == ("bfloat16", 1.0, 1.0)
    parameters = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
    moments, tables = 2 * parameters * 4, 2 * 32 * 64 * 4
    assert plain["resident_bytes"] - (parameters * 4 + moments + tables) in range(1024)  # and the step counters
    assert float8[0]["saved_bytes"] < plain["saved_bytes"]
    for row in rows:
        median_us = row["timing"]["median_us"]
        assert row["tokens_per_s"] == pytest.approx(64 / median_us * 1e6)
        assert row["time_over_bfloat16"] == median_us / plain["timing"]["median_us"]
        assert row["peak_over_bfloat16"] == row["peak_bytes"] / plain["peak_bytes"]
        assert row["resident_bytes"] == plain["resident_bytes"]
        assert row["resident_bytes"] + 4 * parameters < row["tensor_peak_bytes"] <= row["peak_bytes"]


BLOCK = "--divisor 2 --tokens 64 --seq-len 32 --recipes tensorwise delayed --modes eager"
COMMANDS = [
    ("linear", "--shapes 16,16 --modes eager eager --recipes rowwise axiswise --torchao no", "16 x 16", check_linear),
    ("cast", "--shapes 64x128 --casts delayed delayed --torchao no", "64 x 128", check_cast),
    ("gemm", "--shapes 32x48x64", "unknown", check_gemm),
    ("host", "--modes eager --recipes tensorwise --torchao no", "not counted", check_host),
    ("block", BLOCK, "2 x 32 tokens", check_block),
]
BOTH = "delayed", "rowwise_both"
TWO_CASTS = (
    "cast",
    f"--shapes 64x128 --casts {' '.join(BOTH)} --torchao no",
    "64 x 128",
    partial(check_cast, kinds=BOTH),
)


@pytest.mark.parametrize(
    ("verb", "words", "printed", "check", "backend"),
    [
        *(pytest.param(*command, "aot_eager", id=command[0]) for command in COMMANDS),
        pytest.param(*TWO_CASTS, "inductor", id="two casts", marks=pytest.mark.nightly),
    ],
)
def test_the_command_prints_and_saves_a_table(verb, words, printed, check, backend, tmp_path, run_quaver, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    output = tmp_path / "new" / f"{verb}.json"
    assert printed in run_quaver("bench", verb, *words.split(), "--rounds", 2, "--device", "cpu", "--output", output)
    result = json.loads(output.read_text())
    assert (result["benchmark"], result["complete"]) == (verb, True)
    assert all(row["timing"]["median_us"] > 0 for row in result["rows"])
    check(result["rows"])
    assert result["environment"] == describe_measurement(torch.device("cpu"))


BAD_INPUT = {
    "bench gem": "unknown benchmark 'gem'; did you mean 'gemm'?",
    "bench xyz": "choose from linear, ",
    "bench linear --shapes llama-9b": "expected a size such as 1024",
    "bench linear --shapes llama-8b --tokens 9000000000000000000": "--tokens must be at most 1000000000",
    "bench host --size 99999999999": "--size must be at most 1000000000",
    "bench cast --shapes 99999999999999999999": "up to 1000000000, or one of",
    "bench linear --recipes rowise": "--recipes: unknown recipe 'rowise': expected one of tensorwise",
    "bench linear --rounds 0": "--rounds must be at least 1, got 0",
    "bench linear --output /dev/null/x.json": "--output: cannot write /dev/null/x.json",
    "bench linear --output /dev": "--output must be a file to write, got the folder /dev",
    "bench linear --device cuda": "sees no CUDA device",
    "bench cast --shapes 1x2x3": "expected a size such as 1024, rows x columns",
    "bench cast --shapes llama-8b --divisor 5000": "expected at most 4096, a width of llama-8b, got 5000",
    "bench block --divisor 3": "--divisor: expected a divisor of debug's 4 heads, got 3",
    "bench block --tokens 100 --seq-len 64": "expected a multiple of --seq-len 64, got 100",
    "bench train --warmup 1": "--warmup: expected 2 or more, got 1",
    "bench roofline --device abacus": "--device: unknown device 'abacus': expected the full name of one of GB200",
    "bench roofline --recipes rowwise:half": "recipe 'rowwise:half': expected one of float8, dequantized, high_precis",
    "bench roofline --model llama-9b": "--model llama-9b: expected one of llama-8b, llama-70b",
    "bench roofline --config /nowhere.toml": "config file '/nowhere.toml' does not exist",
    "bench roofline --model llama-8b llama-8b": "two models are called llama-8b",
    "bench roofline --device H200 --pictures B200": "--pictures must be devices of --device, got B200",
    "bench roofline --pictures --output /dev/null/x": "/dev/null/x",
    "bench ledger --model llama-9b": "must be one of debug, llama-8b, llama-70b, or a TOML file, got 'llama-9b'",
    "bench ledger --model missing.toml": "missing.toml",
    "bench ledger --recipe mxfp8": "mxfp8: no float8 matmul of H200 takes 1 x 32 scales; operands would be widened",
    "bench ledger --recipe blockwise --gpu b200": "no float8 matmul of B200 takes 1 x 128 scales",
    "doctor --gpu=nope": "--gpu must be the full name of one of GB200, B200, ",
    "doctor --gpu=MI300X": "A100-PCIe, L40S, got 'MI300X'",
    "doctor --gpu=h100 --model=/nowhere": "has no config.json and no config.toml",
    "doctor --gpu=h100 --no-compile": "with --gpu",
    "doctor --recipe=rowwise": "unless --gpu and --model are given",
    "doctor --gpu=h100 --model=train_configs/llama3_debug.toml --recipe=nope": "nope",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(words, run_refused):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has what it should lack")
    assert BAD_INPUT[words] in run_refused(*words.split())


def test_a_full_disk_is_one_line_and_exit_code_4(capsys):
    words = "--device cpu --shapes 16 --rounds 1 --output /dev/full"
    assert main(["bench", "gemm", *words.split()]) == 4
    assert capsys.readouterr().err == "quaver: error: --output: cannot write /dev/full: No space left on device\n"

"""quaver bench: the list of benchmarks, one run from end to end; its one-line errors."""

import json
from pathlib import Path

import pytest
import torch

from quaver.cli import main
from quaver.cli.bench import VERBS


@pytest.mark.parametrize(
    ("verb", "words", "contestants", "printed"),
    [
        ("linear", "--shapes 16 --modes eager --recipes rowwise --torchao no", ["bfloat16", "quaver"], "16 x 16 x 16"),
        ("cast", "--shapes 16x32 --casts rowwise --torchao no", ["copy", "quaver", "quaver", "PyTorch"], "16 x 32"),
        ("gemm", "--shapes 16 --scales rowwise", ["bfloat16", "rowwise"] * 3, "unknown"),
        ("host", "--modes eager --recipes rowwise --torchao no", ["bfloat16", "quaver"], "not counted"),
        (
            "block",
            "--divisor 4 --tokens 64 --seq-len 32 --recipes rowwise --modes eager",
            ["bfloat16", "quaver"],
            "2 x 32 tokens",
        ),
    ],
)
def test_the_command_prints_and_saves_a_table(verb, words, contestants, printed, tmp_path, capsys):
    output = tmp_path / "new" / f"{verb}.json"
    common = ["--rounds", "2", "--device", "cpu", "--output", str(output)]
    assert main(["bench", verb, *words.split(), *common]) == 0
    result = json.loads(output.read_text())
    assert result["benchmark"] == verb
    assert result["complete"]
    assert [row.get("library", row.get("contestant")) for row in result["rows"]] == contestants
    assert all(row["timing"]["median_us"] > 0 for row in result["rows"])
    assert {"device", "torch", "commit", "command", "date"} <= set(result["environment"])
    assert printed in capsys.readouterr().out


BAD_INPUT = {
    "bench linear --shapes llama-9b": "expected a size such as 1024",
    "bench linear --recipes rowise": "unknown recipe 'rowise': expected one of tensorwise",
    "bench linear --rounds 0": "--rounds must be at least 1, got 0",
    "bench linear --rounds many": "--rounds must be an integer, got 'many'",
    "bench linear --threads -1": "--threads must be at least 0, got -1",
    "bench linear --modes fast": "--modes must be one of eager, compiled, got 'fast'",
    "bench linear --output /dev/null/x.json": "--output: cannot write /dev/null/x.json",
    "bench linear --output /dev": "--output: expected a file to write, got the folder /dev",
    "bench linear --device cuda": "sees no CUDA device",
    "bench linear --device abacus": "--device must be one of auto, cpu, cuda, got 'abacus'",
    "bench cast --shapes 1x2x3": "expected a size such as 1024, rows x columns",
    "bench cast --casts rowise": "--casts must be one of ",
    "bench cast --shapes llama-8b --divisor 5000": "expected at most 4096, a width of llama-8b, got 5000",
    "bench gemm --shapes 8x8": "expected a size such as 1024",
    "bench gemm --tokens -5": "--tokens must be at least 1, got -5",
    "bench host --size 0": "--size must be at least 1, got 0",
    "bench block --model llama-9b": "--model must be one of debug, llama-8b, llama-70b, got 'llama-9b'",
    "bench block --divisor 3": "--divisor: expected a divisor of debug's 4 heads, got 3",
    "bench block --tokens 100 --seq-len 64": "expected a multiple of --seq-len 64, got 100",
    "bench train --warmup 1": "--warmup: expected 2 or more, got 1",
    "bench train --training.stepz 3": "unknown flag: 'training.stepz'; did you mean 'training.steps'?",
    "bench train nowhere.toml": "config file 'nowhere.toml' does not exist",
    "bench train --recipes rowise": "unknown recipe 'rowise'",
    "bench roofline --device abacus": "no data about device 'abacus': name one of B200",
    "bench roofline --recipes rowise": "unknown recipe 'rowise': expected one of tensorwise",
    "bench roofline --tokens 0": "--tokens must be at least 1, got 0",
    "bench roofline --model llama-9b": "--model llama-9b: expected one of llama-8b, llama-70b",
    "bench roofline --config /nowhere.toml": "config file '/nowhere.toml' does not exist",
    "bench roofline --model llama-8b llama-8b": "two models are called llama-8b",
    "bench roofline --device H200 --pictures B200": "--pictures B200: expected devices that are in --device",
    "bench roofline --pictures --output /dev/null/x": "/dev/null/x",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(words, refused):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has what it should lack")
    assert BAD_INPUT[words] in refused(*words.split())


def test_an_unknown_benchmark_is_one_line_with_the_nearest_name(capsys):
    assert main(["bench", "gem"]) == 2
    assert capsys.readouterr().err == "quaver: error: unknown benchmark 'gem'; did you mean 'gemm'?\n"
    assert main(["bench", "xyz"]) == 2
    assert "choose from linear, " in capsys.readouterr().err


def test_without_a_name_the_benchmarks_are_listed(capsys):
    assert main(["bench"]) == 2
    listed = capsys.readouterr().out
    assert all(f"  {verb}" in listed for verb in VERBS)
    assert main(["bench", "--help"]) == 0


def test_the_docs_have_every_benchmark():
    docs = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    assert all(f"quaver bench {verb}" in docs for verb in VERBS)

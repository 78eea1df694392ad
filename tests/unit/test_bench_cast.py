"""quaver bench cast: what it counts, who takes part, and the sums in its rows."""

import json

import pytest
import torch

from quaver.bench import cast_contestants as bench
from quaver.bench.cast import bench_cast
from quaver.bench.cast_contestants import COPY, KINDS
from quaver.bench.rotation import Rotation, last_level_cache_bytes
from quaver.bench.shapes import Matrix, parse_matrices
from quaver.bench.traffic import count_compiled, count_operators, distinct_bytes
from quaver.cli import main
from quaver.gemm import GemmBackend
from quaver.kernels import cpu

CPU = torch.device("cpu")
TIMED = ["delayed", "rowwise_both"]


@pytest.fixture(scope="module")
def result():
    return bench_cast(
        [Matrix("", 64, 128)],
        TIMED,
        device=CPU,
        dtype=torch.bfloat16,
        rounds=2,
        with_torchao=False,
    )


def test_every_cast_has_its_contestants_and_the_same_codes(result):
    contestants = [(COPY, ""), ("quaver", "eager"), ("quaver", "compiled"), ("PyTorch", "compiled")]
    rows = [(row["cast"], row["library"], row["mode"]) for row in result["rows"]]
    assert rows == [(kind, *contestant) for kind in TIMED for contestant in contestants]
    assert all(row["same_codes"] for row in result["rows"] if row["library"] != COPY)
    assert all(row["same_codes"] is None for row in result["rows"] if row["library"] == COPY)


def test_rates_come_from_the_floor_and_the_median(result):
    copies = {row["cast"]: row for row in result["rows"] if row["library"] == COPY}
    for row in result["rows"]:
        moved = row["floor_bytes_per_element"] * 64 * 128
        assert row["gb_per_s"] == pytest.approx(moved / row["timing"]["median_us"] / 1e3)
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / copies[row["cast"]]["gb_per_s"])
        assert row["input_copies"] > 1


@pytest.mark.skipif(not cpu.AVAILABLE, reason="no C extension to count")
@pytest.mark.parametrize(
    ("name", "floor", "counted"),
    # One set of codes serves both layouts on a CPU; columns are read once more than rows and columns need.
    [("tensorwise", 5, 5), ("delayed", 3, 3), ("rowwise", 3, 3), ("rowwise_both", 6, 6)],
)
def test_what_the_extension_moves_is_counted(name, floor, counted):
    kind, source = KINDS[name], torch.randn(64, 128, dtype=torch.bfloat16)
    cast = bench._quaver_cast(kind, bench._kept_scale(source, kind))
    traffic = bench._traffic("quaver", "eager", cast, source, kind)
    assert kind.floor(2, CPU) == floor
    assert traffic.source == "C extension"
    assert traffic.moved / source.numel() == pytest.approx(counted, abs=0.2)  # and the scales


def test_the_floor_where_hardware_multiplies_float8(monkeypatch):
    monkeypatch.setattr(bench, "backend_for", lambda device, *, rowwise: GemmBackend.NATIVE)
    floors = {name: kind.floor(2, torch.device("cuda")) for name, kind in KINDS.items()}
    assert floors == {"tensorwise": 6, "delayed": 4, "rowwise": 3, "rowwise_both": 6}


def test_bytes_of_operators_and_of_compiled_code():
    a = torch.zeros(64, 64)

    def double_and_copy():
        return a.t().mul(2).clone()

    assert count_operators(double_and_copy, 0).moved == 4 * a.nbytes  # two operators; the view is free
    assert count_operators(double_and_copy, 4 * a.nbytes + 1).moved is None
    torch.compiler.reset()
    compiled = torch.compile(lambda: (a * 2 + 1).sigmoid(), fullgraph=True)
    assert count_compiled(compiled, 2 * a.nbytes).moved == 2 * a.nbytes  # fused: read once, written once
    assert count_compiled(compiled, 0).moved is None  # it was compiled before
    torch.compiler.reset()
    assert count_compiled(compiled, 2 * a.nbytes + 1).moved is None
    assert distinct_bytes([a, a.t(), a[:2]]) == a.nbytes


def test_a_rotation_is_larger_than_the_cache_and_takes_turns():
    each = 1 << 20
    rotation = Rotation(lambda: torch.empty(each, dtype=torch.uint8), each, CPU)
    cache = last_level_cache_bytes(CPU)
    assert len(rotation) * each >= min(2 * cache, 512 << 20) if cache else len(rotation) >= 64
    first_round = [rotation.next().data_ptr() for _ in range(len(rotation))]
    assert len(set(first_round)) == len(rotation)
    assert [rotation.next().data_ptr() for _ in range(len(rotation))] == first_round
    assert len(Rotation(lambda: 0, 1 << 40, CPU)) == 1
    assert len(Rotation(lambda: 0, 1, CPU)) == 256


def test_matrices_that_people_type():
    assert parse_matrices("64, 8x32", tokens=1) == [Matrix("", 64, 64), Matrix("", 8, 32)]
    names = [str(matrix) for matrix in parse_matrices("llama-8b", tokens=16, divisor=4)]
    assert names == ["16 x 1024 (llama-8b/4 input)", "16 x 3584 (llama-8b/4 input)"]


@pytest.mark.parametrize("text", ["llama-9b", "1x2x3", "0", "axb", ""])
def test_matrices_that_mean_nothing(text):
    with pytest.raises(ValueError, match="expected a size such as 1024, rows x columns .* llama-8b, llama-70b"):
        parse_matrices(text, tokens=1)


def test_the_command_prints_and_saves_a_table(tmp_path, capsys):
    output = tmp_path / "cast.json"
    words = ["bench", "cast", "--shapes", "16x32", "--casts", "rowwise", "--rounds", "2", "--torchao", "no"]
    assert main([*words, "--output", str(output)]) == 0
    saved = json.loads(output.read_text())
    assert saved["benchmark"] == "cast"
    assert {"device", "torch", "commit", "command", "date"} <= set(saved["environment"])
    assert [row["library"] for row in saved["rows"]] == [COPY, "quaver", "quaver", "PyTorch"]
    assert "16 x 32" in capsys.readouterr().out

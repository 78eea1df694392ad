"""quaver bench cast: its contestants, their codes, and the rates in its rows."""

import pytest
import torch

from quaver.bench import cast as bench
from quaver.bench.cast import COPY, KINDS, Cast

CPU = torch.device("cpu")
TIMED = ("delayed", "rowwise_both")


@pytest.fixture(scope="module")
def result():
    return Cast(shapes="64x128", casts=TIMED, torchao="no", device="cpu", rounds=2).measure()


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


def test_the_floor_of_a_cpu_and_of_hardware_that_multiplies_float8(monkeypatch):
    assert {name: kind.floor(2, CPU) for name, kind in KINDS.items()} == {
        "tensorwise": 5,
        "delayed": 3,
        "rowwise": 3,
        "rowwise_both": 6,
    }
    monkeypatch.setattr(bench, "reads_along_contracted", lambda device: True)
    floors = {name: kind.floor(2, torch.device("cuda")) for name, kind in KINDS.items()}
    assert floors == {"tensorwise": 6, "delayed": 4, "rowwise": 3, "rowwise_both": 6}

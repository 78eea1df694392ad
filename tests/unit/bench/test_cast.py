"""quaver bench cast: the bytes that each cast has to move."""

import torch

from quaver.bench import cast as bench
from quaver.bench.cast import KINDS

CPU = torch.device("cpu")


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

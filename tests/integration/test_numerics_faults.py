"""A small part of benchmarks/numerics_faults.py: faults seeded in short runs of the debug model, and a healthy run."""

from dataclasses import replace

import pytest

from benchmarks.numerics_faults import tables, verdict, watched
from benchmarks.numerics_scenarios import FAULTS, HEALTHY

QUICK = {
    "flipped layout of a weight's codes": 1,
    "a row of NaN in an activation": 1,
    "weights of a layer x 100": 1,
    "a detached layer: no gradient": 2,
}
"""Faults, and after how many samples they are named."""


@pytest.mark.parametrize(("name", "samples"), QUICK.items(), ids=QUICK)
def test_a_seeded_fault_is_named_first(name, samples):
    (fault,) = (each for each in FAULTS if each.name == name)
    fault = replace(fault, at=7, steps=10, every=1)
    found = verdict(fault, watched(fault))
    assert found["before"] == []
    assert (found["found"], found["first"], found["samples"]) == (True, True, samples)


def test_a_healthy_run_raises_none():
    assert watched(replace(HEALTHY[0], steps=20, every=1)).events == []


def test_tables_have_misses():
    fault = {"fault": "shuffled labels", "found": False, "samples": None, "alarms": [], "expected": []}
    made = tables({"faults": [fault], "healthy": [{"run": "recipe rowwise", "samples": 30, "alarms": []}]})
    assert "shuffled labels | **none** | - | **missed** | 0" in made["faults"]
    assert "0 of 1 faults were named; 1 of 1 healthy runs raised no alarm" in made["faults"]

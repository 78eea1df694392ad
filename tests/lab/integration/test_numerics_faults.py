"""Runs a small part of benchmarks/numerics/faults.py: faults seeded in short runs, and a healthy run."""

from dataclasses import replace

import pytest

from benchmarks.numerics.faults import judge, make_tables, run_monitored
from benchmarks.numerics.scenarios import FAULTS, HEALTHY
from tests.thinned import first

SAMPLES = {
    "flipped layout of a weight's codes": 1,
    "a row of NaN in an activation": 1,
    "weights of a layer x 100": 1,
    "a detached layer: no gradient": 2,
}
"""Faults, and after how many samples they are named."""


@pytest.mark.parametrize(("name", "samples"), first(1, SAMPLES.items()), ids=SAMPLES)
def test_a_seeded_fault_is_named_first(name, samples):
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    fault = replace(fault, first_step=5, steps=7, every=1)
    result = judge(fault, run_monitored(fault))
    assert result["before"] == []
    assert (result["found"], result["first"], result["samples"]) == (True, True, samples)


@pytest.mark.nightly  # the steps before a fault are healthy, too
def test_a_healthy_run_raises_none():
    assert run_monitored(replace(HEALTHY[0], steps=7, every=1)).events == []


def test_tables_list_missed_faults_and_false_alarms():
    alarm = {"rule": "dead", "layer": "model.layers.3.mlp", "operand": "grad_weight"}
    faults = [
        {"fault": "shuffled labels", "found": False, "samples": None, "alarms": [], "expected": []},
        {"fault": "an idle expert", "found": True, "samples": 3, "alarms": [alarm], "expected": ["dead"]},
        {"fault": "another", "found": False, "samples": None, "alarms": [alarm], "expected": ["dead"]},
    ]
    healthy = [{"run": "recipe rowwise", "alarms": []}, {"run": "experts", "alarms": [alarm, alarm]}]
    table = make_tables({"faults": faults, "healthy": healthy})["faults"]
    assert "\n**missed** | shuffled labels; another\n`dead` | an idle expert (3)\n" in table
    assert "1 of 3 faults were named; 1 of 2 healthy runs raised no alarm:\n\n- experts: " in table
    assert "\n\n- experts: `dead` of layers.3.mlp grad" in table

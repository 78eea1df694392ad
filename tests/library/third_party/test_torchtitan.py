"""Tests quaver in torchtitan, which cannot stand next to this environment's datasets: installed without dependencies.

titan_programs.py tests what torchtitan 0.3 does with a linear: the config tree, `build`, `init_states` after meta-init,
and DTensors by `sharding_config` are its own code. Its Trainer needs a GPU and a newer torch than 2.13 in few places;
titan_trainer.py replaces these and runs it.
"""

import json
import math

import pytest

from tests.library.third_party.installed import run_with_packages

EXTRA = ["tomli", "einops", "tyro", "docstring_parser", "typeguard", "torchdata==0.11.0"]
PACKAGES = {
    "0.3": ["torchtitan==0.3.0", "spmd_types==0.2.3", "torch_checkpointing==0.1.1", *EXTRA],
    "0.2": ["torchtitan==0.2.2", *EXTRA],
}


def run_check(version, *words, folder):
    arguments = ["-m", "tests.library.third_party.titan_programs", *words]
    assert f"{words[0]} passed" in run_with_packages(PACKAGES[version], arguments, folder)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_the_converter_and_the_override_of_0_3_convert(recipe, tmp_path):
    run_check("0.3", "check_converter", recipe, folder=tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_experts_of_0_3_are_converted(recipe, tmp_path):
    run_check("0.3", "check_experts", recipe, folder=tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_of_0_3_trains_in_float8_as_in_bfloat16(ranks, tmp_path):
    """By FSDP2, with and without a float8 gather, and by tensor parallelism: as in bfloat16, and no MFU."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    arguments = [*launch, "-m", "tests.library.third_party.titan_trainer", str(tmp_path / "runs.json")]
    run_with_packages(PACKAGES["0.3"], arguments, tmp_path)
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert len(runs) == (3 if ranks == 1 else 8)
    bfloat16 = {run["tp"]: run for run in runs if run["recipe"] is None}
    assert all(run["mfu"] and not run["float8"] for run in bfloat16.values())
    for run in (run for run in runs if run["recipe"]):
        expected = bfloat16[run["tp"]]["losses"]
        assert len(expected) == 3
        assert expected[-1] < expected[0] - 0.2
        assert all(map(math.isfinite, run["losses"])), run
        assert run["losses"] != expected, run
        assert run["losses"] == pytest.approx(expected, abs=0.02), (run, expected)
        assert (run["float8"], run["high precision"], run["backends"]) == (10, ["lm_head"], ["exact"]), run
        assert (run["gathers float8"], run["mfu"]) == (run["gather"], False), run


@pytest.mark.nightly
def test_the_converter_of_0_2_runs_on_quaver_with_the_shim(tmp_path):
    run_check("0.2", "check_shim", folder=tmp_path)

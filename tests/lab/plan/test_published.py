"""The published runs load, and none contradicts itself."""

from collections import Counter
from dataclasses import asdict

import pytest

from benchmarks.plan.published_runs import load_models, load_published, parse_run


def test_runs_are_sorted_by_source_and_told_apart():
    runs = load_published()
    assert 60 <= len(runs) <= 110
    groups = [run.name.partition(" ")[0] for run in runs]
    assert groups == sorted(groups)
    assert [name for name, count in Counter(run.name for run in runs).items() if count > 1] == []
    assert {run.model for run in runs} | {"llama3_8b", "llama3_70b", "llama3_405b"} == set(load_models())


def test_the_micro_batches_of_a_pipeline_are_read():
    (run,) = (
        run for run in load_published() if run.pp_schedule == "Interleaved1F1B" and run.name.startswith("torchtitan")
    )
    assert (run.local_batch, run.micro_batches, run.data_parallel, run.memory_gib) == (4, 8, 8, 72.7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 2}, r"degrees \(1, 32, 2, 1, 1\) that multiply to 32 GPUs"),
        ({"model": "llama4"}, "a model of"),
        ({"recipe": "fp8"}, "a recipe of"),
        ({"float8_all_gather": True}, "float8 where float8_all_gather is true"),
        ({"pp": 2, "gpus": 64}, "a pp_schedule with pipelines"),
        ({"pp_virtual": 2}, "virtual stages where the schedule is interleaved"),
        ({"global_batch": 33}, "a global_batch of whole microbatches of 32 ranks"),
        ({"memory_gib": 47.5}, "a loss where memory is stated"),
        ({"assumed": ["batch"]}, "assumed: names of fields"),
        ({"gpus": "32"}, "gpus: Input should be a valid integer"),
        ({"gpu": "H20"}, "gpu: Input should be"),
        ({"power": 500}, "power: Unexpected keyword argument"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(change, message):
    first = {key: value for key, value in asdict(load_published()[0]).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        parse_run({**first, **change})

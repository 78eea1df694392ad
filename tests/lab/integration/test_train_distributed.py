"""Compares `quaver train` on several ranks with the same run in one process: losses, norms, and how it ends.

Ranks sum the same numbers in another order. In float32 losses then agree to a few units in the last place (2e-7
measured, 2e-6 allowed), and gradient norms, which depend on every gradient, to ten times that. In float8 a unit in the
last place may move a value to the next code, which is up to an eighth larger. Few values move, so losses agree to 1e-5
and norms to 5e-4 (2.3e-4 measured in the third step, after two updates that differ). The warm-up has one step, so that
the first update has the full learning rate.

The runs call `main` on the ranks of tests/ranks.py; a nightly test starts torchrun.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from quaver.lab.cli import main
from quaver.lab.runs.json_lines import read_json_lines
from tests.command_line import quaver_on_ranks
from tests.lab.integration.train_on_ranks import LIMIT_S, TINY, Results, train_on_ranks

REPOSITORY = Path(__file__).parents[3]
HP = ["--float8.no-enable_float8_linear"]
ALL_GATHER = ["--float8.enable_fsdp_float8_all_gather", "--float8.precompute_float8_dynamic_scale_for_fsdp"]
SELECTIVE = ["--activation_checkpoint.mode=selective"]
REPLICATE = ["--parallelism.data_parallel_replicate_degree=2"]
TENSOR = ["--parallelism.tensor_parallel_degree=2"]
DELAYED = ["--float8.recipe_name=delayed"]
DELAYED_DYNAMIC_WEIGHT = ["--float8.recipe_name=delayed_with_dynamic_weight"]
MASKED = ["--data.document_mask"]
LAST = ["--training.reduce=last"]
ONE_SEQUENCE = ["--training.local_batch_size=1", "--validation.steps=8"]
GATHERED_ONCE = [*LAST, "--parallelism.fsdp_reshard_after_forward=never"]
MXFP8 = ["--float8.recipe_name=mxfp8", "--model.dim=128", "--model.hidden_dim=128"]
MIXED = ["--float8.filter_fqns=lm_head,k_proj,layers.1.mlp", *MASKED]
EXPERTS = ["--model.n_experts=4", "--model.n_shared_experts=1", "--model.hidden_dim=32"]
SCHEDULED = ["--float8.high_precision_schedule=forward: last 1 steps,grad_weight: last 50% of blocks"]
MIXTURE = ["--float8.recipe_name=rowwise", *EXPERTS, "--lr_scheduler.schedule=constant"]
TWO_STEPS = ["--training.steps=2", "--checkpoint.enable"]
CAST_ONCE = [*ALL_GATHER, *GATHERED_ONCE, "--float8.cast_weights_once"]
SPLIT_BY_2, SPLIT_BY_4 = (["--parallelism.expert_parallel_degree=2"], ["--parallelism.expert_parallel_degree=4"])
# Where sums are taken in another order a code may move by one step; of blocks a scale, too, by a power of two.
EXACT, FLOAT8, BLOCKS, CODES = 2e-6, 1e-5, 1e-4, 2e-4
GRAD_NORM_TOLERANCES = {EXACT: 10 * EXACT, FLOAT8: 50 * FLOAT8, BLOCKS: 50 * BLOCKS, CODES: 50 * CODES}

REFERENCES = {"hp": HP, "tensorwise": [], "mixture": MIXTURE, "delayed": DELAYED, "scheduled": SCHEDULED}
REFERENCES_AT_NIGHT = {
    "tied": [*HP, "--model.tie_word_embeddings", *MASKED],
    "mixed": MIXED,
    "mxfp8": MXFP8,
    "mixture_tensorwise": EXPERTS,
    "mixture_hp": [*HP, *EXPERTS],
    "delayed_dynamic_weight": DELAYED_DYNAMIC_WEIGHT,
}

LAYOUTS = {
    # name: (ranks, reference, argv, tolerance)
    "all_gather": (2, "tensorwise", [*ALL_GATHER, "--job.compare"], FLOAT8),
    # Its blocks are not compiled, which the run says; "mixture_split_compiled" without checkpoints is.
    "mixture_split": (2, "mixture", [*MIXTURE, *SPLIT_BY_2, *SELECTIVE, "--training.compile"], FLOAT8),
    # After two steps `resharded` resumes it on 2 ranks.
    "mixture_shard_split": (4, "mixture", [*MIXTURE, *SPLIT_BY_2, *ALL_GATHER, *SELECTIVE, *TWO_STEPS], FLOAT8),
    "delayed_all_gather": (2, "delayed", [*DELAYED, *ALL_GATHER], FLOAT8),
    "delayed_shard_tensor": (4, "delayed", [*DELAYED, *TENSOR, *ALL_GATHER], FLOAT8),
    "last_all_reduce": (4, "hp", [*HP, *REPLICATE, "--training.reduce=last_all_reduce", *ONE_SEQUENCE], EXACT),
    "scheduled": (2, "scheduled", [*SCHEDULED, *CAST_ONCE, "--validation.high_precision_too"], FLOAT8),
    "shard_tensor": (4, "hp", [*HP, *TENSOR], EXACT),
}

NIGHTLY = {
    # In each run test_experts_dispatch.py compiles split experts, test_experts.py those of two ranks, and
    # test_train_cli.py the blocks of the trainer.
    "mixture_split_compiled": (2, "mixture", [*MIXTURE, *SPLIT_BY_2, "--training.compile"], FLOAT8),
    "scheduled_tensor_compiled": (2, "scheduled", [*SCHEDULED, *TENSOR, "--training.compile"], FLOAT8),
    "scheduled_tensor": (2, "scheduled", [*SCHEDULED, *TENSOR], FLOAT8),
    "last": (2, "tensorwise", CAST_ONCE, FLOAT8),
    "tied": (2, "tied", REFERENCES_AT_NIGHT["tied"], EXACT),
    "mxfp8_shard_tensor": (4, "mxfp8", [*MXFP8, *TENSOR, *ALL_GATHER], BLOCKS),
    "tensor_mixed": (2, "mixed", [*MIXED, *TENSOR], FLOAT8),
    # The tensorwise scale of an expert's tokens is one for those of all ranks.
    "tensorwise_split": (2, "mixture_tensorwise", [*EXPERTS, *SPLIT_BY_2, *ALL_GATHER], BLOCKS),
    "shard_tensor_all_gather": (4, "tensorwise", [*TENSOR, *ALL_GATHER, "--float8.cast_weights_once"], FLOAT8),
    "split_selective": (4, "mixture_tensorwise", [*EXPERTS, *SPLIT_BY_2, ALL_GATHER[0], *SELECTIVE], BLOCKS),
    "mixture_shard": (2, "mixture", MIXTURE, FLOAT8),
    "mixture_hp_split": (4, "mixture_hp", [*HP, *EXPERTS, *SPLIT_BY_4], EXACT),
    "delayed_shard": (2, "delayed", DELAYED, FLOAT8),
    "delayed_dynamic_weight": (2, "delayed_dynamic_weight", [*DELAYED_DYNAMIC_WEIGHT, *ALL_GATHER], FLOAT8),
    "tensor_compiled": (2, "hp", [*HP, *TENSOR, "--training.compile"], EXACT),
    "replicate": (2, "hp", [*HP, *REPLICATE], EXACT),
    "shard_replicate": (4, "hp", [*HP, *REPLICATE, "--validation.steps=3"], EXACT),
    "mixture_replicate_split": (4, "mixture", [*MIXTURE, *SPLIT_BY_2, *REPLICATE], FLOAT8),
    "mixture_foreach_split": (2, "mixture", [*MIXTURE, *SPLIT_BY_2, "--optimizer.implementation=foreach"], FLOAT8),
    "tensor": (2, "hp", [*HP, *TENSOR], EXACT),
    "resharded": (2, "hp", [*HP, "--parallelism.fsdp_reshard_after_forward=always"], EXACT),
    "delayed_tensor": (2, "delayed", [*DELAYED, *TENSOR], FLOAT8),
    "tensor_float8": (2, "tensorwise", TENSOR, FLOAT8),
    "delayed_tensor_compiled": (2, "delayed", [*DELAYED, *TENSOR, "--training.compile"], FLOAT8),
    "replicate_tensor": (4, "hp", [*HP, *TENSOR, *REPLICATE], EXACT),
    "shard_tensor_compiled": (4, "hp", [*HP, *TENSOR, "--training.compile"], EXACT),
    "last_tied": (2, "tied", [*REFERENCES_AT_NIGHT["tied"], *GATHERED_ONCE, "--training.compile"], EXACT),
    "last_shard_tensor": (4, "tensorwise", [*TENSOR, *ALL_GATHER, *LAST, *SELECTIVE], FLOAT8),
    "last_replicate": (4, "hp", [*HP, *REPLICATE, *LAST, *ONE_SEQUENCE], EXACT),
    "last_split": (2, "mixture", [*MIXTURE, *SPLIT_BY_2, *ALL_GATHER, *GATHERED_ONCE, *SELECTIVE], FLOAT8),
    "last_delayed": (2, "delayed", [*DELAYED, *ALL_GATHER, *GATHERED_ONCE], FLOAT8),
    "last_codes": (2, "hp", [*HP, *LAST, "--comm.float8_gradients"], CODES),
    "last_tensor": (2, "delayed", [*DELAYED, *TENSOR, *LAST], FLOAT8),
}

BAD = {
    "few_gradients": (["--comm.float8_gradients", "--model.dim=16"], "comm.float8_gradients: the FSDP2 group of "),
    "unscattered": (["--comm.float8_gradients", *REPLICATE], "must be false where no gradient is reduce-scattered"),
    "no_replicas": (["--training.reduce=last_all_reduce"], "training.reduce must be every or last without replicas"),
    "world": (["--parallelism.data_parallel_shard_degree=3"], "must be the number of processes = 2, got 1 * 3 * 1"),
    "sharding": ([*REPLICATE, *ALL_GATHER], "float8.enable_fsdp_float8_all_gather must be false where no weight"),
    "tied_head": (
        [*ALL_GATHER, "--model.tie_word_embeddings", "--float8.filter_fqns=k_proj"],
        "the weight of lm_head is tied to model.embed_tokens, so it cannot be gathered in float8",
    ),
    "data": (["--data=none"], "data.path 'none' does not exist"),
    "split": ([*EXPERTS, *SPLIT_BY_4], "must be a divisor of the 2 ranks over which FSDP2 shards, got 4"),
    "folder": (["--job.name=used"], "has files already; give another job.name or remove it"),
}


def finish(command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
    """Run a launcher in a session of its own, and end all of it where it takes too long."""
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **options)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # torchrun ends its ranks, which have sessions of their own
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"took over {LIMIT_S} s: {command}\n{out[-2000:]}\n{err[-4000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with some text and one used run folder."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "text").mkdir()
    for n in range(400):  # a sequence has more than one document
        (folder / "text" / f"{n}.txt").write_text(f"{n} bottles of beer on the wall, {n} bottles\n")
    (folder / "runs" / "used").mkdir(parents=True)
    (folder / "runs" / "used" / "notes.txt").write_text("mine")
    return folder


def make_argv(folder: Path, name: str, argv: list[str]) -> list[str]:
    places = [f"--data={folder / 'text'}", f"--job.dump_folder={folder / 'runs'}", f"--job.name={name}"]
    return [*TINY, *places, *argv]


def train_all(folder: Path, ranks: int, layouts: dict, bad: dict) -> Results:
    cases = [(name, make_argv(folder, name, case[2])) for name, case in layouts.items() if case[0] == ranks]
    cases += [(f"bad_{name}", make_argv(folder, f"bad_{name}", argv)) for name, (argv, _) in bad.items()]
    return train_on_ranks(ranks, cases)


def train_alone(folder: Path, references: dict[str, list[str]]) -> None:
    for name, argv in references.items():
        assert main(["train", *make_argv(folder, f"one_{name}", argv)]) == 0


@pytest.fixture(scope="module")
def on_two(folder: Path) -> Results:
    return train_all(folder, 2, LAYOUTS, BAD)


@pytest.fixture(scope="module")
def on_four(folder: Path) -> Results:
    return train_all(folder, 4, LAYOUTS, {})


@pytest.fixture(scope="module")
def nightly(folder: Path) -> None:
    train_alone(folder, REFERENCES_AT_NIGHT)
    for ranks in (2, 4):
        train_all(folder, ranks, NIGHTLY, {})


@pytest.fixture(scope="module")
def references(folder: Path) -> Path:
    train_alone(folder, REFERENCES)
    return folder / "runs"


def read_numbers(run: Path, key: str, model: str | None = None) -> list[float]:
    """Return the values of a metric for a model, by default for the run's first."""
    records = read_json_lines(run / "metrics.jsonl")
    name = model or records[0]["model"]
    return [record[key] for record in records if key in record and record["model"] == name]


def check_numbers(run: Path, one: Path, tolerance: float, model: str | None = None) -> None:
    losses, expected = read_numbers(run, "loss", model), read_numbers(one, "loss")
    assert expected[0] > expected[-1] + 0.03  # the updates matter
    assert losses == pytest.approx(expected, rel=tolerance)
    norms = read_numbers(run, "grad_norm", model)
    assert norms == pytest.approx(read_numbers(one, "grad_norm"), rel=GRAD_NORM_TOLERANCES[tolerance])
    if run.name != "shard_replicate":  # which takes fewer validation batches, that do not divide by the ranks
        *_, validation = read_numbers(run, "validation_loss", model)  # `resharded` has an earlier one, after two steps
        assert [validation] == pytest.approx(read_numbers(one, "validation_loss"), rel=tolerance)


@pytest.fixture(scope="module")
def resharded(folder: Path, on_four: Results) -> None:
    """Resume on 2 ranks, for the third step, the run with experts that took two steps on 4."""
    argv = [f"--resume={folder / 'runs' / 'mixture_shard_split'}", "--training.steps=3"]
    train_on_ranks(2, [("resharded", argv)])


FIXTURES = {name: "on_two" if ranks == 2 else "on_four" for name, (ranks, *_) in LAYOUTS.items()}
FIXTURES |= dict.fromkeys(NIGHTLY, "nightly") | {"mixture_shard_split": "resharded"}
"""The fixture that runs each layout."""


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)])
def test_ranks_compute_what_one_process_computes(name, request, references):
    _, reference, _, tolerance = (LAYOUTS | NIGHTLY)[name]
    request.getfixturevalue(FIXTURES[name])
    check_numbers(references / name, references / f"one_{reference}", tolerance)


def test_the_baseline_on_ranks_is_that_of_one_process(on_two, references):
    check_numbers(references / "all_gather", references / "one_hp", EXACT, "float32")


def test_the_load_of_experts_is_that_of_one_process(on_two, resharded, references):
    one = read_numbers(references / "one_mixture", "expert_load_max")
    for name in ("mixture_split", "mixture_shard_split"):
        assert read_numbers(references / name, "expert_load_max") == one


def test_a_float8_all_gather_starts_with_the_bits_of_one_process(on_two, references):
    losses = [read_numbers(references / name, "loss")[0] for name in ("all_gather", "one_tensorwise")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)


def test_the_amaxes_of_ranks_are_those_of_one_process(on_two, on_four, references):
    """The maximum over ranks. FSDP averages the gradients of ranks, so that each rank's are as many times larger."""
    one = read_json_lines(references / "one_delayed" / "float8_scales.jsonl")
    for name in ("delayed_all_gather", "delayed_shard_tensor"):
        steps = read_json_lines(references / name / "float8_scales.jsonl")
        assert [step["step"] for step in steps] == [1, 2, 3]
        for step, reference in zip(steps, one, strict=True):
            factors = {tensor: 2 if tensor.endswith("grad_output") else 1 for tensor in reference["amax"]}
            expected = {tensor: factors[tensor] * amax for tensor, amax in reference["amax"].items()}
            assert step["amax"] == pytest.approx(expected, rel=1e-4), name
            assert step["dynamic"] == reference["dynamic"]


def read_summary(run: Path) -> tuple[dict, dict]:
    """Return the summary of a run, and the part of its one model."""
    summary = json.loads((run / "summary.json").read_text())
    (model,) = summary["models"].values()
    return summary, model


def test_the_summary_names_the_ranks_and_has_numbers_of_one_device(on_two, on_four, references):
    summary, run = read_summary(references / "delayed_shard_tensor")
    assert (summary["status"], summary["ranks"], summary["mesh"]) == ("finished", 4, {"dp_shard": 2, "tp": 2})
    flops_share = run["mfu"] * summary["bfloat16_peak"]["flops_per_s"] / run["tokens_per_s"]
    one, alone = read_summary(references / "one_delayed")
    per_token = alone["mfu"] * one["bfloat16_peak"]["flops_per_s"] / alone["tokens_per_s"]
    assert flops_share == pytest.approx(per_token / 4)  # per device
    _, sharded = read_summary(references / "delayed_all_gather")
    assert run["peak_memory_bytes"] < sharded["peak_memory_bytes"] < alone["peak_memory_bytes"]
    assert run["peak_memory_source"].endswith(", of rank 0")
    assert "global_batch_size = 8" in (references / "delayed_shard_tensor" / "config.toml").read_text()


def test_a_compile_that_compiles_nothing_is_noted(on_two, references):
    summary, run = read_summary(references / "mixture_split")
    assert run["compiled_graphs"] == 0
    note = "training.compile compiled no graph, so the blocks run eagerly: expert parallelism ends graphs"
    assert sum(note in line for line in summary["notes"]) == 1
    assert on_two.stdout.count(f"rowwise: {note}") == 1  # after the first step


def test_only_the_first_rank_prints(on_two):
    assert on_two.stdout.count("run folder:") == sum(case[0] == 2 for case in LAYOUTS.values())


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_for_all_ranks_and_no_process_group(name, on_two, folder):
    errors = [line for line in on_two.stderr.splitlines() if "quaver: error:" in line]
    assert len(errors) == len(BAD)
    message = BAD[name][1]
    assert sum(message in error for error in errors) == 1
    assert [ended[f"bad_{name}"] for ended in on_two.ended] == [(2, 0)] * 2
    assert not (folder / "runs" / f"bad_{name}").exists()


def test_every_good_run_asked_for_one_process_group(on_two, on_four):
    for name, (ranks, *_) in LAYOUTS.items():
        assert [ended[name] for ended in {2: on_two, 4: on_four}[ranks].ended] == [(0, 1)] * ranks


DIVERGES = ["--optimizer.lr=1e38", "--lr_scheduler.warmup_steps=0", *ALL_GATHER]


def check_diverged(run: Path, stdout: str, stderr: str) -> None:
    assert stdout.count("step     1") == 1  # of rank 0 alone
    (line,) = [line for line in stderr.splitlines() if "quaver: error:" in line]
    assert "tensorwise: step 2 has loss nan" in line
    assert "first in weight of model.embed_tokens" in line
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["ranks"]) == ("non-finite", 2)
    assert summary["reason"] in line


def test_the_script_starts_ranks_and_a_diverging_run_ends_them_with_its_summary(folder, tmp_path):
    """torchrun's own parser reads the arguments of the script, and this test starts the ranks that they ask for."""
    shutil.copytree(REPOSITORY / "train_configs", tmp_path / "train_configs")
    script = shutil.copy(REPOSITORY / "run_train.sh", tmp_path)
    torchrun = tmp_path / ".venv" / "bin" / "torchrun"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text("""#!/usr/bin/env bash\nprintf "%s\\0" "$OMP_NUM_THREADS" "$@"\n""")
    torchrun.chmod(0o755)
    environment = {**os.environ, "NGPU": "2", "CONFIG_FILE": "train_configs/llama3_debug.toml"}
    process = finish([script, *make_argv(folder, "diverges", DIVERGES)], env=environment, cwd=folder)
    threads, *argv = process.stdout.split("\0")[:-1]
    args = get_args_parser().parse_args(argv)
    assert (threads, args.nproc_per_node, args.module, args.training_script) == ("1", "2", True, "quaver")
    assert (args.local_ranks_filter, args.tee, args.role) == ("0", "3", "rank")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "localhost:0")

    first, second = [rank.finished() for rank in quaver_on_ranks(2, args.training_script_args, cwd=folder)]
    assert (first.returncode, second.returncode) == (3, 3)
    check_diverged(folder / "runs" / "diverges", first.stdout + second.stdout, first.stderr + second.stderr)


def test_a_dry_run_is_printed_by_the_first_rank_alone(folder):
    argv = ["train", "--dry-run", *make_argv(folder, "planned", HP)]
    first, second = [rank.finished() for rank in quaver_on_ranks(2, argv, cwd=folder)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert "ranks        2: dp_shard 2\n" in first.stdout
    assert "nothing was trained or written" in first.stdout
    assert (second.stdout, second.stderr) == ("", "")
    first, second = [rank.finished() for rank in quaver_on_ranks(2, [*argv, "--training.steps=0"], cwd=folder)]
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.startswith("quaver: error: training.steps must be at least 1, got 0")
    assert (second.stdout, second.stderr) == ("", "")


@pytest.mark.nightly
def test_torchrun_ends_the_ranks_of_a_diverging_run(folder):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NGPU": "2", "CONFIG_FILE": "train_configs/llama3_debug.toml"}
    argv = make_argv(folder, "diverges_by_torchrun", DIVERGES)
    process = finish([str(REPOSITORY / "run_train.sh"), *argv], env=environment, cwd=folder)
    assert process.returncode != 0
    assert "exitcode  : 3" in process.stderr
    check_diverged(folder / "runs" / "diverges_by_torchrun", process.stdout, process.stderr)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (["--data=none"], "quaver: error: rank 1: data.path 'none' does not exist"),
        (["--training.seed=1"], "quaver: error: rank 1 read another config or other data than rank 0"),
    ],
)
def test_ranks_that_disagree_end_together_without_torchrun_too(folder, other, message):
    """Without torchrun rank 0 hosts the store, and must outlive the last read of the other ranks."""
    argv = ["train", *make_argv(folder, "disagree", HP)]
    first, second = [rank.finished() for rank in quaver_on_ranks(2, argv, others=other)]
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.startswith(message)
    assert len(first.stderr.splitlines()) == 1
    assert second.stderr == ""
    assert not (folder / "runs" / "disagree").exists()

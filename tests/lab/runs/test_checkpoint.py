"""Tests checkpoints in one process: contents of a folder, exact resumes, and what is refused."""

import json
import shutil
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from quaver.lab.cli import main
from quaver.lab.huggingface.convert import open_checkpoint_model
from quaver.lab.runs.checkpoint_folder import RECORD_FILE, CheckpointFolder, read_record
from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.runs.manifest import MANIFEST_FILE
from quaver.lab.runs.model_state import load_rng_states, resize_histories
from quaver.lab.runs.ranks import Ranks
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.settings import Checkpoint, Float8, TrainConfig
from quaver.lab.settings.config_file import load_config
from quaver.lab.trainer.optimizer import build_optimizer
from quaver.lab.trainer.train import train
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import TrainingRun, prepare_run
from quaver.optim import copy_states
from quaver.roofline.device_specs import get_peak_flops
from quaver.runtime.errors import InputError
from tests.lab.conftest import make_resumable, make_tiny, write_text
from tests.lab.trainer.runs import hash_files, read_numbers, read_steps, run_to_end, with_settings
from tests.steps import assert_same
from tests.thinned import at_night

DELAYED = Float8(recipe_name="delayed", delayed_history_len=3)


def compare_delayed(config: TrainConfig) -> TrainConfig:
    """Return a run with delayed scaling and its bfloat16 baseline."""
    return with_settings(replace(make_resumable(config), float8=DELAYED), job={"compare": True})


@pytest.fixture
def config(tiny_config: TrainConfig) -> TrainConfig:
    return compare_delayed(tiny_config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Return a run of six steps, with checkpoints after two, four and six."""
    folder = tmp_path_factory.mktemp("finished")
    return run_to_end(set_steps(compare_delayed(make_tiny(folder, write_text(folder / "text"))), 6))


@pytest.fixture
def saved(config: TrainConfig, finished: TrainingRun) -> Path:
    """Return a copy of the folder of `finished`, in the place of the run of `config`."""
    return Path(shutil.copytree(finished.folder.path, Path(config.job.dump_folder) / "tiny"))


def set_steps(config: TrainConfig, steps: int, name: str = "tiny", **checkpoint: object) -> TrainConfig:
    return with_settings(config, training={"steps": steps}, job={"name": name}, checkpoint=checkpoint)


def collect_tensors(run: TrainingRun) -> dict[str, torch.Tensor]:
    """Return weights, moments, step counters, scales and histories of every model."""
    tensors = {}
    for model in run.models:
        moments = enumerate(model.optimizer.state.values())
        states = {f"{index} {name}": value for index, state in moments for name, value in state.items()}
        states |= {**model.model.state_dict(), **model.scaling.state_dict()}
        tensors |= {f"{model.name} {name}": value for name, value in states.items()}
    return tensors


@pytest.mark.parametrize(
    ("async_mode", "optimizer"),
    [("disabled", "AdamW"), ("async", "Float8AdamW"), *at_night([("async", "Float8Muon"), ("disabled", "Muon")])],
)
def test_a_resumed_run_has_the_same_bits(config, async_mode, optimizer):
    compare = optimizer == "AdamW"  # the baseline's states are saved as the model's are
    config = with_settings(config, model={"dim": 128}, optimizer={"name": optimizer}, job={"compare": compare})
    if not compare:  # it resumes within the phase of the block
        schedule = ("forward: first 1 step", "grad_weight: last 1 block")
        config = with_settings(config, float8={"high_precision_schedule": schedule})
    run_to_end(set_steps(config, 2, async_mode=async_mode))
    resumed = run_to_end(set_steps(config, 3, resume="must", async_mode=async_mode))
    whole = run_to_end(set_steps(config, 3, "whole", async_mode=async_mode))
    assert resumed.began_at_step == 2
    assert read_numbers(resumed) == read_numbers(whole)
    expected = collect_tensors(whole)
    assert any("amax_history" in name for name in expected)
    assert any(name.endswith("_fp8") for name in expected) == optimizer.startswith("Float8")
    assert any("momentum_buffer" in name for name in expected) == optimizer.endswith("Muon")
    assert_same(collect_tensors(resumed), expected)
    assert resumed.progress == whole.progress
    assert resumed.checkpoints.folder.list_steps() == [2, 3]


def test_a_run_and_its_resume_leave_the_warning_filters_of_the_process(tiny_config):
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        before = [*warnings.filters]
        run_to_end(set_steps(tiny_config, 1))
        run_to_end(set_steps(tiny_config, 2, resume="must"))
        assert warnings.filters == before
    assert not [warning for warning in shown if "torch.distributed is disabled" in str(warning.message)]


def test_a_label_with_a_colon_is_no_name_of_a_file(config):
    """Records have the label as typed. Windows and rsync refuse a colon in a path."""
    config = replace(config, float8=Float8(recipe_name="rowwise", backward="dequantized"))
    config = with_settings(config, profiling={"enable_profiling": True, "profile_freq": 1, "profiler_warmup": 0})
    run = run_to_end(set_steps(config, 1, name=""))
    assert {row[1] for row in read_numbers(run)} >= {"rowwise:dequantized"}
    paths = [path.relative_to(run.folder.path.parent).as_posix() for path in run.folder.path.rglob("*")]
    assert not [path for path in paths if ":" in path]
    assert any("checkpoint/step-00000001/rowwise-dequantized/" in path for path in paths)
    assert any("step-000001/rowwise-dequantized-rank0" in path for path in paths)
    resumed = run_to_end(set_steps(config, 2, name=run.folder.path.name, resume="must"))
    assert resumed.began_at_step == 1
    assert open_checkpoint_model(run.checkpoints.folder.get_path(1), "rowwise:dequantized").weights_path.is_dir()


@pytest.mark.parametrize(("saved", "resumed"), [("Float8Muon", "Muon"), *at_night([("AdamW", "Float8AdamW")])])
def test_states_are_converted_when_a_run_resumes_with_the_other_optimizer(config, saved, resumed):
    """The states are, to the bit, what the new optimizer stores of the saved moments, in both directions."""
    config = with_settings(config, model={"dim": 128, "hidden_dim": 160}, job={"compare": False})

    def make_config(number: int, name: str) -> TrainConfig:
        return with_settings(set_steps(config, number, resume="auto"), optimizer={"name": name})

    run = run_to_end(make_config(1, saved))
    for name, number in ((resumed, 2), (saved, 3)):
        (before,), run = run.models, prepare_run(make_config(number, name))
        (model,) = run.models
        expected = build_optimizer(before.model, model.config.optimizer)
        copy_states(expected, before.optimizer)
        for old, new in zip(before.model.parameters(), model.model.parameters(), strict=True):
            assert_same([new, model.optimizer.state[new]], [old, expected.state[old]])
        train(run)
    assert (run.began_at_step, run.progress.step) == (2, 3)


def test_a_background_save_has_the_values_of_its_step(config, finished, monkeypatch):
    """The thread of step 2 begins to write when step 3 has changed every parameter."""
    is_changed, make_partial, steps = threading.Event(), CheckpointFolder.make_partial, []

    def make_partial_late(folder: CheckpointFolder, step: int) -> None:
        assert step > 2 or is_changed.wait(60)
        make_partial(folder, step)

    def take_step(model: TrainedModel, step: int, *batches: object, **options: object) -> object:
        result = train_step(model, step, *batches, **options)
        steps.append(step)
        if steps.count(3) == 2:  # of both models
            is_changed.set()
        return result

    train_step = TrainedModel.train_step
    monkeypatch.setattr(CheckpointFolder, "make_partial", make_partial_late)
    monkeypatch.setattr(TrainedModel, "train_step", take_step)
    run = run_to_end(set_steps(config, 3, async_mode="async"))
    manifests = [run.checkpoints.folder.get_path(2) / MANIFEST_FILE for run in (run, finished)]
    digests, expected = (json.loads(path.read_text())["files"] for path in manifests)
    names = [name for name in expected if name.endswith(".distcp")]
    assert len(names) == 2
    assert [digests[name] for name in names] == [expected[name] for name in names]


def test_a_resume_takes_the_options_of_the_optimizer_from_its_config(config, saved):
    options = {"weight_decay": 0.3, "beta1": 0.5, "eps": 1e-6}
    for model in prepare_run(with_settings(set_steps(config, 8, resume="must"), optimizer=options)).models:
        matrices, _ = model.optimizer.param_groups
        assert (matrices["weight_decay"], matrices["betas"], matrices["eps"]) == (0.3, (0.5, 0.95), 1e-6)
        assert model.optimizer.state


def test_states_of_another_algorithm_are_refused(config, saved):
    with pytest.raises(CheckpointError, match=r"saved by optimizer.name = AdamW: states of AdamW cannot become .*Muon"):
        prepare_run(with_settings(set_steps(config, 8, resume="must"), optimizer={"name": "Muon"}))


@pytest.mark.parametrize("length", [2, 5])
def test_a_run_resumes_with_another_length_of_histories(config, finished, saved, length):
    resumed = prepare_run(with_settings(set_steps(config, 8, resume="must"), float8={"delayed_history_len": length}))
    scales, saved_scales = (run.models[0].scaling.state_dict() for run in (resumed, finished))
    expected = {name: F.pad(scale, (2, 0))[-length:] if scale.dim() else scale for name, scale in saved_scales.items()}
    assert_same(scales, expected)


def test_a_checkpoint_cannot_ask_for_a_history_of_any_length():
    size = TensorStorageMetadata(TensorProperties(), torch.Size([1 << 40]), [])
    metadata = Metadata(dict.fromkeys(("float8.input.amax_history", "float8.quant_scale"), size))
    for name, shape in (("input.amax_history", (3,)), ("quant_scale", ())):
        with pytest.raises(CheckpointError, match=rf"'x': {name} must be .*, got a tensor of \[1099511627776\]"):
            resize_histories({name: torch.zeros(shape)}, metadata, Path("x"))


def test_resuming_from_an_earlier_step_sets_the_later_ones_aside(config, finished, saved):
    again = run_to_end(set_steps(config, 6, resume="must", load_step=2))
    assert (again.began_at_step, read_numbers(again)) == (2, read_numbers(finished))
    prepare_run(set_steps(config, 3, resume="must", load_step=2)).folder.release()  # it dies before its first save
    assert list_set_aside(saved) == [4, 6], "removed before the next checkpoint is complete"
    shorter = run_to_end(set_steps(config, 3, resume="must"))
    assert (shorter.began_at_step, shorter.checkpoints.folder.list_steps()) == (2, [2, 3])
    assert list_set_aside(saved) == []
    assert max(record["step"] for record in read_json_lines(shorter.folder.metrics_path)) == 3


def list_set_aside(run: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix(".step-")) for path in (run / "checkpoint").glob(".step-*.aside"))


def test_a_history_that_is_set_aside_again_replaces_the_checkpoints_of_the_earlier_one(config, saved, monkeypatch):
    """The second run dies after it has published step 4, and before it has removed the first one's."""
    monkeypatch.setattr(CheckpointFolder, "prune", lambda folder, keep: None)
    run_to_end(set_steps(config, 4, resume="must", load_step=2))
    assert list_set_aside(saved) == [4, 6]
    prepare_run(set_steps(config, 3, resume="must", load_step=2)).folder.release()
    monkeypatch.undo()
    assert list_set_aside(saved) == [4, 6]
    assert run_to_end(set_steps(config, 3, resume="must")).checkpoints.folder.list_steps() == [2, 3]
    assert list_set_aside(saved) == []


def test_random_numbers_follow_the_seed_and_resume(config):
    config = with_settings(config, job={"compare": False})
    run = prepare_run(set_steps(config, 2))
    seeded = torch.rand(3)
    train(run)
    expected = torch.rand(3)
    torch.manual_seed(6)
    get_peak_flops.cache_clear()  # a run in another process measures after it has loaded
    prepare_run(set_steps(config, 4, resume="must"))
    assert torch.equal(torch.rand(3), expected)
    prepare_run(set_steps(config, 2, name="again"))
    assert torch.equal(torch.rand(3), seeded)


def test_keep_latest_k_removes_older_checkpoints(config):
    assert run_to_end(set_steps(config, 3, keep_latest_k=1)).checkpoints.folder.list_steps() == [3]


def test_disabled_checkpoints_leave_nothing(config):
    run = run_to_end(replace(set_steps(config, 1), checkpoint=Checkpoint(enable=False)))
    assert not run.checkpoints.folder.path.exists()


def test_the_record_of_a_checkpoint_has_config_progress_report_and_provenance(config, finished):
    record = read_record(finished.checkpoints.folder.get_path(2))
    assert record["models"] == ["delayed", "bfloat16"]
    assert record["progress"]["step"] == 2
    assert record["progress"]["consumed_sequences"] == 2 * config.training.local_batch_size
    assert record["config"]["float8"]["recipe_name"] == "delayed"
    assert record["conversion_report"]["layers"]
    assert record["provenance"]["environment"]["torch"] == torch.__version__
    assert list_starts(finished.folder.path) == [0]


def list_starts(run: Path) -> list[int]:
    return [json.loads(line)["from_step"] for line in (run / "provenance.jsonl").read_text().splitlines()]


def test_a_start_that_was_killed_while_it_was_noted_is_removed(config, saved):
    with (saved / "provenance.jsonl").open("a") as file:
        file.write('{"from_st')
    report = (saved / "conversion_report.json").read_text()
    prepare_run(set_steps(config, 7, resume="must")).folder.release()
    assert list_starts(saved) == [0, 6]
    assert not (saved / "summary.json").exists(), "of the earlier start"
    assert (saved / "conversion_report.json").read_text() == report
    assert "not run yet" not in report


def test_a_partial_checkpoint_does_not_count(config, saved):
    folder = CheckpointFolder(saved / "checkpoint")
    folder.get_path(6).rename(folder.get_partial_path(6))
    resumed = prepare_run(set_steps(config, 8, resume="auto"))
    assert resumed.began_at_step == 4
    train(resumed)
    assert folder.list_steps() == [2, 4, 6, 8]
    assert not list(folder.path.glob(".*"))


def test_auto_begins_a_run_again_that_was_killed_before_its_first_checkpoint_and_says_so(config, capsys):
    run = run_to_end(set_steps(config, 2, resume="auto"))
    assert run.began_at_step == 0
    run.checkpoints.folder.get_path(2).rename(run.checkpoints.folder.get_partial_path(2))
    (run.folder.path / "summary.json").unlink()
    again = run_to_end(with_settings(set_steps(config, 2, resume="auto"), metrics={"log_freq": 3}))
    assert again.began_at_step == 0
    assert read_numbers(again)[-1] == read_numbers(run)[-1]
    assert len(read_steps(again.folder.metrics_path)) == 4
    removed = "2 recorded steps of metrics.jsonl, 2 recorded steps of float8_scales.jsonl"
    assert f"the run begins again at step 0 and removes {removed}\n" in capsys.readouterr().out
    start = json.loads((again.folder.path / "provenance.jsonl").read_text().splitlines()[-1])
    assert (start["from_step"], start["changes"]) == (0, {"metrics.log_freq": [1, 3]})


def test_a_start_without_its_checkpoints_does_not_erase_a_run(config, saved, run_refused):
    argv = (saved / "config.toml", f"--job.dump_folder={saved.parent}", "--job.name=tiny", "--training.steps=7")
    before = hash_files(saved)
    line = run_refused("train", *argv, "--checkpoint.resume=auto", "--checkpoint.folder=other")
    problem = f"'{saved}' has 6 recorded steps and no checkpoint in 'other'"
    assert line.endswith(f"{problem}; give checkpoint.folder = 'checkpoint', or another job.name")
    line = run_refused("train", "--resume", saved, "--checkpoint.folder=other")
    assert "no complete checkpoint in 'other'" in line
    assert line.endswith("give checkpoint.folder = 'checkpoint', that of the run")
    assert hash_files(saved) == before
    shutil.rmtree(saved / "checkpoint")
    line = run_refused("train", *argv, "--checkpoint.resume=auto")
    assert line.endswith("no checkpoint in 'checkpoint'; the run is finished; give another job.name")
    (saved / "metrics.jsonl").write_text("{}\n")
    assert "line 1 of" in run_refused("train", *argv, "--checkpoint.resume=auto")


def test_a_run_that_saves_nothing_is_not_erased_by_its_second_start(config):
    config = replace(set_steps(config, 1), checkpoint=Checkpoint(enable=False, resume="auto"))
    run_to_end(config)
    with pytest.raises(FileExistsError, match=r"1 recorded step and .* checkpoint\.enable = false give another job"):
        RunFolder.open(config)


def test_a_resume_tells_of_each_setting_that_changes_and_of_what_it_removes(config, saved, capsys):
    changes = {"comm": {"watchdog_seconds": 7}, "numerics": {"every": 1}, "metrics": {"log_freq": 3}}
    with (saved / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"ste')
    (saved / "numerics_post_mortem.jsonl").write_text('{"kind":"header","step":2}\n{"kind":"sample","step":3}\n')
    run = prepare_run(with_settings(set_steps(config, 8, resume="must", load_step=2, interval=3), **changes))
    run.folder.release()
    names = {"checkpoint.interval", "comm.watchdog_seconds", "metrics.log_freq", "numerics.every", "training.steps"}
    assert run.folder.changed_settings.keys() - {"data.path"} == names
    lines = ["4 recorded steps of metrics.jsonl", "4 recorded steps of float8_scales.jsonl"]
    removed = ["the incomplete last line of metrics.jsonl", *lines, "the checkpoints of step 4, 6"]
    removed.append("numerics_post_mortem.jsonl")
    assert not run.folder.post_mortem_path.exists()
    assert run.notes == [f"the run goes on after step 2 and removes {', '.join(removed)}"]


def test_a_resume_without_its_metrics_says_so(config, saved):
    (saved / "metrics.jsonl").unlink()
    run = prepare_run(set_steps(config, 8, resume="must"))
    run.folder.release()
    assert run.notes == ["metrics.jsonl is missing: a new file begins after step 6"]


def test_a_folder_without_a_config_is_a_new_run(config):
    folder = Path(config.job.dump_folder) / "tiny"
    folder.mkdir(parents=True)
    (folder / ".partial.config.toml").write_text("[mod")
    assert run_to_end(set_steps(config, 2, resume="auto")).began_at_step == 0


def test_a_resume_says_what_does_not_continue_as_it_was_saved(config, saved, tmp_path, capsys, monkeypatch):
    resumed = prepare_run(set_steps(config, 7, resume="must"))
    resumed.folder.release()
    assert resumed.notes == []
    text = tmp_path / "new.txt"
    text.write_text("other words " * 200)
    changes = {"training": {"seq_len": 16, "seed": 1, "steps": 7}, "data": {"path": str(text)}}
    record = json.loads((saved / "checkpoint/step-00000006" / RECORD_FILE).read_text()) | {"world_size": 2}
    (saved / "checkpoint/step-00000006" / RECORD_FILE).write_text(json.dumps(record))
    run_to_end(with_settings(set_steps(config, 7, resume="must", verify=False), **changes))
    order, generators = json.loads((saved / "summary.json").read_text())["notes"]
    assert order.startswith(
        "the order of the data is new (training.seq_len 32 -> 16, training.seed 0 -> 1, other tokens): "
        "the run begins after its first 12 sequences"
    )
    assert generators.endswith("the checkpoint has the states of 2 ranks")
    assert f"{order}\n" in capsys.readouterr().out


def test_a_run_that_moves_from_a_cpu_to_a_gpu_keeps_the_state_of_the_cpu(finished, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(16, dtype=torch.uint8))
    path = finished.checkpoints.folder.get_path(6) / "delayed"
    torch.manual_seed(7)
    note = load_rng_states(path, 1, Ranks(), torch.device("cuda"))
    assert "the CUDA random number generator begins with training.seed" in note
    assert torch.initial_seed() == finished.config.training.seed


def test_unnamed_runs_that_start_in_the_same_second_have_their_own_folders(tiny_config, monkeypatch):
    """The second run opens its folder when the first is about to make one."""
    unnamed, make, folders = with_settings(tiny_config, job={"name": ""}), Path.mkdir, []

    def open_second(path: Path, *args: object, **options: object) -> None:
        monkeypatch.setattr(Path, "mkdir", make)
        folders.append(RunFolder.open(unnamed))
        make(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", open_second)
    folders.append(RunFolder.open(unnamed))
    assert folders[0].path != folders[1].path


def test_a_finished_run_has_nothing_left_to_do(config, saved, capsys):
    before = hash_files(saved)
    for steps in (6, 5):
        run_to_end(with_settings(set_steps(config, steps, resume="must"), metrics={"enable_tensorboard": True}))
        assert hash_files(saved) == before
        assert f"nothing left to do: the run is after step 6, and training.steps = {steps}" in capsys.readouterr().out


def test_a_run_begins_with_the_weights_of_another_and_without_its_states(config, finished):
    path = str(finished.checkpoints.folder.get_path(6))
    second = prepare_run(set_steps(config, 2, initial_load_path=path))
    assert second.began_at_step == 0
    for model, expected in zip(second.models, finished.models, strict=True):
        assert_same(model.model.state_dict(), expected.model.state_dict())
        assert not model.optimizer.state


def test_a_run_resumes_without_the_weights_that_it_began_from(config, finished, tmp_path, run_refused):
    weights = shutil.copytree(finished.checkpoints.folder.get_path(6), tmp_path / "weights")
    begun = set_steps(config, 2, "begun", resume="auto", initial_load_path=str(weights))
    folder = run_to_end(begun).folder.path
    shutil.rmtree(weights)
    assert main(["train", "--resume", str(folder), "--training.steps=3"]) == 0
    again = run_to_end(with_settings(begun, training={"steps": 4}))
    assert again.began_at_step == 3
    assert load_config(folder / "config.toml").checkpoint.initial_load_path == str(weights)
    gone = f"--checkpoint.initial_load_path={finished.checkpoints.folder.path / 'step-00000001'}"
    line = run_refused("train", "--dry-run", folder / "config.toml", gone)
    assert "the folder does not exist; the checkpoints beside it are of steps 2, 4, 6; give a step-... folder" in line
    other = f"--checkpoint.initial_load_path={finished.checkpoints.folder.get_path(4)}"
    for argv in ([other], [other, "--dry-run"]):
        line = run_refused("train", "--resume", folder, *argv)
        assert f"initial_load_path must be '{weights}', from which the run in" in line


def test_refused_initial_weights_leave_no_folder(config, finished, tmp_path, run_refused):
    weights = shutil.copytree(finished.checkpoints.folder.get_path(6), tmp_path / "weights")
    argv = [f"--checkpoint.initial_load_path={weights}", "--checkpoint.resume=never", "--job.name=new"]
    argv = ["train", finished.folder.path / "config.toml", *argv]
    run_path = f"--checkpoint.initial_load_path={finished.folder.path}"
    assert f"such as '{finished.checkpoints.folder.get_path(6)}'" in run_refused(*argv, run_path)
    expected = f"model.n_layers must be 2, that of checkpoint.initial_load_path '{weights}', got 1"
    assert expected in run_refused(*argv, "--model.n_layers=1")
    (weights / "delayed" / "__0_0.distcp").write_bytes(b"")
    assert "has 0 bytes, expected" in run_refused(*argv)
    assert not finished.folder.path.with_name("new").exists()


def test_delayed_scaling_begins_anew_from_initial_weights(config):
    first = run_to_end(replace(set_steps(config, 1), float8=Float8(recipe_name="tensorwise")))
    path = str(first.checkpoints.folder.get_path(1))
    second = run_to_end(set_steps(config, 1, "second", initial_load_path=path))
    assert min(tensor.amax for tensor in second.models[0].scaling.report()) > 0


def test_a_failed_write_keeps_every_checkpoint(config, saved, monkeypatch):
    """The run removes even those that it sets aside only when the next checkpoint is complete."""
    again = prepare_run(set_steps(config, 6, resume="must", load_step=2, keep_latest_k=1))

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed.checkpoint.filesystem.FileSystemWriter, "finish", fail)
        with pytest.raises(CheckpointError, match="step 4 could not be.*No space left.*of step 2 is intact"):
            train(again)
    assert again.checkpoints.folder.list_steps() == [2]
    assert list_set_aside(saved) == [4, 6]
    assert not list(again.checkpoints.folder.path.glob(".*.partial"))


def test_a_checkpoint_folder_that_cannot_be_made_fails_the_save(config):
    run = prepare_run(set_steps(config, 2))
    blocked = run.folder.path / "checkpoint"
    blocked.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="checkpoint of step 2 could not be written.*there is no earlier one"):
        train(run)
    assert json.loads((run.folder.path / "summary.json").read_text())["status"] == "checkpoint failed"


@pytest.mark.parametrize("cause", [OSError(116, "Stale file handle"), InputError("Stale file handle")])
def test_a_save_to_a_folder_that_cannot_be_listed_reports_why_it_failed(tiny_config, monkeypatch, cause):
    def fail(*_: object) -> None:
        raise type(cause)(*cause.args)

    run = prepare_run(make_resumable(tiny_config))
    for name in ("publish", "list_steps"):
        monkeypatch.setattr(CheckpointFolder, name, fail)
    with pytest.raises(
        CheckpointError, match=r"of step 2 could not be written to .*: Stale .*; the earlier ones cannot"
    ):
        train(run)
    summary = json.loads((run.folder.path / "summary.json").read_text())
    assert summary["status"] == "checkpoint failed"


def test_an_interrupted_removal_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.make_partial(step)
        (folder.get_partial_path(step) / "model").mkdir()
        folder.publish(step, {"format": 1})

    def fail(path: Path) -> None:
        raise OSError("interrupted")

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(OSError, match="interrupted"):
        folder.prune(1)
    assert folder.list_steps() == [2]


def test_a_failed_removal_is_not_called_a_failed_save(tiny_config, monkeypatch):
    def fail(folder: CheckpointFolder, keep: int) -> None:
        raise OSError("busy")

    monkeypatch.setattr(CheckpointFolder, "prune", fail)
    run = prepare_run(make_resumable(tiny_config))
    with pytest.raises(CheckpointError, match=r"^old checkpoints in .* be removed: .*busy; the checkpoint of step 2"):
        train(run)

"""Provides a text folder and a config small enough for a run in about a second."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quaver.lab.data import TokenData, load_data
from quaver.lab.settings import (
    Checkpoint,
    Data,
    Float8,
    Job,
    LRScheduler,
    Metrics,
    Model,
    TrainConfig,
    Training,
    Validation,
)
from quaver.lab.trainer import run_end
from quaver.lab.trainer.trained_model import TrainedModel


@pytest.fixture
def run_quaver(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `quaver *argv`, which must succeed, and returns what it prints."""

    def run_quaver(*argv: object) -> str:
        from quaver.lab.cli import main  # importing it takes seconds

        capsys.readouterr()
        assert main([str(word) for word in argv]) == 0
        return capsys.readouterr().out

    return run_quaver


@pytest.fixture
def drawn_curves() -> None:
    """Let the run draw curves.png, for the tests that look at it."""


@pytest.fixture(autouse=True)
def undrawn_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave curves.png empty elsewhere: drawing takes two thirds of a tiny run."""
    if "drawn_curves" not in request.fixturenames:
        monkeypatch.setattr(run_end, "draw_curves", lambda metrics, image, title: image.touch())


SENTENCES = ["the quick brown fox jumps over the lazy dog", "float8 has four bits of exponent", "0123456789"]


def write_text(folder: Path) -> Path:
    folder.mkdir()
    for index in range(12):
        (folder / f"{index:02d}.txt").write_text(f"{SENTENCES[index % 3]} {index}\n" * 40)
    return folder


def make_tiny(folder: Path, text_folder: Path) -> TrainConfig:
    """Return a run of four steps in `folder`."""
    return TrainConfig(
        job=Job(name="tiny", dump_folder=str(folder / "runs")),
        model=Model(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48),
        training=Training(steps=4, seq_len=32, local_batch_size=2, device="cpu"),
        float8=Float8(enable_float8_linear=False),
        data=Data(path=str(text_folder)),
        validation=Validation(freq=2, steps=2),
        metrics=Metrics(log_freq=1),
    )


def make_resumable(config: TrainConfig) -> TrainConfig:
    """Return `config` with checkpoints after steps 2 and 4, and a learning rate independent of training.steps."""
    schedule = LRScheduler(schedule="constant", warmup_steps=2)
    return replace(config, lr_scheduler=schedule, checkpoint=Checkpoint(interval=2, keep_latest_k=0))


@pytest.fixture
def before_each_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[TrainedModel, int], object]], None]:
    """Return a function that calls its argument with the model and the step before each step."""

    def before_each_step(action: Callable[[TrainedModel, int], object]) -> None:
        original = TrainedModel.train_step

        def train_step(model, step, batches, **options):
            action(model, step)
            return original(model, step, batches, **options)

        monkeypatch.setattr(TrainedModel, "train_step", train_step)

    return before_each_step


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


@pytest.fixture
def tiny_config(tmp_path: Path, text_folder: Path) -> TrainConfig:
    return make_tiny(tmp_path, text_folder)


@pytest.fixture
def load() -> Callable[..., TokenData]:
    """Return a function that loads the data at a path with [data] settings, for sequences of 16 tokens."""

    def load(path: Path | str, *, seq_len: int = 16, vocab_size: int = 1 << 20, **settings: object) -> TokenData:
        training, model = Training(seq_len=seq_len, device="cpu"), Model(vocab_size=vocab_size)
        data = Data(path=str(path), **settings)
        return load_data(TrainConfig(training=training, model=model, data=data))

    return load


@pytest.fixture
def tiny_float8_config(tiny_config: TrainConfig) -> TrainConfig:
    return replace(tiny_config, job=replace(tiny_config.job, compare=True), float8=Float8(recipe_name="tensorwise"))


@pytest.fixture
def resumable_config(tiny_config: TrainConfig) -> TrainConfig:
    return make_resumable(tiny_config)


@pytest.fixture
def run_refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `quaver *argv`, which must exit with 2, and returns its one line on stderr."""

    def run_refused(*argv: object) -> str:
        from quaver.lab.cli import main  # importing it takes seconds

        capsys.readouterr()
        try:
            code = main([str(word) for word in argv])
        except SystemExit as stopped:
            code = stopped.code
        output, error = capsys.readouterr()
        (line,) = error.splitlines()
        assert code == 2, error
        assert not output or output.startswith("making tokens of "), output
        assert line.startswith("quaver: error: "), error
        return line

    return run_refused

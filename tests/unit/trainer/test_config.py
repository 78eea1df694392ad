"""Configs: where values come from, and what is said about wrong ones."""

import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from quaver.trainer.config import Float8, LRScheduler, Model, Optimizer, TrainConfig, Training
from quaver.trainer.config_io import load_config, parse_arguments, read_toml, write_config
from quaver.trainer.model import Llama
from quaver.trainer.optimizer import build_optimizer, learning_rate

REPOSITORY = Path(__file__).parents[3]


def from_words(*words: str) -> TrainConfig:
    return load_config(*parse_arguments(list(words)))


def test_flags_win_over_toml_which_wins_over_defaults(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 1\n")
    config = from_words(str(path), "--training.steps", "9", "--job.name=x")
    assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (9, 64, 1.0)
    assert config.job.name == "x"
    assert config.training.local_batch_size == Training().local_batch_size


def test_a_flag_repairs_a_bad_value_in_the_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[training]\nsteps = 0\n")
    assert from_words(str(path), "--training.steps", "3").training.steps == 3


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["--training.compile"], lambda c: c.training.compile is True),
        (["--training.compile", "false"], lambda c: c.training.compile is False),
        (["--training.compile=true"], lambda c: c.training.compile is True),
        (["--float8.no-enable_float8_linear"], lambda c: c.float8.enable_float8_linear is False),
        (["--float8.enable_float8_linear"], lambda c: c.float8.enable_float8_linear is True),
        (["--float8.enable-float8-linear"], lambda c: c.float8.enable_float8_linear is True),
        (["--float8.recipe_name", "rowwise"], lambda c: c.float8.recipe_name == "rowwise"),
        (["--float8.recipe-name", "rowwise"], lambda c: c.float8.recipe_name == "rowwise"),
        (["--float8.filter_fqns", "lm_head", "o_proj"], lambda c: c.float8.filter_fqns == ("lm_head", "o_proj")),
        (["--float8.filter_fqns=lm_head,o_proj"], lambda c: c.float8.filter_fqns == ("lm_head", "o_proj")),
        (["--float8.filter_fqns"], lambda c: c.float8.filter_fqns == ()),
        (["--compare"], lambda c: c.job.compare is True),
        (["--data", "stdlib"], lambda c: c.data.path == "stdlib"),
        (["--data=some/folder"], lambda c: c.data.path == "some/folder"),
        (["--optimizer.lr", "1e-3"], lambda c: c.optimizer.lr == 1e-3),
        (["--training.global_batch_size", "-1"], lambda c: c.training.step_batch_size == 8),
    ],
)
def test_flags(words, read):
    assert read(from_words(*words))


def test_the_file_may_stand_after_flags(tmp_path):
    path, flags = parse_arguments(["--compare", "a.toml", "--training.steps", "3"])
    assert path == Path("a.toml")
    assert flags == {"job": {"compare": True}, "training": {"steps": 3}}


def test_a_written_config_reads_back_equal(tmp_path):
    config = from_words("--compare", "--training.steps", "3", "--float8.filter_fqns", "a", "b", "--data", "x")
    write_config(config, tmp_path / "c.toml")
    assert load_config(tmp_path / "c.toml") == config


def test_the_configs_of_the_repository_load():
    paths = list((REPOSITORY / "train_configs").glob("*.toml"))
    assert paths
    for path in paths:
        load_config(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training.stepz", "3"], "unknown flag: 'training.stepz'; did you mean 'training.steps'"),
        (["--steps", "3"], "unknown flag: 'steps'; did you mean 'training.steps'|'validation.steps'"),
        (["--training.steps", "abc"], "training.steps must be an integer, got 'abc'"),
        (["--training.steps", "1.5"], "training.steps must be an integer, got '1.5'"),
        (["--training.steps"], "--training.steps needs a value: an integer"),
        (["--training.steps", "--compare"], "--training.steps needs a value"),
        (["--training.compile=maybe"], "training.compile must be true or false, got 'maybe'"),
        (["--optimizer.lr", "fast"], "optimizer.lr must be a number, got 'fast'"),
        (["a.toml", "b.toml"], "unexpected argument 'b.toml'"),
        (["-x"], "unexpected argument '-x'"),
        (["--float8.recipe_name", "rowwize"], "tensorwise.*rowwise.*rowwise_with_gw_hp"),
        (["--compare", "--float8.no_enable_float8_linear"], "float8.enable_float8_linear must be true"),
        (["--no-such-thing"], "unknown flag: 'no_such_thing'"),
    ],
)
def test_bad_flags(words, message):
    with pytest.raises(ValueError, match=message):
        from_words(*words)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[traning]\nsteps = 3\n", "unknown section in .*: 'traning'; did you mean 'training'"),
        ("[training]\nsteps_ = 3\n", "unknown key in .*: 'training.steps_'; did you mean 'training.steps'"),
        ("[training]\nlr = 3.0\n", "unknown key in .*: 'training.lr'; did you mean"),
        ("[model]\nwarmup_steps = 3\n", "'model.warmup_steps'; did you mean 'lr_scheduler.warmup_steps'"),
        ("steps = 3\n", "unknown section"),
        ("training = 3\n", r"write \[training\]"),
        ("[training\n", "is not valid TOML"),
        ("[training]\nsteps = '3'\n", "training.steps must be an integer, got '3'"),
        ("[training]\nsteps = true\n", "training.steps must be an integer, got True"),
        ("[training]\ncompile = 1\n", "training.compile must be true or false, got 1"),
        ("[float8]\nfilter_fqns = 'lm_head'\n", "float8.filter_fqns must be a list of strings, got 'lm_head'"),
        ("[float8]\nfilter_fqns = [3]\n", "float8.filter_fqns must be a list of strings"),
    ],
)
def test_bad_toml(tmp_path, toml, message):
    path = tmp_path / "bad.toml"
    path.write_text(toml)
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_missing_config_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config file '.*none.toml' does not exist"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model(n_heads=6, n_kv_heads=4), "model.n_heads must be a multiple of model.n_kv_heads = 4, got 6"),
        (lambda: Model(dim=100, n_heads=3, n_kv_heads=3), "model.dim must be a multiple of 2"),
        (lambda: Model(n_layers=0), "model.n_layers must be at least 1, got 0"),
        (lambda: Model(norm_eps=math.nan), "model.norm_eps must be finite"),
        (lambda: TrainConfig(model=Model(vocab_size=255)), "model.vocab_size must be at least 256"),
        (lambda: Training(steps=0), "training.steps must be at least 1, got 0"),
        (lambda: Training(dtype="float8"), "training.dtype must be one of float32, bfloat16, got 'float8'"),
        (lambda: Training(mixed_precision_param="int8"), "training.mixed_precision_param must be one of"),
        (lambda: Training(dtype="bfloat16", mixed_precision_param="float32"), "autocast only lowers"),
        (lambda: Training(global_batch_size=12), "a multiple of training.local_batch_size = 8, got 12"),
        (lambda: Training(global_batch_size=0), "training.global_batch_size must be -1 or a multiple"),
        (lambda: Training(max_norm=0.0), "training.max_norm must be positive"),
        (lambda: Training(device="tpu"), "training.device must be one of auto, cpu, cuda"),
        (lambda: Training(seed=-1), "training.seed"),
        (lambda: Optimizer(beta2=1.0), "optimizer.beta2 must be at least 0 and below 1"),
        (lambda: Optimizer(lr=math.inf), "optimizer.lr must be finite"),
        (lambda: LRScheduler(min_lr_factor=2.0), "lr_scheduler.min_lr_factor must be from 0 to 1"),
        (lambda: Float8(recipe_name="nope"), "nope"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configs_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Training().steps = 3


def test_learning_rate_warms_up_then_falls_to_its_floor():
    optimizer, schedule = Optimizer(lr=1.0), LRScheduler(warmup_steps=10, min_lr_factor=0.1)
    rates = [learning_rate(step, 110, optimizer, schedule) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)  # half-way down the cosine
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert learning_rate(1, 1, optimizer, replace(schedule, warmup_steps=0)) == pytest.approx(0.1)


def test_norms_are_not_decayed():
    model = Llama(Model(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=32))
    decayed, kept = build_optimizer(model, Optimizer(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    norms = {id(parameter) for name, parameter in model.named_parameters() if "norm" in name}
    assert {id(parameter) for parameter in kept["params"]} == norms
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))

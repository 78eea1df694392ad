"""Configs: where values come from, and what is said about wrong ones."""

import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from quaver.trainer.config import Float8, LRScheduler, Metrics, Model, Optimizer, TrainConfig, Training
from quaver.trainer.config_io import load_config, parse_arguments, read_toml, write_config
from quaver.trainer.model import Llama
from quaver.trainer.optimizer import build_optimizer, learning_rate

REPOSITORY = Path(__file__).parents[3]
DELAYED = ["--float8.recipe_name", "delayed"]


def from_words(*words: str) -> TrainConfig:
    return load_config(*parse_arguments(list(words)))


def window(config: TrainConfig) -> tuple[float, float] | None:
    return config.float8.delayed_scaling_config.dynamic_window


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
        ([*DELAYED, "--float8.delayed_history_len=4"], lambda c: c.float8.delayed_scaling_config.history_len == 4),
        ([*DELAYED, "--float8.delayed-dynamic-window", "0.25", "2"], lambda c: window(c) == (0.25, 2.0)),
        ([*DELAYED, "--float8.delayed_dynamic_window=0.25,2"], lambda c: window(c) == (0.25, 2.0)),
        ([*DELAYED, "--float8.delayed_dynamic_window=0.25,inf"], lambda c: window(c) == (0.25, math.inf)),
        ([*DELAYED, "--float8.delayed_dynamic_window"], lambda c: window(c) is None),
        (["--float8.no-enable_amax_init"], lambda c: c.float8.enable_amax_init is False),
        (["--float8.enable_pre_and_post_forward=false"], lambda c: not c.float8.enable_pre_and_post_forward),
        (["--metrics.float8_scales_freq=0"], lambda c: c.metrics.float8_scales_freq == 0),
        ([*DELAYED, "--metrics.plot_float8_scales"], lambda c: c.metrics.plot_float8_scales),
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


@pytest.mark.parametrize("given", [(), ("0.5", "1"), ("0", "inf")])
def test_a_window_reads_back_equal(tmp_path, given):
    config = from_words(*DELAYED, "--float8.delayed_dynamic_window", *given)
    write_config(config, tmp_path / "c.toml")
    assert load_config(tmp_path / "c.toml") == config
    assert config.float8.delayed_dynamic_window == tuple(map(float, given))


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
        (
            [*DELAYED, "--float8.delayed_dynamic_window", "0.5", "x"],
            "float8.delayed_dynamic_window must be a list of n",
        ),
        ([*DELAYED, "--float8.delayed_history", "3"], "did you mean 'float8.delayed_history_len'"),
        ([*DELAYED, "--float8.delayed_history_len", "1.5"], "float8.delayed_history_len must be an integer, got '1.5'"),
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
        ("[float8]\ndelayed_dynamic_window = ['0.5', 1]\n", "float8.delayed_dynamic_window must be a list of numbers"),
        ("[float8]\ndelayed_dynamic_window = [true, 1]\n", "float8.delayed_dynamic_window must be a list of numbers"),
        ("[float8]\ndelayed_dynamic_window = 0.5\n", "float8.delayed_dynamic_window must be a list of numbers"),
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
        (lambda: delayed(delayed_history_len=0), "^float8.delayed_history_len must be 1 to 65536 steps, got 0$"),
        (
            lambda: delayed(delayed_scale_fn_name="mean"),
            "^float8.delayed_scale_fn_name must be one of max, most_recent, g",
        ),
        (lambda: delayed(delayed_margin=17), "^float8.delayed_margin must be 0 to 16 powers of two, got 17$"),
        (lambda: delayed(delayed_headroom=0.5), "^float8.delayed_headroom must be a factor of 1 to 65536, got 0.5$"),
        (
            lambda: delayed(delayed_headroom=math.nan),
            "^float8.delayed_headroom must be a factor of 1 to 65536, got nan",
        ),
        (lambda: delayed(delayed_nonfinite_amax="drop"), "^float8.delayed_nonfinite_amax must be one of skip, keep_sc"),
        (
            lambda: delayed(delayed_dynamic_window=(0.5,)),
            "^float8.delayed_dynamic_window must be two numbers, low and h",
        ),
        (lambda: delayed(delayed_dynamic_window=(2.0, 0.5)), "^float8.delayed_dynamic_window must be 0 <= low <= 1 "),
        (
            lambda: Float8(delayed_margin=1),
            "^float8.delayed_margin must be its default, 0, without delayed scaling, got 1",
        ),
        (
            lambda: Float8(recipe_name="rowwise", delayed_dynamic_window=(0.5, 2.0)),
            "one of the recipes delayed, delayed_",
        ),
        (
            lambda: delayed(enable_float8_linear=False, delayed_headroom=2.0),
            "delayed_headroom must be its default, 1.0",
        ),
        (lambda: Metrics(float8_scales_freq=-1), "^metrics.float8_scales_freq must be not negative, got -1"),
        (
            lambda: Metrics(float8_scales_freq=0, plot_float8_scales=True),
            "^metrics.float8_scales_freq must be at least 1 with metrics.plot_float8_scales, got 0",
        ),
        (
            lambda: TrainConfig(metrics=Metrics(plot_float8_scales=True)),
            r"^metrics.plot_float8_scales must be false where no scale is kept from step to step \(tensorwise\), "
            "got True; choose float8.recipe_name delayed or delayed_with_dynamic_weight$",
        ),
        (
            lambda: TrainConfig(float8=delayed(enable_float8_linear=False), metrics=Metrics(plot_float8_scales=True)),
            r"step to step \(no float8\), got True; ",
        ),
        (
            lambda: TrainConfig(metrics=Metrics(float8_scales_freq=5)),
            "^metrics.float8_scales_freq must be 0 or 1 where",
        ),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def delayed(**settings: object) -> Float8:
    return Float8(**{"recipe_name": "delayed", **settings})


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

"""Tests where values of configs come from, and what is said about wrong ones."""

import re
import shlex
from dataclasses import FrozenInstanceError

import pytest

from quaver.lab.model.llama import make_meta_llama
from quaver.lab.settings import Float8, TrainConfig, Training
from quaver.lab.settings.config_file import build_config, list_settings_turned_off, load_config, parse_arguments
from quaver.lab.settings.fields import get_base_type, get_field_types

DELAYED = "--float8.recipe_name delayed --float8.delayed_history_len=4"


def read_config(*argv: str) -> TrainConfig:
    return load_config(*parse_arguments(list(argv)))


def test_flags_win_over_toml_which_wins_over_defaults(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 1\n")
    config = read_config(str(path), "--training.steps", "9", "--job.name=x")
    assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (9, 64, 1.0)
    assert config.job.name == "x"
    assert config.training.local_batch_size == Training().local_batch_size


def test_a_flag_repairs_a_bad_value_in_the_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[training]\nsteps = 0\n")
    assert read_config(str(path), "--training.steps", "3").training.steps == 3


def test_a_flag_that_turns_float8_off_turns_off_what_needs_it(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        '[float8]\nrecipe_name = "delayed"\nenable_fsdp_float8_all_gather = true\ndelayed_history_len = 4\n'
        "precompute_float8_dynamic_scale_for_fsdp = true\ncast_weights_once = true\nlayer_recipes = []\n"
        "auto_filter = true\nemulate = true\nuse_fast_accum = false\n"
        'filter_fqns = ["mlp"]\n[numerics]\nevery = 5\n[metrics]\nfloat8_scales_freq = 3\n'
    )
    argv = [str(path), "--float8.enable_float8_linear", "false"]
    config = read_config(*argv)
    assert config.float8 == Float8(enable_float8_linear=False, recipe_name="delayed", filter_fqns=("mlp",))
    names = {f"float8.{name}" for name in ("enable_fsdp_float8_all_gather", "cast_weights_once", "delayed_history_len")}
    names |= {f"float8.{name}" for name in ("auto_filter", "emulate", "use_fast_accum")}
    names |= {"float8.precompute_float8_dynamic_scale_for_fsdp", "numerics.every", "metrics.float8_scales_freq"}
    assert {*list_settings_turned_off(*parse_arguments(argv))} == names
    assert list_settings_turned_off(*parse_arguments([str(path), "--float8.emulate"])) == []
    with pytest.raises(ValueError, match="enable_float8_linear must be true with float8.enable_fsdp_float8_all"):
        read_config(*argv, "--float8.enable_fsdp_float8_all_gather")  # both flags are meant


@pytest.mark.parametrize(
    ("flags", "is_set"),
    [
        ("--training.compile", lambda config: config.training.compile is True),
        ("--float8.no-enable_float8_linear", lambda config: config.float8.enable_float8_linear is False),
        ("--float8.recipe-name rowwise", lambda config: config.float8.recipe_name == "rowwise"),
        ("--float8.filter_fqns lm_head o_proj", lambda config: config.float8.filter_fqns == ("lm_head", "o_proj")),
        ("--float8.filter_fqns", lambda config: config.float8.filter_fqns == ()),
        (DELAYED, lambda config: config.float8.delayed_history_len == 4),
        ("--compare", lambda config: config.job.compare is True),
        ("--data=some/folder", lambda config: config.data.path == "some/folder"),
        ("--optimizer.lr 1e-3", lambda config: config.optimizer.lr == 1e-3),
        ("--training.global_batch_size -1", lambda config: config.training.step_batch_size == 8),
    ],
)
def test_a_flag_sets_its_field(flags, is_set):
    assert is_set(read_config(*flags.split()))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[traning]\nsteps = 3\n", "unknown section in .*: 'traning'; did you mean 'training'"),
        ("[training]\nsteps_ = 3\n", "unknown key in .*: 'training.steps_'; did you mean 'training.steps'"),
        ("[training]\nlr = 3.0\n", "unknown key in .*: 'training.lr'; did you mean 'optimizer.lr'"),
        ("[model]\nflavor = '8B'\n", "'model.flavor'; see quaver train --help"),
        ("[model]\nwarmup_steps = 3\n", "'model.warmup_steps'; did you mean 'lr_scheduler.warmup_steps'"),
        ("steps = 3\n", "unknown section"),
        ("training = 3\n", r"write \[training\]"),
        ("[training\n", "is not valid TOML"),
        ("[training]\nsteps = '3'\n", "training.steps must be an integer, got '3'"),
        ("[training]\nsteps = true\n", "training.steps must be an integer, got True"),
        ("[training]\ncompile = 1\n", "training.compile must be true or false, got 1"),
        ("[float8]\nfilter_fqns = 'lm_head'\n", "float8.filter_fqns must be a list of strings, got 'lm_head'"),
        ("[float8]\nfilter_fqns = [3]\n", "float8.filter_fqns must be a list of strings"),
        ("[float8]\ndelayed_dynamic_window = [0.5, 1.0]\n", "unknown key in .*: 'float8.delayed_dynamic_window'"),
        ("[metrics]\nplot_float8_scales = true\n", "unknown key in .*: 'metrics.plot_float8_scales'"),
    ],
)
def test_a_wrong_key_or_value_in_toml_is_named(tmp_path, toml, message):
    path = tmp_path / "bad.toml"
    path.write_text(toml)
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_a_file_with_a_byte_order_mark_and_windows_line_ends_loads(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("\ufeff[metrics]\r\nlog_freq = 3\r\n")
    assert load_config(path).metrics.log_freq == 3


BAD_SETTINGS = {
    "--training.stepz 3": "unknown flag: '--training.stepz'; did you mean '--training.steps'",
    "--steps 3": "unknown flag: '--steps'; did you mean '--training.steps'",
    "--training.steps abc": "training.steps must be an integer, got 'abc'",
    "--training.steps --compare": "--training.steps must have a value",
    "--float8.emulate maybe": "float8.emulate must be true or false, got 'maybe'",
    "--compare 1": "job.compare must be true or false, got '1'",
    "--optimizer.lr fast": "optimizer.lr must be a number, got 'fast'",
    "a.toml b.toml": "unexpected argument 'b.toml'",
    "-x": "unexpected argument '-x'",
    "--no-such-thing": "unknown flag: '--no-such-thing'; see quaver train --help",
    "--float8.serving vlm": "float8.serving: expected one of vllm-per-token, ",
    "--float8.serving vllm-static": "float8.serving must be an engine that scales dynamically, got 'vllm-static'",
    "--float8.serving deepgemm --float8.recipe_name delayed": "float8.recipe_name: expected a recipe with dynamic",
    "--model.n_layers=100000000": "model.n_layers must be at most 10000, got 100000000",
    "--model.n_layers=1e8": "model.n_layers must be an integer, got '1e8'",
    "--model.dim=1000000000000": "model.dim must be at most 1000000, got 1000000000000",
    "--model.hidden_dim=1000000000000000000000000000000": "model.hidden_dim must be at most 1000000, got 1000",
    "--model.vocab_size=1000000000000000": "model.vocab_size must be at most 100000000, got 1000000000000000",
    "--model.n_experts=1000000000000": "model.n_experts must be at most 100000, got 1000000000000",
    "--model.n_experts=2 --model.n_shared_experts=1000000000000": "model.n_shared_experts must be at most 1000, got",
    "--training.seq_len=1000000000000": "training.seq_len must be at most 10000000, got 1000000000000",
    "--training.local_batch_size=1000000000000000000": "training.local_batch_size must be at most 1000000, got",
    "--training.local_batch_size=1000000 --training.seq_len=10000000 --model.vocab_size=100000000": "wide as 100000000",
    "--training.global_batch_size=8000000000000": "training.global_batch_size must be at most 1000000000, got",
    "--training.steps=1000000000000000000000000000000": "training.steps must be at most 9223372036854775807, got 1000",
    "--validation.steps=1000000000": "validation.steps must be at most 100000, got 1000000000",
    "--comm.watchdog_seconds=100000000000000": "comm.watchdog_seconds must be at most 10000000, got",
    "--comm.train_timeout_seconds=100000000000000": "comm.train_timeout_seconds must be at most 10000000, got",
    "--model.n_heads=6 --model.n_kv_heads=4": "model.n_heads must be a multiple of model.n_kv_heads = 4, got 6",
    "--model.dim=100 --model.n_heads=3 --model.n_kv_heads=3": "model.dim must be a multiple of 2",
    "--model.n_layers=0": "model.n_layers must be at least 1, got 0",
    "--model.norm_eps=nan": "model.norm_eps must be finite",
    "--model.rope_low_freq_factor=2": "its default, 1.0, unless model.rope_scaling_factor is above 1, got 2.0",
    "--model.rope_scaling_factor=0.5": "model.rope_scaling_factor must be at least 1.0, got 0.5",
    "--model.rope_scaling_factor=8 --model.rope_low_freq_factor=0": "model.rope_low_freq_factor must be above 0",
    "--model.rope_scaling_factor=8 --model.rope_high_freq_factor=1": "above model.rope_low_freq_factor = 1.0, got 1.0",
    "--training.dtype=float8": "training.dtype must be one of float32, bfloat16, got 'float8'",
    "--training.dtype=bfloat16 --training.mixed_precision_param=float32": "autocast only lowers",
    "--training.residual_dtype=float16": "must be one of auto, float32, bfloat16, got 'float16'",
    "--training.dtype=bfloat16 --training.residual_dtype=float32": "must be auto or bfloat16, got 'float32'",
    "--training.mixed_precision_param=float32 --training.residual_dtype=bfloat16": "must be auto or float32, got",
    "--training.global_batch_size=12": "a multiple of training.local_batch_size = 8, got 12",
    "--training.global_batch_size=0": "training.global_batch_size must be -1 or a multiple",
    "--training.max_norm=0": "training.max_norm must be above 0",
    "--training.seed=-1": "training.seed must be between 0 and 2**63 - 1, got -1",
    "--optimizer.beta2=1": "optimizer.beta2 must be below 1",
    "--optimizer.lr=inf": "optimizer.lr must be finite",
    "--lr_scheduler.min_lr_factor=2": "lr_scheduler.min_lr_factor must be at most 1.0",
    "--lr_scheduler.decay_ratio=0.2": "must be its default, 0.1, unless lr_scheduler.schedule is wsd, got 0.2",
    "--lr_scheduler.schedule=wsd --lr_scheduler.decay_ratio=0": "must be above 0.0, got 0.0",
    "--lr_scheduler.schedule=constant --lr_scheduler.min_lr_factor=0": "unless lr_scheduler.schedule goes down, got",
    "--training.steps=100 --lr_scheduler.schedule=wsd --lr_scheduler.warmup_steps=91": "must be at most 90 with the 10",
    "--parallelism.tensor_parallel_degree=3": "model.n_heads must be a multiple of parallelism.tensor_parallel_degree",
    "--parallelism.tensor_parallel_degree=2 --training.seq_len=255": "training.seq_len must be a multiple of",
    "--parallelism.tensor_parallel_degree=2 --model.tie_word_embeddings": "model.tie_word_embeddings must be false",
    "--parallelism.data_parallel_shard_degree=0": "data_parallel_shard_degree must be -1 or at least 1, got 0",
    "--comm.train_timeout_seconds=0": "comm.train_timeout_seconds must be at least 1",
    "--float8.recipe_name=rowwize": "float8.recipe_name: unknown recipe 'rowwize': expected one of tensorwise, rowwise",
    "--compare --float8.no_enable_float8_linear": "enable_float8_linear must be true with job.compare, got False",
    "--float8.no-enable_float8_linear --float8.enable_fsdp_float8_all_gather": "enable_float8_linear must be true",
    "--float8.precompute_float8_dynamic_scale_for_fsdp": "float8.enable_fsdp_float8_all_gather must be true with",
    "--float8.cast_weights_once": "float8.enable_fsdp_float8_all_gather must be true with float8.cast_weights_once",
    "--float8.skip_last_layers=-1": "float8.skip_last_layers must be at least 0, got -1",
    "--float8.skip_first_layers=1 --float8.no-enable_float8_linear": "must be its default, 0, unless float8.enable",
    "--float8.skip_first_layers=3 --float8.skip_last_layers=2": "must be at most model.n_layers = 4, got 5",
    "'--float8.high_precision_schedule=all: last 9 steps' --training.steps=9": "steps = 9, got 'all: last 9 steps'",
    "'--float8.high_precision_schedule=all: last 100% steps'": "entries of fewer steps than training.steps = 200, got",
    "'--float8.high_precision_schedule=forward: first 5 blocks'": "entries of at most model.n_layers = 4 blocks, got",
    **{
        f"'--float8.high_precision_schedule={entry}'": f"forward, backward, all, grad_input, grad_weight, got '{entry}'"
        for entry in (
            *("forward", "forward:", "sideways: last 3 steps", "forward: last 0 steps", "forward: last 101% of steps"),
            *("forward: last 1 step in first 1 step", "forward: last 1.5% of steps", "forward: first 3 layers"),
        )
    },
    "--float8.backward=high_precision --float8.enable_fsdp_float8_all_gather": "false with the backward of tensorwise:",
    "--float8.layer_recipes=0": "float8.layer_recipes: expected an entry 'layer=recipe', got '0'",
    "--float8.layer_recipes=a=rowwise --parallelism.tensor_parallel_degree=2": (
        "float8.layer_recipes must be empty with parallelism.tensor_parallel_degree = 2"
    ),
    "--float8.backward=hp": "float8.backward must be one of float8, dequantized, high_precision, got 'hp'",
    "--float8.auto_filter --float8.no-enable_float8_linear": "must be its default, False, unless float8.enable",
    "--float8.emulate --float8.no-enable_float8_linear": "must be its default, False, unless float8.enable",
    "--float8.use_fast_accum=false --float8.no-enable_float8_linear": "must be its default, True, unless float8.enable",
    "--optimizer.expert_bias_rate=0.1": "optimizer.expert_bias_rate must be its default, 0.001, unless model.n_experts",
    "--float8.backward=dequantized --float8.no-enable_float8_linear": "float8.backward must be its default, 'float8'",
    "--validation.high_precision_too --float8.no-enable_float8_linear": "validation.high_precision_too must be false",
    "--float8.recipe_name=delayed --float8.delayed_history_len=0": "float8.delayed_history_len must be 1 to 65536",
    "--float8.recipe_name=delayed --float8.delayed_headroom=nan": "must be a factor of 1 to 65536, got nan",
    "--float8.delayed_margin=1": "float8.delayed_margin must be its default, 0, unless scaling is delayed, got 1; set",
    "--metrics.float8_scales_freq=5 --float8.no-enable_float8_linear": "must be 0 or 1 where no scale",
    "--profiling.profile_freq=5": "must be its default, 10, unless profiling.enable_profiling",
    "--profiling.enable_profiling --profiling.profile_freq=3": "must be at least profiler_warmup + profiler_active = 4",
    "--profiling.enable_profiling --profiling.profile_freq=999": "must be at most training.steps = 200, got 999",
    "--profiling.enable_profiling --profiling.save_traces_folder=../a": "must be a folder inside the run folder",
    "--metrics.enable_tensorboard --metrics.save_tb_folder=/tmp/a": "must be a folder inside the run folder",
    "--profiling.enable_memory_snapshot --profiling.memory_snapshot_step=999": "must be at most training.steps = 200",
    "--data.eos_token=x": "data.eos_token must be its default, '', unless data.tokenizer is a file",
    "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=ops": 'expected "op" or a',
    "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=5": "no block would be",
    "--activation_checkpoint.mode=full --training.compile --parallelism.tensor_parallel_degree=2": "selective with op",
    "--activation_checkpoint.mode=memory_budget --training.compile --parallelism.tensor_parallel_degree=2": "with op",
    "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=2 --training.compile "
    "--parallelism.tensor_parallel_degree=2": "selective with op",
    "--activation_checkpoint.selective_ac_option=2": "unless activation_checkpoint.mode is selective, got '2'",
    "--activation_checkpoint.mode=memory_budget": "training.compile must be true with activation_checkpoint.mode = m",
    "--activation_checkpoint.mode=full --activation_checkpoint.selective_ac_also_save=aten.abs": "got ('aten.abs',)",
    "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_also_save=aten.asb": "torch knows",
    "--model.top_k=5 --model.n_experts=4": "model.top_k must be at most model.n_experts = 4, got 5",
    "--model.n_experts=1": "model.n_experts must be 0, or at least 2",
    "--model.top_k=3": "model.top_k",
    "--model.n_shared_experts=1": "model.n_shared_experts",
    "--model.n_experts=-1": "model.n_experts",
    "--model.n_experts=4 --parallelism.tensor_parallel_degree=2": "be 0 with parallelism.tensor_parallel_degree = 2",
    "--parallelism.expert_parallel_degree=2": "model.n_experts must be above 0 with parallelism.expert_parallel_degree",
    "--model.n_experts=5 --parallelism.expert_parallel_degree=2": "model.n_experts must be a multiple of parallelism",
    "--model.n_experts=4 --float8.grad_weight_from_codes": "float8.grad_weight_from_codes must be false without",
    "--numerics.every=2 --float8.no-enable_float8_linear": "must be 0 where float8.enable_float8_linear is false",
    "--numerics.every=-1": "numerics.every must be",
    "--numerics.extras_every=3": "numerics.extras_every",
    "--numerics.emulate_sums_of=h100": "emulate_sums_of must be its default, 'none', unless numerics.every is set",
    "--numerics.every=1 --numerics.emulate_sums_of=b200": "emulate_sums_of must be one of none, h100, h200, got 'b200'",
    "--numerics.every=1 --numerics.extras_every=0 --numerics.emulate_sums_of=h100": "unless numerics.extras_every is 1",
    "--numerics.on_alarm=stop": "numerics.on_alarm must be its default, 'log', unless numerics.every is set",
    "--numerics.every=1 --numerics.fallback_recipe=rowwise": "numerics.fallback_recipe must be its default",
    "--numerics.every=1 --numerics.on_alarm=fallback --numerics.fallback_recipe=delayed": "recipe must be one of",
    "--numerics.every=1 --numerics.on_alarm=fallback --parallelism.tensor_parallel_degree=2": "with parallelism.tensor",
    "--numerics.every=1 --numerics.on_alarm=fallback --float8.enable_fsdp_float8_all_gather": "stop with float8.enable",
}


@pytest.mark.parametrize("flags", BAD_SETTINGS)
def test_impossible_settings_are_refused_in_one_line(flags):
    with pytest.raises(ValueError, match=re.escape(BAD_SETTINGS[flags])) as error:
        read_config(*shlex.split(flags))
    assert "\n" not in str(error.value)


def test_settings_of_another_version_are_refused():
    with pytest.raises(ValueError, match="unknown section in the settings: 'mode'"):
        build_config({"mode": {"dim": 4}})
    with pytest.raises(ValueError, match=r"unknown key in the settings: 'model\.dims'"):
        build_config({"model": {"dims": 4}})


def test_configs_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Training().steps = 3


NUMBERS = [
    f"{section}.{name}"
    for section, kind in get_field_types(TrainConfig).items()
    for name, hint in get_field_types(kind).items()
    if get_base_type(hint) in (int, float)
]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_in_its_bounds_or_refused_in_one_line(name, tmp_path):
    section, field = name.split(".")
    for text in ("0", "-1", str(10**12), str(10**18), str(10**30), "1e300", "nan", "inf", "true", '""', "[]"):
        path = tmp_path / "a.toml"
        path.write_text(f"[{section}]\n{field} = {text}\n")
        try:
            value = getattr(getattr(load_config(path), section), field)
        except ValueError as error:
            message = str(error)
            assert section in message
            assert "\n" not in message
        else:
            assert type(value) in (int, float)
            assert isinstance(value, float) or abs(value) < 2**63


def test_the_tensors_of_the_largest_model_can_be_counted():
    flags = "--model.dim=1000000 --model.hidden_dim=1000000 --model.vocab_size=100000000 --model.n_heads=1 --data=text"
    config = read_config(*flags.split(), "--model.n_kv_heads=1", "--model.n_layers=1", "--model.n_experts=100000")
    assert sum(parameter.numel() for parameter in make_meta_llama(config.model).parameters()) > 10**17


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({}, "tensorwise"),
        ({"recipe_name": "axiswise", "backward": "dequantized"}, "rowwise:dequantized"),
        ({"serving": "vllm-per-token", "recipe_name": "rowwise"}, "vllm-per-token+rowwise"),
    ],
)
def test_the_label_of_a_run_names_its_serving_recipe_and_backward(options, label):
    assert Float8(**options).label == label

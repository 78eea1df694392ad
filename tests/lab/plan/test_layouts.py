"""Tests that a search tries each layout that the trainer accepts once."""

from collections import defaultdict
from dataclasses import replace

from quaver.lab.plan.changes import with_precision
from quaver.lab.plan.layouts import list_layouts, list_precisions
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.config_file import load_config
from quaver.lab.settings.float8 import BFLOAT16
from quaver.roofline.device_specs import find_device_spec
from tests.lab.trainer.runs import CONFIGS, with_settings


def load_layouts(name, ranks, *, precisions=(BFLOAT16, "tensorwise"), step_batch_size=None, less_precise_storage=False):
    config = load_config(CONFIGS / f"{name}.toml")
    options = {"step_batch_size": step_batch_size, "less_precise_storage": less_precise_storage}
    return list_layouts(config, ranks, gpus_per_node=8, precisions=list(precisions), **options)


def test_each_layout_is_tried_once_and_uses_all_gpus():
    layouts = load_layouts("llama3_70b", 64)
    configs = [candidate.config for candidate in layouts.candidates]
    degrees = [candidate.dims for candidate in layouts.candidates]
    assert len(set(configs)) == len(configs) > 100
    assert {dims.world_size for dims in degrees} == {64}
    assert {dims.tp for dims in degrees} == {1, 2, 4, 8}
    assert {dims.dp_replicate for dims in degrees} >= {1, 2, 8}
    assert [candidate.is_configured for candidate in layouts.candidates] == [True] + [False] * (len(configs) - 1)
    refused = "none, or selective with op, for compiled blocks that are split by tensor parallelism"
    assert any(refused in reason for reason in layouts.refusals)


def test_a_layout_in_words_names_the_degrees_above_1():
    candidate = load_layouts("llama3_70b", 8).candidates[0]
    degrees = {"FSDP2 8 x TP 4,": (8, 1, 4, 1), "TP 8,": (1, 1, 8, 1), "FSDP2 4 x HSDP 2 EP 2,": (4, 2, 1, 2)}
    for words, (dp_shard, dp_replicate, tp, ep) in degrees.items():
        dims = replace(candidate.dims, dp_shard=dp_shard, dp_replicate=dp_replicate, tp=tp, ep=ep)
        assert f"{replace(candidate, dims=dims).description} ".startswith(words.replace(",", ""))


def test_a_step_has_the_tokens_that_were_asked_for():
    for candidate in load_layouts("llama3_70b", 64, step_batch_size=128).candidates:
        training, groups = candidate.config.training, candidate.dims.data_parallel_degree
        assert training.global_batch_size == 128
        assert 128 % (training.local_batch_size * groups) == 0


def test_experts_are_split_and_dense_models_are_not():
    mixture = load_layouts("mixture_30b_a3b", 16, precisions=["rowwise"])
    assert {candidate.dims.ep for candidate in mixture.candidates} == {1, 2, 4, 8, 16}
    assert {candidate.dims.tp for candidate in mixture.candidates} == {1}
    assert {candidate.dims.ep for candidate in load_layouts("llama3_8b", 8).candidates} == {1}


def test_a_configured_run_that_cannot_have_the_batch_is_refused_and_says_why():
    """With a batch of its own it would be compared with steps of other tokens."""
    config = with_settings(TrainConfig(), training={"local_batch_size": 4, "global_batch_size": 16})
    layouts = list_layouts(
        config, 2, gpus_per_node=8, precisions=[BFLOAT16], step_batch_size=4, less_precise_storage=False
    )
    assert not any(candidate.is_configured for candidate in layouts.candidates)
    assert {candidate.config.training.global_batch_size for candidate in layouts.candidates} == {4}
    assert "training.global_batch_size" in layouts.configured_refusal


def test_less_precise_storage_is_tried_where_it_is_asked_for():
    plain, stored = (
        load_layouts("llama3_8b", 8, less_precise_storage=stores, precisions=[BFLOAT16]) for stores in (False, True)
    )
    assert not any(candidate.config.activation_checkpoint.store_in_float8 for candidate in plain.candidates)
    assert {candidate.config.optimizer.name for candidate in stored.candidates} == {"AdamW", "Float8AdamW"}
    assert {"none", "1/2", "none+opt", "none+opt+act"} <= {
        candidate.checkpointing_label for candidate in stored.candidates
    }


def test_weights_are_gathered_in_each_way_that_the_trainer_has():
    layouts = load_layouts("llama3_8b", 8, precisions=[BFLOAT16, "tensorwise", "rowwise"]).candidates
    ways = {
        (candidate.precision_label, candidate.gathering_label) for candidate in layouts if candidate.dims.dp_shard > 1
    }
    assert ways == {
        *((precision, words) for precision in (BFLOAT16, "tensorwise", "rowwise") for words in ("bf16x1", "bf16x2")),
        ("tensorwise", "fp8x2"),
        ("tensorwise", "fp8x1"),
    }
    alone = load_layouts("llama3_debug", 1, precisions=["tensorwise"]).candidates
    assert {candidate.gathering_label for candidate in alone} == {""}


def test_gradients_are_reduced_in_each_way_that_may_be_best():
    candidates = load_layouts("llama3_8b", 16, step_batch_size=32, precisions=[BFLOAT16]).candidates
    assert candidates[0].is_configured
    reduces = defaultdict(set)
    for candidate in candidates[1:]:
        dims, training = candidate.dims, candidate.config.training
        reduces[dims.dp_replicate > 1, dims.count_micro_batches(training) > 1].add(training.reduce)
    assert reduces == {
        **dict.fromkeys([(False, False), (True, False)], {"every"}),
        (False, True): {"every", "last"},
        (True, True): {"last", "last_all_reduce"},
    }


def test_with_precision_resets_settings_of_other_precisions():
    config = load_config(CONFIGS / "llama3_8b.toml")
    gathering = with_precision(config, "tensorwise", float8_all_gather=True)
    assert gathering.float8.enable_fsdp_float8_all_gather
    assert with_precision(gathering, "tensorwise").float8.enable_fsdp_float8_all_gather
    assert not with_precision(gathering, "tensorwise", float8_all_gather=False).float8.enable_fsdp_float8_all_gather
    plain = with_precision(gathering, BFLOAT16).float8
    assert not plain.enable_fsdp_float8_all_gather
    assert not plain.enable_float8_linear


def test_a_bfloat16_candidate_drops_job_compare():
    config = load_config(CONFIGS / "llama3_8b.toml")
    compared = replace(config, job=replace(config.job, compare=True))
    assert not with_precision(compared, BFLOAT16).job.compare
    assert with_precision(compared, "rowwise").job.compare


def test_recipes_are_those_that_the_gpu_multiplies():
    last = {gpu: list_precisions(find_device_spec(gpu))[-1] for gpu in ("h100", "b200", "l40s", "a100")}
    assert last == {"h100": "blockwise", "b200": "mxfp8", "l40s": "rowwise", "a100": BFLOAT16}

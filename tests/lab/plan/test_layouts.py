"""The layouts that a search tries: those that the trainer accepts, each once."""

from dataclasses import replace
from pathlib import Path

from quaver.lab.plan.changes import BFLOAT16, with_precision
from quaver.lab.plan.layouts import list_layouts, list_precisions
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.config_file import load_config

CONFIGS = Path(__file__).parents[3] / "train_configs"


def load_layouts(name, ranks, **options):
    options = {
        "gpus_per_node": 8,
        "precisions": [BFLOAT16, "tensorwise"],
        "step_sequences": None,
        "stores": False,
    } | options
    return list_layouts(load_config(CONFIGS / f"{name}.toml"), ranks, **options)


def test_each_layout_is_tried_once_and_uses_all_gpus():
    layouts = load_layouts("llama3_70b", 64)
    configs = [each.config for each in layouts.candidates]
    assert len(set(configs)) == len(configs) > 100
    assert {each.layout.world_size for each in layouts.candidates} == {64}
    assert {each.layout.tensor for each in layouts.candidates} == {1, 2, 4, 8}
    assert {each.layout.replicate for each in layouts.candidates} >= {1, 2, 8}
    assert [each.is_configured for each in layouts.candidates].index(True) == 0
    assert sum(each.is_configured for each in layouts.candidates) == 1
    refused = "none, or selective with op, for compiled blocks that are split by tensor parallelism"
    assert any(refused in reason for reason in layouts.refusals)


def test_a_layout_in_words_names_the_degrees_above_1():
    candidate = load_layouts("llama3_70b", 8).candidates[0]
    degrees = {"FSDP2 8 x TP 4,": (8, 1, 4, 1), "TP 8,": (1, 1, 8, 1), "FSDP2 4 x HSDP 2 EP 2,": (4, 2, 1, 2)}
    for words, (shard, replicate, tensor, expert) in degrees.items():
        layout = replace(candidate.layout, shard=shard, replicate=replicate, tensor=tensor, expert=expert)
        assert f"{replace(candidate, layout=layout).description} ".startswith(words.replace(",", ""))


def test_a_step_has_the_tokens_that_were_asked_for():
    layouts = load_layouts("llama3_70b", 64, step_sequences=128)
    assert {each.config.training.global_batch_size for each in layouts.candidates} == {128}
    batches = {(each.config.training.local_batch_size, each.layout.data_parallel_degree) for each in layouts.candidates}
    assert all(128 % (local * groups) == 0 for local, groups in batches)


def test_experts_are_split_and_dense_models_are_not():
    mixture = load_layouts("mixture_30b_a3b", 16, precisions=["rowwise"])
    assert {each.layout.expert for each in mixture.candidates} == {1, 2, 4, 8, 16}
    assert {each.layout.tensor for each in mixture.candidates} == {1}
    assert {each.layout.expert for each in load_layouts("llama3_8b", 8).candidates} == {1}


def test_a_configured_run_that_cannot_have_the_batch_is_refused_and_says_why():
    """With a batch of its own it would be compared with steps of other tokens."""
    config = replace(TrainConfig(), training=replace(TrainConfig().training, local_batch_size=4, global_batch_size=16))
    layouts = list_layouts(config, 2, gpus_per_node=8, precisions=[BFLOAT16], step_sequences=4, stores=False)
    assert not any(each.is_configured for each in layouts.candidates)
    assert {each.config.training.global_batch_size for each in layouts.candidates} == {4}
    assert "training.global_batch_size" in layouts.configured_refusal


def test_less_precise_storage_is_tried_where_it_is_asked_for():
    plain, stored = (load_layouts("llama3_8b", 8, stores=stores, precisions=[BFLOAT16]) for stores in (False, True))
    assert not any(each.config.activation_checkpoint.store_in_float8 for each in plain.candidates)
    assert {each.config.optimizer.name for each in stored.candidates} == {"AdamW", "Float8AdamW"}
    assert {"none", "1/2", "none+opt", "none+opt+act"} <= {each.storage for each in stored.candidates}


def test_weights_are_gathered_in_each_way_that_the_trainer_has():
    layouts = load_layouts("llama3_8b", 8, precisions=[BFLOAT16, "tensorwise", "rowwise"]).candidates
    ways = {(each.precision, each.gathering) for each in layouts if each.layout.shard > 1}
    assert ways == {
        *((precision, words) for precision in (BFLOAT16, "tensorwise", "rowwise") for words in ("bf16x1", "bf16x2")),
        ("tensorwise", "fp8x2"),
        ("tensorwise", "fp8x1"),
    }
    alone = load_layouts("llama3_debug", 1, precisions=["tensorwise"]).candidates
    assert {each.gathering for each in alone} == {""}


def test_gradients_are_reduced_in_each_way_that_may_be_best():
    candidates = load_layouts("llama3_8b", 16, step_sequences=32, precisions=[BFLOAT16]).candidates
    assert candidates[0].is_configured
    ways = {
        (each.layout.replicate > 1, each.layout.micro_batches(each.config.training) > 1, each.config.training.reduce)
        for each in candidates[1:]
    }
    one = {(replicas, False, "every") for replicas in (False, True)}
    assert ways == one | {(replicas, True, "last") for replicas in (False, True)} | {
        (False, True, "every"),
        (True, True, "last_all_reduce"),
    }


def test_a_precision_takes_the_settings_of_others_away():
    config = load_config(CONFIGS / "llama3_8b.toml")
    gathering = with_precision(config, "tensorwise", gathers_codes=True)
    assert gathering.float8.enable_fsdp_float8_all_gather
    assert with_precision(gathering, "tensorwise").float8.enable_fsdp_float8_all_gather
    assert not with_precision(gathering, "tensorwise", gathers_codes=False).float8.enable_fsdp_float8_all_gather
    plain = with_precision(gathering, BFLOAT16).float8
    assert not plain.enable_fsdp_float8_all_gather
    assert not plain.enable_float8_linear


def test_a_compared_run_has_a_baseline_without_one():
    config = load_config(CONFIGS / "llama3_8b.toml")
    compared = replace(config, job=replace(config.job, compare=True))
    assert not with_precision(compared, BFLOAT16).job.compare
    assert with_precision(compared, "rowwise").job.compare


def test_recipes_are_those_that_the_gpu_multiplies():
    assert list_precisions(128, True)[-1] == "blockwise"
    assert list_precisions(32, True)[-1] == "mxfp8"
    assert list_precisions(None, False) == [BFLOAT16]

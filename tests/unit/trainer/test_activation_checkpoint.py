"""`[activation_checkpoint]`: the same losses with less memory, compiled and on two ranks, and bad values."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch._functorch.config as compiler_config
from torch import nn

from quaver.trainer.config import ActivationCheckpoint, Float8, Job, TrainConfig
from quaver.trainer.config_io import load_config, parse_arguments
from quaver.trainer.metrics import read_metrics
from quaver.trainer.model import Block
from quaver.trainer.train import Run, prepare, train
from tests.integration.train_on_ranks import train_on_ranks

FULL, BY_POLICY = ActivationCheckpoint("full"), ActivationCheckpoint("selective")
SECTIONS = {"none": ActivationCheckpoint(), "full": FULL, "op": BY_POLICY, "2": ActivationCheckpoint("selective", "2")}


def run_to_end(config: TrainConfig, name: str, checkpoint: ActivationCheckpoint) -> Run:
    job = replace(config.job, name=name)
    run = prepare(replace(config, job=job, activation_checkpoint=checkpoint))
    assert train(run)["status"] == "finished"
    return run


def numbers(run_folder: Path) -> list[tuple]:
    """Losses and gradient norms of every step and model, and validation losses."""
    keys = ("step", "run", "loss", "grad_norm", "validation_loss")
    return [tuple(record.get(key) for key in keys) for record in read_metrics(run_folder / "metrics.jsonl")]


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_every_mode_trains_to_the_same_bits_and_full_needs_the_least_memory(recipe, tiny_config):
    job = replace(tiny_config.job, compare=True)
    config = replace(tiny_config, job=job, float8=Float8(recipe_name=recipe))
    runs = {name: run_to_end(config, name, checkpoint) for name, checkpoint in SECTIONS.items()}
    expected = numbers(runs["none"].folder.path)
    for name, run in runs.items():
        assert numbers(run.folder.path) == expected, name
    for index in range(2):
        peak = {name: run.models[index].peak for name, run in runs.items()}
        assert all(each.exact for each in peak.values())
        assert peak["none"].peak_bytes > peak["op"].peak_bytes > peak["full"].peak_bytes
        assert peak["none"].peak_bytes > peak["2"].peak_bytes > peak["full"].peak_bytes


def test_checkpointed_blocks_compile(tiny_config, monkeypatch):
    """Traced as training.compile does, partitioned, but no code generated, whose fusions would round otherwise."""

    def compile_quickly(block: Block, **options: object) -> None:
        nn.Module.compile(block, backend="aot_eager_decomp_partition", **options)

    monkeypatch.setattr(Block, "compile", compile_quickly)
    compiled = replace(tiny_config.training, compile=True, steps=2)
    config = replace(tiny_config, training=compiled, float8=Float8(recipe_name="delayed"))
    expected = numbers(run_to_end(config, "none", ActivationCheckpoint()).folder.path)
    for name, checkpoint in (("full", FULL), ("op", BY_POLICY)):
        assert numbers(run_to_end(config, name, checkpoint).folder.path) == expected, name


def test_a_memory_budget_is_given_to_the_compiler(tiny_config, monkeypatch, memory_budget_restored):
    monkeypatch.setattr(Block, "compile", lambda block, **options: None)
    config = replace(tiny_config, training=replace(tiny_config.training, compile=True))
    prepare(replace(config, activation_checkpoint=ActivationCheckpoint("memory_budget", memory_budget=0.25)))
    assert compiler_config.activation_memory_budget == 0.25


def test_the_checkpoint_of_a_bad_step_is_searched_too(tiny_float8_config):
    run = prepare(replace(tiny_float8_config, activation_checkpoint=BY_POLICY))
    block = next(run.models[0].model.blocks())
    block.mlp.up_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match=r"first in weight of model\.layers\.0\.mlp\.up_proj"):
        train(run)


def modes(layout: str) -> list[str]:
    """Both modes where FSDP2 shards, one for each of the other layouts."""
    return {"shard": ["none", "selective", "full"], "delayed": ["none", "full"]}.get(layout, ["none", "selective"])


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that FSDP2 shards over two ranks; all in the ranks that the distributed tests share."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "text.txt").write_text("".join(f"{n} bottles of beer on the wall, {n} bottles\n" for n in range(400)))
    tiny = {"model.dim": 32, "model.n_layers": 2, "model.n_heads": 4, "model.n_kv_heads": 2, "model.hidden_dim": 64}
    tiny |= {"training.seq_len": 32, "training.local_batch_size": 2, "training.device": "cpu", "training.steps": 3}
    tiny |= {"validation.steps": 2, "data": folder / "text.txt", "job.dump_folder": folder}
    cases = []
    for layout, words in LAYOUTS.items():
        for mode in modes(layout):
            settings = tiny | {"job.name": f"{layout}_{mode}", "activation_checkpoint.mode": mode}
            cases.append((f"{layout}_{mode}", [*words, *(f"--{name}={value}" for name, value in settings.items())]))
    done = train_on_ranks(2, cases)
    assert set(done.ended[0].values()) == {(0, 1)}, done.stderr[-6000:]
    return folder


ALL_GATHER = ["--float8.enable_fsdp_float8_all_gather", "--float8.precompute_float8_dynamic_scale_for_fsdp"]
COMPILED_TENSOR = ["--training.compile", "--parallelism.tensor_parallel_degree=2"]
TENSOR = ["--parallelism.tensor_parallel_degree=2"]
LAYOUTS = {
    "shard": ["--float8.recipe_name=rowwise"],
    "all_gather_compiled": [*ALL_GATHER, "--training.compile"],
    "delayed": [*ALL_GATHER, "--float8.recipe_name=delayed"],
    "tensor": TENSOR,
    "tensor_compiled": [*TENSOR, "--training.compile"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_recompute_the_same_bits(layout, on_two_ranks):
    expected = numbers(on_two_ranks / f"{layout}_none")
    assert len(expected) == 4
    for mode in modes(layout)[1:]:
        assert numbers(on_two_ranks / f"{layout}_{mode}") == expected, mode


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mode=all"], "activation_checkpoint.mode must be one of none, full, selective, memory_budget, got 'all'"),
        (["mode=selective", "selective_ac_option=ops"], 'selective_ac_option must be "op" or a number of at least 1'),
        (["mode=selective", "selective_ac_option=5"], "must be op or at most model.n_layers = 4, got '5'"),
        (
            ["mode=full", *COMPILED_TENSOR],
            "activation_checkpoint.mode must be none, or selective with op, for compiled",
        ),
        (["selective_ac_option=2"], "its default, 'op', unless activation_checkpoint.mode is selective, got '2'"),
        (["mode=memory_budget"], "training.compile must be true with activation_checkpoint.mode = memory_budget"),
        (["mode=memory_budget", "memory_budget=1.5"], "activation_checkpoint.memory_budget must be from 0 to 1"),
        (
            ["mode=full", "selective_ac_also_keep=aten.abs"],
            "activation_checkpoint.selective_ac_also_keep must be its default, (), unless activation_checkpoint.mode "
            "is selective and its selective_ac_option is op, got ('aten.abs',)",
        ),
        (
            ["mode=selective", "selective_ac_option=2", "selective_ac_never_keep=aten.amax"],
            "selective_ac_never_keep must",
        ),
        (
            ["mode=selective", "selective_ac_also_keep=aten.abs,aten.asb"],
            "activation_checkpoint.selective_ac_also_keep: expected the name of an operator that torch knows, such as "
            "aten.abs or aten.abs.default, got 'aten.asb'",
        ),
    ],
)
def test_bad_values(words, message):
    flags = [word if word.startswith("--") else f"--activation_checkpoint.{word}" for word in words]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
        load_config(*parse_arguments(flags))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_debug_config_shows_the_defaults():
    toml = Path(__file__).parents[3] / "train_configs" / "llama3_debug.toml"
    assert load_config(toml).activation_checkpoint == TrainConfig(job=Job()).activation_checkpoint

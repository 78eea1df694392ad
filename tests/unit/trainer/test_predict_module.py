"""One module of a run, predicted alone: what the model gives it, and what it keeps and takes."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from quaver.memory.faking.gpu_like import as_on_a_gpu
from quaver.memory.runs.module import module_inputs, names_inside, predict_module
from quaver.memory.runs.predict import SEES_GATHERS, predict_memory
from quaver.trainer.config import ActivationCheckpoint, Data, Float8, Model, Parallelism

needs_gathers = pytest.mark.skipif(not SEES_GATHERS, reason="gathers into fake tensors go unseen in this torch")
MLP = "model.layers.1.mlp"
BFLOAT16 = 2
TOKENS = 2 * 32


def _kept(memory, name):
    """Tensors that the module and what is in it made and that are kept for the backward: how many of which looks."""
    kept = Counter()
    for row in memory.prediction.saved_for_backward:
        is_inside = row["module"] == name or row["module"].startswith(f"{name}.")
        if is_inside and row["category"] in ("saved_activations", "float8_weights"):
            kept[row["operator"], tuple(row["shape"]), row["dtype"]] += row["count"]
    return kept


@pytest.mark.parametrize("name", ["model.layers.1", "model.layers.0.self_attn", MLP])
@pytest.mark.parametrize(
    "float8", [Float8(enable_float8_linear=False), Float8(recipe_name="rowwise")], ids=["hp", "f8"]
)
def test_a_module_keeps_alone_what_it_keeps_in_the_model(tiny_config, name, float8):
    config = replace(tiny_config, float8=float8)
    in_model = _kept(predict_memory(config), name)
    assert sum(in_model.values()) >= 3
    alone = _kept(predict_module(config, name), name)
    assert alone <= in_model
    # In the model the layer behind a block keeps its output.
    output = [(("aten.add.Tensor", (2, 32, 32), "float32"), 1)]
    assert list((in_model - alone).items()) == (output if name == "model.layers.1" else [])


def test_arithmetic_of_a_feed_forward(tiny_config):
    """In bfloat16 its backward reads the input, gate, up, silu(gate) and their product."""
    shape = tiny_config.model
    memory = predict_module(tiny_config, MLP)
    activations = TOKENS * (shape.dim + 4 * shape.hidden_dim) * BFLOAT16
    weights = 3 * shape.dim * shape.hidden_dim
    assert memory.parameters == weights
    assert memory.prediction.kept_bytes == pytest.approx(activations + weights * BFLOAT16, abs=64)
    assert memory.prediction.by_category["parameters"] == 4 * weights
    assert memory.prediction.by_category["optimizer_state"] == 2 * 4 * weights + 3 * 4


@pytest.mark.parametrize(
    ("checkpoint", "kept"),
    [
        (ActivationCheckpoint("full"), 1),
        (ActivationCheckpoint("selective", "2"), 1),
        (ActivationCheckpoint("selective"), 1 + 48 / 32),
    ],
    ids=lambda value: str(value),
)
def test_it_is_checkpointed_as_its_block(tiny_config, checkpoint, kept):
    """kept: in units of the input; with a policy one of its three matmuls, 48 wide, is kept."""
    memory = predict_module(replace(tiny_config, activation_checkpoint=checkpoint), MLP)
    assert memory.prediction.kept_bytes == pytest.approx(kept * TOKENS * 32 * BFLOAT16, abs=64)
    first = predict_module(replace(tiny_config, activation_checkpoint=checkpoint), "model.layers.0.mlp")
    is_every_second = checkpoint.selective_ac_option == "2"
    assert (first.prediction.kept_bytes > 2 * memory.prediction.kept_bytes) == is_every_second


@needs_gathers
def test_on_ranks_it_is_sharded_and_gathered_in_the_dtype_of_the_computation(tiny_config):
    weights = 3 * 32 * 48
    memory = predict_module(tiny_config, MLP, ranks=4)
    assert memory.prediction.by_category["parameters"] == 4 * weights / 4
    gathered = [row for row in memory.prediction.at_peak if row["category"] == "gathered_weights"]
    assert {row["dtype"] for row in gathered} <= {"bfloat16"}
    assert memory.layout.mesh == {"dp_shard": 4}
    assert not torch.distributed.is_initialized()


@needs_gathers
@pytest.mark.parametrize("name", ["model.embed_tokens", "model.norm", "lm_head"])
def test_what_is_in_no_block(tiny_config, name):
    config = replace(tiny_config, activation_checkpoint=ActivationCheckpoint("full"))
    memory = predict_module(config, name, ranks=2)
    assert memory.prediction.peak_bytes > 4 * memory.parameters / 2


@needs_gathers
@pytest.mark.parametrize(
    "float8",
    [
        Float8(recipe_name="delayed"),
        Float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True),
    ],
    ids=["delayed", "float8 all-gather"],
)
def test_settings_of_float8(tiny_config, float8):
    memory = predict_module(replace(tiny_config, float8=float8), MLP, ranks=2)
    assert memory.name == float8.recipe_name
    assert ("kept_scales" in memory.prediction.by_category) == float8.has_persistent_scales
    names = {row["module"] for row in memory.prediction.at_peak}
    assert f"{MLP}.down_proj" in names


def test_inputs_are_those_of_the_forward(tiny_config):
    config = replace(tiny_config, data=replace(tiny_config.data, document_mask=True))
    args, kwargs = module_inputs(config, "model.layers.1")
    assert kwargs == {}
    looks = [(tuple(each.shape), each.dtype, each.requires_grad) for each in args]
    assert looks == [
        ((2, 32, 32), torch.float32, True),
        ((32, 8), torch.float32, False),
        ((32, 8), torch.float32, False),
        ((2, 1, 32, 32), torch.bool, False),
    ]
    (rows,), _ = module_inputs(tiny_config, MLP + ".down_proj")
    assert (tuple(rows.shape), rows.dtype) == ((2, 32, 48), torch.bfloat16)
    (tokens,), _ = module_inputs(tiny_config, "model.embed_tokens")
    assert (tuple(tokens.shape), tokens.dtype) == ((2, 32), torch.int64)
    assert predict_module(config, "model.layers.1.self_attn").prediction.kept_bytes > 0


def test_an_input_that_a_gpus_norm_has_cast_is_a_tensor_alone(tiny_config):
    config = replace(tiny_config, float8=Float8(recipe_name="rowwise"))
    with as_on_a_gpu():
        (rows,), _ = module_inputs(config, MLP)
    assert (tuple(rows.shape), rows.dtype, rows.requires_grad) == ((2, 32, 32), torch.bfloat16, True)
    assert rows.is_contiguous()


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", pytest.param(MLP, marks=pytest.mark.nightly)])
def test_what_is_in_a_block_is_compiled_with_it(tiny_config, name):
    """A linear keeps its input; what it makes of its weight is made in the backward again."""
    training = replace(tiny_config.training, compile=True)
    memory = predict_module(replace(tiny_config, training=training), name)
    keepers = {row["kept_by"] for row in memory.prediction.saved_for_backward if row["category"] == "saved_activations"}
    assert keepers == {"compiled graph"}
    assert not any("compile" in note for note in memory.notes)
    eager = predict_module(tiny_config, name)
    assert memory.prediction.kept_bytes <= eager.prediction.kept_bytes


def test_what_is_in_no_block_is_not_compiled(tiny_config):
    training = replace(tiny_config.training, compile=True)
    compiled, eager = (
        predict_module(each, "lm_head") for each in (replace(tiny_config, training=training), tiny_config)
    )
    assert compiled.prediction.peak_bytes == eager.prediction.peak_bytes
    assert not compiled.notes


def test_the_next_modules_below_one(tiny_config):
    assert names_inside(tiny_config, MLP) == [f"{MLP}.{name}_proj" for name in ("gate", "up", "down")]
    assert names_inside(tiny_config, "lm_head") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mpl", r"got 'model.layers.1.mpl'; did you mean 'model.layers.1.mlp'\?"),
        ("feed_forward.w9", "expected the name of a module of the model that has parameters, got 'feed_forward.w9'"),
        ("model", "expected a block of the model, a part of one or a part that holds none, got 'model'"),
        ("model.layers", "a part that holds none, got 'model.layers'"),
        ("", "has parameters, got ''"),
    ],
)
def test_names_that_are_none(tiny_config, name, message):
    with pytest.raises(ValueError, match=message) as raised:
        predict_module(tiny_config, name)
    assert "\n" not in str(raised.value)


@needs_gathers
def test_tensor_parallelism_is_refused(tiny_config):
    config = replace(tiny_config, parallelism=Parallelism(tensor_parallel_degree=2))
    with pytest.raises(NotImplementedError, match="expected parallelism.tensor_parallel_degree 1, got 2"):
        predict_module(config, MLP, ranks=2)


def test_a_tied_projection(tiny_config):
    config = replace(tiny_config, model=replace(tiny_config.model, tie_word_embeddings=True), data=Data())
    assert isinstance(config.model, Model)
    assert predict_module(config, "lm_head").parameters == config.model.vocab_size * config.model.dim

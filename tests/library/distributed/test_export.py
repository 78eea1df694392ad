"""Tests that all ranks export a sharded model together, with the codes of its forward, or all fail."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from quaver import (
    Float8ColwiseParallel,
    Float8LinearConfig,
    Float8RowwiseParallel,
    convert_to_high_precision,
    freeze_to_float8,
)
from quaver.conversion.freeze import make_blockwise_config
from quaver.export import iter_float8_weights, load_float8, load_frozen, save_float8
from quaver.export.files import SafetensorsWriter
from quaver.recipes.serving import SERVING_CASTS, serving_config
from tests.library.export.mixtures import mixture, plain
from tests.library.export.models import PROJECTIONS, Tiny, tiny
from tests.ranks import get_cached_mesh, on_ranks
from tests.recipes import make_recipe_config
from tests.steps import assert_same
from tests.thinned import at_night

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def shard(model, **options):
    for linear in model.layer.values():
        fully_shard(linear, **options)
    return fully_shard(model)


def round_weights(model, dtype):
    """Round the weights of float8 linears to `dtype`, as FSDP2 gathers them."""
    for name in PROJECTIONS:
        model.layer[name].weight.data = model.layer[name].weight.data.to(dtype)
    return model


@pytest.mark.parametrize(("gathers_float8", "param_dtype"), [(False, None), (False, torch.bfloat16), (True, None)])
@on_ranks(2)
def test_codes_are_those_of_the_sharded_forward(gathers_float8, param_dtype, tmp_path):
    """The codes are those of a single process with weights in `param_dtype`; each weight moves once."""
    whole = round_weights(tiny("tensorwise"), param_dtype or torch.float32)
    expected = dict(iter_float8_weights(whole, share_fused_scales=False))
    model = tiny(GATHERED if gathers_float8 else "tensorwise")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if param_dtype or gathers_float8 else None
    shard(model, **({"mp_policy": policy} if policy else {}))
    weights = save_float8(model, tmp_path / "out", config={}, share_fused_scales=False)
    stored = dict(iter_float8_weights(model, share_fused_scales=False))
    assert_same(stored, expected)
    bias = whole.layer["q_proj"].bias  # which FSDP2 gathers with the weight, and which is written in its own dtype
    bias_bytes = 0 if gathers_float8 else bias.numel() * whole.layer["q_proj"].weight.itemsize
    assert weights.bytes_moved == bias_bytes + sum(tensor.nbytes for tensor in whole.state_dict().values())
    dist.barrier()
    assert set(load_float8(tmp_path / "out")) == set(tiny().state_dict())


def stream(model, weights):
    """Return the exported tensors; assert that the model is sharded at each of them."""
    tensors = {}
    for name, tensor in weights:
        tensors[name] = tensor
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return tensors


@on_ranks(2)
def test_an_export_leaves_the_model_sharded_at_every_tensor():
    """FSDP2 has two linears in one group and the others in the root's; training could go on between the tensors."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = tiny("rowwise")
    fully_shard([model.layer["q_proj"], model.layer["v_proj"]], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    expected = dict(iter_float8_weights(round_weights(tiny("rowwise"), torch.bfloat16)))
    assert_same(stream(model, iter_float8_weights(model)), expected)


@pytest.mark.parametrize(
    ("param_dtype", "gathers_float8", "format"),
    [
        (None, False, "fp8"),
        (torch.bfloat16, False, "compressed-tensors"),
        (None, True, "compressed-tensors"),
        *at_night([(None, False, "compressed-tensors"), (torch.bfloat16, False, "fp8"), (None, True, "fp8")]),
    ],
)
@on_ranks(2)
def test_codes_of_experts_are_those_of_the_sharded_forward(param_dtype, gathers_float8, format, tmp_path):
    """Three experts are on two ranks. The experts are an FSDP2 group, and the linear is in the root's."""
    config = make_recipe_config("rowwise", enable_fsdp_float8_all_gather=gathers_float8)
    model, whole = mixture(config, 128, 128), mixture("rowwise", 128, 128)
    for weight in (whole.o_proj.weight, *whole.experts.parameters()):
        weight.data = weight.data.to(param_dtype or torch.float32)
    expected = dict(expected_weights := iter_float8_weights(whole, format=format))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    fully_shard(model.experts, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    weights = iter_float8_weights(model, format=format)
    assert_same(stream(model, weights), expected)
    assert weights.requantized == expected_weights.requantized
    save_float8(model, tmp_path / "out", config={}, format=format)
    dist.barrier()
    assert set(load_float8(tmp_path / "out", model=model)) == set(model.state_dict())


@on_ranks(4)
def test_a_model_in_tensor_parallel_and_sharded_parts_exports_the_codes_of_its_forward():
    mesh = get_cached_mesh((2, 2), ("fsdp", "tp"))
    model = tiny("rowwise")
    parallelize_module(model.layer, mesh["tp"], {"q_proj": Float8ColwiseParallel(), "o_proj": Float8RowwiseParallel()})
    shard(model, mesh=mesh["fsdp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    expected = dict(iter_float8_weights(round_weights(tiny("rowwise"), torch.bfloat16)))
    stored = dict(iter_float8_weights(model))
    assert stored.keys() == expected.keys()
    for name in ("layer.q_proj.weight", "layer.o_proj.weight", "layer.k_proj.weight"):
        assert torch.equal(stored[name].float(), expected[name].float()), name


def build_unconverted(size):
    """Return `tiny` before its conversion: linears of unlike scales."""
    return convert_to_high_precision(tiny("rowwise", size))


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("fsdp", "tensorwise"),
        ("replicas", "mxfp8"),
        ("tp and fsdp", "rowwise"),
        ("tp and fsdp", "blockwise"),
        ("fsdp", "compressed-tensors"),
        *at_night([("fsdp", "blockwise"), ("tp and fsdp", "tensorwise"), ("tp and fsdp", "transformers")]),
    ],
)
@on_ranks(4)
def test_ranks_that_train_in_high_precision_gather_codes_alone(recipe, layout):
    """160 rows on 4 ranks cut blocks of 128 and of 32; the codes are those of one process with the whole weights."""
    size, mesh = 160, get_cached_mesh((2, 2), ("outer", "inner"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"recipe": serving_config(recipe) if recipe in SERVING_CASTS else recipe, "dtype": torch.bfloat16}
    expected = dict(iter_float8_weights(build_unconverted(size), forward_dtype="bfloat16", **options))
    model = build_unconverted(size)
    if layout == "tp and fsdp":
        plan = {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
        parallelize_module(model.layer, mesh["inner"], plan)
        shard(model, mesh=mesh["outer"], mp_policy=policy)
    else:
        shard(model, mesh=mesh if layout == "replicas" else get_cached_mesh((4,)), mp_policy=policy)
    before = {name: weight.to_local().clone() for name, weight in model.named_parameters()}
    weights = iter_float8_weights(model, **options)
    assert_same(dict(weights), expected)
    codes = len(PROJECTIONS) * size * size
    others = sum(parameter.numel() for name, parameter in model.named_parameters() if "proj.weight" not in name)
    assert weights.bytes_moved == codes + 4 * others
    assert_same({name: weight.to_local() for name, weight in model.named_parameters()}, before)
    holders = {"fsdp": (1,), "replicas": (1, 3), "tp and fsdp": (2, 3)}[layout]  # of the same part
    if dist.get_rank() in holders:
        model.layer["k_proj"].weight.detach().to_local().view(-1)[:1].fill_(torch.nan)
    with pytest.raises(ValueError, match=r"layer.k_proj.weight has an inf or a NaN"):
        dict(iter_float8_weights(model, **options))  # on every rank: none waits for another


@pytest.mark.parametrize(
    ("recipe", "rows", "split"),
    [("rowwise", 128, "ep"), ("tensorwise", 96, "fsdp"), ("blockwise", 128, "fsdp"), ("blockwise", 96, "fsdp")],
)
@on_ranks(2)
def test_experts_of_all_ranks_are_streamed_from_high_precision(recipe, rows, split):
    """Where a block of 128 rows has rows of gate and of up, both are gathered whole, and cast apart."""
    options = {"recipe": recipe, "forward_dtype": "bfloat16"}
    expected = dict(iter_float8_weights(plain(128, rows), **options))
    model = plain(128, rows)
    if split == "ep":  # as transformers' plan and Float8ExpertParallel do
        for name, weight in list(model.experts.named_parameters(recurse=False)):
            shard = distribute_tensor(weight.detach(), get_cached_mesh((2,), ("ep",)), [Shard(0)])
            model.experts.register_parameter(name, torch.nn.Parameter(shard))
        model.experts.num_experts, model.experts._is_expert_parallel = 2, True
    else:
        fully_shard(model.experts)
    fully_shard([model.o_proj, model.router])
    weights = iter_float8_weights(model, **options)
    assert_same(dict(weights), expected)
    sizes = {name: weight.numel() for name, weight in model.named_parameters() if isinstance(weight, DTensor)}
    whole = {"router.weight", *(["experts.gate_up_proj"] if rows == 96 and recipe == "blockwise" else [])}
    assert weights.bytes_moved == sum(n * (4 if name in whole else 1) for name, n in sizes.items())


@pytest.mark.parametrize("config", ["blockwise", "tensorwise"])
@on_ranks(2)
def test_a_sharded_frozen_base_is_gathered_in_float8(config):

    def build_frozen():
        torch.manual_seed(0)
        return freeze_to_float8(Tiny(256), config=config, module_filter_fn=lambda module, name: name != "lm_head")

    weights = iter_float8_weights(shard(build_frozen()))
    assert_same(dict(weights), dict(iter_float8_weights(build_frozen())))
    assert weights.bytes_moved < 1.5 * weights.bytes_yielded


@pytest.mark.parametrize("format", ["fp8", "compressed-tensors-block"])
@on_ranks(2)
def test_a_sharded_base_of_ragged_blocks_is_exported_and_loaded_again(format, tmp_path):
    """200 rows are blocks of 128 and 72, of which each rank holds 100 rows."""
    torch.manual_seed(0)
    model = Tiny(200)
    with torch.no_grad():
        for linear in model.layer.values():
            linear.weight.mul_(torch.logspace(-1, 0, 200)[:, None]).mul_(torch.logspace(0, -1, 200))
    whole = freeze_to_float8(model, config=make_blockwise_config(power_of_2=False))
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        expected = whole(tokens)
        codes = dict(iter_float8_weights(whole, format=format))
        save_float8(shard(whole), tmp_path / "out", config={}, format=format)
        dist.barrier()
        loaded = shard(load_frozen(Tiny(200), tmp_path / "out"))
        assert loaded(tokens).equal(expected)
    assert_same(dict(iter_float8_weights(loaded, format=format)), codes)


@on_ranks(2)
def test_a_tensor_that_rank_0_cannot_write_is_an_error_on_all(tmp_path):
    """By then the other rank gathers the next tensor."""
    full = mock.patch.object(SafetensorsWriter, "add", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match="No space left on device"):
        save_float8(fully_shard(tiny()), tmp_path / "out", config={})
    dist.barrier()
    assert not list(tmp_path.iterdir())


class StrangeError(Exception):
    """An error that cannot be pickled back, because `a` is missing."""

    def __init__(self, a, b):
        super().__init__(f"no model of {a} and {b}")


def fail_to_build():
    raise StrangeError(1, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, FileExistsError, "exists already"),
        ({"origin": {"x": object()}}, ValueError, "origin: expected what JSON holds, got Object of type object"),
        ({"origin": {"x": float("nan")}}, ValueError, "origin: expected what JSON holds"),
        ({"make_hp_model": fail_to_build}, (StrangeError, RuntimeError), "no model of 1 and 2"),
    ],
)
@on_ranks(2)
def test_all_ranks_raise_what_rank_0_raises(options, error, message, tmp_path):
    """Rank 0 alone writes, and here it alone has the options."""
    folder = tmp_path / "out" if options else tmp_path
    with pytest.raises(error, match=message):
        save_float8(fully_shard(tiny()), folder, **({"config": {}, **options} if dist.get_rank() == 0 else {}))
    dist.barrier()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("format", "message"), [("zip", "format: expected one of .* got 'zip'"), ("fp8", "ranks disagree about the export")]
)
@on_ranks(2)
def test_another_format_on_one_rank_is_an_error_on_all(format, message, tmp_path):
    with pytest.raises((ValueError, RuntimeError), match=message):
        save_float8(fully_shard(tiny()), tmp_path / "out", config={}, **({"format": format} if dist.get_rank() else {}))
    dist.barrier()
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_all_ranks_raise_what_a_format_refuses_on_rank_0(tmp_path):
    config = {"vocab_size": 32} if dist.get_rank() == 0 else None
    with pytest.raises(ValueError, match="config: expected none for the format comfyui"):
        save_float8(fully_shard(tiny()), tmp_path / "out.safetensors", format="comfyui", config=config)
    dist.barrier()
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_a_tensor_that_is_invalid_on_one_rank_is_an_error_on_all(tmp_path):
    """A buffer is not sharded, so one rank alone may hold a NaN."""
    model = fully_shard(tiny())
    model.register_buffer("limit", torch.tensor(float("nan") if dist.get_rank() == 1 else 1.0))
    with pytest.raises(ValueError, match="limit has an inf or a NaN"):
        save_float8(model, tmp_path / "out", config={})
    dist.barrier()
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_rank_0_writes_sharded_weights_of_a_model_on_meta(tmp_path):
    weights = fully_shard(tiny()).state_dict()
    config = {} if dist.get_rank() == 0 else None
    save_float8(tiny().to("meta"), tmp_path / "out", config=config, weights=weights)
    dist.barrier()
    assert set(load_float8(tmp_path / "out")) == set(weights)

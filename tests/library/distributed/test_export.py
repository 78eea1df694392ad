"""All ranks export a sharded model together, with the codes of its forward; rank 0 writes, or all ranks fail."""

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
from quaver.recipes.serving import SERVING, serving_config
from tests.library.distributed.models import config_of
from tests.library.export.mixtures import mixture, plain
from tests.library.export.models import PROJECTIONS, Tiny, tiny
from tests.ranks import mesh_of, on_ranks
from tests.steps import assert_same
from tests.thinned import at_night

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def sharded(model, **options):
    for linear in model.layer.values():
        fully_shard(linear, **options)
    return fully_shard(model)


def rounded(model, dtype):
    """`model` with the weights of its float8 linears in `dtype`, as FSDP2 gathers them."""
    for name in PROJECTIONS:
        model.layer[name].weight.data = model.layer[name].weight.data.to(dtype)
    return model


@pytest.mark.parametrize(("gathers_float8", "param_dtype"), [(False, None), (False, torch.bfloat16), (True, None)])
@on_ranks(2)
def test_codes_are_those_of_the_sharded_forward(gathers_float8, param_dtype, tmp_path):
    """They are those of a single process whose weights are in `param_dtype`; each weight moves once."""
    whole = rounded(tiny("tensorwise"), param_dtype or torch.float32)
    expected = dict(iter_float8_weights(whole, share_fused_scales=False))
    model = tiny(GATHERED if gathers_float8 else "tensorwise")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if param_dtype or gathers_float8 else None
    sharded(model, **({"mp_policy": policy} if policy else {}))
    weights = save_float8(model, tmp_path / "out", config={}, share_fused_scales=False)
    stored = dict(iter_float8_weights(model, share_fused_scales=False))
    assert_same(stored, expected)
    bias = whole.layer["q_proj"].bias  # which FSDP2 gathers with the weight, and which is written in its own dtype
    again = 0 if gathers_float8 else bias.numel() * whole.layer["q_proj"].weight.itemsize
    assert weights.bytes_moved == again + sum(tensor.nbytes for tensor in whole.state_dict().values())
    dist.barrier()
    assert set(load_float8(tmp_path / "out")) == set(tiny().state_dict())


@on_ranks(2)
def test_an_export_leaves_the_model_sharded_at_every_tensor():
    """Two linears fused into one module by FSDP2, the others in the root's; training goes on between the tensors."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = tiny("rowwise")
    fully_shard([model.layer["q_proj"], model.layer["v_proj"]], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    expected = dict(iter_float8_weights(rounded(tiny("rowwise"), torch.bfloat16)))
    weights, stored = iter_float8_weights(model), {}
    for name, tensor in weights:
        stored[name] = tensor
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_same(stored, expected)


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
    """Three experts on two ranks. The module of the experts is one of FSDP2's; the linear is in the root's."""
    config = config_of("rowwise", enable_fsdp_float8_all_gather=gathers_float8)
    model, whole = mixture(config, 128, 128), mixture("rowwise", 128, 128)
    for weight in (whole.o_proj.weight, *whole.experts.parameters()):
        weight.data = weight.data.to(param_dtype or torch.float32)
    expected = dict(iter_float8_weights(whole, format=format))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    fully_shard(model.experts, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    weights, stored = iter_float8_weights(model, format=format), {}
    for name, tensor in weights:
        stored[name] = tensor
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_same(stored, expected)
    assert weights.requantized == iter_all(whole, format).requantized
    save_float8(model, tmp_path / "out", config={}, format=format)
    dist.barrier()
    assert set(load_float8(tmp_path / "out", model=model)) == set(model.state_dict())


def iter_all(model, format):
    weights = iter_float8_weights(model, format=format)
    for _ in weights:
        pass
    return weights


@on_ranks(4)
def test_codes_of_a_model_in_tensor_parallel_and_sharded_parts():
    mesh = mesh_of((2, 2), ("fsdp", "tp"))
    model = tiny("rowwise")
    parallelize_module(model.layer, mesh["tp"], {"q_proj": Float8ColwiseParallel(), "o_proj": Float8RowwiseParallel()})
    sharded(model, mesh=mesh["fsdp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    expected = dict(iter_float8_weights(rounded(tiny("rowwise"), torch.bfloat16)))
    stored = dict(iter_float8_weights(model))
    assert stored.keys() == expected.keys()
    for name in ("layer.q_proj.weight", "layer.o_proj.weight", "layer.k_proj.weight"):
        assert torch.equal(stored[name].float(), expected[name].float()), name


def unconverted(size):
    """`tiny` before its conversion: linears of unlike scales."""
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
    size, mesh = 160, mesh_of((2, 2), ("outer", "inner"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"recipe": serving_config(recipe) if recipe in SERVING else recipe, "dtype": torch.bfloat16}
    expected = dict(iter_float8_weights(unconverted(size), rounded_from="bfloat16", **options))
    model = unconverted(size)
    if layout == "tp and fsdp":
        plan = {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
        parallelize_module(model.layer, mesh["inner"], plan)
        sharded(model, mesh=mesh["outer"], mp_policy=policy)
    else:
        sharded(model, mesh=mesh if layout == "replicas" else mesh_of((4,)), mp_policy=policy)
    before = {name: weight.to_local().clone() for name, weight in model.named_parameters()}
    weights = iter_float8_weights(model, **options)
    assert_same(dict(weights), expected)
    codes = len(PROJECTIONS) * size * size
    rest = sum(each.numel() for name, each in model.named_parameters() if "proj.weight" not in name)
    assert weights.bytes_moved == codes + 4 * rest  # one byte an element of what is served in float8
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
    """Three experts. Where a block of 128 rows has rows of gate and of up, both are gathered whole, and cast apart."""
    options = {"recipe": recipe, "rounded_from": "bfloat16"}
    expected = dict(iter_float8_weights(plain(128, rows), **options))
    model = plain(128, rows)
    if split == "ep":  # as transformers' plan and ours do
        for name, weight in list(model.experts.named_parameters(recurse=False)):
            shard = distribute_tensor(weight.detach(), mesh_of((2,), ("ep",)), [Shard(0)])
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

    def frozen():
        torch.manual_seed(0)
        return freeze_to_float8(Tiny(256), config=config, module_filter_fn=lambda module, name: name != "lm_head")

    expected = dict(iter_float8_weights(frozen()))
    weights = iter_float8_weights(sharded(frozen()))
    stored = dict(weights)
    assert_same(stored, expected)
    assert weights.bytes_moved < 1.5 * weights.bytes_yielded


@pytest.mark.parametrize("format", ["fp8", "compressed-tensors-block"])
@on_ranks(2)
def test_a_sharded_base_of_ragged_blocks_is_exported_and_loaded_again(format, tmp_path):
    """200 rows: blocks of 128 and 72, of which each rank holds 100 rows."""
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
        save_float8(sharded(whole), tmp_path / "out", config={}, format=format)
        dist.barrier()
        again = sharded(load_frozen(Tiny(200), tmp_path / "out"))
        assert again(tokens).equal(expected)
    stored = dict(iter_float8_weights(again, format=format))
    assert_same(stored, codes)


@on_ranks(2)
def test_a_tensor_that_rank_0_cannot_write_is_an_error_on_all(tmp_path):
    """The other rank gathers the next tensor by then."""
    full = mock.patch.object(SafetensorsWriter, "add", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match="No space left on device"):
        save_float8(fully_shard(tiny()), tmp_path / "out", config={})
    dist.barrier()
    assert not list(tmp_path.iterdir())


class StrangeError(Exception):
    """It cannot be pickled back: `a` is missing."""

    def __init__(self, a, b):
        super().__init__(f"no model of {a} and {b}")


def no_model():
    raise StrangeError(1, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, FileExistsError, "exists already"),
        ({"about": {"x": object()}}, ValueError, "about: expected what JSON holds, got Object of type object"),
        ({"about": {"x": float("nan")}}, ValueError, "about: expected what JSON holds"),
        ({"high_precision_model": no_model}, (StrangeError, RuntimeError), "no model of 1 and 2"),
    ],
)
@on_ranks(2)
def test_all_ranks_raise_what_rank_0_raises(options, error, message, tmp_path):
    """It alone writes, and here it alone has the options."""
    folder = tmp_path / "out" if options else tmp_path
    with pytest.raises(error, match=message):
        save_float8(fully_shard(tiny()), folder, config={}, **(options if dist.get_rank() == 0 else {}))
    dist.barrier()
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_a_tensor_that_is_invalid_on_one_rank_is_an_error_on_all(tmp_path):
    """A buffer is not sharded."""
    model = fully_shard(tiny())
    model.register_buffer("limit", torch.tensor(float("nan") if dist.get_rank() == 1 else 1.0))
    with pytest.raises(ValueError, match="limit has an inf or a NaN"):
        save_float8(model, tmp_path / "out", config={})
    dist.barrier()
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_rank_0_writes_sharded_weights_of_a_model_on_meta(tmp_path):
    weights = fully_shard(tiny()).state_dict()
    save_float8(tiny().to("meta"), tmp_path / "out", config={}, weights=weights)
    dist.barrier()
    assert set(load_float8(tmp_path / "out")) == set(weights)

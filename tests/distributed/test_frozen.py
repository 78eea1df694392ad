"""A frozen float8 base under FSDP2 and DistributedDataParallel: the same numbers, and codes gathered at one byte."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from quaver import Float8ColwiseParallel, convert_to_high_precision, freeze_to_float8
from quaver.frozen_weight import FrozenFloat8Weight
from tests.distributed.counting import CollectiveCounter
from tests.distributed.models import LEARNING_RATE, loss_of, make_model
from tests.distributed.ranks import run

RANKS, STEPS, DIM, HIDDEN = 2, 3, 130, 301  # a rank's 151 rows end inside a block of 128
CONFIGS = ("blockwise", "tensorwise", "rowwise")
CONFIG = pytest.mark.parametrize("config", CONFIGS)


def frozen_model(config):
    """Norms, biases and the last linear train; what lies between is frozen."""
    model = make_model(layers=2, dim=DIM, hidden=HIDDEN)
    return freeze_to_float8(model, config, module_filter_fn=lambda module, name: "." in name)


def parts():
    """[STEPS, RANKS, tokens, DIM]"""
    return torch.randn(STEPS, RANKS, 6, DIM, generator=torch.Generator().manual_seed(1))


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


def one_process(config):
    model, losses = frozen_model(config), []
    optimizer = optimizer_of(model)
    for step in parts():
        losses.append(0.0)
        for part in step:
            loss = loss_of(model(part)) / RANKS
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(model):
    """The losses, averaged over the ranks."""
    optimizer, losses = optimizer_of(model), []
    for part in parts()[:, dist.get_rank()]:
        loss = loss_of(model(part))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / RANKS)
    return losses


def sharded(model, mesh=None, **options):
    mesh = mesh or init_device_mesh("cpu", (RANKS,))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def codes_of(model):
    return {n: p.data_fp8.clone() for n, p in model.named_parameters() if isinstance(p, FrozenFloat8Weight)}


def same(codes, others):
    return all(codes[name].view(torch.uint8).equal(others[name].view(torch.uint8)) for name in codes)


def _under_fsdp(config):
    whole = frozen_model(config)
    model = sharded(copy.deepcopy(whole))
    with CollectiveCounter() as counter, torch.no_grad():
        outputs = [model(parts()[0, 0]), whole(parts()[0, 0])]
    rows = {name: -(-parameter.shape[0] // RANKS) * RANKS for name, parameter in whole.named_parameters()}
    expected_bytes = sum(
        rows[name] * parameter[:1].numel() * 4 if name not in codes_of(whole) else rows[name] * parameter.shape[1]
        for name, parameter in whole.named_parameters()
    )
    losses = train(model)
    return outputs[0].equal(outputs[1]), counter.bytes["all_gather"] - expected_bytes, losses


@CONFIG
def test_fsdp_computes_the_same_and_gathers_a_byte_per_element(config):
    for equal, more_bytes, losses in run(RANKS, _under_fsdp, config):
        assert equal
        assert more_bytes == 0
        assert losses == pytest.approx(one_process(config), rel=1e-5)


def _fsdp_variants(config):
    whole = frozen_model(config)
    input = parts()[0, 0]
    found = {}
    with torch.no_grad():
        half = sharded(copy.deepcopy(whole), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        found["mixed precision"] = half(input).equal(copy.deepcopy(whole).bfloat16()(input.bfloat16()))
        alone = sharded(copy.deepcopy(whole), init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("a", "b"))["b"])
        found["one rank, twice"] = alone(input).equal(whole(input)) and alone(input).equal(whole(input))
        replicas = sharded(copy.deepcopy(whole), init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("a", "b")))
        found["replicas"] = replicas(input).equal(whole(input))
        model = sharded(copy.deepcopy(whole))
        model[0].unshard()
        found["values"] = model[0].up.weight.to_high_precision().equal(whole[0].up.weight.to_high_precision())
        model[0].reshard()
    messages = []
    for attempt in (
        lambda: model[0].up.weight.to_local() + 1,
        lambda: convert_to_high_precision(model),
        lambda: freeze_to_float8(sharded(make_model(layers=1)), config),
        lambda: parallelize_module(
            frozen_model(config)[0], init_device_mesh("cpu", (RANKS,)), {"up": Float8ColwiseParallel()}
        ),
    ):
        try:
            attempt()
            messages.append("no error")
        except (RuntimeError, ValueError, NotImplementedError) as error:
            messages.append(str(error))
    return found, messages


def test_fsdp_variants_and_refusals():
    for found, messages in run(RANKS, _fsdp_variants, "blockwise"):
        assert all(found.values()), found
        for message, expected in zip(
            messages,
            (
                "a shard of a frozen float8 weight has no values of its own",
                "fully_shard shards its frozen float8 weight; convert back before that",
                "is a DTensor; freeze before fully_shard",
                "Float8ColwiseParallel: expected a weight in high precision",
            ),
            strict=True,
        ):
            assert expected in message


def _state_dicts(config):
    whole = frozen_model(config)
    model, input = sharded(copy.deepcopy(whole)), parts()[0, 0]
    state = model.state_dict()
    local = state["0.up.weight"].to_local()
    rows = whole[0].up.weight.data_fp8.chunk(RANKS)[dist.get_rank()]
    found = {
        "codes": isinstance(state["0.up.weight"], DTensor)
        and local.dtype is torch.float8_e4m3fn
        and local.view(torch.uint8).equal(rows.view(torch.uint8)),
        "scale": state["0.up.weight_dequant_scale"].equal(whole[0].up.weight_dequant_scale),
    }
    for how in ("load_state_dict", "set_model_state_dict"):
        other = make_model(layers=2, dim=DIM, hidden=HIDDEN)
        for parameter in other.parameters():
            nn.init.normal_(parameter)
        other = sharded(freeze_to_float8(other, config, module_filter_fn=lambda module, name: "." in name))
        if how == "load_state_dict":
            other.load_state_dict(copy.deepcopy(state))
        else:
            set_model_state_dict(other, get_model_state_dict(model))
        with torch.no_grad():
            found[how] = other(input).equal(whole(input))
    adapters = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)  # gloo cannot gather float8
    full = get_model_state_dict(model, options=adapters)
    if dist.get_rank() == 0:
        found["full"] = all(full[name].equal(p) for name, p in whole.named_parameters() if p.requires_grad)
        found["frozen"] = not any(name in full for name in codes_of(whole))
    return found


def test_sharded_state_dicts_hold_codes_and_scales():
    for found in run(RANKS, _state_dicts, "blockwise"):
        assert all(found.values()), found


def _under_ddp(config):
    model = frozen_model(config)
    before = codes_of(model)
    losses = train(DistributedDataParallel(model))
    return same(before, codes_of(model)), losses


def test_ddp_computes_the_same_and_leaves_the_codes():
    for unchanged, losses in run(RANKS, _under_ddp, "blockwise"):
        assert unchanged
        assert losses == pytest.approx(one_process("blockwise"), rel=1e-5)

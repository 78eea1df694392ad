"""All ranks export a sharded model together, with the codes of its forward; rank 0 writes, or all ranks fail."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from quaver import Float8LinearConfig, freeze_to_float8
from quaver.export import iter_float8_weights, load_float8, load_frozen, save_float8
from quaver.frozen import blockwise_config
from tests.distributed.ranks import on_ranks
from tests.unit.export.models import PROJECTIONS, Tiny, tiny

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def sharded(model):
    for linear in model.layer.values():
        fully_shard(linear)
    return fully_shard(model)


@pytest.mark.parametrize(("gathers_float8", "param_dtype"), [(False, None), (False, torch.bfloat16), (True, None)])
@on_ranks(2)
def test_codes_are_those_of_the_sharded_forward(gathers_float8, param_dtype, tmp_path):
    """They are those of a single process whose weights are in `param_dtype`; each byte moves once."""
    expected = tiny("tensorwise")
    if param_dtype is not None:
        for name in PROJECTIONS:
            expected.layer[name].weight.data = expected.layer[name].weight.data.to(param_dtype)
    expected = dict(iter_float8_weights(expected, share_fused_scales=False))
    model = tiny(GATHERED if gathers_float8 else "tensorwise")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if param_dtype or gathers_float8 else None
    for linear in model.layer.values():
        fully_shard(linear, **({"mp_policy": policy} if policy else {}))
    fully_shard(model)
    weights = save_float8(model, tmp_path / "out", config={}, share_fused_scales=False)
    stored = dict(iter_float8_weights(model, share_fused_scales=False))
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name].float(), tensor.float()) for name, tensor in expected.items())
    assert weights.bytes_moved == sum(tensor.nbytes for tensor in tiny().state_dict().values())
    dist.barrier()
    assert set(load_float8(tmp_path / "out")) == set(tiny().state_dict())


@pytest.mark.parametrize("config", ["blockwise", "tensorwise"])
@on_ranks(2)
def test_a_sharded_frozen_base_is_gathered_in_float8(config):

    def frozen():
        torch.manual_seed(0)
        return freeze_to_float8(Tiny(256), config, module_filter_fn=lambda module, name: name != "lm_head")

    expected = dict(iter_float8_weights(frozen()))
    weights = iter_float8_weights(sharded(frozen()))
    stored = dict(weights)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name].float(), tensor.float()) for name, tensor in expected.items())
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
    whole = freeze_to_float8(model, blockwise_config(power_of_2=False))
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        expected = whole(tokens)
        codes = dict(iter_float8_weights(whole, format=format))
        save_float8(sharded(whole), tmp_path / "out", config={}, format=format)
        dist.barrier()
        again = sharded(load_frozen(Tiny(200), tmp_path / "out"))
        assert again(tokens).equal(expected)
    stored = dict(iter_float8_weights(again, format=format))
    assert stored.keys() == codes.keys()
    assert all(torch.equal(stored[name].float(), tensor.float()) for name, tensor in codes.items())


@on_ranks(2)
def test_all_ranks_fail_together(tmp_path):
    error, message = (
        (FileExistsError, "exists already")
        if dist.get_rank() == 0
        else (RuntimeError, "^rank 0 could not export.*exists already")
    )
    with pytest.raises(error, match=message):
        save_float8(fully_shard(tiny()), tmp_path, config={})

"""All ranks export a sharded model together, with the codes of its forward; rank 0 writes, or all ranks fail."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from quaver import Float8LinearConfig, freeze_to_float8
from quaver.export import iter_float8_weights, load_float8, save_float8
from tests.distributed.ranks import run
from tests.unit.export.models import PROJECTIONS, Tiny, tiny

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def _export(folder: Path, gathers_float8: bool, param_dtype: torch.dtype | None) -> tuple[bool, int, int]:
    """Whether the codes are those of a single process whose weights are in `param_dtype`; bytes moved and yielded."""
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
    weights = save_float8(model, folder, config={}, share_fused_scales=False)
    stored = dict(iter_float8_weights(model, share_fused_scales=False))
    same = stored.keys() == expected.keys() and all(
        torch.equal(stored[name].float(), tensor.float()) for name, tensor in expected.items()
    )
    return same, weights.bytes_moved, weights.bytes_yielded


@pytest.mark.parametrize(("gathers_float8", "param_dtype"), [(False, None), (False, torch.bfloat16), (True, None)])
def test_codes_are_those_of_the_sharded_forward(gathers_float8, param_dtype, tmp_path):
    whole = sum(tensor.nbytes for tensor in tiny().state_dict().values())
    results = run(2, _export, tmp_path / "out", gathers_float8, param_dtype)
    assert [result[:2] for result in results] == [(True, whole)] * 2
    assert set(load_float8(tmp_path / "out")) == set(tiny().state_dict())


def _export_frozen(config: str) -> bool:
    """Whether a sharded frozen base has the codes and scales of one process."""

    def frozen():
        torch.manual_seed(0)
        return freeze_to_float8(Tiny(256), config, module_filter_fn=lambda module, name: name != "lm_head")

    expected = dict(iter_float8_weights(frozen()))
    model = frozen()
    for linear in model.layer.values():
        fully_shard(linear)
    weights = iter_float8_weights(fully_shard(model))
    stored = dict(weights)
    same = all(torch.equal(stored[name].float(), tensor.float()) for name, tensor in expected.items())
    return same and stored.keys() == expected.keys() and weights.bytes_moved < 1.5 * weights.bytes_yielded


@pytest.mark.parametrize("config", ["blockwise", "tensorwise"])
def test_a_sharded_frozen_base_is_gathered_in_float8(config):
    assert run(2, _export_frozen, config) == [True, True]


def _fail(folder: Path) -> str:
    model = fully_shard(tiny())
    try:
        save_float8(model, folder, config={})
    except (FileExistsError, RuntimeError) as error:
        return f"{dist.get_rank()} {type(error).__name__} {error}"
    return ""


def test_all_ranks_fail_together(tmp_path):
    first, second = run(2, _fail, tmp_path)
    assert first.startswith("0 FileExistsError")
    assert second.startswith("1 RuntimeError rank 0 could not export")
    assert "exists already" in second

"""Accelerate on two ranks: DDP, and FSDP2 with and without float8 all-gather."""

from dataclasses import replace

import pytest
import torch

from quaver import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from tests.distributed.ranks import RanksError, run
from tests.foreign.llama import batches, llama, not_the_head, optimizer_of


def accelerator_on(strategy, mixed_precision, **options):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, **options)
    if strategy == "FSDP2":  # which Accelerate ignores on CPUs, unless it is told so afterwards
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
    return accelerator


def full(state_dict):
    """Whole tensors, float32."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().float().clone()
        for name, value in state_dict.items()
    }


def train(strategy, recipe, float8_all_gather=False, mixed_precision="no", dtype=torch.float32):
    """Losses of this rank, and the names of the weights that moved."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=float8_all_gather)
    model = convert_to_float8_training(llama().to(dtype), config=config, module_filter_fn=not_the_head)
    accelerator = accelerator_on(strategy, mixed_precision)
    before = full(model.state_dict())
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    losses = []
    for batch in batches():
        rank = accelerator.process_index
        loss = model(**{name: part[rank : rank + 1] for name, part in batch.items()}).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if float8_all_gather:
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
    after = full(accelerator.unwrap_model(model).state_dict())
    return losses, {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_every_weight_trains_under_fsdp2_and_the_all_gather_changes_no_loss(recipe):
    """Accelerate finds the sharded parameters of an optimizer by the addresses of the whole ones."""
    in_float8 = run(2, train, "FSDP2", recipe, True)
    in_high_precision = run(2, train, "FSDP2", recipe, False)
    names = set(llama().state_dict())
    for (losses, moved), (expected, _) in zip(in_float8, in_high_precision, strict=True):
        assert moved == names
        assert losses == expected


def test_every_weight_trains_under_ddp():
    for losses, moved in run(2, train, "DDP", "tensorwise", False, "bf16"):
        assert moved == set(llama().state_dict())
        assert all(loss > 0 for loss in losses)


def test_bfloat16_parameters():
    """Under mixed precision Accelerate upcasts them by assigning to `.data`."""
    for _, moved in run(2, train, "FSDP2", "tensorwise", False, "bf16", torch.bfloat16):
        assert moved == set(llama().state_dict())
    with pytest.raises(RanksError, match="upcast bfloat16 parameters: load the model in float32"):
        run(2, train, "FSDP2", "tensorwise", True, "bf16", torch.bfloat16)

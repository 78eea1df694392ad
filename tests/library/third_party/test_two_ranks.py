"""Tests Trainer, PEFT, Fabric and Lightning under DDP and FSDP2 against the losses of a loop written by hand."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from quaver import precompute_float8_dynamic_scale_for_fsdp
from quaver.fsdp.all_gather_weight import Float8AllGatherWeight
from tests.library.third_party import llama as models
from tests.library.third_party.accelerated import as_torchrun_starts_a_rank, make_accelerator, make_fsdp2
from tests.library.third_party.llama import (
    batches,
    build_adapted,
    build_optimizer,
    clip,
    convert,
    llama,
    mixture,
    sharded,
    train_by_hand,
)
from tests.library.third_party.table import proves
from tests.ranks import run
from tests.recipes import make_recipe_config
from tests.thinned import at_night

DDP, FSDP2, GATHER = ("DDP", False), ("FSDP2", False), ("FSDP2", True)
"""Strategy, and whether weights are gathered in float8."""
STEPS = 2


def rowwise(float8_all_gather):
    return make_recipe_config("rowwise", enable_fsdp_float8_all_gather=float8_all_gather)


def converted(float8_all_gather, make=llama):
    return convert(make(), rowwise(float8_all_gather))


def is_distributed_as(strategy, float8_all_gather, model):
    shards = [weight.to_local() for weight in model.parameters() if isinstance(weight, DTensor)]
    gathered = {shard.dim() for shard in shards if isinstance(shard, Float8AllGatherWeight)}
    matrices = {shard.dim() for shard in shards} - {1}
    return bool(shards) == (strategy == "FSDP2") and gathered == (matrices if float8_all_gather else set())


def by_hand(model, rank, strategy, distribute=None, **options):
    """Return the losses of this rank."""
    distribute = distribute or (sharded if strategy == "FSDP2" else DistributedDataParallel)
    after = precompute_float8_dynamic_scale_for_fsdp
    return train_by_hand(distribute(model), rank=rank, after=after, only=range(STEPS), **options)


def transformers_trainer(folder, model, **options):
    from quaver.integrations.transformers import Float8Callback
    from tests.library.third_party.hf_trainer import trainer

    return trainer(folder, model, [Float8Callback()], **options)


def trl_trainer(folder, model, **options):
    from tests.library.third_party.sft_trainer import sft

    return sft(folder, model, **options)


def train_by_trainer(make_trainer, folder, make, strategy, float8_all_gather):
    """Return the losses that the trainer logs, means over the ranks, and those of this rank by hand."""
    from tests.library.third_party.hf_trainer import get_losses

    with as_torchrun_starts_a_rank() as rank:
        options = {"per_device_train_batch_size": 1, "max_steps": STEPS}
        trained = make_trainer(folder, converted(float8_all_gather, make), **options)
        if strategy == "FSDP2":
            make_fsdp2(trained.accelerator)
            trained.is_fsdp_enabled = True
        trained.train()
    assert is_distributed_as(strategy, float8_all_gather, trained.model)
    return get_losses(trained), by_hand(converted(float8_all_gather, make), rank, strategy, before=clip)


@proves("transformers' Trainer", "DDP", "FSDP2", "FSDP2, float8 gather")
@proves("TRL", "DDP", "FSDP2", "FSDP2, float8 gather")
@pytest.mark.parametrize(
    ("make_trainer", "make", "strategy", "float8_all_gather"),
    [
        (transformers_trainer, llama, *DDP),
        (transformers_trainer, llama, *GATHER),
        *at_night([(transformers_trainer, mixture, *GATHER), (transformers_trainer, llama, *FSDP2)]),
        *at_night((trl_trainer, llama, *way) for way in (DDP, FSDP2, GATHER)),
    ],
)
def test_trainers_log_the_losses_of_a_loop_written_by_hand(tmp_path, make_trainer, make, strategy, float8_all_gather):
    (logged, first), (_, second) = run(2, train_by_trainer, make_trainer, tmp_path, make, strategy, float8_all_gather)
    assert logged == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)], abs=1e-4)


def train_adapters(folder, strategy, float8_all_gather):
    """Return the losses of this rank with Accelerate and by hand."""
    accelerator = make_accelerator(strategy, "no")
    rank = accelerator.process_index
    model, plain = (build_adapted(rowwise(float8_all_gather)) for _ in range(2))
    model, optimizer = accelerator.prepare(model, build_optimizer(model))
    options = {"rank": rank, "after": precompute_float8_dynamic_scale_for_fsdp, "only": range(STEPS)}
    losses = train_by_hand(model, optimizer, accelerator.backward, **options)
    assert is_distributed_as(strategy, float8_all_gather, model)

    def distribute(model):
        if strategy == "DDP":
            return DistributedDataParallel(model)
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        return fully_shard(model)

    return losses, by_hand(plain, rank, strategy, distribute)


def train_by_fabric(folder, make, strategy, float8_all_gather):
    """Return the losses of this rank with Fabric and by hand."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy

    from quaver.integrations.lightning import Float8FabricPrecision

    config = rowwise(float8_all_gather)
    precision = Float8FabricPrecision(config, module_filter_fn=models.is_not_head, autocast_dtype=None)
    how = "ddp"
    if strategy == "FSDP2":
        parallelize = lambda model, mesh: sharded(model, mesh["data_parallel"])  # noqa: E731
        how = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    with as_torchrun_starts_a_rank() as rank:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=how, plugins=[precision, TorchElasticEnvironment()])
        fabric.launch()
        model = fabric.setup_module(make())
        optimizer = fabric.setup_optimizers(build_optimizer(model))
        losses = train_by_hand(model, optimizer, fabric.backward, rank=rank, only=range(STEPS))
    assert is_distributed_as(strategy, float8_all_gather, model)
    return losses, by_hand(converted(float8_all_gather, make), rank, strategy)


def train_by_lightning(folder, make, strategy, float8_all_gather):
    """Return the losses of this rank with Lightning's Trainer and by hand."""
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from pytorch_lightning.strategies import ModelParallelStrategy

    from tests.library.third_party.lightning_trainer import Module, make_trainer

    class ShardedModule(Module):
        def configure_model(self):
            if strategy == "FSDP2" and not self.is_sharded:
                self.model = sharded(converted(float8_all_gather, make), self.device_mesh["data_parallel"])
                self.is_sharded = True

        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            precompute_float8_dynamic_scale_for_fsdp(self)

        is_sharded = False

    module = ShardedModule("rowwise", False)
    with as_torchrun_starts_a_rank() as rank:
        how = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if strategy == "FSDP2" else "ddp"
        options = {"devices": 2, "strategy": how, "use_distributed_sampler": False}
        loader = torch.utils.data.DataLoader(batches(rank), batch_size=None)
        make_trainer(folder, STEPS, plugins=[TorchElasticEnvironment()], **options).fit(module, loader, [])
    assert is_distributed_as(strategy, float8_all_gather, module)
    return module.losses, by_hand(converted(float8_all_gather, make), rank, strategy)


@proves("PEFT", "DDP", "FSDP2", "FSDP2, float8 gather")
@proves("Fabric", "DDP", "FSDP2", "FSDP2, float8 gather")
@proves("Lightning's Trainer", "DDP", "FSDP2", "FSDP2, float8 gather")
@pytest.mark.parametrize(
    ("train", "case"),
    [
        (train_adapters, GATHER),
        (train_by_fabric, (mixture, *GATHER)),
        (train_by_lightning, (llama, *DDP)),
        *at_night((train_adapters, way) for way in (DDP, FSDP2)),
        *at_night((train_by_fabric, (llama, *way)) for way in (DDP, FSDP2, GATHER)),
        *at_night(
            (train_by_lightning, (make, *way)) for make, way in ((llama, FSDP2), (llama, GATHER), (mixture, GATHER))
        ),
    ],
)
def test_libraries_have_the_losses_of_a_loop_written_by_hand(tmp_path, train, case):
    for by_library, expected in run(2, train, tmp_path, *case):
        assert by_library == expected

"""transformers' Trainer, PEFT, Fabric and Lightning under DDP: the losses of a loop written by hand."""

import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.ranks import run
from tests.foreign.llama import batches, llama, optimizer_of
from tests.foreign.table import proves


def by_hand(model, rank, clip=None):
    """The losses of this rank."""
    optimizer, losses = optimizer_of(model), []
    model = DistributedDataParallel(model)
    for batch in batches():
        loss = model(**{name: part[rank : rank + 1] for name, part in batch.items()}).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextmanager
def as_torchrun_starts_a_rank():
    """With torchrun's environment, and without what Accelerate knows from before."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    rank = torch.distributed.get_rank()
    words = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    with mock.patch.dict(os.environ, {name: str(word) for name, word in words.items()}):
        yield rank


def with_the_trainer(folder):
    """The losses that it logs, means over the ranks, and those of this rank by hand."""
    from tests.foreign.test_transformers_trainer import losses_of, trainer

    with as_torchrun_starts_a_rank() as rank:
        trained = trainer(folder, "rowwise", per_device_train_batch_size=1)
        trained.train()
    return losses_of(trained), by_hand(llama("rowwise"), rank, clip=1.0)


@proves("transformers' Trainer", "DDP")
def test_the_trainer(tmp_path):
    (logged, first), (_, second) = run(2, with_the_trainer, tmp_path)
    assert logged == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)], abs=1e-4)


def with_adapters():
    """The losses of this rank with Accelerate and by hand."""
    from tests.foreign.test_accelerate import accelerator_on
    from tests.foreign.test_peft import adapted

    accelerator, losses = accelerator_on("DDP", "no"), []
    rank = accelerator.process_index
    model, optimizer = (made := adapted("rowwise", "convert, then adapt")), optimizer_of(made)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches():
        loss = model(**{name: part[rank : rank + 1] for name, part in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, by_hand(adapted("rowwise", "convert, then adapt"), rank)


@proves("PEFT", "DDP")
def test_adapters():
    for by_accelerate, expected in run(2, with_adapters):
        assert by_accelerate == expected


def with_fabric():
    """The losses of this rank with Fabric and by hand."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    from quaver.integrations.lightning import Float8FabricPrecision
    from tests.foreign.llama import not_the_head

    precision = Float8FabricPrecision("rowwise", module_filter_fn=not_the_head, autocast_dtype=None)
    with as_torchrun_starts_a_rank() as rank:
        plugins = [precision, TorchElasticEnvironment()]
        fabric, losses = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=plugins), []
        fabric.launch()
        model, optimizer = (made := llama()), optimizer_of(made)
        model, optimizer = fabric.setup(model, optimizer)
        for batch in batches():
            loss = model(**{name: part[rank : rank + 1] for name, part in batch.items()}).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, by_hand(llama("rowwise"), rank)


@proves("Fabric", "DDP")
def test_fabric():
    for by_the_library, expected in run(2, with_fabric):
        assert by_the_library == expected


def with_lightning(folder):
    """The losses of this rank with Lightning's Trainer and by hand."""
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    from tests.foreign.test_lightning import Module, trainer

    module = Module("rowwise", False)
    with as_torchrun_starts_a_rank() as rank:
        parts = [{name: part[rank : rank + 1] for name, part in batch.items()} for batch in batches()]
        options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
        trainer(folder, len(parts), plugins=[TorchElasticEnvironment()], **options).fit(
            module, torch.utils.data.DataLoader(parts, batch_size=None), []
        )
    return module.losses, by_hand(llama("rowwise"), rank)


@proves("Lightning's Trainer", "DDP")
def test_lightnings_trainer(tmp_path):
    for by_the_library, expected in run(2, with_lightning, tmp_path):
        assert by_the_library == expected

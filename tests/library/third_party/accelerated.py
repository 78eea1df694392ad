"""Makes Accelerators on the ranks of tests/ranks.py, and trains and resumes with them."""

import os
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch

from tests.library.third_party.llama import BATCHES, batches, build_optimizer, llama, train_by_hand
from tests.recipes import make_recipe_config
from tests.steps import to_plain


@contextmanager
def as_torchrun_starts_a_rank():
    """Set torchrun's environment, and forget what Accelerate stored before."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    rank = torch.distributed.get_rank()
    words = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    with mock.patch.dict(os.environ, {name: str(word) for name, word in words.items()}):
        yield rank


def make_accelerator(strategy, mixed_precision, state_dict_type=None, **options):
    from accelerate import Accelerator

    with as_torchrun_starts_a_rank() as rank:  # else Accelerate takes each rank for a process of its own
        accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, **options)
    assert (accelerator.process_index, accelerator.num_processes) == (rank, 2)
    if strategy == "FSDP2":
        make_fsdp2(accelerator, state_dict_type)
    return accelerator


def make_fsdp2(accelerator, state_dict_type=None):
    """Let Accelerate shard: it ignores FSDP2 on CPUs, unless it is told so afterwards."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    options = {"auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": False}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=state_dict_type, **options)
    accelerator.state.fsdp_plugin = plugin


def find_changed(model, before):
    """Return the names of the parameters that differ from `before`."""
    after = {name: to_plain(parameter).float() for name, parameter in model.named_parameters()}
    return {name for name in before if not torch.equal(before[name].float(), after[name])}


def train_as_documented(accelerator, model, optimizer, batches, schedule=None):
    """Train in a loop as Accelerate's documentation writes it, with clipping for a schedule, and return the losses."""
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if schedule is not None:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_by_accelerate_and_by_hand(variant, build=llama):
    """Return the losses of Accelerate with DDP, an evaluation last, and those of torch's DDP in a loop by hand."""
    every = 2 if variant == "accumulate" else 1
    accelerator = make_accelerator("DDP", "no", gradient_accumulation_steps=every)
    model, rank = build("rowwise"), accelerator.process_index
    if variant == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if variant == "compile":
        model = torch.compile(model, backend="aot_eager")
    model, optimizer = accelerator.prepare(model, build_optimizer(model))
    by_accelerate = train_as_documented(accelerator, model, optimizer, batches(rank))
    replica = torch.nn.parallel.DistributedDataParallel(build("rowwise"))
    by_hand = train_by_hand(replica, rank=rank, every=every, within_a_step=replica.no_sync)
    if variant != "compile":  # it would compile again
        with torch.inference_mode():
            for trained, losses in ((model, by_accelerate), (replica, by_hand)):
                losses.append(trained.eval()(**batches(rank)[-1]).loss.item())
    return by_accelerate, by_hand


def save_and_resume(strategy, float8_all_gather, state_dict_type, folder, make_optimizer=build_optimizer, change=id):
    """Return the losses of a whole run after its state was saved, and of one that loads it."""
    config, losses = make_recipe_config("tensorwise", enable_fsdp_float8_all_gather=float8_all_gather), []
    for resumed in (False, True):
        model = llama(config)
        change(model)
        accelerator = make_accelerator(strategy, "no", state_dict_type)
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        steps = partial(train_by_hand, model, optimizer, accelerator.backward, rank=accelerator.process_index)
        if resumed:
            accelerator.load_state(folder)
        else:
            steps(only=range(2))
            accelerator.save_state(folder)
        losses.append(steps(only=range(2, BATCHES)))
    return losses

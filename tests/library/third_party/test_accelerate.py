"""Tests Accelerate on two ranks: DDP, and FSDP2 with and without float8 all-gather."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch

from quaver import precompute_float8_dynamic_scale_for_fsdp, sync_float8_amax_and_scale_history
from tests.library.third_party.accelerated import (
    find_changed,
    make_accelerator,
    save_and_resume,
    train_by_accelerate_and_by_hand,
)
from tests.library.third_party.llama import build_optimizer, convert, copy_weights, llama, train_by_hand
from tests.library.third_party.table import proves, refuses
from tests.ranks import RanksError, run
from tests.recipes import make_recipe_config
from tests.thinned import at_night


def train(strategy, recipe, float8_all_gather=False, mixed_precision="no", dtype=torch.float32):
    """Return the losses of this rank, and the names of the weights that changed."""
    model = convert(llama().to(dtype), make_recipe_config(recipe, enable_fsdp_float8_all_gather=float8_all_gather))
    accelerator = make_accelerator(strategy, mixed_precision)
    before = copy_weights(model)
    model, optimizer = accelerator.prepare(model, build_optimizer(model))
    options = {"rank": accelerator.process_index, "after": precompute_float8_dynamic_scale_for_fsdp, "only": range(2)}
    options |= {"before": lambda model: accelerator.clip_grad_norm_(model.parameters(), 1.0)}
    losses = train_by_hand(model, optimizer, accelerator.backward, **options)
    return losses, find_changed(accelerator.unwrap_model(model), before)


@proves("Accelerate", "FSDP2", "FSDP2, float8 gather")
@pytest.mark.parametrize("recipe", ["rowwise", *at_night([("tensorwise",)])])
def test_every_weight_trains_under_fsdp2_and_the_all_gather_changes_no_loss(recipe):
    """Accelerate finds the sharded parameters of an optimizer by the addresses of the whole ones."""
    in_float8 = run(2, train, "FSDP2", recipe, True)
    in_high_precision = run(2, train, "FSDP2", recipe, False)
    names = set(llama().state_dict())
    for (losses, trained), (expected, _) in zip(in_float8, in_high_precision, strict=True):
        assert trained == names
        assert losses == expected


def test_every_weight_trains_under_ddp():
    for losses, trained in run(2, train, "DDP", "tensorwise", False, "bf16"):
        assert trained == set(llama().state_dict())
        assert all(loss > 0 for loss in losses)


@refuses(
    "Accelerate",
    "FSDP2, float8 gather",
    "with bfloat16 parameters and `mixed_precision=bf16`, which upcasts by assigning to `.data`. Load the model in "
    "float32, or leave `enable_fsdp_float8_all_gather` off.",
)
def test_bfloat16_parameters_train_but_refuse_the_float8_gather():
    """Under mixed precision Accelerate upcasts them by assigning to `.data`."""
    for _, trained in run(2, train, "FSDP2", "tensorwise", False, "bf16", torch.bfloat16):
        assert trained == set(llama().state_dict())
    with pytest.raises(RanksError, match="upcast bfloat16 parameters: load the model in float32"):
        run(2, train, "FSDP2", "tensorwise", True, "bf16", torch.bfloat16)


@proves("Accelerate", "train", "accumulate", "checkpointing", "compile", "DDP", "evaluate")
@pytest.mark.parametrize("variant", ["accumulate", *at_night([("checkpointing",), ("compile",)])])
def test_losses_are_those_of_a_loop_written_by_hand(variant):
    """To the bit; compiled code may sum in another order."""
    for by_accelerate, by_hand in run(2, train_by_accelerate_and_by_hand, variant):
        assert by_accelerate == pytest.approx(by_hand, rel=1e-4 if variant == "compile" else 0)
        assert by_hand[-1] < by_hand[0]


# test_optimizers.py has whole states, and DDP, in each run.
RESUMED = [("FSDP2", True, "SHARDED_STATE_DICT")]
RESUMED += at_night([("DDP", False, None), ("FSDP2", True, "FULL_STATE_DICT")])


@proves("Accelerate", "save, resume")
@pytest.mark.parametrize(("strategy", "float8_all_gather", "state_dict_type"), RESUMED)
def test_a_resumed_run_goes_on_as_before(strategy, float8_all_gather, state_dict_type, tmp_path):
    for whole, resumed in run(2, save_and_resume, strategy, float8_all_gather, state_dict_type, str(tmp_path)):
        assert resumed == whole


def train_delayed_by_hand():
    """Return the losses of this rank from batch 2 on, with delayed scaling."""
    model = llama("delayed")
    replica = torch.nn.parallel.DistributedDataParallel(model)
    sync = partial(sync_float8_amax_and_scale_history, model)
    return train_by_hand(replica, rank=torch.distributed.get_rank(), before=lambda _: sync())[2:]


@pytest.mark.nightly
@proves("Accelerate", "DDP", "save, resume", "resume elsewhere")
def test_processes_that_accelerate_launch_starts_train_and_resume(tmp_path):
    """`--multi_gpu` starts torchrun's, on CPUs, too; `--cpu` starts one, and leaves more to mpirun."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--main_process_port", "0", "-m", "tests.library.third_party.launched", str(tmp_path)]
    subprocess.run([*launch, "0"], check=True, timeout=600)
    (tmp_path / "state").rename(tmp_path / "moved")
    subprocess.run([*launch, "2"], check=True, timeout=600)
    names = [f"{start}.{rank}.json" for start in (0, 2) for rank in (0, 1)]
    report, *others = (json.loads((tmp_path / name).read_text()) for name in names)
    assert others == [report] * 3
    assert report["type"] == "DistributedType.MULTI_CPU"
    assert report["losses"] == torch.tensor(run(2, train_delayed_by_hand)).mean(0).tolist()

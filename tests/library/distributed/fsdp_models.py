"""Uses FSDP2 in many ways on the small model: policies, checkpoints, compiled code, writes between steps."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from quaver import Float8Linear, convert_to_float8_training
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.linear.tensor import Float8Tensor
from tests import steps
from tests.library.distributed import models
from tests.ranks import get_cached_mesh
from tests.recipes import make_recipe_config

STEPS = 3


def find_different_operands(model, whole, config):
    """Return names and directions of the weights whose gathered codes or scales are not those of the whole weights."""
    wrong = []
    for block in model:
        block.unshard()
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            gathered, expected = module.weight, models.quantize(whole.get_submodule(name).weight, config)
            assert isinstance(gathered, Float8Tensor)
            for direction, operand, whole_operand in zip(
                expected._fields, gathered.get_operands(), expected, strict=True
            ):
                same = torch.equal(operand.data.view(torch.uint8), whole_operand.data.view(torch.uint8))
                if not same or not torch.equal(operand.dequant_scale, whole_operand.dequant_scale):
                    wrong.append((name, direction))
    for block in model:
        block.reshard()
    return wrong


def make_gathering_config(recipe):
    return make_recipe_config(recipe, enable_fsdp_float8_all_gather=True)


def model_by(how, config, make=models.make_model):
    """Return the model of `make`, with FSDP2 used in one particular way."""
    options, model = {}, make()
    if how in ("keep gathered", "always reshard"):
        options["reshard_after_forward"] = how == "always reshard"
    elif how == "hsdp":
        shape = (2, dist.get_world_size() // 2)
        options["mesh"] = get_cached_mesh(shape, ("replicate", "shard"))
    elif how == "cpu offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    elif how == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif how == "meta":
        with torch.device("meta"):
            model = make()
    elif how.startswith("checkpointed"):
        convert_to_float8_training(model, config=config)
        config = None
        kind = CheckpointImpl.REENTRANT if "reentrant" in how else CheckpointImpl.NO_REENTRANT
        policy = {"context_fn": SAVE_MATMULS} if "by op" in how else {}
        for index, block in enumerate(model[:-1]):
            model[index] = checkpoint_wrapper(block, kind, **policy)
    model = models.shard_model(config, model=model, **options)
    if how == "meta":
        model.to_empty(device="cpu")
        model.load_state_dict(_sharded_like(model, make().state_dict()))
    return model


MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default]
SAVE_MATMULS = functools.partial(create_selective_checkpoint_contexts, MATMULS)


def _sharded_like(model, state_dict):
    return {
        name: torch.distributed.tensor.distribute_tensor(state_dict[name], like.device_mesh, like.placements)
        for name, like in model.state_dict().items()
    }


def change_weights(how, model, optimizer, state_dict):
    """Change the first block's up.weight, and maybe others, by one of the `CHANGES`."""
    with torch.no_grad():
        CHANGES[how](model, optimizer, state_dict)


CHANGES = {
    "step": lambda model, optimizer, state_dict: optimizer.step(),
    "load": lambda model, optimizer, state_dict: model.load_state_dict(state_dict),
    "assign": lambda model, optimizer, state_dict: model.load_state_dict(state_dict, assign=True),
    "in place": lambda model, *_: model[0].up.weight.mul_(2),
    "data": lambda model, *_: model[0].up.weight.data.mul_(2),
    "to_local": lambda model, *_: model[0].up.weight.to_local().mul_(2),
    "transposed": lambda model, *_: model[0].up.weight.to_local().t().mul_(2),
    "each row": lambda model, *_: [row.mul_(2) for row in model[0].up.weight.to_local()],
    "foreach multiply": lambda model, *_: torch._foreach_mul_(list(model.parameters()), 2.0),
    "to dtype": lambda model, *_: model.to(torch.bfloat16),
    "around": lambda model, *_: model.state_dict()["0.up.weight"].to_local().mul_(2),
}

MICROBATCHES = 2


def run_step(model, batch, microbatches=MICROBATCHES, **options):
    """Run this rank's parts of the microbatches of `batch`, and return the losses."""
    parts = torch.cat([models.get_rank_part(microbatch) for microbatch in batch.chunk(microbatches)])
    return steps.train(model, None, [parts], microbatches=microbatches, **options)


@dataclass(frozen=True)
class Case:
    """One way to train the small model under FSDP2."""

    recipe: str
    gather: bool = True
    """Whether the all-gather is in float8."""
    precompute: bool = False
    compiled: str | None = None
    param_dtype: torch.dtype | None = None


def train_cases(cases, steps):
    """Return the losses of each case."""
    result = []
    for case in cases:
        config = make_recipe_config(case.recipe, enable_fsdp_float8_all_gather=case.gather)
        policy = MixedPrecisionPolicy(param_dtype=case.param_dtype, reduce_dtype=torch.float32)
        torch.compiler.reset()
        model = models.shard_model(config, compiled=case.compiled, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE)
        losses = []
        for step, batch in enumerate(models.get_batches(steps, dist.get_world_size())):
            if case.precompute and step != 1:  # one graph serves steps with and without scales computed before
                precompute_float8_dynamic_scale_for_fsdp(model)
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                losses.append(models.train_step(model, optimizer, batch))
        result.append(losses)
    return result

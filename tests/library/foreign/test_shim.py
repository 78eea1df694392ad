"""quaver.integrations.torchao: programs that import torchao.float8, Accelerate among them, on quaver's linears."""

import os
import runpy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from quaver import Float8Linear, Float8LinearConfig, assert_float8_training, convert_to_float8_training
from quaver.integrations.torchao import main
from tests.isolated import Forked, isolated
from tests.library.foreign.llama import BATCHES, batches, llama, optimizer_of
from tests.library.foreign.table import lacks, proves
from tests.library.foreign.test_accelerate import accelerator_on
from tests.ranks import run
from tests.steps import assert_same

pytest.importorskip("torchao")


def float8_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


# ---- installation ----------------------------------------------------------------------------------------------------


def check_names():
    import torchao.float8 as package
    from torchao.float8 import config, float8_linear, float8_linear_utils, float8_tensor_parallel, fsdp_utils

    import quaver
    from quaver.fsdp.gathered import Float8AllGatherWeight
    from quaver.integrations import torchao as shim

    importer = sys.modules["a_users_module"] = type(sys)("a_users_module")
    importer.convert = package.convert_to_float8_training
    importer.Linear = float8_linear.Float8Linear
    e4m3, inference = config.e4m3_dtype, package.Float8MMConfig
    shim.install()
    shim.install()
    assert package.Float8LinearConfig is config.Float8LinearConfig is not quaver.Float8LinearConfig  # taken by value
    assert float8_linear.Float8Linear is importer.Linear is Float8Linear
    assert importer.convert is float8_linear_utils.convert_to_float8_training is shim.convert_to_float8_training
    assert fsdp_utils.WeightWithDynamicFloat8CastTensor is Float8AllGatherWeight
    assert float8_tensor_parallel.Float8ColwiseParallel is quaver.Float8ColwiseParallel
    assert package._auto_filter_for_recipe("rowwise", filter_fqns=[]) is not None
    assert config.e4m3_dtype is e4m3
    assert package.Float8MMConfig is inference
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    assert package.convert_to_float8_training(model, config=package.Float8LinearConfig()) is model
    assert float8_names(model) == {"0", "1"}


def check_refusals(kind):
    import torchao.float8 as package
    from torchao.float8 import config, float8_linear

    from quaver.integrations import torchao as shim

    linear = nn.Sequential(nn.Linear(16, 16))
    if kind == "derived":

        class Derived(float8_linear.Float8Linear):
            pass

        expected = "Derived derives from torchao's Float8Linear: call install"
    elif kind == "no counterpart":
        importer = sys.modules["a_users_module"] = type(sys)("a_users_module")
        importer.T = config.Float8TypeConfig
        expected = "a_users_module has imported torchao.float8.config.T, which quaver has no counterpart of"
    elif kind == "converted before":
        package.convert_to_float8_training(linear)
        shim.install()
        expected = "0 was converted by torchao: call install"
    else:
        sys.modules["torchao.float8"] = None
        expected = "cannot import torchao.float8"
    with pytest.raises(RuntimeError, match=expected):
        shim.install()
        package.convert_to_float8_training(linear)


def test_names_are_replaced_where_they_are_and_where_they_were_imported():
    isolated(check_names)


@pytest.mark.parametrize("kind", ["derived", "no counterpart", "converted before", "no torchao"])
def test_what_it_cannot_serve_is_refused_in_one_line(kind):
    isolated(check_refusals, kind)


def step_under_the_shim(converts):
    import torchao.float8

    from quaver.integrations import torchao as shim

    shim.install()
    model = nn.Linear(16, 16)
    if converts:
        torchao.float8.convert_to_float8_training(model)
    for _ in range(2):
        model(torch.ones(16, 16)).sum().backward()
        torch.optim.SGD(model.parameters()).step()


@pytest.mark.parametrize("converts", [True, False])
def test_the_first_step_without_a_float8_linear_is_noticed(converts):
    said = Forked(step_under_the_shim, converts).finished().stderr
    assert said.count("an optimizer has stepped, and no linear is in float8") == (not converts)


PROGRAM = """
import sys
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
model = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(16, 16)), config=Float8LinearConfig())
print(__name__, type(model[0]).__module__, sys.argv[1:], sys.path[0])
"""


def as_a_module(words):
    sys.argv = ["quaver.integrations.torchao", *words]
    runpy.run_module("quaver.integrations.torchao", run_name="__main__")


def test_a_script_runs_unchanged(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = Forked(as_a_module, [str(tmp_path / "program.py"), "--lr", "1"]).finished()
    assert done.stdout.splitlines()[-1] == f"__main__ quaver.linear.module ['--lr', '1'] {tmp_path}"
    assert done.stderr.count("quaver stands in for torchao.float8") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-m"], ["missing.py"]])
def test_wrong_usage_ends_in_one_line(arguments):
    with pytest.raises(SystemExit, match=r"^[^\n]*usage: python -m quaver.integrations.torchao[^\n]*$"):
        main(arguments)


# ---- Accelerate ------------------------------------------------------------------------------------------------------

HALF = BATCHES // 2


def train_with_accelerate(strategy, recipe, variant, folder):
    """Losses of Accelerate's fp8 and of quaver's conversion by hand, and the names of the weights that moved.

    An evaluation follows the steps, and then the second half again, from the state that was saved before it.

    `recipe` None: Accelerate's own config, which asks for a float8 all-gather also without FSDP2.
    """
    from accelerate.utils import AORecipeKwargs
    from accelerate.utils.ao import find_first_last_linear_layers

    from quaver.integrations import torchao as shim

    shim.install()
    config = None if recipe is None else Float8LinearConfig.from_recipe_name(recipe)
    results = []
    for by_accelerate in (True, False):
        model = llama()
        ends = find_first_last_linear_layers(model)
        if by_accelerate:
            options = {"mixed_precision": "fp8", "kwargs_handlers": [AORecipeKwargs(config=config)]}
        else:
            options = {"mixed_precision": "bf16"}
            all_gather = recipe is None and strategy == "FSDP2"
            by_hand = replace(config or Float8LinearConfig(), enable_fsdp_float8_all_gather=all_gather)
            convert_to_float8_training(model, config=by_hand, module_filter_fn=lambda _, name: name not in ends)  # noqa: B023
        if variant == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        accumulated = HALF if variant == "accumulate" else 1
        accelerator = accelerator_on(strategy, **options, gradient_accumulation_steps=accumulated)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        compiled = torch.compile(model, backend="aot_eager") if variant == "compile" else model
        prepared, optimizer = accelerator.prepare(compiled, optimizer_of(model))
        plain = accelerator.unwrap_model(prepared, keep_torch_compile=False)
        plain = getattr(plain, "_orig_mod", plain)  # compiled inside DDP
        assert_float8_training(plain, optimizer.optimizer)
        rank, losses = accelerator.process_index, []
        parts = [{name: part[rank : rank + 1] for name, part in batch.items()} for batch in batches()]

        def step(part, accelerator=accelerator, model=prepared, optimizer=optimizer):
            with accelerator.accumulate(model):
                loss = model(**part).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return loss.item()

        state = str(folder / str(by_accelerate))
        losses = [step(part) for part in parts[:HALF]]
        accelerator.save_state(state)
        losses += [step(part) for part in parts[HALF:]]
        after = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in plain.named_parameters()}
        moved = {name for name in before if not torch.equal(before[name], after[name].detach())}
        if variant != "compile":  # it would compile again
            with torch.inference_mode():
                losses.append(prepared.eval()(**parts[0]).loss.item())
            prepared.train()
        accelerator.load_state(state)
        again = [step(part) for part in parts[HALF:]]
        results.append((losses, again, moved, sorted(float8_names(plain) - {"lm_head"}), set(before)))
    return results


lacks(
    "Accelerate, mixed_precision=fp8",
    "best model",
    "heads",
    "adapters before",
    "adapters after",
    "merge",
    "reference model",
    sentence="as Accelerate; it leaves the first and the last linear in high precision.",
)


@proves("Accelerate, mixed_precision=fp8", "train", "DDP", "FSDP2", "FSDP2, float8 gather", "save, resume", "evaluate")
@proves("Accelerate, mixed_precision=fp8", "accumulate", "checkpointing", "compile")
@pytest.mark.parametrize(
    ("strategy", "recipe", "variant"),
    [
        pytest.param("DDP", None, "train", marks=pytest.mark.nightly),
        ("DDP", "rowwise", "accumulate"),
        pytest.param("DDP", "tensorwise", "checkpointing", marks=pytest.mark.nightly),
        pytest.param("DDP", "rowwise", "compile", marks=pytest.mark.nightly),
        ("FSDP2", None, "train"),
        pytest.param("FSDP2", "rowwise", "train", marks=pytest.mark.nightly),
    ],
)
def test_accelerates_fp8_trains_as_a_conversion_by_hand(tmp_path, strategy, recipe, variant):
    """On ranks of their own, because the names stay replaced."""
    for results in run(2, train_with_accelerate, strategy, recipe, variant, tmp_path, collective_timeout=60):
        by_accelerate, by_hand = results
        assert by_accelerate == by_hand
        losses, again, moved, float8, names = by_accelerate
        assert losses[BATCHES - 1] < losses[0]
        assert again == losses[HALF:BATCHES]
        assert moved == names
        assert len(float8) == 13


def check_between_batches(folder):
    """As test_between.py does for the libraries whose model is converted before."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from safetensors.torch import load_file

    from quaver.integrations import torchao as shim
    from tests.library.foreign import test_between

    shim.install()

    def prepared(model):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision="fp8")
        return accelerator, *accelerator.prepare(model, optimizer_of(model))

    def trained(between=lambda model, ends_step: None, model=None):
        accelerator, model, optimizer = prepared(model or llama())
        test_between.loop(model, optimizer, accelerator.backward, between)
        return accelerator, model

    alone = test_between.weights(trained()[1])
    swap = test_between.Swap()
    accelerator, model = trained(swap)
    assert len(float8_names(model)) == 13
    assert_same(test_between.weights(model), alone)
    last = test_between.evaluated(model)
    assert swap.losses[-1] != last
    accelerator.save_model(model, folder)
    again = prepared(test_between.loaded(load_file(folder / "model.safetensors")))[1]
    assert test_between.evaluated(again) == last

    def fail(model, ends_step):
        raise OSError("no batch")

    failed = llama()
    with pytest.raises(OSError, match="no batch"):
        trained(fail, failed)
    failed.load_state_dict(llama().state_dict())
    assert_same(test_between.weights(trained(model=failed)[1]), alone)

    *_, batch = batches()
    states = []
    for load_from in (None, folder / "moved"):
        accelerator, model, optimizer = prepared(llama())
        if load_from is None:
            accelerator.save_state(str(folder / "state"))
            (folder / "state").rename(folder / "moved")
        else:
            model.load_state_dict(alone)
            accelerator.load_state(str(load_from))
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        states.append(test_between.weights(model))
    assert_same(*states)


@proves("Accelerate, mixed_precision=fp8", "reload", "evaluate in a step", "EMA swap", "after a failed run")
@proves("Accelerate, mixed_precision=fp8", "resume elsewhere")
@pytest.mark.nightly
def test_what_is_done_between_the_batches_of_accelerates_fp8(tmp_path):
    isolated(check_between_batches, tmp_path)


def check_without_the_shim():
    from accelerate import Accelerator

    from quaver.integrations.transformers import prepare_model_for_float8

    model = convert_to_float8_training(llama(), config="rowwise")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    with pytest.raises(RuntimeError, match=r"set it to bf16, or call quaver.integrations.torchao.install\(\)"):
        prepare_model_for_float8(llama(), "rowwise")
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    with pytest.raises(RuntimeError, match=r"torchao has converted .*call quaver.integrations.torchao.install\(\)"):
        assert_float8_training(model, optimizer.optimizer)
    with pytest.raises(RuntimeError, match="torchao has converted this model"):
        prepare_model_for_float8(model, "rowwise")


def test_accelerates_fp8_without_the_shim_is_refused():
    isolated(check_without_the_shim)


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["test_script", "test_sync"])
def test_accelerates_own_scripts(script):
    """On two processes, as its own test suite runs them."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launch, "quaver.integrations.torchao", "-m", f"accelerate.test_utils.scripts.{script}"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("quaver stands in for torchao.float8") == 1

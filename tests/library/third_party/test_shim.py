"""Tests that programs that import torchao.float8, such as Accelerate, run on quaver's linears."""

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from quaver import Float8Linear, Float8LinearConfig, assert_float8_training, convert_to_float8_training
from quaver.integrations.torchao import main
from tests.isolated import Forked, isolated
from tests.library.third_party.accelerated import find_changed, make_accelerator, train_as_documented
from tests.library.third_party.llama import BATCHES, batches, build_optimizer, copy_weights, list_float8_names, llama
from tests.library.third_party.table import proves
from tests.ranks import run
from tests.steps import assert_same
from tests.thinned import first

pytest.importorskip("torchao")


def check_names():
    import torchao.float8 as package
    from torchao.float8 import config, float8_linear, float8_linear_utils, float8_tensor_parallel, fsdp_utils

    import quaver
    from quaver.fsdp.all_gather_weight import Float8AllGatherWeight
    from quaver.integrations import torchao as shim

    importer = sys.modules["a_users_module"] = type(sys)("a_users_module")
    importer.convert = package.convert_to_float8_training  # type: ignore[attr-defined]
    importer.Linear = float8_linear.Float8Linear  # type: ignore[attr-defined]
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
    assert package.convert_to_float8_training(model, config=package.Float8LinearConfig(emulate=True)) is model
    assert list_float8_names(model) == {"0", "1"}
    assert model[0].config.emulate


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
        importer.T = config.Float8TypeConfig  # type: ignore[attr-defined]
        expected = "a_users_module has imported torchao.float8.config.T, for which quaver has no counterpart"
    elif kind == "converted before":
        package.convert_to_float8_training(linear)
        shim.install()
        expected = "'0' was converted by torchao: call install"
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
    stderr = Forked(step_under_the_shim, converts).finished().stderr
    assert stderr.count("an optimizer has stepped, and no linear is in float8") == (not converts)


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
    assert done.stderr.count("classes and functions of torchao.float8") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-m"], ["missing.py"]])
def test_wrong_usage_ends_in_one_line(arguments):
    with pytest.raises(SystemExit, match=r"^[^\n]*usage: python -m quaver.integrations.torchao[^\n]*$"):
        main(arguments)


HALF = BATCHES // 2
WAYS = [("FSDP2", None, "accumulate"), ("DDP", None, "train"), ("DDP", "tensorwise", "checkpointing")]
WAYS += [("DDP", "rowwise", "compile"), ("FSDP2", "rowwise", "train")]


def train_with_accelerate(strategy, recipe, variant, folder):
    """Return the losses of Accelerate's fp8 and of quaver's conversion by hand, and the weights that changed.

    An evaluation follows the steps, and then the second half again, from the state that was saved before it. Without a
    recipe Accelerate has its own config, which asks for a float8 all-gather also without FSDP2.
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
        accelerator = make_accelerator(strategy, **options, gradient_accumulation_steps=accumulated)
        before = copy_weights(model)
        compiled = torch.compile(model, backend="aot_eager") if variant == "compile" else model
        prepared, optimizer = accelerator.prepare(compiled, build_optimizer(model))
        plain = accelerator.unwrap_model(prepared, keep_torch_compile=False)
        plain = getattr(plain, "_orig_mod", plain)  # compiled inside DDP
        assert_float8_training(plain, optimizer.optimizer)
        parts = batches(accelerator.process_index)
        steps = partial(train_as_documented, accelerator, prepared, optimizer)
        state = str(folder / str(by_accelerate))
        losses = steps(parts[:HALF])
        accelerator.save_state(state)
        losses += steps(parts[HALF:])
        trained = find_changed(plain, before)
        if variant != "compile":  # it would compile again
            with torch.inference_mode():
                losses.append(prepared.eval()(**parts[0]).loss.item())
            prepared.train()
        accelerator.load_state(state)
        again = steps(parts[HALF:])
        results.append((losses, again, trained, sorted(list_float8_names(plain) - {"lm_head"}), set(before)))
    return results


@proves("Accelerate, mixed_precision=fp8", "train", "DDP", "FSDP2", "FSDP2, float8 gather", "save, resume", "evaluate")
@proves("Accelerate, mixed_precision=fp8", "accumulate", "checkpointing", "compile")
@pytest.mark.parametrize(("strategy", "recipe", "variant"), first(1, WAYS))
def test_accelerates_fp8_trains_as_a_conversion_by_hand(tmp_path, strategy, recipe, variant):
    """The ranks serve no other test, because the names stay replaced in them."""
    for results in run(2, train_with_accelerate, strategy, recipe, variant, tmp_path, collective_timeout=60):
        by_accelerate, by_hand = results
        assert by_accelerate == by_hand
        losses, again, trained, float8, names = by_accelerate
        assert losses[BATCHES - 1] < losses[0]
        assert again == losses[HALF:BATCHES]
        assert trained == names
        assert len(float8) == 13


def check_between_batches(folder):
    """As test_between_batches.py does for the libraries whose model is converted before."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from safetensors.torch import load_file

    from quaver.integrations import torchao as shim
    from tests.library.third_party.between_batches import check_a_failed_run, check_evaluations, load_llama, run_loop

    shim.install()

    def prepared(model):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision="fp8")
        return accelerator, *accelerator.prepare(model, build_optimizer(model))

    def by_accelerate(model, between, folder):
        accelerator, model, optimizer = prepared(model)
        assert len(list_float8_names(model)) == 13
        run_loop(model, optimizer, accelerator.backward, between)
        accelerator.save_model(model, folder)
        return model, lambda: prepared(load_llama(load_file(folder / "model.safetensors")))[1]

    check_evaluations(by_accelerate, llama, folder / "evaluations", convert=lambda model, recipe: model)
    check_a_failed_run(by_accelerate, llama, folder / "failed")

    *_, batch = batches()
    states = []
    for loads in (False, True):
        accelerator, model, optimizer = prepared(llama())
        if loads:
            torch.nn.init.zeros_(model.lm_head.weight)
            accelerator.load_state(str(folder / "moved"))
        else:
            accelerator.save_state(str(folder / "state"))
            (folder / "state").rename(folder / "moved")
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        states.append(copy_weights(model))
    assert_same(*states)


@proves("Accelerate, mixed_precision=fp8", "reload", "evaluate in a step", "EMA swap", "after a failed run")
@proves("Accelerate, mixed_precision=fp8", "resume elsewhere")
@pytest.mark.nightly
def test_nothing_between_the_batches_of_accelerates_fp8_changes_a_loss(tmp_path):
    isolated(check_between_batches, tmp_path)


def check_without_the_shim():
    from accelerate import Accelerator

    from quaver.integrations.transformers import prepare_model_for_float8

    model = convert_to_float8_training(llama(), config="rowwise")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    with pytest.raises(RuntimeError, match=r"set it to bf16, or call quaver.integrations.torchao.install\(\)"):
        prepare_model_for_float8(llama(), "rowwise")
    model, optimizer = accelerator.prepare(model, build_optimizer(model))
    with pytest.raises(RuntimeError, match=r"torchao has converted .*call quaver.integrations.torchao.install\(\)"):
        assert_float8_training(model, optimizer.optimizer)
    with pytest.raises(RuntimeError, match="torchao has converted this model"):
        prepare_model_for_float8(model, "rowwise")


def test_accelerates_fp8_without_the_shim_is_refused():
    isolated(check_without_the_shim)


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["test_script", "test_sync"])
def test_accelerates_own_scripts_pass(script):
    """They run on two processes, as in Accelerate's test suite."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launch, "quaver.integrations.torchao", "-m", f"accelerate.test_utils.scripts.{script}"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("classes and functions of torchao.float8") == 1

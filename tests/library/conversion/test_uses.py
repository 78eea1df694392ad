"""Tests converted models in evaluation, and their copies, pickles, exported and traced programs."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from quaver import convert_to_float8_training, freeze_to_float8, sync_float8_amax_and_scale_history
from tests.recipes import TORCHAO_RECIPES
from tests.steps import by_torch_save

RECIPE = pytest.mark.parametrize("recipe", [*TORCHAO_RECIPES, "blockwise", "mxfp8", "delayed", "frozen"])


def make(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 48))
    if recipe == "frozen":
        return freeze_to_float8(model, config="rowwise")
    convert_to_float8_training(model, config=recipe)
    model(torch.randn(8, 64)).sum().backward()
    sync_float8_amax_and_scale_history(model)
    return model


def export(model, example, *, smallest):
    return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=smallest)},))


@RECIPE
def test_evaluation_and_copies_have_the_bits_of_training(recipe):
    model, input = make(recipe), torch.randn(48, 64)
    expected = model(input)
    model.eval()
    for scope in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with scope():
            assert model(input).equal(expected)
    for duplicate in (copy.deepcopy(model), by_torch_save(model)):
        assert duplicate(input).equal(expected)
    assert nn.Sequential(*map(copy.copy, model))(input).equal(expected)
    if recipe == "frozen":
        with pytest.raises(AttributeError, match="dtype"):  # as torch's pickle of any float8 tensor
            pickle.loads(pickle.dumps(model))
    else:
        assert pickle.loads(pickle.dumps(model))(input).equal(expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:No complete tensor found")
@RECIPE
def test_exported_and_traced_programs_have_the_outputs_of_the_model(recipe):
    model, example, few = make(recipe).eval(), torch.randn(300, 64), torch.randn(7, 64)
    expected = model(example)
    program, buffer = torch.export.export(model, (example,)), io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    assert torch.export.load(buffer).module()(example).equal(expected)
    with torch.no_grad():
        assert export(model, example, smallest=2).module()(few).equal(model(few))
        assert torch.jit.trace(model, example)(example).equal(expected)
    with pytest.raises(ValueError, match="Unknown type annotation"):
        torch.jit.script(model)
    if recipe in ("blockwise", "mxfp8"):
        more = example[: {"blockwise": 129, "mxfp8": 33}[recipe]].contiguous()
        assert export(model, example, smallest=len(more)).module()(more).equal(model(more))
        # When this fails, docs/limitations.md can say so.
        with pytest.raises(torch._dynamo.exc.UserError, match="!= 1"):
            export(model, example, smallest=2)
    else:
        assert export(model, example, smallest=2).module()(few).equal(model(few))

"""Pickles that quaver 1.0 made load, and what they hold computes the same bits and trains on."""

import gzip
import importlib
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import quaver
from quaver.recipes.reference import ScaleHistory
from quaver.runtime.old_names import NEW_NAMES


class Subclass(nn.Linear):
    """A linear of some model, which the pickle names."""


@pytest.fixture(scope="module")
def pickled():
    """By recipe or form: a model of two linears after one step, its output for `input`, and perhaps its optimizer.

    `torch.save` of quaver 1.0 (torch 2.13) wrote them, with the modules where they were then.
    """
    content = gzip.decompress((Path(__file__).parent / "files" / "models_of_1_0.pt.gz").read_bytes())
    return torch.load(io.BytesIO(content), weights_only=False)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "delayed", "frozen", "primary"])
def test_a_model_of_quaver_1_0_goes_on(pickled, name):
    model, optimizer, output = (pickled["saved"][name][key] for key in ("model", "optimizer", "output"))
    assert isinstance(model[2], Subclass)
    made = model(pickled["input"])
    assert torch.equal(made.detach(), output)
    made.sum().backward()
    if optimizer is not None:
        optimizer.step()


@pytest.mark.parametrize("name", sorted(NEW_NAMES))
def test_an_old_name_gives_the_attributes_of_the_new_module(name):
    old, new = importlib.import_module(f"quaver.{name}"), importlib.import_module(f"quaver.{NEW_NAMES[name]}")
    own = [each for each, value in vars(new).items() if getattr(value, "__module__", None) == new.__name__]
    assert all(getattr(old, each) is getattr(new, each) for each in own)
    with pytest.raises(AttributeError):
        old.no_such_name  # noqa: B018


def test_the_scales_of_a_reference_linear_of_quaver_1_0_load():
    pickle_of_1_0 = b"cquaver.reference\nPersistentScale\n."
    assert pickle.loads(pickle_of_1_0) is ScaleHistory


def test_a_public_function_keeps_its_name():
    module = importlib.import_module("quaver.conversion_report")
    assert quaver.conversion_report is module.conversion_report

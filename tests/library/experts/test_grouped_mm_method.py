"""Tests experts that multiply through `_grouped_mm`: torchtitan's three signatures, and unknown ones."""

import inspect

import pytest
import torch
from torch import nn

from quaver import float8_grouped_mm
from quaver.experts.grouped_mm_method import Float8GroupedMM, to_float8_grouped_mm
from quaver.recipes.config import resolve_config
from tests.reference import assert_same_bits


def build_experts(method):
    return type("Experts", (nn.Module,), {"_grouped_mm": method})()


@pytest.mark.parametrize(
    "method",
    [
        lambda self, *, A, B_t, offs: None,
        lambda self, *, A, weight_EOI, offs: None,
        lambda self, *, input_RI, weight_EOI, offsets_E: None,
    ],
    ids=["release", "stored weight", "grouped linear"],
)
def test_a_signature_is_bound(method):
    tokens, weight, ends = torch.randn(50, 64), torch.randn(3, 32, 64), torch.tensor([20, 20, 50], dtype=torch.int32)
    experts = build_experts(method)
    kind, names = type(experts), list(inspect.signature(experts._grouped_mm).parameters)
    module = to_float8_grouped_mm(experts, resolve_config("rowwise"))
    assert isinstance(module, kind)
    assert isinstance(module, Float8GroupedMM)
    b_t = weight.transpose(1, 2)
    out = module._grouped_mm(**dict(zip(names, (tokens, b_t if "B_t" in names else weight, ends), strict=True)))
    assert_same_bits(out, float8_grouped_mm(tokens, b_t, ends, config="rowwise"))
    with pytest.raises(ValueError, match="config: experts are scaled dynamically"):
        module.float8_config = "delayed"


@pytest.mark.parametrize(
    ("module", "signature"),
    [
        (build_experts(lambda self, *, x, weight, offs: None), "x, weight, offs"),
        (build_experts(lambda self, *, A, B_t, weight_EOI: None), "A, B_t, weight_EOI"),
        (nn.Linear(16, 16), "no such method"),
    ],
)
def test_an_unknown_signature_is_refused(module, signature):
    kind = type(module)
    with pytest.raises(ValueError, match=rf"{kind.__name__}\._grouped_mm: expected .* got {signature}; this version"):
        to_float8_grouped_mm(module, resolve_config("rowwise"))
    assert type(module) is kind

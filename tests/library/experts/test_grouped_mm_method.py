"""Experts that multiply through `_grouped_mm`: torchtitan's three signatures, and unknown ones."""

import pytest
import torch
from torch import nn

from quaver import float8_grouped_mm
from quaver.experts.grouped_mm_method import Float8GroupedMM, to_float8_grouped_mm
from quaver.recipes.config import resolve_config
from tests.reference import assert_same_bits


class OfRelease(nn.Module):
    def _grouped_mm(self, *, A, B_t, offs):
        raise AssertionError("this is converted")


class WithStoredWeight(nn.Module):
    def _grouped_mm(self, *, A, weight_EOI, offs):
        raise AssertionError("this is converted")


class GroupedLinear(nn.Module):
    def _grouped_mm(self, *, input_RI, weight_EOI, offsets_E):
        raise AssertionError("this is converted")


class Unknown(nn.Module):
    def _grouped_mm(self, *, x, weight, offs):
        raise AssertionError("this is not called")


class Twice(nn.Module):
    def _grouped_mm(self, *, A, B_t, weight_EOI):
        raise AssertionError("this is not called")


SIGNATURES = [
    (OfRelease, ("A", "B_t", "offs"), True),
    (WithStoredWeight, ("A", "weight_EOI", "offs"), False),
    (GroupedLinear, ("input_RI", "weight_EOI", "offsets_E"), False),
]


@pytest.mark.parametrize(("kind", "names", "turned"), SIGNATURES, ids=lambda each: getattr(each, "__name__", None))
def test_a_signature_is_bound(kind, names, turned):
    tokens, weight, ends = torch.randn(50, 64), torch.randn(3, 32, 64), torch.tensor([20, 20, 50], dtype=torch.int32)
    module = to_float8_grouped_mm(kind(), resolve_config("rowwise"))
    assert isinstance(module, kind)
    assert isinstance(module, Float8GroupedMM)
    b_t = weight.transpose(1, 2)
    out = module._grouped_mm(**dict(zip(names, (tokens, b_t if turned else weight, ends), strict=True)))
    assert_same_bits(out, float8_grouped_mm(tokens, b_t, ends, config="rowwise"))


@pytest.mark.parametrize(
    ("kind", "got"), [(Unknown, "x, weight, offs"), (Twice, "A, B_t, weight_EOI"), (nn.Linear, "no such method")]
)
def test_an_unknown_signature_is_refused(kind, got):
    module = kind(16, 16) if kind is nn.Linear else kind()
    with pytest.raises(ValueError, match=rf"{kind.__name__}\._grouped_mm: expected .* got {got}; this version"):
        to_float8_grouped_mm(module, resolve_config("rowwise"))
    assert type(module) is kind

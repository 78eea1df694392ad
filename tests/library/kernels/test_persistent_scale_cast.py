"""Tests that every path of a cast with a persistent scale equals its definition, and reads the data once."""

import functools
import itertools
import math

import pytest
import torch
from torch import Tensor

from quaver.kernels import cpu
from quaver.kernels.persistent_cast import cast_with_persistent_scale
from quaver.recipes import scaling
from quaver.recipes.formats import FLOAT8_FORMATS
from quaver.recipes.scaling import PersistentScale
from quaver.runtime.devices import simulate_gpu
from tests.recipes import E4M3, E5M2
from tests.reference import MAX, every_value, reference_amax, reference_scales
from tests.steps import assert_same
from tests.thinned import at_night, thinned

HP_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SATURATES_ABOVE = {E4M3: 464.0, E5M2: 61440.0}  # halfway from 448 to 480, from 57344 to 65536
NAN, INF = math.nan, math.inf


def oracle(hp: Tensor, quant_scale: float, float8_dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, ...]:
    """Cast in float64, except for the one product that is defined to be rounded to float32."""
    amax, quant = reference_amax(hp.float()), torch.tensor(quant_scale)
    if not quant_scale > 0:
        quant, _ = reference_scales(amax, float8_dtype, power_of_2=power_of_2)
    scaled = hp.float() * quant
    finite = hp.isfinite() & ~scaled.isnan()
    codes = torch.where(finite, scaled.clamp(-MAX[float8_dtype], MAX[float8_dtype]), NAN).to(float8_dtype)
    saturated = (finite & (scaled.double().abs() > SATURATES_ABOVE[float8_dtype])).sum()
    return codes, quant, (1 / quant.double()).float(), torch.stack([amax, saturated.float()])


def by_pytorch(hp, quant_scale, float8_dtype, power_of_2):
    return scaling.cast_with_persistent_scale(hp, quant_scale, float8_dtype, power_of_2=power_of_2)


def by_the_extension(hp, quant_scale, float8_dtype, power_of_2):
    recorded_amax = torch.zeros(2)
    return (*cpu.cast_and_record_amax(hp, quant_scale, float8_dtype, power_of_2, recorded_amax), recorded_amax)


@functools.cache
def compiled_cast(float8_dtype, power_of_2, is_known, on_gpu):
    def cast(hp, quant_scale, recorded_amax):
        scale = PersistentScale(quant_scale, recorded_amax, torch.tensor(True), is_known)
        codes, dequant, _, quant, _ = cast_with_persistent_scale(hp, scale, float8_dtype, True, False, power_of_2).row
        return codes, quant, dequant

    return torch.compile(cast, fullgraph=True, backend="aot_eager")


def compiled(hp, quant_scale, float8_dtype, power_of_2, is_known=False, on_gpu=False):
    recorded_amax = torch.full((2,), -1.0)
    with torch._dynamo.config.patch(recompile_limit=100):
        return (
            *compiled_cast(float8_dtype, power_of_2, is_known, on_gpu)(hp, quant_scale, recorded_amax),
            recorded_amax,
        )


def compiled_for_a_gpu(hp, quant_scale, float8_dtype, power_of_2):
    """Run both graphs where the scale is known: the host knows it, or does not yet."""
    with simulate_gpu((9, 0)):
        results = compiled(hp, quant_scale, float8_dtype, power_of_2, on_gpu=True)
        if quant_scale > 0:
            assert_same(compiled(hp, quant_scale, float8_dtype, power_of_2, is_known=True, on_gpu=True), results)
    return results


PATHS = [by_pytorch, *([by_the_extension] if cpu.HAS_EXTENSION else []), compiled]
FOR_A_GPU = pytest.param(compiled_for_a_gpu, marks=pytest.mark.nightly)


KNOWN = thinned([path for path in PATHS if path is not compiled], HP_DTYPES, [E4M3, E5M2])
KNOWN += thinned([compiled, compiled_for_a_gpu], HP_DTYPES, [E4M3, E5M2], together=1)


@pytest.mark.parametrize(("path", "hp_dtype", "float8_dtype"), KNOWN)
def test_known_scales_cast_every_value_as_the_oracle(path, hp_dtype, float8_dtype):
    hp = every_value(hp_dtype).view(256, 256)
    for scale in (1.0, 0.37, 2.0**20, 448e12, 1e-30, 3.0e38):
        assert_same(path(hp, torch.tensor(scale), float8_dtype, False), oracle(hp, scale, float8_dtype, False))


UNKNOWN = [*((path, E5M2) for path in PATHS), *((path, E4M3) for path in PATHS if path is not compiled)]
UNKNOWN += at_night([(compiled, E4M3), (compiled_for_a_gpu, E5M2), (compiled_for_a_gpu, E4M3)])


@pytest.mark.parametrize(("path", "float8_dtype"), UNKNOWN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_an_unknown_scale_is_computed_from_the_tensor(path, float8_dtype):
    """As the dynamic cast to the bit; 0, negative and NaN scales all stand for unknown."""
    values = every_value(torch.bfloat16)
    finite = values[values.isfinite()]
    tiny = torch.full((2, 2), 1e-20)
    tensors = [torch.randn(33, 7), finite.view(1, -1) * 1e-6, torch.zeros(3, 5), tiny, torch.ones(0, 4)]
    tensors += [torch.tensor([[1.0, bad], [2.0, 3.0]]) for bad in (INF, -INF, NAN)]
    for hp, scale, power_of_2 in itertools.product(tensors, (0.0, -3.0, NAN), (False, True)):
        *cast, (_, saturated) = results = path(hp, torch.tensor(scale), float8_dtype, power_of_2)
        assert_same(results, oracle(hp, scale, float8_dtype, power_of_2))
        assert_same(cast, scaling.dynamic_cast(hp, float8_dtype, power_of_2=power_of_2))
        assert saturated == 0


@pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=str)
def test_saturation_counts_what_loses_more_than_rounding(float8_dtype):
    """Up to half a unit above the largest number an element rounds to it anyway, ties included."""
    edge = torch.tensor(FLOAT8_FORMATS[float8_dtype].saturates_above)
    assert edge == SATURATES_ABOVE[float8_dtype]
    hp = torch.stack([edge, -edge, edge.nextafter(torch.tensor(INF)), -edge * 1.001, torch.tensor(MAX[float8_dtype])])
    for path in (by_pytorch, by_the_extension) if cpu.HAS_EXTENSION else (by_pytorch,):
        assert path(hp.view(1, -1), torch.tensor(1.0), float8_dtype, False)[3][1] == 2


@pytest.mark.skipif(not cpu.HAS_EXTENSION, reason="the C extension is off")
def test_casts_on_several_threads_have_the_bits_of_the_oracle(threads):
    hp = torch.randn(517, 1031) * 300
    hp[516, 1030], hp[0, 0] = 1e6, -2e6
    for scale in (1.0, 0.0):
        assert_same(by_the_extension(hp, torch.tensor(scale), E4M3, False), oracle(hp, scale, E4M3, False))


@pytest.mark.parametrize("path", [*PATHS, FOR_A_GPU])
def test_what_casts_observe_is_a_maximum_in_which_nan_stays(path):
    def observe(*tensors):
        recorded_amax = torch.tensor([-1.0, 0.0])
        for hp in tensors:
            if path is by_the_extension:
                cpu.cast_and_record_amax(hp, torch.tensor(448.0), E4M3, False, recorded_amax)
            else:
                recorded_amax = torch.maximum(recorded_amax, path(hp, torch.tensor(448.0), E4M3, False)[3])
        return recorded_amax

    small, large, bad = torch.full((2, 2), 0.5), torch.tensor([[3.0, -4.0, 0.1, 9.0]]), torch.tensor([[NAN, 1.0]])
    assert observe(small, large, small, large).tolist() == [9.0, 3.0]
    assert observe(torch.zeros(3, 3)).tolist() == [0.0, 0.0]
    assert observe(small, bad, large)[0].isnan()
    assert observe(torch.full((1, 1), INF), small)[0] == INF

"""The Triton cast on a GPU: the oracle's bits, whatever the size and the scale; no synchronisation; in a CUDA graph."""

import math

import pytest
import torch

pytest.importorskip("triton")

from quaver import scaling
from quaver.kernels import triton_cast
from tests.triton_kernels import E4M3, E5M2, assert_same_bits, every_value

pytestmark = pytest.mark.gpu
FLOAT8 = pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _needs_a_gpu_that_rounds_once():
    if not triton_cast.takes(torch.ones(1, device="cuda"), E4M3):
        pytest.skip("needs triton, and a GPU that converts to float8 in one rounding")


def cast(hp, scale, float8_dtype, power_of_2=False):
    assert triton_cast.takes(hp, float8_dtype)
    quant_scale = torch.full((), scale, device="cuda")
    return triton_cast.cast_with_persistent_scale(hp, quant_scale, float8_dtype, power_of_2=power_of_2)


def assert_all_same_bits(got, expected):
    for g, e in zip(got, expected, strict=True):
        assert_same_bits(g, e)


def assert_is_the_oracle(hp, scale, float8_dtype, power_of_2=False):
    expected = scaling.cast_with_persistent_scale(hp, torch.tensor(scale), float8_dtype, power_of_2=power_of_2)
    assert_all_same_bits(cast(hp.cuda(), scale, float8_dtype, power_of_2), expected)


@FLOAT8
@HP
@pytest.mark.parametrize("scale", [0.0, 1.0, 0.37, 3.7, 2.0**20, 448e12, 1e-30, 3e38, 1e-42, INF, NAN, -1.0], ids=str)
def test_every_value(hp_dtype, float8_dtype, scale):
    hp = every_value(hp_dtype)
    assert_is_the_oracle(hp, scale, float8_dtype)
    assert_is_the_oracle(hp[hp.isfinite()], scale, float8_dtype)


@FLOAT8
@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 100.0, 2.0**14], ids=str)
def test_random_float32(float8_dtype, scale):
    """Over all exponents that reach the format, its subnormals and what saturates; and close to every halfway point."""
    hp = torch.randn(1 << 20) * torch.exp2(torch.randint(-24, 20, (1 << 20,)).float())
    assert_is_the_oracle(hp, scale, float8_dtype)
    codes = torch.arange(256, dtype=torch.uint8).view(float8_dtype).float()
    finite = codes[codes.isfinite()].sort().values
    halfway = (finite[1:] + finite[:-1]) / 2
    inf = torch.tensor(INF)
    close = torch.cat([halfway, halfway.nextafter(inf), halfway.nextafter(-inf)])
    assert_is_the_oracle(close, 1.0, float8_dtype)


@FLOAT8
@HP
@pytest.mark.parametrize("power_of_2", [False, True])
def test_an_unknown_scale_is_the_tensors_own(hp_dtype, float8_dtype, power_of_2):
    for values in ([0.0, -0.0], [1e-20], [0.7], [1.0, NAN, 2.0], [1.0, INF], [-INF, NAN], [1e-40, 0.0], [3e4, -6e4]):
        for scale in (0.0, -3.0, NAN):
            assert_is_the_oracle(torch.tensor(values).to(hp_dtype), scale, float8_dtype, power_of_2)


@HP
@pytest.mark.parametrize("scale", [0.0, 100.0])
def test_sizes(hp_dtype, scale):
    tile = triton_cast.TILE_BYTES // hp_dtype.itemsize
    many = triton_cast.AMAX_PROGRAMS * tile
    for size in (0, 1, 2, 15, 16, 17, tile - 1, tile, tile + 1, 3 * tile + 5, many + 16, 2 * many + 3):
        hp = torch.randn(size).to(hp_dtype)
        if size:
            hp[-1] = -17.25  # the last element matters
        assert_is_the_oracle(hp, scale, E4M3)
    hp = torch.randn(3, 5, 7).to(hp_dtype)
    expected = scaling.cast_with_persistent_scale(hp[1:], torch.tensor(scale), E4M3)
    assert_all_same_bits(cast(hp.cuda()[1:], scale, E4M3), expected)  # starts off 16 bytes
    assert_is_the_oracle(torch.randn(2, 0, 3).to(hp_dtype), scale, E4M3)


def test_what_it_takes():
    hp = torch.ones(4, 6, device="cuda")
    assert triton_cast.takes(torch.nn.Parameter(hp), E5M2)
    assert not triton_cast.takes(hp.t(), E4M3)
    assert not triton_cast.takes(hp.double(), E4M3)
    assert not triton_cast.takes(hp, torch.float8_e4m3fnuz)
    assert not triton_cast.takes(hp.cpu(), E4M3)


def test_more_than_2_to_the_31_elements():
    size = 2**31 + triton_cast.TILE_BYTES + 3
    if torch.cuda.mem_get_info()[0] < 6 * size:
        pytest.skip("needs 13 GB of free GPU memory")
    hp = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    hp[-9:] = torch.arange(-4.0, 5.0)
    hp[2**31 - 1] = -3.5
    for scale in (0.0, 100.0):
        codes, quant, _, observed = cast(hp, scale, E4M3)
        assert quant.item() == (scale or 112.0)
        assert observed.tolist() == [4.0, 0.0]
        assert codes[-9:].float().equal(torch.arange(-4.0, 5.0, device="cuda").mul(quant).to(E4M3).float())
        assert codes[2**31 - 1].item() == torch.tensor(-3.5 * quant.item()).to(E4M3).item()
        assert codes.view(torch.uint8).count_nonzero() == 9


def test_saturated_elements_are_counted_up_to_2_to_the_24():
    hp = torch.full((2**24 + 64,), 500.0, dtype=torch.bfloat16, device="cuda")
    hp[:64] = 464.0  # rounds to 464, which is halfway from 448 to 480: no more than rounding takes
    assert cast(hp, 1.0, E4M3)[3].tolist() == [500.0, 2.0**24]


@pytest.mark.parametrize("scale", [0.0, 100.0])
def test_no_synchronisation(scale):
    hp = torch.randn(1000, 1000, device="cuda", dtype=torch.bfloat16)
    quant_scale = torch.full((), scale, device="cuda")
    triton_cast.cast_with_persistent_scale(hp, quant_scale, E4M3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_cast.cast_with_persistent_scale(hp, quant_scale, E4M3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_follows_the_scale_and_the_data():
    """What a CUDA graph replays decides on the device, each time anew, whether the scale is known."""
    hp, quant_scale = torch.randn(300, 130, device="cuda"), torch.zeros((), device="cuda")
    triton_cast.cast_with_persistent_scale(hp, quant_scale, E4M3)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = triton_cast.cast_with_persistent_scale(hp, quant_scale, E4M3)
    for scale, magnitude in ((0.0, 1.0), (100.0, 3.0), (0.0, 0.1), (20.0, 50.0)):
        quant_scale.fill_(scale)
        hp.normal_(0, magnitude)
        graph.replay()
        expected = scaling.cast_with_persistent_scale(hp.cpu(), torch.tensor(scale), E4M3)
        assert_all_same_bits(results, expected)

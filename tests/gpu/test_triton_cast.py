"""Tests the Triton casts on a GPU: the oracle's bits, 2^31 elements and more, no synchronization, CUDA graphs."""

import math

import pytest
import torch

pytest.importorskip("triton")

from quaver.experts.cast import group_amax
from quaver.kernels import triton_cast
from quaver.kernels.cast import to_column_major
from quaver.recipes import scaling
from quaver.recipes.config import BLOCK_SIZES
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.scale_rules import SCALE_RULES, has_cast_kernel
from tests.gpu.device import DEVICE, Graph, host, host_sync_refused, needs_silicon, smaller
from tests.library.kernels.triton_kernels import (
    BOTH,
    E4M3,
    FLOAT8,
    HP,
    ROWS,
    UNUSUAL,
    assert_block_casts,
    assert_casts,
    assert_casts_by_rule,
    assert_equal,
    laid_out,
    varied,
)
from tests.reference import every_value

pytestmark = pytest.mark.gpu
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _needs_a_gpu_that_rounds_once():
    if not triton_cast.supports(torch.ones(1, 1, device=DEVICE), E4M3):
        pytest.skip("needs a GPU that converts to float8 in one rounding")


@FLOAT8
@HP
@pytest.mark.parametrize("power_of_2", [False, True])
def test_every_value_has_the_codes_of_the_reference(hp_dtype, float8_dtype, power_of_2):
    hp = every_value(hp_dtype).view(256, 256).to(DEVICE)
    scales = (0.0, 1.0, 0.37, 2.0**20, 448e12, 1e-30, 3e38, 1e-42, INF, NAN, -1.0)
    scales = smaller(scales, (0.37, 3e38, 1e-42, INF, NAN))
    given = [(torch.tensor(scale), torch.tensor(scale)) for scale in scales]
    assert_casts(hp, float8_dtype, persistent=scales, given=given, power_of_2=power_of_2)
    assert_casts(hp.t().contiguous(), float8_dtype, power_of_2=power_of_2)
    assert_casts(hp[hp.isfinite().all(1)], float8_dtype, persistent=(0.0, 100.0), power_of_2=power_of_2)


@HP
def test_amaxes_of_groups_are_those_of_the_reference(hp_dtype):
    rows, columns = smaller((3000, 4096), (300, 80))
    hp, sizes = varied(rows, columns, hp_dtype), torch.tensor([rows // 3, 0, 7, rows - rows // 3 - 7])
    for group in (torch.arange(4).repeat_interleave(sizes), torch.randperm(rows) % 100, torch.zeros(rows).long()):
        amaxes = triton_cast.group_amax(hp.to(DEVICE), group.to(DEVICE), 101)
        with host():
            assert_equal([amaxes.cpu()], [group_amax(hp, group, 101)])


@FLOAT8
@HP
def test_unusual_amaxes_have_the_codes_of_the_reference(hp_dtype, float8_dtype):
    for values in UNUSUAL:
        for repeats in ((2, 1), (128, 64)):
            hp = torch.tensor(values).repeat(*repeats).to(DEVICE, hp_dtype)
            for power_of_2 in (False, True):
                assert_casts(hp, float8_dtype, persistent=(0.0, -3.0, NAN), power_of_2=power_of_2)


@HP
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, 40), (33, 1), (3, 5), (127, 129), (144, 80), *smaller([(2000, 1008), (1000, 4100)], [(208, 112)])],
    ids=str,
)
def test_odd_shapes_have_the_codes_of_the_reference(shape, hp_dtype):
    given = [(torch.rand(shape[0], 1) * 9, torch.rand(1, shape[1]) * 9), (None, torch.tensor(0.7))]
    assert_casts(varied(*shape, dtype=hp_dtype).to(DEVICE), E4M3, persistent=(100.0,), given=given)
    shifted = varied(shape[0] + 1, shape[1], hp_dtype).to(DEVICE).view(-1)[1 : 1 + math.prod(shape)].view(shape)
    assert_casts(shifted, E4M3)


@FLOAT8
@HP
@pytest.mark.parametrize("mode", ["", "rceil", "floor"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=str)
def test_blocks_have_the_codes_of_the_reference(block_size, mode, hp_dtype, float8_dtype):
    large = varied(*smaller((2000, 1008), (208, 112)), dtype=hp_dtype)
    for hp in (varied(130, 257, hp_dtype), large, every_value(hp_dtype).view(256, 256)):
        assert_block_casts(hp.to(DEVICE), float8_dtype, block_size, True, mode)
    for values in UNUSUAL:
        hp = torch.tensor(values).repeat(2, 1).to(DEVICE, hp_dtype)
        assert_block_casts(hp, float8_dtype, block_size, bool(mode), mode)


@pytest.mark.parametrize("rule", smaller([*filter(has_cast_kernel, SCALE_RULES)], ["vllm-kernel", "sglang-group"]))
@pytest.mark.parametrize("hp_dtype", smaller(HP_DTYPES, [torch.bfloat16]), ids=str)
def test_rules_of_serving_engines(rule, hp_dtype):
    hp = smaller(every_value(hp_dtype).view(256, 256), varied(48, 144, hp_dtype))
    assert_casts_by_rule(hp.to(DEVICE), rule)


def test_rows_of_any_width_are_cast():
    for width in (7, 4096, 5000, triton_cast.WIDEST_ROW, triton_cast.WIDEST_ROW + 16, smaller(50_001, 33_001)):
        assert_casts(varied(smaller(40, 3), width, torch.bfloat16).to(DEVICE), E4M3, directions=[ROWS])


@FLOAT8
@HP
def test_both_layouts_have_the_same_codes(float8_dtype, hp_dtype):
    """The assembler of Triton 3.6 to 3.9 lost the second store of a pair of codes: [Note: ptxas before 13]."""
    for rows, columns in ((128, 64), *smaller([(256, 1024), (1024, 96), (4096, 4096)], [(256, 128), (160, 96)])):
        hp = torch.randn(rows, columns, device=DEVICE, dtype=hp_dtype)
        row, column = triton_cast.cast_tensorwise(hp, float8_dtype, True, True, False)
        assert column.data.view(torch.uint8).equal(row.data.view(torch.uint8))


@FLOAT8
def test_a_transposing_copy_keeps_every_code(float8_dtype):
    matrices = (4096, 4096), (1000, 1024), (4097, 33), (8, 512, 1024), (3, 33, 1000)
    for shape in smaller(matrices, ((256, 256), (1000, 64), (257, 33), (8, 144, 80), (3, 33, 100))):
        codes = torch.randint(0, 256, shape, device=DEVICE, dtype=torch.uint8).view(float8_dtype)
        copy = to_column_major(codes)
        assert copy.mT.is_contiguous()
        assert copy.view(torch.uint8).equal(codes.view(torch.uint8))


@needs_silicon("22 GB of memory")
def test_more_than_2_to_the_31_elements():
    rows, columns = 2**17 + 16, 2**14
    if torch.cuda.mem_get_info()[0] < 10 * rows * columns:
        pytest.skip("needs 22 GB of free GPU memory")
    hp = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    hp[-1, -9:] = torch.arange(-4.0, 5.0)
    hp[2**17 - 1, -1] = -3.5
    for cast, *scaled in (
        (triton_cast.cast_tensorwise(hp, E4M3, True, True, False), -3.5 * 112, -3.5 * 112),
        (triton_cast.cast_rowwise(hp, E4M3, True, True, False), -448.0, -3.5 * 112),
    ):
        for (codes, *_), value in zip(cast, scaled, strict=True):
            assert codes[2**17 - 1, -1].float().item() == torch.tensor(value).to(E4M3).float().item()
            assert codes[-1, -9].item() == -448.0
            assert codes.view(torch.uint8).count_nonzero() == 9  # one of the ten is 0


def run_casts(hp, quant_scale):
    """Return the tensors that all casts return."""
    return [
        *flatten(triton_cast.cast_tensorwise(hp, E4M3, *BOTH, False)),
        *triton_cast.cast_with_persistent_scale(hp, E4M3, *BOTH, False, quant_scale),
        *flatten(triton_cast.cast_rowwise(hp, E4M3, *BOTH, True)),
        *flatten([triton_cast.cast_rowwise(hp, E4M3, *ROWS, True).row]),
    ]


def flatten(operands):
    return [tensor for operand in operands for tensor in (operand.data, operand.dequant_scale, operand.quant_scale)]


def test_a_graph_follows_the_scale_and_the_data_without_synchronizing():
    hp, quant_scale = torch.randn(304, 144, device=DEVICE), torch.zeros((), device=DEVICE)
    run_casts(hp, quant_scale)  # compiles
    with host_sync_refused():
        run_casts(hp, quant_scale)
    graph = Graph(lambda: run_casts(hp, quant_scale))
    for scale, magnitude in ((0.0, 1.0), (100.0, 3.0), (0.0, 0.1), (20.0, 50.0)):
        quant_scale.fill_(scale)
        hp.normal_(0, magnitude)
        graph.replay()
        on_host = hp.cpu()
        codes, quant, dequant = scaling.dynamic_cast(on_host, E4M3)
        row_codes, column_codes = laid_out(codes, codes)
        expected = [row_codes, dequant, quant, column_codes, dequant, quant]
        codes, quant, dequant, recorded_amax = scaling.cast_with_persistent_scale(on_host, torch.tensor(scale), E4M3)
        row_codes, column_codes = laid_out(codes, codes)
        expected += [row_codes, quant, dequant, column_codes, recorded_amax]
        codes, quant, dequant = scaling.dynamic_cast(on_host, E4M3, 1, power_of_2=True)
        row = codes, dequant, quant
        codes, quant, dequant = scaling.dynamic_cast(on_host, E4M3, 0, power_of_2=True)
        expected += [*row, laid_out(None, codes)[1], dequant, quant, *row]
        assert_equal(graph.results, expected)

"""Compares statistics of a cast, in C and in PyTorch, with a float64 reference in numpy; histograms; what-if."""

import itertools
import math

import numpy as np
import pytest
import torch

from quaver.kernels import cpu
from quaver.kernels.operands import Operand
from quaver.linear.quantize import Quantizer
from quaver.numerics import statistics
from quaver.numerics.extra_statistics import (
    CONFIG_BY_RECIPE,
    DYNAMIC_RECIPES,
    HISTOGRAM_ROWS,
    compute_extras,
    compute_what_if,
    summarize_extras,
)
from quaver.numerics.record import decode_counts
from quaver.numerics.statistics import (
    TallyIndex,
    compute_ratio_db,
    make_tallies,
    merge_tallies,
    observe_matrix,
    summarize_tallies,
)
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.sqnr import replace_inf, to_decibels
from tests.reference import sqnr_db as reference_sqnr_db
from tests.thinned import thinned

EXACT = ("numel", "amax", "smallest", "scale_min", "scale_max", "scale_worst", "nonfinite")
SHAPES = [(5, 7), (129, 257), (64, 640), (1, 33), (300, 1)]


def make_hostile(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows and columns of unlike size, outliers, zeros, numbers that underflow, a NaN and infinities."""
    torch.manual_seed(rows)
    matrix = torch.randn(rows, columns) * torch.logspace(-4, 2, columns) * torch.logspace(0, -3, rows)[:, None]
    matrix[torch.rand(rows, columns) < 0.1] = 0
    if rows * columns > 40:
        matrix[-1, -1], matrix[0, -1], matrix[-1, 0] = math.nan, math.inf, -math.inf
    return matrix.to(dtype)


def cast(hp: torch.Tensor, recipe: str, operand: str, column: bool) -> Operand:
    casts = getattr(Float8LinearConfig.from_recipe_name(recipe).casts, operand)
    operands = Quantizer(casts, hp.dtype)(hp, row=not column, column=column)
    return operands.column if column else operands.row


def summarize(hp: torch.Tensor, operand: Operand) -> dict[str, list[float]]:
    return summarize_tallies(observe_matrix(hp, operand)[None], [None])


def compute_reference(hp: torch.Tensor, operand: Operand) -> dict[str, float]:
    """Return every statistic by its definition, in float64."""
    codes, dequant, layout, quant, _ = operand
    values, fp8 = hp.double().numpy(), codes.double().numpy()
    height, width = layout.get_block_shape(hp.shape)
    rows, columns = np.arange(hp.shape[0]) // height, np.arange(hp.shape[1]) // width
    grid = [scale.double().reshape(rows[-1] + 1, columns[-1] + 1).numpy() for scale in (dequant, quant)]
    back, by = (scale[rows][:, columns] for scale in grid)
    finite, nonzero = np.isfinite(values), np.isfinite(values) & (values != 0)
    with np.errstate(all="ignore"):
        noise = np.nan_to_num((values - fp8 * back) ** 2, nan=np.inf, posinf=np.inf)[finite].sum()
        limit = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}[codes.dtype]
        saturated = np.abs(values * by) > limit
        signal = (values[finite] ** 2).sum()
        return {
            "numel": values.size,
            "amax": np.abs(values[finite]).max(),
            "rms": np.sqrt(signal / finite.sum()),
            "smallest": np.abs(values[nonzero]).min() if nonzero.any() else None,
            "underflow": (fp8[nonzero] == 0).mean() if nonzero.any() else 0,
            "saturated": saturated.mean(),
            "sqnr_db": 10 * np.log10(signal / noise) if noise else np.inf,
            "scale_min": np.min(grid[0]),
            "scale_max": np.max(grid[0]),
            "nonfinite": (~finite).sum(),
            "zeros": (values == 0).mean(),
            "kurtosis": (values[finite] ** 4).mean() / (values[finite] ** 2).mean() ** 2 if nonzero.any() else None,
        }


@pytest.fixture(params=["c", "pytorch"])
def implementation(request, monkeypatch):
    if request.param == "pytorch":
        monkeypatch.setattr(cpu, "observe", lambda *_: None)
    elif not cpu.HAS_EXTENSION:
        pytest.skip("without the C extension")
    return request.param


@pytest.mark.parametrize(
    ("shape", "recipe", "dtype"),
    thinned(SHAPES, ["tensorwise", "rowwise", "blockwise", "mxfp8"], [torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_statistics_of_a_cast_are_those_of_a_float64_reference(implementation, shape, recipe, dtype):
    hp = make_hostile(*shape, dtype=dtype)
    for name, column in itertools.product(("input", "weight", "grad_output"), (False, True)):
        operand = cast(hp, recipe, name, column)
        summary = summarize(hp, operand)
        for statistic, value in compute_reference(hp, operand).items():
            tolerance = 0 if statistic in EXACT else 6e-6
            expected = None if value is None else pytest.approx(value, rel=tolerance, abs=0, nan_ok=True)
            assert summary[statistic] == [expected], (statistic, name, column)


@pytest.mark.skipif(not cpu.HAS_EXTENSION, reason="without the C extension")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_threads_and_pytorch_agree_on_every_block(monkeypatch, recipe, threads):
    hp = make_hostile(300, 1100, torch.bfloat16)
    codes, dequant, layout, quant, _ = cast(hp, recipe, "input", True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    wide = quant.double().contiguous(), dequant.double().contiguous()
    observed = cpu.observe(hp, codes, *wide, layout)
    expected = statistics.observe_in_pytorch(hp, codes, *wide, layout.get_block_shape(hp.shape))
    assert torch.equal(observed[2][:-1], expected[2][:-1])  # counts
    torch.testing.assert_close(tuple(observed), tuple(expected), rtol=1e-12, atol=0)


def test_the_worst_scale_is_the_one_with_the_lowest_sqnr():
    hp = torch.randn(64, 64)
    hp[17, 3] = 3e4  # the rest of the row loses its bits
    operand = cast(hp, "rowwise", "input", False)
    summary = summarize(hp, operand)
    values = operand.data.float() * operand.dequant_scale
    sqnrs = [reference_sqnr_db(hp[row], values[row]) for row in range(64)]
    assert summary["scale_worst"] == [int(np.argmin(sqnrs))]
    assert summary["scale_worst_sqnr_db"][0] == pytest.approx(min(sqnrs), abs=1e-3)


def test_tallies_of_parts_merge_to_the_tally_of_the_whole():
    hp = make_hostile(96, 64, torch.bfloat16)
    operand = cast(hp, "rowwise", "input", False)
    merged = make_tallies(1, torch.device("cpu"))
    for rows in (slice(0, 32), slice(32, 33), slice(33, 96)):
        part = Operand(operand.data[rows], operand.dequant_scale[rows], operand.layout, operand.quant_scale[rows])
        merge_tallies(merged, observe_matrix(hp[rows], part)[None])
    whole = observe_matrix(hp, operand)
    apart = [TallyIndex[name] for name in ("SIGNAL", "NOISE", "REFERENCE", "FOURTH_POWERS", "WORST_INDEX")]
    torch.testing.assert_close(merged[0, apart[:4]], whole[apart[:4]], rtol=1e-12, atol=0)
    merged[0, apart] = whole[apart] = 0
    torch.testing.assert_close(merged[0], whole, rtol=0, atol=0, equal_nan=True)


def test_elements_of_a_weight_count_once():
    hp = torch.randn(32, 16)
    operand = cast(hp, "tensorwise", "weight", False)
    tallies = make_tallies(1, torch.device("cpu"))
    for _ in range(3):  # microbatches
        merge_tallies(tallies, observe_matrix(hp, operand)[None])
    assert summarize_tallies(tallies, [hp.numel()]) == summarize(hp, operand)
    assert summarize_tallies(tallies, [None])["numel"] == [3 * hp.numel()]


@pytest.mark.parametrize(
    ("signal", "noise", "to_decibels"), [(100.0, 1.0, 20.0), (1.0, 0.0, math.inf), (1.0, math.inf, -math.inf)]
)
def test_a_ratio_without_a_finite_noise_is_infinite(signal, noise, to_decibels):
    assert compute_ratio_db(np.array([signal]), np.array([noise])).tolist() == pytest.approx([to_decibels])


# ---- histograms and other recipes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("column", [False, True])
def test_histograms_count_powers_of_two(recipe, column):
    hp = make_hostile(2 * HISTOGRAM_ROWS, 64, torch.bfloat16)
    codes, dequant, layout, *_ = operand = cast(hp, recipe, "input", column)
    histogram = summarize_extras(compute_extras(hp, operand, "input", "row")[None].numpy())["histogram"]
    height, width = layout.get_block_shape(hp.shape)
    rows, columns = torch.arange(hp.shape[0]) // height, torch.arange(hp.shape[1]) // width
    scale = dequant.reshape(rows[-1] + 1, -1)[rows][:, columns]
    for side, values in (("before", hp.float()), ("after", codes.float() * scale)):
        chosen = values[::2].flatten().abs()
        chosen = chosen[chosen.isfinite() & (chosen > 0)]
        exponents = torch.frexp(chosen)[1] - 1 - histogram["low"]
        expected = torch.bincount(exponents, minlength=histogram["bins"])
        np.testing.assert_allclose(decode_counts(histogram[side][0]), expected, rtol=0.045, atol=0.01)


@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("direction", ["row", "column"])
def test_what_if_is_the_sqnr_of_each_recipes_own_cast(operand, direction):
    hp = torch.randn(96, 160) * torch.logspace(-2, 2, 160)
    sqnrs = compute_what_if(hp, operand, direction=direction)
    assert list(sqnrs) == list(DYNAMIC_RECIPES)
    assert not any(name.startswith("delayed") for name in sqnrs)
    for name, sqnr_db in sqnrs.items():
        codes = cast(hp, name, operand, direction == "column")
        if codes.dequant_scale is None:
            assert sqnr_db == math.inf
        else:
            tally = observe_matrix(hp, codes).numpy()
            assert sqnr_db == pytest.approx(float(compute_ratio_db(tally[TallyIndex.SIGNAL], tally[TallyIndex.NOISE])))


def test_what_if_of_gaussian_gradients_is_that_of_their_formats():
    sqnrs = compute_what_if(torch.randn(256, 256), "grad_output", ["tensorwise", Float8LinearRecipeName.ROWWISE])
    assert sqnrs == {"tensorwise": pytest.approx(25.6, abs=0.3), "rowwise": pytest.approx(31.5, abs=0.3)}
    for value in (0.0, math.nan, math.inf):
        assert compute_what_if(torch.full((4, 4), value), "input") == dict.fromkeys(CONFIG_BY_RECIPE)


def test_an_outlier_that_hides_in_the_sqnr_shows_where_it_underflows():
    """One channel 2^17 times larger: tensorwise and rowwise lose the rest, blocks of 32 only the outlier's block."""
    input = torch.randn(64, 4096)
    input[:, 7] *= 2**17
    sqnrs = compute_what_if(input, "input", direction="both")
    assert sqnrs["tensorwise"] < 15
    assert sqnrs["rowwise"] < 15 < sqnrs["mxfp8"]
    row, column = (compute_what_if(input, "input", direction=direction) for direction in ("row", "column"))
    assert sqnrs == {name: min(row[name], column[name]) for name in DYNAMIC_RECIPES}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 2), "output"), "expected an operand of"),
        ((torch.ones(2, 2), "input", ["delayed"]), "expected recipes with dynamic scaling, got 'delayed'"),
        ((torch.ones(2, 2), "input", ["nonsense"]), "nonsense"),
        ((torch.tensor(1.0), "input"), "hp: expected .*, got a number"),
        ((torch.ones(2, 2).double(), "input"), "hp: expected one of .*, got torch.float64"),
    ],
)
def test_bad_arguments_of_what_if_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_what_if(*arguments)


def test_decibels_of_norms_and_of_squares_agree():
    norms = {"a": (8.0, 0.5), "exact": (2.0, 0.0), "zeros": (0.0, 1.0), "inf": (1.0, math.inf), "nan": (1.0, math.nan)}
    from_norms = {name: to_decibels(*pair) for name, pair in norms.items()}
    signal, noise = np.square(list(norms.values())).T
    assert compute_ratio_db(signal, noise) == pytest.approx(list(from_norms.values()))
    assert replace_inf(from_norms) == {"a": pytest.approx(20 * math.log10(16)), **dict.fromkeys(list(norms)[1:])}
    assert [from_norms[name] for name in ("exact", "zeros", "inf", "nan")] == [math.inf, *[-math.inf] * 3]

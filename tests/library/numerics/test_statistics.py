"""Statistics of a cast, in C and in PyTorch, against a float64 reference in numpy; histograms; other recipes."""

import math

import numpy as np
import pytest
import torch

from quaver.kernels import cpu
from quaver.kernels.operands import Operand
from quaver.linear.quantize import Quantizer
from quaver.numerics import statistics
from quaver.numerics.extras import CONFIGS, HISTOGRAM_ROWS, RECIPES, compute_extras, describe_extras, what_if
from quaver.numerics.record import decode_counts
from quaver.numerics.statistics import SlotIndex, merge, new_slots, observe_matrix, power_ratio_db, summarize_slots
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.sqnr import decibels, replace_inf
from tests.reference import sqnr_db as reference_sqnr_db
from tests.thinned import thinned

EXACT = ("numel", "amax", "smallest", "scale_min", "scale_max", "scale_worst", "nonfinite")
SHAPES = [(5, 7), (129, 257), (64, 640), (1, 33), (300, 1)]


def hostile(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows and columns of unlike size, outliers, zeros, numbers that underflow, and a NaN and infinities."""
    torch.manual_seed(rows)
    matrix = torch.randn(rows, columns) * torch.logspace(-4, 2, columns) * torch.logspace(0, -3, rows)[:, None]
    matrix[torch.rand(rows, columns) < 0.1] = 0
    if rows * columns > 40:
        matrix[-1, -1], matrix[0, -1], matrix[-1, 0] = math.nan, math.inf, -math.inf
    return matrix.to(dtype)


def operand_of(hp: torch.Tensor, recipe: str, operand: str, column: bool):
    casts = getattr(Float8LinearConfig.from_recipe_name(recipe).casts, operand)
    made = Quantizer(casts, hp.dtype)(hp, row=not column, column=column)
    return made.column if column else made.row


def reference(hp: torch.Tensor, made: Operand) -> dict[str, float]:
    """Every statistic by its definition, in float64."""
    codes, dequant, layout, quant, _ = made
    values, fp8 = hp.double().numpy(), codes.double().numpy()
    height, width = layout.block(hp.shape)
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
    elif not cpu.AVAILABLE:
        pytest.skip("without the C extension")
    return request.param


@pytest.mark.parametrize(
    ("shape", "recipe", "dtype"),
    thinned(SHAPES, ["tensorwise", "rowwise", "blockwise", "mxfp8"], [torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_statistics_of_a_cast_are_those_of_a_float64_reference(implementation, shape, recipe, dtype):
    hp = hostile(*shape, dtype)
    for operand in ("input", "weight", "grad_output"):
        for column in (False, True):
            made = operand_of(hp, recipe, operand, column)
            found = summarize_slots(observe_matrix(hp, made)[None], [None])
            for name, value in reference(hp, made).items():
                (got,) = found[name]
                if name in EXACT or value is None:
                    assert got == value or (math.isnan(got) and math.isnan(value)), (name, operand, column)
                else:
                    assert got == pytest.approx(value, rel=6e-6), (name, operand, column)


@pytest.mark.skipif(not cpu.AVAILABLE, reason="without the C extension")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_threads_and_pytorch_agree_on_every_block(monkeypatch, recipe, threads):
    hp = hostile(300, 1100, torch.bfloat16)
    codes, dequant, layout, quant, _ = operand_of(hp, recipe, "input", True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    wide = quant.double().contiguous(), dequant.double().contiguous()
    signal, noise, counts = cpu.observe(hp, codes, *wide, layout)
    expected = statistics.observe_in_pytorch(hp, codes, *wide, layout.block(hp.shape))
    assert torch.equal(counts[:-1], expected[2][:-1])
    for got, want in zip((signal, noise, counts), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_the_worst_scale_is_the_one_with_the_lowest_sqnr():
    hp = torch.randn(64, 64)
    hp[17, 3] = 3e4  # the rest of the row loses its bits
    made = operand_of(hp, "rowwise", "input", False)
    found = summarize_slots(observe_matrix(hp, made)[None], [None])
    error = hp - made.data.float() * made.dequant_scale
    worst = [reference_sqnr_db(hp[row], hp[row] - error[row]) for row in range(64)]
    assert found["scale_worst"] == [int(np.argmin(worst))]
    assert found["scale_worst_sqnr_db"][0] == pytest.approx(min(worst), abs=1e-3)


def test_slots_of_parts_merge_to_the_slot_of_the_whole():
    hp = hostile(96, 64, torch.bfloat16)
    made = operand_of(hp, "rowwise", "input", False)
    merged = new_slots(1, torch.device("cpu"))
    for rows in (slice(0, 32), slice(32, 33), slice(33, 96)):
        codes, dequant, quant = (each[rows] for each in (made.data, made.dequant_scale, made.quant_scale))
        merge(merged, observe_matrix(hp[rows], Operand(codes, dequant, made.layout, quant))[None])
    whole = observe_matrix(hp, made)
    apart = [SlotIndex.SIGNAL, SlotIndex.NOISE, SlotIndex.REFERENCE, SlotIndex.FOURTH, SlotIndex.WORST_INDEX]
    torch.testing.assert_close(merged[0, apart[:4]], whole[apart[:4]], rtol=1e-12, atol=0)
    merged[0, apart] = whole[apart] = 0
    torch.testing.assert_close(merged[0], whole, rtol=0, atol=0, equal_nan=True)


def test_elements_of_a_weight_count_once():
    hp = torch.randn(32, 16)
    made = operand_of(hp, "tensorwise", "weight", False)
    slots = new_slots(1, torch.device("cpu"))
    for _ in range(3):  # micro-batches
        merge(slots, observe_matrix(hp, made)[None])
    once = summarize_slots(observe_matrix(hp, made)[None], [None])
    assert summarize_slots(slots, [hp.numel()]) == once
    assert summarize_slots(slots, [None])["numel"] == [3 * hp.numel()]


@pytest.mark.parametrize(
    ("signal", "noise", "decibels"), [(100.0, 1.0, 20.0), (1.0, 0.0, math.inf), (1.0, math.inf, -math.inf)]
)
def test_sqnr(signal, noise, decibels):
    assert power_ratio_db(np.array([signal]), np.array([noise])).tolist() == pytest.approx([decibels])


# ---- histograms and other recipes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("column", [False, True])
def test_histograms_count_powers_of_two(recipe, column):
    hp = hostile(2 * HISTOGRAM_ROWS, 64, torch.bfloat16)
    made = operand_of(hp, recipe, "input", column)
    codes, dequant, layout, *_ = made
    histogram = describe_extras(compute_extras(hp, made, "input", "row")[None].numpy())["histogram"]
    height, width = layout.block(hp.shape)
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
    found = what_if(hp, operand, direction=direction)
    assert list(found) == list(RECIPES)
    assert not any(name.startswith("delayed") for name in found)
    for name, value in found.items():
        made = operand_of(hp, name, operand, direction == "column")
        if made.dequant_scale is None:
            assert value == math.inf
        else:
            slot = observe_matrix(hp, made)
            assert value == pytest.approx(
                float(power_ratio_db(slot[SlotIndex.SIGNAL].numpy(), slot[SlotIndex.NOISE].numpy()))
            )


def test_what_if_of_gaussian_gradients_is_that_of_their_formats():
    found = what_if(torch.randn(256, 256), "grad_output", ["tensorwise", Float8LinearRecipeName.ROWWISE])
    assert found == {"tensorwise": pytest.approx(25.6, abs=0.3), "rowwise": pytest.approx(31.5, abs=0.3)}
    assert what_if(torch.zeros(4, 4), "input") == dict.fromkeys(CONFIGS)


def test_an_outlier_that_hides_in_the_sqnr_shows_where_it_underflows():
    """One channel 2^17 times larger: tensorwise and rowwise lose the rest, blocks of 32 only the outlier's block."""
    input = torch.randn(64, 4096)
    input[:, 7] *= 2**17
    found = what_if(input, "input", direction="both")
    assert found["tensorwise"] < 15
    assert found["rowwise"] < 15 < found["mxfp8"]
    worse = {name: min(what_if(input, "input", direction=each)[name] for each in ("row", "column")) for name in RECIPES}
    assert found == worse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 2), "output"), "expected an operand of"),
        ((torch.ones(2, 2), "input", ["delayed"]), "expected recipes with dynamic scaling, got 'delayed'"),
        ((torch.ones(2, 2), "input", ["nonsense"]), "nonsense"),
        ((torch.ones(2, 2).double(), "input"), "hp: expected one of .*, got torch.float64"),
    ],
)
def test_what_if_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        what_if(*arguments)


def test_decibels_of_norms_and_of_squares_agree():
    norms = {"a": (8.0, 0.5), "exact": (2.0, 0.0), "zeros": (0.0, 1.0), "inf": (1.0, math.inf), "nan": (1.0, math.nan)}
    of_norms = {name: decibels(*pair) for name, pair in norms.items()}
    signal, noise = np.square(list(norms.values())).T
    assert power_ratio_db(signal, noise) == pytest.approx(list(of_norms.values()))
    assert replace_inf(of_norms) == {"a": pytest.approx(20 * math.log10(16)), **dict.fromkeys(list(norms)[1:])}
    assert [of_norms[name] for name in ("exact", "zeros", "inf", "nan")] == [math.inf, *[-math.inf] * 3]

"""Tests the page of `quaver report` in a real browser: heat maps, curves, distributions and alarms."""

import numpy as np
import pytest

from quaver.lab.report.palette import SPECIAL_COLORS, make_palette
from quaver.lab.report.statistics import STATISTICS
from tests.lab.browser.browser import Keys
from tests.lab.browser.heat_map import HeatMap
from tests.lab.browser.reports import ALARMS, BAD_SAMPLE, BAD_TENSOR, HOSTILE, LAYERS, TENSORS, WIDE
from tests.lab.report.records import split_casts


def encode_color(color):
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return 0xFF000000 | blue << 16 | green << 8 | red


def read_view(browser):
    return browser.one("#maps .controls .status").text


def read_choice(browser):
    return browser.one("#maps .panel").text


def choose(browser, select, text):
    script = """
    const [id, text] = arguments, select = document.getElementById(id);
    select.value = [...select.options].find((option) => option.textContent === text).value;
    select.dispatchEvent(new Event('change'))"""
    browser.run(script, select, text)


def test_hovering_over_a_cell_shows_its_numbers(browser, reports, runs):
    browser.open(reports / "one.html")
    heat = HeatMap(browser, len(TENSORS))
    (tip,) = heat.hover(6, 30)
    values = {name: columns[30, 6] for name, columns in runs[0].numerics.statistics.items()}
    assert tip.startswith(f"{TENSORS[6]['layer']} input float8_e4m3fn tensorwise, step 310 ")
    low, high = browser.run("return JSON.parse(document.getElementById('data').textContent).statistics[0].limits")
    sqnr = float(tip.partition("SQNR ")[2].split()[0])
    assert sqnr == pytest.approx(values["sqnr_db"], abs=(high - low) / 252)
    assert ALARMS[0]["message"] in tip  # since step 220
    assert ALARMS[0]["message"] not in heat.hover(6, 20)[0]
    (hostile,) = heat.hover(0, 0)
    assert " ".join(HOSTILE.split()) in hostile
    browser.pointer().move_to_element(browser.one("h1")).perform()
    assert browser.texts(".maps .tip:not([hidden])") == []


def test_cells_stand_where_their_tensor_and_step_are(browser, reports, runs):
    browser.open(reports / "one.html")
    choose(browser, "maps-statistic", "saturation")
    choose(browser, "maps-kind", "input")
    rows = len(LAYERS)
    pixels = HeatMap(browser, rows).pixels()
    inputs = [at for at, tensor in enumerate(TENSORS) if tensor["operand"] == "input"]
    saturated = runs[0].numerics.statistics["saturated"].T[inputs]
    height, width = pixels.shape
    for row in range(rows):
        for sample in range(40):
            pixel = pixels[int((row + 0.5) / rows * height), int((sample + 0.5) / 40 * width)]
            assert (pixel == encode_color(SPECIAL_COLORS["light"][0])) == (saturated[row, sample] == 0)


@pytest.mark.parametrize("width", [400, pytest.param(1280, marks=pytest.mark.nightly)])
def test_one_bad_cell_of_600_000_is_seen(browser, reports, width):
    browser.open(reports / "large.html", width=width)
    heat = HeatMap(browser, WIDE)
    pixels = heat.pixels()
    rows, columns = np.nonzero(pixels == encode_color(make_palette()[0]))
    assert 1 <= len(rows) <= 4
    assert rows[0] / pixels.shape[0] == pytest.approx((BAD_TENSOR + 0.5) / WIDE, abs=0.01)
    assert columns[0] / pixels.shape[1] == pytest.approx((BAD_SAMPLE + 0.5) / 1000, abs=0.01)
    heat.press("w")
    assert f"layers.{BAD_TENSOR // 6}.ffn output" in read_choice(browser)
    assert f"step {(BAD_SAMPLE + 1) * 10:,}" in read_choice(browser)
    assert "-15.0 dB" in read_choice(browser)


def test_the_worst_cell_stands_out_in_dark_mode(browser, reports):
    browser.open(reports / "large.html", dark=True)
    assert (HeatMap(browser, WIDE).pixels() == encode_color(make_palette()[-1])).sum() in range(1, 5)
    browser.show(1280, 1000, dark=False)
    browser.wait(lambda: (HeatMap(browser, WIDE).pixels() == encode_color(make_palette()[0])).sum() in range(1, 5))


def test_a_large_page_redraws_no_cell_on_hover(browser, reports):
    """By the number of cells that it reads, not by time: a pointer's move draws no cell again."""
    browser.open(reports / "large.html")
    browser.run(
        "window.painted = 0; const put = CanvasRenderingContext2D.prototype.putImageData;"
        "CanvasRenderingContext2D.prototype.putImageData ="
        " function (...all) { window.painted += 1; return put.apply(this, all); };"
    )
    heat = HeatMap(browser, WIDE, samples=1000)
    for sample in range(0, 900, 150):
        assert heat.hover(300, sample)
    heat.click(100, 500)
    heat.press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert browser.run("return window.painted") == 0
    heat.press("+")
    assert browser.run("return window.painted") == 1


def test_the_maps_zoom_by_pointer(browser, reports):
    browser.open(reports / "one.html")
    heat = HeatMap(browser, len(TENSORS))
    assert read_view(browser) == "48 of 48 rows, steps 10 to 400"
    heat.drag((5, 9), (14, 19))
    assert read_view(browser) == "10 of 48 rows, steps 100 to 209"
    heat.rows, heat.samples = 10, 11
    (tip,) = heat.hover(1, 5)
    assert f"{TENSORS[6]['layer']} input" in tip
    assert "step 150" in tip
    browser.pointer().double_click(heat.plot).perform()
    assert read_view(browser) == "48 of 48 rows, steps 10 to 400"
    zoom_in, zoom_out, whole = browser.all("#maps .controls .more")
    zoom_in.click()
    assert read_view(browser).startswith("24 of 48 rows")
    zoom_out.click()
    assert read_view(browser) == "48 of 48 rows, steps 10 to 400"
    zoom_in.click()
    whole.click()
    assert read_view(browser) == "48 of 48 rows, steps 10 to 400"


def test_walking_and_zooming_by_keyboard(browser, reports):
    browser.open(reports / "one.html")
    heat = HeatMap(browser, len(TENSORS))

    def read_cell():
        lines = read_choice(browser).splitlines()
        return lines[0].removeprefix(TENSORS[6]["layer"]).strip(), lines[1].partition("step ")[2]

    heat.click(6, 5)
    cells = [read_cell()]
    right, down, left, up = Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ARROW_UP
    for key in (right, down, Keys.END, right, up, Keys.HOME, left):
        heat.press(key)
        cells.append(read_cell())
    at = [("input", "60"), ("input", "70"), ("weight", "70"), ("weight", "400"), ("weight", "400"), ("input", "400")]
    assert cells == [*at, ("input", "10"), ("input", "10")]
    heat.press("+", "+", "+", "+")
    rows = int(read_view(browser).split()[0])
    assert rows <= 4
    heat.press(Keys.END, Keys.PAGE_DOWN, Keys.PAGE_DOWN)  # the zoomed part follows
    assert int(read_view(browser).split()[0]) == rows
    assert read_view(browser).endswith(" to 400")
    assert [box.is_displayed() for box in browser.all(".cell-box:not(.hover)")] == [True]
    heat.press("-")
    assert int(read_view(browser).split()[0]) > rows
    heat.press("0")
    assert read_view(browser) == "48 of 48 rows, steps 10 to 400"


def test_statistics_filters_and_order_change_the_maps(browser, reports, runs):
    browser.forget_what_was_logged()
    browser.open(reports / "one.html")
    heat = HeatMap(browser, len(TENSORS))
    choose(browser, "maps-statistic", "underflow")
    assert read_view(browser).startswith("24 of 48 rows")  # results have none
    assert browser.one(".scale strong").text == "underflow"
    choose(browser, "maps-statistic", "SQNR")
    choose(browser, "maps-kind", "grad output")
    assert read_view(browser).startswith("8 of 48 rows")
    browser.one("#maps-text").send_keys("attention WQ")
    assert read_view(browser).startswith("1 of 48 rows")
    browser.one("#maps-text").send_keys(" nowhere")
    assert read_view(browser) == "no row has all these words"
    heat.press(Keys.ARROW_RIGHT, "+", "w")
    assert browser.take_log() == []
    browser.one("#maps-text").clear()
    browser.one("#maps-text").send_keys("layers")
    choose(browser, "maps-kind", "all tensors")
    choose(browser, "maps-order", "worst first")
    heat.rows = len(TENSORS)
    worst = runs[0].numerics.statistics["sqnr_db"].min(0)
    (tip,) = heat.hover(0, 0)
    bad = TENSORS[int(worst.argmin())]
    assert " ".join(f"{bad['layer']} {bad['operand'].replace('_', ' ')}".split()) in tip


def test_an_alarm_is_shown_at_its_moment(browser, reports):
    browser.open(reports / "one.html")
    assert len(browser.all(".alarm-mark")) == 2
    assert len(browser.all("#loss-plot .mark.alarm")) == 2
    row = browser.texts("#alarms-table tbody tr")[0]
    assert "rowwise: 27.1 dB, +14.0 dB high precision: 0.8% of the FLOPs" in row
    choose(browser, "maps-kind", "weight")  # whose rows lack the alarm's
    browser.all("#alarms-table .link")[0].click()
    assert read_choice(browser).splitlines()[0] == f"{TENSORS[6]['layer']} input"
    assert "step 220" in read_choice(browser)
    assert ALARMS[0]["message"] in read_choice(browser)
    assert browser.driver.switch_to.active_element == browser.one(".heat")
    assert browser.one("#maps-kind").get_attribute("value") == ""


def test_curves_show_a_step_by_keyboard_and_choose_it_by_click(browser, reports, runs):
    browser.open(reports / "one.html")
    charts = [f"{name} by step" for name in ("Loss", "Gradient norm", "Tokens per second", "Memory")]
    assert browser.map(".chart", "element.getAttribute('aria-label')") == charts
    labels = browser.map("#loss-plot polyline", "element.dataset.label")
    assert labels == ["tensorwise", "bfloat16", "tensorwise validation", "bfloat16 validation"]
    plot = browser.one("#loss-plot")
    browser.run("arguments[0].focus()", plot)
    browser.press(Keys.HOME, Keys.ARROW_RIGHT)
    steps = [record for record in runs[0].records if record["model"] == "tensorwise" and record["kind"] == "step"]
    assert plot.get_attribute("aria-valuetext").startswith(f"step 2: tensorwise {steps[1]['loss']:.4g}, bfloat16 ")
    browser.press(Keys.END)
    assert plot.get_attribute("aria-valuenow") == "400"
    tip = browser.one("#loss-plot .tip")
    assert tip.text.splitlines()[0] == "step 400"
    assert browser.map(".chart .cursor", "element.getAttribute('visibility')") == ["visible"] * 4
    browser.press(Keys.ESCAPE)
    assert not tip.is_displayed()
    mark = browser.one("#loss-plot .mark.alarm line")
    browser.pointer().move_to_element(mark).perform()
    assert ALARMS[0]["message"] in tip.text
    browser.pointer().click().perform()
    assert "step 220" in read_choice(browser)


def test_the_distribution_follows_the_chosen_cell(browser, reports, runs):
    browser.open(reports / "one.html")
    heat = HeatMap(browser, len(TENSORS))
    heat.click(8, 18)
    steps = sorted(int(runs[0].numerics.steps[at]) for at in runs[0].numerics.histograms)
    assert browser.one("#distribution-step").get_attribute("value") == str(min(steps, key=lambda step: abs(step - 190)))
    tensor = browser.run("return document.getElementById('distribution-tensor').selectedOptions[0].textContent")
    assert tensor == f"{TENSORS[8]['layer']} {TENSORS[8]['operand']}".replace("_", " ")
    titles = browser.map(".distribution title", "element.textContent")
    step = int(browser.one("#distribution-step").get_attribute("value"))
    histogram = runs[0].numerics.histograms[runs[0].numerics.steps.tolist().index(step)]
    first = int(np.flatnonzero(histogram.before[8])[0])
    assert f"2^{histogram.low + first} to 2^{histogram.low + first + 1}: " in titles[0]
    heights = browser.map(".distribution rect", "element.getBBox().height")
    assert heights[0] == 0  # the cast emptied the lowest bins
    assert max(heights) > 100
    before = browser.one(".distribution").get_attribute("aria-label")
    choose(browser, "distribution-step", f"{steps[-1]}")
    assert browser.one(".distribution").get_attribute("aria-label") != before


def test_two_runs_side_by_side(browser, reports, runs):
    browser.open(reports / "two.html")
    left, right = browser.all(".heat")
    assert left.rect["y"] == right.rect["y"]
    assert browser.texts(".headline strong") == ["first:", "second:"]
    assert browser.map(".headline", "element.className") == ["headline bad", "headline good"]
    assert browser.texts(".facts thead th") == ["first", "second"]
    heat = HeatMap(browser, len(TENSORS), at=1)
    heat.click(12, 39)
    assert len([box for box in browser.all(".cell-box:not(.hover)") if box.is_displayed()]) == 2
    lines = dict(line.split(" ", 1) for line in read_choice(browser).splitlines()[3:])
    for shown, run in zip(lines["SQNR"].replace(" dB", "").split(), runs, strict=True):
        assert float(shown) == pytest.approx(run.numerics.statistics["sqnr_db"][39, 12], abs=0.25)
    heat.drag((0, 0), (9, 9))
    images = [HeatMap(browser, 10, at=at).pixels().shape for at in (0, 1)]
    assert images[0] == images[1]  # both maps zoom
    assert len(browser.all("#distribution-place .distribution")) == 2
    assert browser.texts("#beside-table thead th")[-1].startswith("second against first")
    marked = browser.texts("#environment-table tr.marked td:first-child")
    assert marked == ["environment.torch"]
    browser.all("#conversion-rows input[type=radio]")[1].click()
    assert browser.one("#conversion-caption").text == "Matmul weights of second"


def test_two_recipes_share_rows(browser, reports, runs):
    """A tensorwise cast serves both directions; its row stands beside those of the two rowwise casts."""
    browser.open(reports / "recipes.html")
    rows = split_casts(TENSORS)
    assert read_view(browser).startswith(f"{len(rows)} of {len(rows)} rows")
    at = next(at for at, tensor in enumerate(rows) if tensor["layer"] == LAYERS[1] and tensor["cast"] == "column")
    HeatMap(browser, len(rows), at=1).click(at, 39)
    assert read_choice(browser).splitlines()[0] == f"{LAYERS[1]} input (column)"
    both, _ = read_choice(browser).partition("SQNR ")[2].split(" dB")[:2]
    assert float(both) == pytest.approx(runs[0].numerics.statistics["sqnr_db"][39, 6], abs=0.25)


def test_worst_tensors_by_another_statistic(browser, reports, runs):
    browser.open(reports / "one.html")
    choose(browser, "worst-statistic", "amax")
    assert browser.one("#worst-caption").text == "Highest amax of first, by tensor"
    worst = runs[0].numerics.statistics["amax"].max()
    (amax,) = (statistic for statistic in STATISTICS if statistic.name == "amax")
    assert browser.texts("#worst-table tbody td:nth-last-child(2)")[0] == amax.format_value(worst)
    browser.all("#worst-table .link")[0].click()
    assert read_choice(browser)
    gains = [row.replace(" dB", "").split()[-2:] for row in browser.texts("#whatif-table tbody tr")]
    assert [float(other) - float(own) for own, other in gains] == pytest.approx([1.5] * 10, abs=0.11)

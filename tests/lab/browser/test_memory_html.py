"""Tests the page of a memory report in a real browser: what it shows, and what a hover, a click or a key does."""

import pytest

from tests.lab.browser.browser import Keys, hover
from tests.lab.browser.reports import HOSTILE


def test_a_foreign_script_would_not_run_and_no_request_leaves(browser, pages):
    browser.open(pages / "plain.html")
    browser.run(
        "const script = document.createElement('script'); script.textContent = 'window.taken = true';"
        "window.refused = []; const note = (event) => window.refused.push(event.effectiveDirective);"
        "document.addEventListener('securitypolicyviolation', note); document.body.append(script);"
        "fetch('http://127.0.0.1:9/').catch(() => null); new Image().src = 'http://127.0.0.1:9/x.png';"
    )
    browser.wait(lambda: len(browser.run("return window.refused")) == 3)
    assert set(browser.run("return window.refused")) == {"script-src-elem", "connect-src", "img-src"}
    assert browser.run("return window.taken") is None


def test_the_headline_has_the_peak_and_its_difference(browser, pages):
    browser.open(pages / "full.html")
    peak = browser.one("#peak-number")
    assert peak.text == "100.0 MiB"
    assert peak.get_attribute("title") == "104,857,600 bytes"
    assert "in the backward of </script>" in browser.one("#headline").text
    against = " ".join(f"first {HOSTILE}".split())  # as HTML shows spaces and line separators
    assert browser.one("#other-peak").text == f"second: 50.00 MiB, \u221250.00 MiB against {against}"
    facts = dict(zip(browser.texts("#facts dt"), browser.texts("#facts dd"), strict=True))
    assert facts["stays between steps"] == "6.000 MiB"
    assert facts["saved by the first forward for its backward"] == "80.00 MiB"
    assert any("</script><script>" in note for note in browser.texts("#notes li"))
    browser.open(pages / "blind.html")
    assert browser.one("#headline").text == "No peak is known: compiled code: not attributed"
    assert read_column(browser, "categories-table", "what") == ["between steps"]


def test_the_timeline_is_read_by_pointer(browser, pages):
    browser.open(pages / "plain.html")
    tip = browser.one(".tip")
    assert not tip.is_displayed()
    hover(browser, 2)
    assert tip.is_displayed()
    assert tip.text.splitlines()[0] == "event 2, the peak, backward: 100.0 MiB"
    sizes = {"temporaries": "10.00 MiB 10,485,760", "communication": "4.000 MiB 4,194,304"}
    sizes |= {"saved activations": "80.00 MiB 83,886,080", "parameters": "6.000 MiB 6,291,456"}
    assert browser.texts(".tip tr") == [f"{category} {size}" for category, size in sizes.items()]
    hover(browser, 3)
    assert tip.text.splitlines()[0] == "event 3, backward: 7.000 MiB"
    browser.pointer().move_to_element(browser.one("h1")).perform()
    assert not tip.is_displayed()


def test_the_timeline_is_read_by_keyboard(browser, pages):
    browser.open(pages / "plain.html")
    plot = browser.one(".plot")
    browser.run("arguments[0].focus()", plot)
    values = []
    for key in (Keys.HOME, Keys.ARROW_RIGHT, "p", Keys.END, Keys.ARROW_RIGHT):
        plot.send_keys(key)
        values.append((plot.get_attribute("aria-valuenow"), plot.get_attribute("aria-valuetext").split(":")[0]))
    last = ("4", "event 4, optimizer")
    first = [("0", "event 0, before"), ("1", "event 1, forward"), ("2", "event 2, the peak, backward")]
    assert values == [*first, last, last]
    plot.send_keys(Keys.ESCAPE)
    assert not browser.one(".tip").is_displayed()


def test_areas_are_as_high_as_their_bytes(browser, pages):
    browser.open(pages / "plain.html")
    colors = dict(browser.map(".area", "[element.dataset.category, element.getAttribute('fill')]"))
    assert list(colors) == ["parameters", "gradients", "saved_activations", "communication", "temporaries"]
    assert colors["saved_activations"] == "#ddcc77"
    tops = {"parameters": 6, "gradients": 7, "saved_activations": 86, "communication": 90, "temporaries": 100}
    boxes = browser.map(".area", "[element.dataset.category, element.getBBox().y]")
    plot_px, bottom_px = 340 - 34 - 34, 340 - 34
    expected = {name: round(bottom_px - plot_px * top / 100) for name, top in tops.items()}
    assert {name: round(y) for name, y in boxes} == expected


def test_a_short_peak_among_many_events_is_seen(browser, pages):
    """Of 6,000 events one has the peak: it is drawn at its height, in a window of any width."""
    for width in (400, 1600):
        browser.open(pages / "wide.html", width=width)
        assert min(browser.map(".area", "element.getBBox().y")) == pytest.approx(34, abs=0.2)


def find_cell(browser, name):
    (cell,) = [cell for cell in browser.all(".cell") if cell.get_attribute("aria-label").startswith(f"{name}, ")]
    return cell


def read_attributes(browser, selector, name):
    return browser.map(selector, f"element.getAttribute('{name}')")


def read_crumbs(browser):
    return browser.texts(".crumbs li")


def test_zooming_into_the_breakdown_and_back(browser, pages):
    browser.open(pages / "plain.html")
    saved = find_cell(browser, "saved activations")
    tree = browser.one(".icicle")
    assert saved.size["width"] == pytest.approx(0.8 * tree.size["width"], abs=2)
    saved.click()
    assert read_crumbs(browser) == ["all", "saved activations"]
    assert find_cell(browser, "saved activations").size["width"] == pytest.approx(tree.size["width"], abs=2)
    assert not [label for label in read_attributes(browser, ".cell", "aria-label") if "temporaries" in label]
    find_cell(browser, "mlp").click()
    assert read_crumbs(browser) == ["all", "saved activations", "model", "layers", "*", "mlp"]
    find_cell(browser, "mlp").click()  # of the uppermost one: out
    assert read_crumbs(browser)[-1] == "*"
    browser.one(".crumbs button").click()
    assert read_crumbs(browser) == ["all"]
    assert find_cell(browser, "temporaries").get_attribute("aria-label") == "temporaries, 10.00 MiB, 10.0%"


def test_the_breakdown_is_walked_by_keyboard(browser, pages):
    browser.open(pages / "plain.html")

    def press(*keys):
        for key in keys:
            browser.driver.switch_to.active_element.send_keys(key)
        return browser.driver.switch_to.active_element.get_attribute("aria-label").partition(",")[0]

    assert read_attributes(browser, ".cell", "tabindex").count("0") == 1
    browser.run("document.querySelector('.cell[tabindex=\"0\"]').focus()")
    assert press(Keys.ARROW_DOWN) == "saved activations"
    assert press(Keys.ARROW_RIGHT) == "temporaries"
    assert press(Keys.ARROW_LEFT, Keys.ARROW_DOWN) == "model"
    assert press(Keys.ENTER) == "model"
    assert read_crumbs(browser) == ["all", "saved activations", "model"]
    assert press(Keys.ESCAPE) == "saved activations"
    assert press(Keys.ESCAPE, Keys.ESCAPE) == "all"
    assert read_crumbs(browser) == ["all"]
    assert read_attributes(browser, ".cell", "tabindex").count("0") == 1


def test_a_part_shows_all_its_fields_and_layers_unfold(browser, pages):
    browser.open(pages / "plain.html")
    leaf = next(cell for cell in browser.all(".cell") if cell.text.startswith("quaver.exact_float8_mm"))
    browser.pointer().move_to_element(leaf).perform()
    panel = dict(zip(browser.texts(".panel dt"), browser.texts(".panel dd"), strict=True))
    expected = {"operator": "quaver.exact_float8_mm", "bytes": "41,943,040 = 40.00 MiB", "shape": "2048 \u00d7 768"}
    expected |= {"source": "quaver/linear/gemm.py:106", "of": "model.layers.*.mlp.gate_proj.weight"}
    assert expected.items() <= panel.items()
    assert any("</script>" in label for label in read_attributes(browser, ".cell", "aria-label"))
    assert [find_cell(browser, "*").text] == ["*"]
    browser.one("#peak-icicle input[type=checkbox]").click()
    assert find_cell(browser, "0").size["width"] == pytest.approx(find_cell(browser, "1").size["width"], abs=1)
    assert "*" not in browser.texts(".cell")


def read_column(browser, table, label):
    labels = [text.split()[0] for text in browser.texts(f"#{table} th")]
    return browser.texts(f"#{table} tbody td:nth-child({labels.index(label) + 1})")


def read_pairs(browser, table, label):
    return dict(zip(read_column(browser, table, "what"), read_column(browser, table, label), strict=True))


def test_sorting_and_filtering_a_table(browser, pages):
    browser.open(pages / "wide.html")
    table, section = "saved-table", "#saved-rows"
    assert read_column(browser, table, "count") == ["120"]  # layers that are alike are one row
    browser.one(f"{section} input[type=checkbox]").click()
    assert len(browser.all(f"#{table} tbody tr")) == 50
    assert browser.one(f"{section} .more").text == "Show all 120 rows"
    heads = {button.text: button for button in browser.all(f"#{table} th button")}
    heads["size"].click()
    assert read_column(browser, table, "size")[:2] == ["1.093 KiB", "1.092 KiB"]
    assert browser.one(f"#{table} th[aria-sort]").get_attribute("aria-sort") == "descending"
    heads["size"].click()
    assert read_column(browser, table, "size")[:3] == ["1,000 bytes", "1,001 bytes", "1,002 bytes"]
    assert browser.one(f"#{table} th[aria-sort]").get_attribute("aria-sort") == "ascending"
    heads["module"].click()
    modules = read_column(browser, table, "module")
    assert modules == sorted(modules)
    browser.one("#saved-filter").send_keys("S.119. BF")
    assert read_column(browser, table, "module") == ["model.layers.119.mlp.gate_proj"]
    assert browser.one(f"{section} .status").text == "1 of 120 rows, 1.093 KiB of 124.2 KiB"
    browser.one("#saved-filter").send_keys(" zz")
    assert browser.all(f"#{table} tbody tr") == []
    browser.one("#saved-filter").clear()
    browser.one("#saved-filter").send_keys("mlp")
    browser.one(f"{section} .more").click()
    assert len(browser.all(f"#{table} tbody tr")) == 120


def test_the_difference_is_drawn_and_listed(browser, pages):
    browser.open(pages / "full.html")
    assert len(browser.all(".plot")) == 2
    place = "(text) => `${text.textContent} at ${text.getAttribute('y')}`"
    ticks = browser.map(".plot", f"[...element.querySelectorAll('.grid + text')].map({place})")
    assert ticks[0] == ticks[1]  # one scale
    assert [tick.split()[0] for tick in ticks[0]] == ["0", "20", "40", "60", "80", "100"]
    assert read_column(browser, "compare-saved-table", "difference") == ["\u22126.000 MiB", "+3.000 MiB"]
    assert read_column(browser, "compare-peak-table", "difference") == ["+3.000 MiB"]
    less, more = browser.all("#compare-saved-table .bar")
    middle = browser.one("#compare-saved-table .bars").rect
    half = middle["x"] + middle["width"] / 2
    assert less.rect["x"] + less.rect["width"] == pytest.approx(half, abs=1)
    assert more.rect["x"] == pytest.approx(half, abs=1)
    assert less.rect["width"] == pytest.approx(2 * more.rect["width"], abs=1)
    assert HOSTILE.split()[0] in read_column(browser, "compare-saved-table", "in")[0]
    sums = read_pairs(browser, "categories-table", "difference")
    assert sums["saved activations"] == "\u221240.00 MiB"
    assert sums["sum at the peak"] == "\u221250.00 MiB"
    browser.all("#saved-rows input[type=radio]")[1].click()
    assert browser.one("#saved-caption").text == "Saved for backward of second"


def test_advice_and_measurement_are_shown(browser, pages):
    browser.open(pages / "full.html")
    text = "It is to fit into 64.00 MiB. Best is the marked row: full checkpointing."
    assert browser.one("#advice-about").text == text
    (marked,) = browser.all("#advice-table tr.marked")
    assert "500 GFLOP (+25.0%)" in marked.text
    assert marked.find_element("css selector", "code").text == "--activation_checkpoint.mode full"
    ratios = read_pairs(browser, "measured-table", "ratio")
    assert ratios["parameters"] == "1.000"
    assert ratios["saved activations"] == f"{80 / 105:.3f}"
    assert ratios["sum at the peak"] == "0.800"


def test_the_page_prints(browser, pages):
    browser.open(pages / "full.html")
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not browser.one("#saved-filter").is_displayed()
        assert browser.one("#saved-table").is_displayed()
        browser.show(720)  # about the width of A4 within its margins
        assert all(browser.map(".scroll", "element.scrollWidth <= element.clientWidth"))
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})

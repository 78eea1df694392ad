"""Tests that every page is silent, self-contained, readable, no wider than its window, and accessible."""

import pytest

from tests.lab.browser.browser import Keys, hover
from tests.lab.browser.heat_map import HeatMap
from tests.lab.browser.reports import TENSORS, WIDE

READABLE = 4.5
"""The contrast that WCAG's level AA asks of text."""

CONTRASTS = """
for (const [ink, shade] of arguments[0]) {
  const box = document.createElement('p');
  box.textContent = `${ink} on ${shade}`;
  Object.assign(box.style, {color: `var(--${ink})`, backgroundColor: `var(--${shade})`});
  document.body.append(box);
}
const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
function luminance(color) {
  const parts = numbers(color).slice(0, 3).map((value) => value / 255);
  const [r, g, b] = parts.map((part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
}
function ground(element) {
  const color = getComputedStyle(element).backgroundColor;
  return numbers(color)[3] === undefined ? color : ground(element.parentElement);
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), contrasts = [];
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.getClientRects().length || element.closest('svg')) continue;
  const [a, b] = [luminance(getComputedStyle(element).color), luminance(ground(element))].sort((x, y) => y - x);
  contrasts.push([(a + .05) / (b + .05), walker.currentNode.data.trim().slice(0, 40)]);
}
return contrasts;
"""
WIDER = """
return [...document.querySelectorAll('body *')].filter((element) => !element.closest('.scroll, .icicle, svg, .skip')
  && element.getBoundingClientRect().right > innerWidth + 1).map((element) => element.outerHTML.slice(0, 80))
"""
NAMELESS = """
const which = 'input, select, button, .plot, .scroll, nav, section, [role=tree]';
return [...document.querySelectorAll(which)].filter((element) => !(element.getAttribute('aria-label')
  || element.getAttribute('aria-labelledby') || element.textContent.trim()
  || (element.labels && element.labels.length))).map((element) => element.outerHTML.slice(0, 80))
"""
FOCUS = """
const e = document.activeElement, s = getComputedStyle(e);
return [s.outlineStyle + ' ' + s.outlineWidth, e.tagName + e.className]
"""
REPORT = ["alarms", "curves", "maps", "distribution", "worst", "whatif", "conversion", "environment"]
SECTIONS = {
    "full": ["timeline", "compare", "advice", "measured", "peak", "saved"],
    "real": ["timeline", "peak", "saved"],
}
SECTIONS |= {"blind": ["compare", "measured"], "one": REPORT, "two": REPORT, "large": REPORT[2:5]}
TITLES = {"one": "first", "two": "first and second"}


@pytest.fixture
def open_page(browser, pages, reports):
    """Return a function that opens a page by its name and shows what it hides until a pointer or a key asks for it."""

    def open_page(name, *, details=True, **window):
        is_report = (reports / f"{name}.html").exists()
        path = (reports if is_report else pages) / f"{name}.html"
        browser.open(path, **window)
        if details and is_report:
            heat = HeatMap(browser, WIDE if name == "large" else len(TENSORS))
            heat.press("w")
            heat.hover(6, 30)
        elif details:
            browser.one("#peak-details summary").click()
            hover(browser, 2)
        return path

    return open_page


@pytest.mark.parametrize("name", SECTIONS)
def test_a_page_logs_nothing_and_requests_nothing(browser, open_page, name):
    browser.forget_what_was_logged()
    path = open_page(name, details=False)
    sections = browser.all("main > section")
    assert [section.get_attribute("id") for section in sections if section.is_displayed()] == SECTIONS[name]
    assert browser.texts("#contents a") == browser.texts("main > section:not([hidden]) > h2")
    assert bool(browser.all(".icicle .cell")) == ("peak" in SECTIONS[name])
    assert browser.take_log() == []
    assert {url for url in browser.take_requests() if not url.startswith("data:")} == {path.as_uri()}
    # the script in a hostile name was shown, and did not run
    assert browser.one("h1").text.startswith(TITLES.get(name, name))
    assert browser.driver.title.startswith(TITLES.get(name, name))
    assert browser.run("return document.scripts.length") == 2


SHADES = [["ink", f"shade-{name}"] for name in ("forward", "backward", "optimizer", "other")]
RAISED = [["ink", "raised"], ["bad", "ground"], ["bad", "raised"]]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("name", "pairs", "at_least"), [("full", SHADES, 300), ("two", RAISED, 200)])
def test_text_can_be_read(browser, open_page, name, pairs, at_least, dark):
    """Checks all texts of a page, and pairs of named colors."""
    open_page(name, dark=dark)
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    contrasts = browser.run(CONTRASTS, [*pairs, ["quiet", "ground"]])
    assert len(contrasts) > at_least
    assert [contrast for contrast in contrasts if contrast[0] < READABLE] == []


WIDTHS = {"full": [400], "wide": [400], "one": [400], "two": [400, 1600]}


@pytest.mark.parametrize(("name", "width"), [(name, width) for name, widths in WIDTHS.items() for width in widths])
def test_nothing_is_wider_than_the_window(browser, open_page, name, width):
    open_page(name, width=width)
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run(WIDER) == []
    if width == 400:  # nor does a table have to be scrolled
        assert all(browser.map(".scroll", "element.scrollWidth <= element.clientWidth"))


FOCUSED = {"A", "Askip", "DIVplot", "DIVscroll", "BUTTON", "INPUT"}


@pytest.mark.parametrize(("name", "focused"), [("full", FOCUSED), ("two", FOCUSED | {"BUTTONlink", "SELECT"})])
def test_every_control_has_a_name_and_visible_focus(browser, open_page, name, focused):
    open_page(name, details=False)
    assert browser.run(NAMELESS) == []
    ids = browser.map("[id]", "element.id")
    assert len(ids) == len(set(ids))
    named = "element.caption || element.getAttribute('aria-labelledby') || element.getAttribute('aria-label')"
    assert all(browser.map("table:not(.tip table)", f"Boolean({named})"))
    assert set(browser.map("thead th", "element.scope")) <= {"col"}
    visited = set()
    for _ in range(45):
        browser.press(Keys.TAB)
        style, what = browser.run(FOCUS)
        assert style == "solid 3px", what
        visited.add(what.split()[0])
    assert focused <= visited

"""Accessibility of the memory page: contrast, names, keyboard focus, and layouts of any width, also on paper."""

import pytest

from tests.browser.browser import ActionChains, Keys, hover

READABLE = 4.5
"""The contrast that WCAG's level AA asks of text."""

CONTRASTS = """
const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
function rgba(color) {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}
function luminance(color) {
  const parts = rgba(color).slice(0, 3).map((value) => value / 255);
  const [r, g, b] = parts.map((part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
}
function ground(element) {
  for (let at = element; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if (rgba(color)[3] === 255) return color;
  }
  throw new Error('no ground');
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.getClientRects().length || element.closest('svg')) continue;
  const [a, b] = [luminance(getComputedStyle(element).color), luminance(ground(element))].sort((x, y) => y - x);
  found.push([(a + .05) / (b + .05), walker.currentNode.data.trim().slice(0, 40)]);
}
const shades = ['forward', 'backward', 'optimizer', 'other'].map((name) => `var(--shade-${name})`);
for (const [ink, shade] of [...shades.map((each) => ['var(--ink)', each]), ['var(--quiet)', 'var(--ground)']]) {
  const box = document.createElement('p');
  Object.assign(box.style, {color: ink, backgroundColor: shade});
  document.body.append(box);
  const style = getComputedStyle(box);
  const [a, b] = [luminance(style.color), luminance(style.backgroundColor)].sort((x, y) => y - x);
  found.push([(a + .05) / (b + .05), `${ink} on ${shade}`]); box.remove();
}
return found;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read(browser, pages, dark):
    browser.open(pages / "full.html", dark=dark)
    browser.one("#peak-details summary").click()
    hover(browser, 2)
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    contrasts = browser.run(CONTRASTS)
    assert len(contrasts) > 300
    assert [each for each in contrasts if each[0] < READABLE] == []


@pytest.mark.parametrize(("name", "width"), [("full", 400), ("wide", 400), ("real", 1600)])
def test_nothing_is_wider_than_the_window(browser, pages, name, width):
    browser.open(pages / f"{name}.html", width=width)
    browser.one("#peak-details summary").click()
    hover(browser, 2)
    assert browser.run("return document.documentElement.scrollWidth") == width
    wider = browser.run(
        "return [...document.querySelectorAll('body *')].filter((each) => !each.closest('.scroll, .icicle, svg, .skip')"
        " && each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML.slice(0, 80))"
    )
    assert wider == []
    if width == 400:  # nor does a table have to be scrolled
        assert browser.run(
            "return [...document.querySelectorAll('.scroll')].every((each) => each.scrollWidth <= each.clientWidth)"
        )


def test_everything_has_an_accessible_name(browser, pages):
    browser.open(pages / "full.html")
    nameless = browser.run(
        "const which = 'input, select, button, .plot, .scroll, nav, section, [role=tree]';"
        "return [...document.querySelectorAll(which)].filter((each) => !(each.getAttribute('aria-label')"
        " || each.getAttribute('aria-labelledby') || each.textContent.trim()"
        " || (each.labels && each.labels.length))).map((each) => each.outerHTML.slice(0, 80))"
    )
    assert nameless == []
    tables = "[...document.querySelectorAll('table:not(.tip table)')]"
    assert browser.run(f"return {tables}.every((table) => table.caption || table.getAttribute('aria-labelledby'))")
    assert browser.run("return [...document.querySelectorAll('thead th')].every((th) => th.scope === 'col')")


def test_the_focus_is_visible(browser, pages):
    browser.open(pages / "full.html")
    visited = set()
    for _ in range(40):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        style, what = browser.run(
            "const e = document.activeElement, s = getComputedStyle(e);"
            "return [s.outlineStyle + ' ' + s.outlineWidth, e.tagName + e.className]"
        )
        assert style == "solid 3px", what
        visited.add(what.split()[0])
    assert {"A", "Askip", "DIVplot", "DIVscroll", "BUTTON", "INPUT"} <= visited


def test_it_prints(browser, pages):
    browser.open(pages / "full.html")
    printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert len(printed) > 20_000
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not browser.one("#saved-filter").is_displayed()
        assert browser.one("#saved-table").is_displayed()
        too_wide = (
            "return [...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth)"
        )
        browser.show(720)  # about the width of A4 within its margins
        assert browser.run(f"{too_wide}.length") == 0
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})

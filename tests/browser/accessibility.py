"""What every page must be: readable, no wider than its window, and named for those who do not see it."""

from tests.browser.browser import Keys

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
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.getClientRects().length || element.closest('svg')) continue;
  const [a, b] = [luminance(getComputedStyle(element).color), luminance(ground(element))].sort((x, y) => y - x);
  found.push([(a + .05) / (b + .05), walker.currentNode.data.trim().slice(0, 40)]);
}
return found;
"""
WIDER = """
return [...document.querySelectorAll('body *')].filter((each) => !each.closest('.scroll, .icicle, svg, .skip')
  && each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML.slice(0, 80))
"""
NAMELESS = """
const which = 'input, select, button, .plot, .scroll, nav, section, [role=tree]';
return [...document.querySelectorAll(which)].filter((each) => !(each.getAttribute('aria-label')
  || each.getAttribute('aria-labelledby') || each.textContent.trim()
  || (each.labels && each.labels.length))).map((each) => each.outerHTML.slice(0, 80))
"""
FOCUS = """
const e = document.activeElement, s = getComputedStyle(e);
return [s.outlineStyle + ' ' + s.outlineWidth, e.tagName + e.className]
"""


def assert_readable(browser, pairs, *, at_least, dark):
    """Hold all texts of the page, and pairs of names of colors, to `READABLE`; there are `at_least` so many."""
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    contrasts = browser.run(CONTRASTS, pairs)
    assert len(contrasts) > at_least
    assert [each for each in contrasts if each[0] < READABLE] == []


def assert_no_wider_than(browser, width):
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run(WIDER) == []
    if width == 400:  # nor does a table have to be scrolled
        scrolls = "[...document.querySelectorAll('.scroll')].every((each) => each.scrollWidth <= each.clientWidth)"
        assert browser.run(f"return {scrolls}")


def assert_named(browser):
    assert browser.run(NAMELESS) == []
    ids = browser.run("return [...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    tables = "[...document.querySelectorAll('table:not(.tip table)')]"
    name = "table.caption || table.getAttribute('aria-labelledby') || table.getAttribute('aria-label')"
    assert browser.run(f"return {tables}.every((table) => {name})")
    assert browser.run("return [...document.querySelectorAll('thead th')].every((th) => th.scope === 'col')")


def visited_by_tab(browser, presses):
    """The first words of what gets the focus, each of which shows it."""
    visited = set()
    for _ in range(presses):
        browser.press(Keys.TAB)
        style, what = browser.run(FOCUS)
        assert style == "solid 3px", what
        visited.add(what.split()[0])
    return visited

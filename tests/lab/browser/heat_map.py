"""Drives the heat map of the page of `quaver report`: hovers, clicks, drags, presses keys, reads pixels."""

import base64

import numpy as np

TOP_PX = 10


class HeatMap:
    """The heat map of a run as a user meets it."""

    def __init__(self, browser, rows, *, at=0, samples=40, steps=(10, 410)):
        self.browser, self.rows, self.samples, self.steps = browser, rows, samples, steps
        self.plot = browser.all(".heat")[at]
        browser.run("arguments[0].scrollIntoView({block: 'center'})", self.plot)

    def offset(self, row, sample):
        """Return the offset of a cell's middle from the middle of the plot."""
        sizes = "const c = arguments[0].querySelector('canvas'); return [c.offsetLeft, c.offsetWidth, c.offsetHeight]"
        left, width, height = self.browser.run(sizes, self.plot)
        box = self.plot.size
        x = left + (sample + 0.5) / self.samples * width
        y = TOP_PX + (row + 0.5) / self.rows * height
        return int(x - box["width"] / 2), int(y - box["height"] / 2)

    def hover(self, row, sample):
        self.browser.pointer().move_to_element_with_offset(self.plot, *self.offset(row, sample)).perform()
        return self.browser.texts(".maps .tip:not([hidden])")

    def click(self, row, sample):
        self.hover(row, sample)
        self.browser.pointer().click().perform()

    def drag(self, start, end):
        chain = self.browser.pointer().move_to_element_with_offset(self.plot, *self.offset(*start))
        chain.click_and_hold().move_to_element_with_offset(self.plot, *self.offset(*end)).release().perform()

    def press(self, *keys):
        self.browser.run("arguments[0].focus({preventScroll: true})", self.plot)
        self.browser.press(*keys)

    def pixels(self):
        """Return the colors of the picture, [height, width], as 0xAABBGGRR; 0 where nothing is drawn."""
        script = """
        const c = arguments[0].querySelector('canvas'), parts = [];
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        for (let at = 0; at < d.length; at += 4096) parts.push(String.fromCharCode(...d.subarray(at, at + 4096)));
        return [c.height, c.width, btoa(parts.join(''))]"""
        height, width, data = self.browser.run(script, self.plot)
        return np.frombuffer(base64.b64decode(data), dtype=np.uint32).reshape(height, width)
